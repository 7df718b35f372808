"""Which attention ops serve a device: the kernels where they fit, else the reference."""

import torch

from specialized_decode.attention import projection_tuning
from specialized_decode.attention.views import AttentionView

# What the kernels are written for.
HEAD_DIM, ROPE_DIM = 512, 64
MAX_HEADS = 64
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
