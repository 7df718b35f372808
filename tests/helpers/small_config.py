"""A configuration with every kind of layer, small enough for tests that build their own weights."""

import dataclasses
from typing import Any

from specialized_decode.backbone.config import ModelConfig, RopeScaling


def small_config(**changes: Any) -> ModelConfig:
    """10 layers, of which 0 and 1 have a window only, 2 to 5 compress by 2 and 6 to 9 by 1."""
    config = ModelConfig(
        source="a test",
        vocab_size=129280,
        hidden_size=64,
        num_hidden_layers=10,
        num_attention_heads=4,
        head_dim=512,
        qk_rope_head_dim=64,
        q_lora_rank=32,
        o_lora_rank=32,
        o_groups=2,
        sliding_window=48,
        compress_ratios=(0, 0, 2, 2, 2, 2, 1, 1, 1, 1),
        kv_source_layer_ids=(2, 4, 6),
        index_source_layer_ids=(2, 4, 6, 8),
        index_n_heads=4,
        index_head_dim=128,
        index_topk=16,
        candidate_source_layer_id=6,
        candidate_topk_blocks=6,
        candidate_block_size=4,
        n_routed_experts=16,
        n_shared_experts=1,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        routed_scaling_factor=1.5,
        swiglu_limit=10.0,
        hc_mult=4,
        hc_sinkhorn_iters=20,
        hc_eps=1e-6,
        rms_norm_eps=1e-20,
        rope_theta=10000.0,
        compress_rope_theta=160000.0,
        rope_scaling=RopeScaling(16.0, 32.0, 1.0, 65536),
        max_position_embeddings=1048576,
        engram_layer_ids=(1, 5),
        engram_num_embeddings=(0, 0),
        engram_vocab_size=509,
        engram_max_ngram_size=4,
        engram_n_heads=2,
        engram_head_dim=64,
        engram_pad_token_id=2,
        engram_compressed_vocab_size=1000,
        has_image_bias=True,
        image_token_id=129264,
        bos_token_id=0,
        eos_token_id=1,
        num_nextn_predict_layers=0,
        dspark_target_layer_ids=(),
        dspark_n_routed_experts=0,
        dspark_num_experts_per_tok=0,
        dspark_markov_rank=0,
    )
    return dataclasses.replace(config, **changes)
