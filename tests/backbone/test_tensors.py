"""The table of a release's tensors, against names and shapes written out by hand from the layout."""

import torch

from specialized_decode.backbone.config import ModelConfig
from specialized_decode.backbone.tensors import TensorSpec, draft_tensors, text_tensors
from specialized_decode.backbone.writer import flash_plan, tiny_plan

BF16, F32, I8, FP8, E8 = (
    torch.bfloat16,
    torch.float32,
    torch.int8,
    torch.float8_e4m3fn,
    torch.float8_e8m0fnu,
)

# name -> shape, dtype
Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]


def _config(drafts: int = 0) -> ModelConfig:
    return ModelConfig.from_dict(tiny_plan(drafts=drafts).config, "tiny")


def _layer(specs: dict[str, TensorSpec], prefix: str) -> Layout:
    """Names under `prefix` with their shapes and dtypes; experts but the first left out."""
    return {
        name.removeprefix(prefix): (spec.shape, spec.dtype)
        for name, spec in specs.items()
        if name.startswith(prefix) and (".experts." not in name or ".experts.0." in name)
    }


BLOCK: Layout = {
    "attn_norm.weight": ((128,), BF16),
    "hc_attn_fn": ((24, 512), F32),
    "hc_attn_base": ((24,), F32),
    "hc_attn_scale": ((3,), F32),
    "ffn_norm.weight": ((128,), BF16),
    "hc_ffn_fn": ((24, 512), F32),
    "hc_ffn_base": ((24,), F32),
    "hc_ffn_scale": ((3,), F32),
    "attn.wq_a.weight": ((64, 128), FP8),
    "attn.wq_a.scale": ((2, 4), E8),
    "attn.wkv.weight": ((512, 128), FP8),
    "attn.wkv.scale": ((16, 4), E8),
    "attn.wq_b.weight": ((2048, 64), FP8),
    "attn.wq_b.scale": ((64, 2), E8),
    "attn.wo_a.weight": ((128, 1024), FP8),
    "attn.wo_a.scale": ((4, 32), E8),
    "attn.wo_b.weight": ((128, 128), FP8),
    "attn.wo_b.scale": ((4, 4), E8),
    "attn.q_norm.weight": ((64,), BF16),
    "attn.kv_norm.weight": ((512,), BF16),
    "attn.attn_sink": ((4,), F32),
    "ffn.gate.weight": ((16, 128), BF16),
    "ffn.gate.bias": ((16,), F32),
    "ffn.gate.bias_vl": ((16,), F32),
    "ffn.shared_experts.w1.weight": ((64, 128), FP8),
    "ffn.shared_experts.w1.scale": ((2, 4), E8),
    "ffn.shared_experts.w3.weight": ((64, 128), FP8),
    "ffn.shared_experts.w3.scale": ((2, 4), E8),
    "ffn.shared_experts.w2.weight": ((128, 64), FP8),
    "ffn.shared_experts.w2.scale": ((4, 2), E8),
    "ffn.experts.0.w1.weight": ((64, 64), I8),
    "ffn.experts.0.w1.scale": ((64, 4), E8),
    "ffn.experts.0.w3.weight": ((64, 64), I8),
    "ffn.experts.0.w3.scale": ((64, 4), E8),
    "ffn.experts.0.w2.weight": ((128, 32), I8),
    "ffn.experts.0.w2.scale": ((128, 2), E8),
}
ENGRAM: Layout = {
    "engram.embed.weight": ((3198, 64), FP8),
    "engram.embed.scale": ((3198, 2), E8),
    "engram.wkv.weight": ((640, 384), FP8),
    "engram.wkv.scale": ((20, 12), E8),
    "engram.q_weight": ((4, 128), BF16),
    "engram.k_weight": ((4, 128), BF16),
}
INDEXER: Layout = {
    "attn.indexer.wq_b.weight": ((512, 64), FP8),
    "attn.indexer.wq_b.scale": ((16, 2), E8),
    "attn.indexer.weights_proj.weight": ((4, 128), BF16),
}
INDEX_KEYS: Layout = {
    "attn.indexer.wk.weight": ((128, 512), BF16),
    "attn.indexer.k_norm.weight": ((128,), BF16),
}
COMPRESSOR: Layout = {"attn.compressor.wkv.weight": ((512, 128), BF16), "attn.compressor.norm.weight": ((512,), BF16)}
GATE: Layout = {"attn.compressor.wgate.weight": ((512, 128), BF16)}


def test_each_kind_of_layer_has_its_tensors() -> None:
    specs = text_tensors(_config())
    kinds: dict[int, Layout] = {
        0: {},
        1: ENGRAM,
        2: COMPRESSOR | GATE | INDEXER | INDEX_KEYS,
        3: {},
        6: COMPRESSOR | INDEXER | INDEX_KEYS,  # ratio 1 pools nothing, so it has no gate
        8: INDEXER,  # shares the index keys of layer 6
    }
    for layer, extra in kinds.items():
        assert _layer(specs, f"layers.{layer}.") == BLOCK | extra, layer


def test_model_has_embedding_norm_and_head() -> None:
    specs = text_tensors(_config())
    outside = {name: (spec.shape, spec.dtype) for name, spec in specs.items() if not name.startswith("layers.")}
    assert outside == {
        "embed.weight": ((129280, 128), BF16),
        "norm.weight": ((128,), BF16),
        "head.weight": ((129280, 128), BF16),
    }
    assert sum(".experts." in name for name in specs) == 10 * 16 * 6


def test_image_bias_needs_a_vision_tower() -> None:
    config = tiny_plan().config
    del config["vision_config"]
    specs = text_tensors(ModelConfig.from_dict(config, "text only"))
    assert not [name for name in specs if name.endswith("bias_vl")]
    assert "layers.0.ffn.gate.bias" in specs


def test_drafts_are_window_only_blocks_around_their_heads() -> None:
    assert draft_tensors(_config()) == {}
    specs = draft_tensors(_config(drafts=3))
    block: Layout = {
        name: (((8, *shape[1:]), dtype) if name.startswith("ffn.gate") else (shape, dtype))
        for name, (shape, dtype) in BLOCK.items()
    }
    first: Layout = {
        "main_proj.weight": ((128, 384), FP8),
        "main_proj.scale": ((4, 12), E8),
        "main_norm.weight": ((128,), BF16),
    }
    last: Layout = {
        "norm.weight": ((128,), BF16),
        "markov_head.embed.weight": ((129280, 32), BF16),
        "markov_head.head.weight": ((129280, 32), BF16),
        "confidence_head.proj.weight": ((1, 160), F32),
    }
    for draft, extra in enumerate([first, {}, last]):
        assert _layer(specs, f"mtp.{draft}.") == block | extra, draft
    assert sum(".experts." in name for name in specs) == 3 * 8 * 6


def test_flash_has_the_release_widths_and_size() -> None:
    config = ModelConfig.from_dict(flash_plan().config, "flash")
    specs = text_tensors(config)
    assert specs["layers.0.attn.wq_b.weight"].shape == (32768, 1280)
    assert specs["layers.0.attn.wo_a.weight"].shape == (8192, 4096)
    assert specs["layers.1.engram.wkv.weight"].shape == (25600, 6144)
    assert specs["layers.39.ffn.experts.383.w2.weight"].shape == (5120, 1152)
    experts = sum(spec.nbytes for name, spec in specs.items() if ".experts." in name)
    # 40 layers x 384 experts x 3 projections of 5120 x 2304, at 4 bits and one byte per 32.
    assert experts == 40 * 384 * 3 * 5120 * 2304 * 17 // 32


def test_blocks_cut_by_the_edge_have_a_scale() -> None:
    config = tiny_plan().config
    config["text_config"]["engram_head_dim"] = 32
    config["text_config"]["engram_n_heads"] = 1
    specs = text_tensors(ModelConfig.from_dict(config, "narrow"))
    assert specs["layers.1.engram.wkv.weight"].shape == (640, 96)
    assert specs["layers.1.engram.wkv.scale"].shape == (20, 3)
