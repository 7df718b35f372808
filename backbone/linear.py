"""Dense layers of the plain model: dequantized once, multiplied with float32 accumulation, rounded to bfloat16."""

import torch
from torch import Tensor

from specialized_decode.backbone.formats import dequantize_fp8


def compute_dtype(device: torch.device) -> torch.dtype:
    """What dequantized weights are held in: both are exact; bfloat16 is half the bytes where its GEMMs are fast."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def project(x: Tensor, weight: Tensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """x [T, K] bfloat16 times weight [N, K] (see `compute_dtype`) -> [T, N] in `out_dtype`."""
    if weight.dtype == torch.float32:
        return (x.float() @ weight.T).to(out_dtype)
    if out_dtype == torch.float32:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return x @ weight.T


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension in float32 (Zhang and Sennrich, 2019), rounded to bfloat16 once."""
    x = x.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()).to(torch.bfloat16)


class Linear:
    """A dense layer: `weight` [N, K] as stored (FP8 e4m3 or BF16), `scale` UE8M0 [N/32, K/32] or None."""

    def __init__(self, weight: Tensor, scale: Tensor | None = None) -> None:
        self.weight = weight
        self.scale = scale
        dtype = compute_dtype(weight.device)
        self.dense = weight.to(dtype) if scale is None else dequantize_fp8(weight, scale, dtype)

    @classmethod
    def stacked(cls, parts: list[tuple[Tensor, Tensor | None]]) -> "Linear":
        """Several layers of the same input as one; their outputs follow each other."""
        scales = [scale for _, scale in parts if scale is not None]
        weight = torch.cat([_bytes(weight) for weight, _ in parts]).view(parts[0][0].dtype)
        return cls(weight, torch.cat([_bytes(s) for s in scales]).view(scales[0].dtype) if scales else None)

    def __call__(self, x: Tensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return project(x, self.dense, out_dtype)


def _bytes(tensor: Tensor) -> Tensor:
    """One-byte formats as uint8, which every torch operator takes."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
