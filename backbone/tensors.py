"""The tensors of a DeepSeek-V4.1 release: every name with its shape and dtype.

Formats (OCP Microscaling Formats 1.0): dense weights are FP8 e4m3 with one UE8M0 scale per 32x32 block;
routed experts are FP4 e2m1, two codes a byte with the even column in the low nibble, and one UE8M0 scale per
32 columns. Linear weights are [out, in].
"""

from dataclasses import dataclass

import torch

from specialized_decode.backbone.config import WEIGHT_BLOCK, ModelConfig

FP8 = torch.float8_e4m3fn
UE8M0 = torch.float8_e8m0fnu
# The release declares packed FP4 bytes as int8; a reader wants their bits, so it views them as uint8.
PACKED_FP4 = torch.int8
# How a shard's header names a dtype.
STORED_DTYPES = {
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
}


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one stored tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's data in a shard."""
        elements = 1
        for size in self.shape:
            elements *= size
        return elements * self.dtype.itemsize


Specs = dict[str, TensorSpec]


def text_tensors(config: ModelConfig) -> Specs:
    """Tensors of the text model, in the order of use: embedding, layers, final norm, head."""
    hidden = config.hidden_size
    specs = {"embed.weight": TensorSpec((config.vocab_size, hidden), torch.bfloat16)}
    for layer in range(config.num_hidden_layers):
        prefix = f"layers.{layer}."
        specs |= _engram(config, layer, prefix + "engram.")
        specs |= _block(config, prefix, config.n_routed_experts)
        specs |= _compressor(config, layer, prefix + "attn.compressor.")
        specs |= _indexer(config, layer, prefix + "attn.indexer.")
    specs["norm.weight"] = TensorSpec((hidden,), torch.bfloat16)
    specs["head.weight"] = TensorSpec((config.vocab_size, hidden), torch.bfloat16)
    return specs


def draft_tensors(config: ModelConfig) -> Specs:
    """Tensors of the DSpark draft layers, `mtp.{i}.*`; empty where the configuration has none.

    Each draft layer is a window-only block. The first also projects the target's aux hidden states, the last
    holds the final norm, the Markov head (a low-rank bias by previous token) and the confidence head.
    """
    specs: Specs = {}
    experts = config.dspark_n_routed_experts or config.n_routed_experts
    hidden, rank, drafts = config.hidden_size, config.dspark_markov_rank, config.num_nextn_predict_layers
    for draft in range(drafts):
        prefix = f"mtp.{draft}."
        if draft == 0:
            specs |= _fp8(prefix + "main_proj", hidden, hidden * len(config.dspark_target_layer_ids))
            specs[prefix + "main_norm.weight"] = TensorSpec((hidden,), torch.bfloat16)
        specs |= _block(config, prefix, experts)
        if draft == drafts - 1:
            specs[prefix + "norm.weight"] = TensorSpec((hidden,), torch.bfloat16)
            for factor in ("embed", "head"):
                spec = TensorSpec((config.vocab_size, rank), torch.bfloat16)
                specs[f"{prefix}markov_head.{factor}.weight"] = spec
            specs[prefix + "confidence_head.proj.weight"] = TensorSpec((1, hidden + rank), torch.float32)
    return specs


def _fp8(name: str, rows: int, columns: int) -> Specs:
    """An FP8 projection: its weight and one scale per block of 32x32."""
    blocks = (-(-rows // WEIGHT_BLOCK), -(-columns // WEIGHT_BLOCK))
    return {f"{name}.weight": TensorSpec((rows, columns), FP8), f"{name}.scale": TensorSpec(blocks, UE8M0)}


def _fp4(name: str, rows: int, columns: int) -> Specs:
    """A routed expert's projection: two codes a byte, and one scale per 32 columns."""
    return {
        f"{name}.weight": TensorSpec((rows, columns // 2), PACKED_FP4),
        f"{name}.scale": TensorSpec((rows, columns // WEIGHT_BLOCK), UE8M0),
    }


def _block(config: ModelConfig, prefix: str, experts: int) -> Specs:
    """What every decoder layer has: norms, mHC coefficients, attention and experts."""
    hidden = config.hidden_size
    mix, streams = (2 + config.hc_mult) * config.hc_mult, config.hc_mult * hidden
    specs: Specs = {}
    for sublayer in ("attn", "ffn"):
        specs[f"{prefix}{sublayer}_norm.weight"] = TensorSpec((hidden,), torch.bfloat16)
        specs[f"{prefix}hc_{sublayer}_fn"] = TensorSpec((mix, streams), torch.float32)
        specs[f"{prefix}hc_{sublayer}_base"] = TensorSpec((mix,), torch.float32)
        specs[f"{prefix}hc_{sublayer}_scale"] = TensorSpec((3,), torch.float32)
    return specs | _attention(config, prefix + "attn.") | _experts(config, prefix + "ffn.", experts)


def _attention(config: ModelConfig, prefix: str) -> Specs:
    hidden, head = config.hidden_size, config.head_dim
    heads, groups = config.num_attention_heads, config.o_groups
    return (
        _fp8(prefix + "wq_a", config.q_lora_rank, hidden)
        | _fp8(prefix + "wkv", head, hidden)
        | _fp8(prefix + "wq_b", heads * head, config.q_lora_rank)
        | _fp8(prefix + "wo_a", groups * config.o_lora_rank, heads * head // groups)
        | _fp8(prefix + "wo_b", hidden, groups * config.o_lora_rank)
        | {
            prefix + "q_norm.weight": TensorSpec((config.q_lora_rank,), torch.bfloat16),
            prefix + "kv_norm.weight": TensorSpec((head,), torch.bfloat16),
            prefix + "attn_sink": TensorSpec((heads,), torch.float32),
        }
    )


def _compressor(config: ModelConfig, layer: int, prefix: str) -> Specs:
    """A KV source's compressor; ratio 1 pools single tokens, so it has no gate."""
    if layer not in config.kv_source_layer_ids:
        return {}
    projection = TensorSpec((config.head_dim, config.hidden_size), torch.bfloat16)
    specs = {prefix + "wkv.weight": projection}
    if config.compress_ratios[layer] > 1:
        specs[prefix + "wgate.weight"] = projection
    specs[prefix + "norm.weight"] = TensorSpec((config.head_dim,), torch.bfloat16)
    return specs


def _indexer(config: ModelConfig, layer: int, prefix: str) -> Specs:
    """An index source's indexer; only where the layer is also a KV source does it make index keys."""
    if layer not in config.index_source_layer_ids:
        return {}
    heads, head = config.index_n_heads, config.index_head_dim
    specs = _fp8(prefix + "wq_b", heads * head, config.q_lora_rank)
    specs[prefix + "weights_proj.weight"] = TensorSpec((heads, config.hidden_size), torch.bfloat16)
    if layer in config.kv_source_layer_ids:
        specs[prefix + "wk.weight"] = TensorSpec((head, config.head_dim), torch.bfloat16)
        specs[prefix + "k_norm.weight"] = TensorSpec((head,), torch.bfloat16)
    return specs


def _experts(config: ModelConfig, prefix: str, experts: int) -> Specs:
    hidden, width = config.hidden_size, config.moe_intermediate_size
    specs = {
        prefix + "gate.weight": TensorSpec((experts, hidden), torch.bfloat16),
        prefix + "gate.bias": TensorSpec((experts,), torch.float32),
    }
    if config.has_image_bias:
        specs[prefix + "gate.bias_vl"] = TensorSpec((experts,), torch.float32)
    shapes = {"w1": (width, hidden), "w3": (width, hidden), "w2": (hidden, width)}
    for name, (rows, columns) in shapes.items():
        specs |= _fp8(f"{prefix}shared_experts.{name}", rows, columns)
    for expert in range(experts):
        for name, (rows, columns) in shapes.items():
            specs.update(_fp4(f"{prefix}experts.{expert}.{name}", rows, columns))
    return specs


def _engram(config: ModelConfig, layer: int, prefix: str) -> Specs:
    """An Engram layer's table, scaled along its rows, and its projection to a key a stream and one value."""
    if layer not in config.engram_layer_ids:
        return {}
    rows, dim = config.engram_num_embeddings[config.engram_layer_ids.index(layer)], config.engram_head_dim
    hidden, streams = config.hidden_size, config.hc_mult
    specs = {
        prefix + "embed.weight": TensorSpec((rows, dim), FP8),
        prefix + "embed.scale": TensorSpec((rows, dim // WEIGHT_BLOCK), UE8M0),
    }
    specs |= _fp8(prefix + "wkv", (streams + 1) * hidden, config.engram_columns * dim)
    for name in ("q_weight", "k_weight"):
        specs[prefix + name] = TensorSpec((streams, hidden), torch.bfloat16)
    return specs
