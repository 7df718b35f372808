"""Plans of the checkpoints that `write_checkpoint` makes: a release-shaped config.json and a seed."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from specialized_decode.backbone.config import IMAGE_TOKEN_ID
from specialized_decode.backbone.corpus import corpus
from specialized_decode.backbone.errors import InputError
from specialized_decode.backbone.tokenizer import compressed_token_map, train_tokenizer

VOCAB_SIZE = 129280
FLASH_TP_SIZES = (1, 2, 4, 8)
Json = dict[str, Any]


@dataclass(frozen=True)
class CheckpointPlan:
    """What to write: `config` becomes config.json, `seed` determines every weight."""

    config: Json = field(hash=False)
    seed: int = 0


@functools.cache
def release_sized_tokenizer() -> Tokenizer:
    """The tokenizer of every preset, trained once a process."""
    return train_tokenizer(corpus(), VOCAB_SIZE)


def tiny_plan(seed: int = 0, drafts: int = 0) -> CheckpointPlan:
    """A model of every kind of layer that a CPU runs: 10 layers, hidden size 128, 16 experts (80 MB)."""
    _check_drafts(drafts)
    layers = _LayerPlan([0, 0, 2, 2, 2, 2, 1, 1, 1, 1], [2, 4, 6], [2, 4, 6, 8], 6, [1, 5])
    widths: Json = {
        "hidden_size": 128,
        "moe_intermediate_size": 64,
        "num_attention_heads": 4,
        "q_lora_rank": 64,
        "o_lora_rank": 64,
        "o_groups": 2,
        "max_position_embeddings": 4096,
        "rope_scaling": _yarn(factor=4, original=1024),
        "n_routed_experts": 16,
        "num_experts_per_tok": 3,
        "sliding_window": 48,
        "index_n_heads": 4,
        "index_topk": 32,
        "candidate_topk_blocks": 6,
        "engram_n_heads": 2,
        "engram_head_dim": 64,
        "engram_vocab_size": 509,
        "dspark_markov_rank": 32,
        "dspark_n_routed_experts": 8,
        "dspark_num_experts_per_tok": 2,
    }
    return CheckpointPlan(_config(layers, widths, drafts), seed)


def flash_plan(
    layers: int = 40,
    experts: int = 384,
    shard_tp: int = 1,
    engram_rows_per_head: int = 2000,
    seed: int = 0,
    drafts: int = 0,
) -> CheckpointPlan:
    """V4.1-Flash's widths, with fewer layers, experts or Engram rows where asked.

    `shard_tp` divides what tensor parallelism divides (heads, output groups, expert width), so that one GPU
    runs what a rank of that size runs; embedding and head stay whole. Raises InputError for values that give
    no such model.
    """
    _check_drafts(drafts)
    if layers < 4:
        raise InputError(f"layers: found {layers}, expected at least 4, to hold every kind of layer")
    if shard_tp not in FLASH_TP_SIZES:
        raise InputError(f"shard_tp: found {shard_tp}, expected one of {FLASH_TP_SIZES}")
    if experts < 6:
        raise InputError(f"experts: found {experts}, expected at least 6, the experts of a token")
    if engram_rows_per_head < 2:
        raise InputError(f"engram_rows_per_head: found {engram_rows_per_head}, expected at least 2")
    widths: Json = {
        "moe_intermediate_size": 2304 // shard_tp,
        "num_attention_heads": 64 // shard_tp,
        "o_groups": 8 // shard_tp,
        "n_routed_experts": experts,
        "engram_vocab_size": engram_rows_per_head,
    }
    return CheckpointPlan(_config(_flash_layers(layers), widths, drafts), seed)


@dataclass(frozen=True)
class _LayerPlan:
    """Which layers compress, index and inject; field names follow the configuration's keys."""

    ratios: list[int]
    kv_sources: list[int]
    index_sources: list[int]
    candidate_source: int
    engram: list[int]


def _flash_layers(layers: int) -> _LayerPlan:
    """The release's pattern at any depth from 4 on; at 40 it is the release's own plan."""
    if layers == 8:
        return _LayerPlan([0, 0, 2, 2, 2, 1, 1, 1], [2, 5], [2, 5, 7], 5, [1, 4])
    window = 2 if layers >= 6 else 1
    full = layers // 2
    candidate = layers - full
    kv_sources = [*range(window, candidate, 6), candidate]
    consumers = list(range(candidate + 4, layers, 4)) or [layers - 1]
    engram = sorted({1, kv_sources[-2]})
    ratios = [0] * window + [2] * (candidate - window) + [1] * full
    return _LayerPlan(ratios, kv_sources, kv_sources + consumers, candidate, engram)


def _config(plan: _LayerPlan, widths: Json, drafts: int) -> Json:
    """A whole config.json: V4.1-Flash's values with `widths` in their place."""
    layers = len(plan.ratios)
    text: Json = {
        "model_type": "deepseek_v41_text",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 5120,
        "moe_intermediate_size": 2304,
        "num_hidden_layers": layers,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1280,
        "o_lora_rank": 1024,
        "o_groups": 8,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20,
        "attention_bias": False,
        "max_position_embeddings": 1048576,
        "rope_theta": 10000,
        "rope_scaling": _yarn(factor=16, original=65536),
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "sliding_window": 128,
        "compress_ratios": plan.ratios + [0] * drafts,
        "compress_rope_theta": 160000,
        "kv_source_layer_ids": plan.kv_sources,
        "index_source_layer_ids": plan.index_sources,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 512,
        "candidate_source_layer_id": plan.candidate_source,
        "candidate_topk_blocks": 2048,
        "candidate_block_size": 8,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "engram_layer_ids": plan.engram,
        "engram_max_ngram_size": 4,
        "engram_vocab_size": 2000,
        "engram_n_heads": 8,
        "engram_head_dim": 256,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": _compressed_vocab_size(),
        "num_nextn_predict_layers": drafts,
        "dspark_block_size": 5,
        "dspark_noise_token_id": 128799,
        "dspark_target_layer_ids": [layers - 3, layers - 2, layers - 1],
        "dspark_markov_rank": 256,
        "dspark_n_routed_experts": 128,
        "dspark_num_experts_per_tok": 3,
    }
    text |= widths
    text["engram_num_embeddings"] = _engram_rows(text)
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        # Without it transformers takes any large byte-level vocabulary for Mistral's, and warns.
        "transformers_version": "4.57.1",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": IMAGE_TOKEN_ID,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
        "text_config": text,
        "vision_config": _vision(),
    }


def _vision() -> Json:
    """A vision tower's shape. No tower is written; with it the router has its bias for image tokens."""
    return {
        "model_type": "deepseek_v41_vision",
        "num_hidden_layers": 2,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "intermediate_size": 2816,
        "patch_size": 14,
        "rope_theta": 10000,
        "downsample_ratio": 3,
        "max_image_tokens": 1024,
        "min_pixels": 295936,
        "max_wh_ratio": None,
    }


def _yarn(factor: int, original: int) -> Json:
    return {
        "rope_type": "yarn",
        "factor": factor,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": original,
    }


def _check_drafts(drafts: int) -> None:
    if drafts not in (0, 3):
        raise InputError(f"drafts: found {drafts}, expected 0, or 3 as in the release")


@functools.cache
def _compressed_vocab_size() -> int:
    return compressed_token_map(release_sized_tokenizer())[1]


def _engram_rows(text: Json) -> list[int]:
    """Rows of each Engram layer's table: a prime of at least `engram_vocab_size` per n-gram size and head.

    Every n-gram size starts over and takes the least primes that are still unused, so over the model they are
    the successive primes.
    """
    primes = _primes_from(text["engram_vocab_size"])
    columns = (text["engram_max_ngram_size"] - 1) * text["engram_n_heads"]
    return [sum(next(primes) for _ in range(columns)) for _ in text["engram_layer_ids"]]


def _primes_from(start: int) -> Iterator[int]:
    number = start
    while True:
        if number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1)):
            yield number
        number += 1
