"""Checkpoints of a few megabytes that load: the tiny model's layers, 2 experts, 600 tokens, no image bias."""

import copy
import functools
from typing import Any

from specialized_decode.backbone.corpus import corpus
from specialized_decode.backbone.presets import CheckpointPlan, tiny_plan
from specialized_decode.backbone.tokenizer import compressed_token_map, train_tokenizer

VOCAB_SIZE = 600
# Every kind of layer in as few as possible.
_FEW: dict[str, Any] = {
    "num_hidden_layers": 4,
    "compress_ratios": [0, 2, 1, 1],
    "kv_source_layer_ids": [1, 2],
    "index_source_layer_ids": [1, 2, 3],
    "candidate_source_layer_id": 2,
    "engram_layer_ids": [1],
    "dspark_target_layer_ids": [],
}


def small_plan(seed: int) -> CheckpointPlan:
    """10 layers."""
    config = copy.deepcopy(tiny_plan().config)
    del config["vision_config"]
    config["text_config"] |= {"vocab_size": VOCAB_SIZE, "n_routed_experts": 2, "num_experts_per_tok": 1}
    config["text_config"]["engram_compressed_vocab_size"] = compressed_vocab_size()
    return CheckpointPlan(config, seed)


def few_layers_plan() -> CheckpointPlan:
    """4 layers, for tests that run them."""
    config = small_plan(0).config
    first_table = config["text_config"]["engram_num_embeddings"][:1]
    config["text_config"] |= _FEW | {"engram_num_embeddings": first_table}
    return CheckpointPlan(config)


@functools.cache
def compressed_vocab_size() -> int:
    return compressed_token_map(train_tokenizer(corpus(), VOCAB_SIZE))[1]
