"""Routed-expert GEMMs for low-batch steps, and what is built of them at start."""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specialized_decode.moe import reference, select, tuning
from specialized_decode.moe.views import MoEView

if TYPE_CHECKING:
    from specialized_decode.moe.fused import FusedMoE

logger = logging.getLogger(__name__)

# The reference keeps a layer's experts dequantized while they take no more than this; kernels read them in place.
_KEPT_BYTES = {"cpu": 64 << 20, "cuda": 4 << 30}
_CHUNK_BYTES = 512 << 20


class RoutedExpertGemms:
    """Both GEMMs of one layer's routed experts, with the clamped SwiGLU between them.

    fused: the layer's whole MoE on kernels, which serve up to `max_rows` rows, where they read its experts' form; the
    reference's ops are then not there.
    """

    def __init__(self, ffn: MoEView) -> None:
        experts = ffn.experts
        self.experts, self.limit = experts, ffn.limit
        self.fused: FusedMoE | None = None
        self.max_rows: int | None = None
        if experts.layout == select.LAYOUT:
            # The kernels need Triton, which a machine without a GPU need not have.
            from specialized_decode.moe import fused

            self.fused, self.max_rows = fused.FusedMoE(ffn), tuning.MAX_ROWS
            return
        self.dtype = torch.bfloat16 if experts.w13.is_cuda else torch.float32
        per_expert = 2 * (experts.w13[0].numel() + experts.w2[0].numel()) * self.dtype.itemsize
        keeps = experts.count * per_expert <= _KEPT_BYTES[experts.w13.device.type]
        self.chunk = experts.count if keeps else max(1, _CHUNK_BYTES // per_expert)
        self._kept = self._unpack(0, experts.count) if keeps else None

    @staticmethod
    def refusal(ffn: MoEView, kernels: bool = True) -> str | None:
        """Why `ffn`'s experts cannot take the low-batch path, or None. kernels: whether those may run."""
        experts = ffn.experts
        if kernels and experts.layout == select.LAYOUT and experts.w13.is_cuda:
            return select.unsupported(ffn)
        if experts.layout != "checkpoint":
            return f"experts are in the form of {experts.layout}, expected the checkpoint's"
        for name, weight, scale in (("w13", experts.w13, experts.w13_scale), ("w2", experts.w2, experts.w2_scale)):
            if weight.element_size() != 1:
                return f"{name} is {weight.dtype}, expected packed FP4 bytes"
            if scale.shape != (*weight.shape[:2], weight.shape[2] // 16):
                return f"{name}'s scales are {tuple(scale.shape)}, expected one per 32 along K"
        return None

    def _unpack(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        e, part = self.experts, slice(start, stop)
        return (
            reference.unpack_fp4(e.w13[part], e.w13_scale[part], self.dtype),
            reference.unpack_fp4(e.w2[part], e.w2_scale[part], self.dtype),
        )

    def __call__(self, x: Tensor, ids: Tensor) -> Tensor:
        """x: [T, K] bfloat16, ids: [T, k] -> unfinalized rows [T, k, K] bfloat16; the reference's ops.

        Raises RuntimeError where the experts are no longer in the form that this was built for.
        """
        if self.experts.layout != "checkpoint":
            raise RuntimeError(f"experts are in the form of {self.experts.layout}, and were not when this was built")
        tokens = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
        rows = torch.zeros(*ids.shape, x.shape[1], dtype=torch.bfloat16, device=x.device)
        for start in range(0, self.experts.count, self.chunk):
            stop = min(start + self.chunk, self.experts.count)
            w13, w2 = self._kept or self._unpack(start, stop)
            outputs = reference.expert_outputs(x, w13, w2, self.limit)
            here = (ids >= start) & (ids < stop)
            rows = torch.where(here.unsqueeze(2), outputs[(ids - start).clamp(0, stop - start - 1), tokens], rows)
        return rows


def build_routed_expert_gemms(layers: Sequence[MoEView], kernels: bool = True) -> list[RoutedExpertGemms | None]:
    """One per layer, None where the layer stays on the stock path; logs how many took which, and why.

    kernels: whether those may run; they are compiled here, and not in a capture.
    """
    gemms: list[RoutedExpertGemms | None] = []
    refusals: Counter[str] = Counter()
    for ffn in layers:
        reason = RoutedExpertGemms.refusal(ffn, kernels)
        gemms.append(RoutedExpertGemms(ffn) if reason is None else None)
        if reason is not None:
            refusals[reason] += 1
    logger.info("Routed experts: %d of %d layers on the low-batch path", len(gemms) - refusals.total(), len(gemms))
    for reason, count in refusals.items():
        logger.warning("Routed experts: layers on the stock path: %d: %s", count, reason)
    _warm_up([gemm.fused for gemm in gemms if gemm is not None and gemm.fused is not None])
    return gemms


def _warm_up(layers: "Sequence[FusedMoE]") -> None:
    if not layers:
        return
    for layer in {layer.variant: layer for layer in layers}.values():
        layer.warm_up()
    logger.info(
        "Routed experts: %d layers on kernels for up to %d rows; they read all weights in place and keep %d bytes",
        len(layers),
        tuning.MAX_ROWS,
        sum(layer.kept_bytes for layer in layers),
    )
