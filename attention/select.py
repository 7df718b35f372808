"""Which attention ops serve a device: the kernels where they fit, else the reference."""

import torch

from specialized_decode.attention import index_tuning, projection_tuning
from specialized_decode.attention.views import AttentionView

# What the kernels are written for.
HEAD_DIM, ROPE_DIM = 512, 64
MAX_HEADS = 64
INDEX_DIM, MAX_INDEX_HEADS = 128, 64
MAX_WINDOW, MAX_TOPK = 1024, 2048


def mla_unsupported(attn: AttentionView, device: torch.device) -> str | None:
    """Why the sparse MLA kernels do not serve this layer on this device, or None."""
    return _unsupported_device(device) or unsupported_widths(attn)


def projections_unsupported(attn: AttentionView, device: torch.device) -> str | None:
    """Why the low-batch projection kernels do not serve this layer on this device, or None."""
    return _unsupported_device(device) or unsupported_weights(attn)


def _unsupported_device(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"device: found {device.type}, expected cuda"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 9:
        return f"GPU: found compute capability {major}.{minor}, expected 9.0 or later"
    return None


def unsupported_widths(attn: AttentionView) -> str | None:
    """Why the sparse MLA kernels do not serve a layer of these widths, or None."""
    if attn.head_dim != HEAD_DIM or attn.rope_dim != ROPE_DIM:
        return f"head: found {attn.head_dim} columns, {attn.rope_dim} rotated, expected {HEAD_DIM}, {ROPE_DIM} rotated"
    if not 0 < attn.num_heads <= MAX_HEADS:
        return f"heads: found {attn.num_heads}, expected 1 to {MAX_HEADS} a rank"
    if not 0 < attn.window_size <= MAX_WINDOW:
        return f"window: found {attn.window_size}, expected 1 to {MAX_WINDOW}"
    topk = attn.selection.topk_indices.shape[1]
    if not 0 < topk <= MAX_TOPK:
        return f"top-k: found {topk}, expected 1 to {MAX_TOPK}"
    return None


def unsupported_weights(attn: AttentionView) -> str | None:
    """Why the projection kernels do not serve a layer of these weights, or None."""
    layers = {"fused_wqa_wkv": attn.fused_wqa_wkv, "wq_b": attn.wq_b, "wo_a": attn.wo_a, "wo_b": attn.wo_b}
    for name, layer in layers.items():
        if layer.scale is None or layer.weight.dtype != torch.float8_e4m3fn:
            return f"{name}: found {layer.weight.dtype}, expected float8_e4m3fn with scales"
        n, k = layer.weight.shape
        try:
            projection_tuning.projection(n, k, attn.o_groups if name == "wo_a" else 1)
        except ValueError as error:
            return f"{name}: {error}"
    return None


def index_unsupported(attn: AttentionView, device: torch.device) -> str | None:
    """Why the index kernels do not serve this layer, which selects positions, on this device, or None."""
    return _unsupported_device(device) or unsupported_indexer(attn)


def unsupported_indexer(attn: AttentionView) -> str | None:
    """Why the index kernels do not serve an indexer and a compressor of these widths and weights, or None."""
    indexer, compressor = attn.indexer, attn.compressor
    if indexer is None:
        return "indexer: found none, expected a layer that selects positions"
    if indexer.head_dim != INDEX_DIM or not 0 < indexer.num_heads <= MAX_INDEX_HEADS:
        found = f"{indexer.num_heads} heads of {indexer.head_dim} columns"
        return f"indexer: found {found}, expected 1 to {MAX_INDEX_HEADS} of {INDEX_DIM}"
    topk = attn.selection.topk_indices.shape[1]
    if not 0 < topk <= MAX_TOPK:
        return f"top-k: found {topk}, expected 1 to {MAX_TOPK}"
    size = indexer.candidate_block_size
    if attn.selection.candidate_blocks is not None and (size <= 0 or size & (size - 1)):
        return f"candidate blocks: found {size} positions each, expected a power of two"
    plain = {"weights_proj": indexer.weights_proj.weight}
    if compressor is not None:
        if compressor.ratio not in (1, 2):
            return f"compressor: found ratio {compressor.ratio}, expected 1 or 2"
        assert indexer.wk is not None
        plain |= {"fused_wkv_wgate": compressor.fused_wkv_wgate.weight, "wk": indexer.wk.weight}
    for name, weight in plain.items():
        if weight.dtype != torch.bfloat16 or not weight.is_contiguous():
            return f"{name}: found {weight.dtype}, strides {list(weight.stride())}, expected contiguous bfloat16"
    if indexer.wq_b.scale is None or indexer.wq_b.weight.dtype != torch.float8_e4m3fn:
        return f"indexer's wq_b: found {indexer.wq_b.weight.dtype}, expected float8_e4m3fn with scales"
    outputs = sum(weight.shape[0] for name, weight in plain.items() if name != "wk")
    try:
        projection_tuning.projection(*indexer.wq_b.weight.shape)
        index_tuning.index_projection(
            -(-outputs // index_tuning.TILE) * index_tuning.TILE, indexer.weights_proj.weight.shape[1]
        )
    except ValueError as error:
        return f"indexer: {error}"
    return None
