"""GPU memory of a rank's weights, from the model's hyper-parameters. Pure functions; all sizes in bytes."""

from typing import Any

# FP8 with a scale byte per 32x32 block; FP4 with a scale byte per 32 along K.
_FP8 = 1 + 1 / 1024
_FP4 = 0.5 + 1 / 32
_BF16 = 2


def prepared_bytes(text: Any, tp: int) -> int:
    """A second copy of the dense FP8 weights: attention, indexers, shared experts, Engram's WKV.

    text: the text model's configuration, under the release's names.
    """
    layers = text.num_hidden_layers
    per_layer = _attention_weights(text, tp) + _shared_expert_weights(text, tp)
    wkv = len(text.engram_layer_ids) * _engram_weights(text, tp)
    return round(_FP8 * (layers * per_layer + wkv + _indexer_weights(text)))


def projection_bytes(text: Any, tp: int) -> int:
    """What the attention kernels keep of the FP8 weights, the indexers' queries among them: the same bytes in another
    order. BF16 weights are read in place."""
    return round(_FP8 * (text.num_hidden_layers * _attention_weights(text, tp) + _indexer_weights(text)))


def shared_expert_bytes(text: Any, tp: int) -> int:
    """What the MoE kernels read of the shared experts as released, where a copy is kept of no more."""
    return round(_FP8 * text.num_hidden_layers * _shared_expert_weights(text, tp))


def mixer_bytes(text: Any) -> int:
    """What the boundary kernels keep of the mHC projections: each in three bfloat16 pieces, on every rank, and the
    first one's sum over the streams besides, in float32 and in pieces."""
    streams, pieces = text.hc_mult, 3 * _BF16
    column = (2 + streams) * streams * text.hidden_size
    return column * (2 * text.num_hidden_layers * streams * pieces + 4 + pieces)


def weight_bytes(text: Any, tp: int, draft_layers: int) -> int:
    """What a rank's weights take at least: layers, embedding and LM head; without padding, norms and indexers.

    Draft layers have their own number of experts. The Engram tables lie in host memory.
    """
    drafts = draft_layers * _layer_bytes(text, tp, getattr(text, "dspark_n_routed_experts", 0) or text.n_routed_experts)
    layers = text.num_hidden_layers * _layer_bytes(text, tp, text.n_routed_experts)
    engram = _FP8 * len(text.engram_layer_ids) * _engram_weights(text, tp)
    vocabulary = 2 * _BF16 * text.vocab_size * text.hidden_size / tp
    return round(drafts + layers + engram + vocabulary)


def _layer_bytes(text: Any, tp: int, experts: int) -> float:
    routed = experts * 3 * text.hidden_size * text.moe_intermediate_size / tp
    return _FP4 * routed + _FP8 * (_attention_weights(text, tp) + _shared_expert_weights(text, tp))


def _attention_weights(text: Any, tp: int) -> float:
    """fused_wqa_wkv on every rank; wq_b, wo_a and wo_b by heads and groups."""
    heads = text.num_attention_heads * text.head_dim
    fused = (text.q_lora_rank + text.head_dim) * text.hidden_size
    wo_a = text.o_lora_rank * heads
    wo_b = text.hidden_size * text.o_groups * text.o_lora_rank
    return float(fused + (heads * text.q_lora_rank + wo_a + wo_b) / tp)


def _indexer_weights(text: Any) -> float:
    """All indexers' queries, on every rank."""
    return float(len(text.index_source_layer_ids) * text.index_n_heads * text.index_head_dim * text.q_lora_rank)


def _shared_expert_weights(text: Any, tp: int) -> float:
    return float(text.n_shared_experts * 3 * text.hidden_size * text.moe_intermediate_size / tp)


def _engram_weights(text: Any, tp: int) -> float:
    """wkv: all n-grams' heads -> a key per stream and a value, by output columns."""
    columns = (text.engram_max_ngram_size - 1) * text.engram_n_heads * text.engram_head_dim
    return float(columns * (text.hc_mult + 1) * text.hidden_size / tp)
