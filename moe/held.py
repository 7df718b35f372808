"""Experts in the form that the kernels read, in the place of the checkpoint's, on a host that loads its own."""

import logging
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from specialized_decode.moe import select
from specialized_decode.moe.expert_layout import HummingExperts, PackedWeight, pack, projections, unpack
from specialized_decode.moe.views import HoldableExperts, HoldableMoE

logger = logging.getLogger(__name__)

# Packing takes some six bytes a code beside its result (on a CPU, 2026-11-30): 0.4 GB at a time, or one expert's.
_PIECE_CODES = 1 << 26


class HummingForm:
    """A layer's experts as an `ExpertsView` of layout "HUMMING", with a way back to the checkpoint's form."""

    layout = select.LAYOUT

    def __init__(self, held: HummingExperts) -> None:
        self._held = held
        self.count = held.count
        self.w13, self.w13_scale, self.w13_scale_2 = held.w13.weight, held.w13.weight_scale, held.w13.weight_scale_2
        self.w2, self.w2_scale, self.w2_scale_2 = held.w2.weight, held.w2.weight_scale, held.w2.weight_scale_2

    def unpacked(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Experts start..stop as `Mxfp4Experts` has them: w13, w13_scale, w2, w2_scale. Reads nothing back."""
        experts = unpack(self._held.part(start, stop))
        return experts.w13, experts.w13_scale, experts.w2, experts.w2_scale


def pack_in_pieces(w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor) -> HummingExperts:
    """`pack`, in memory that is bounded beside its result. Raises ValueError as `pack` does."""
    count, hidden, width = w13.shape[0], 2 * w13.shape[2], 2 * w2.shape[2]
    piece = max(1, _PIECE_CODES // sum(shape.rows * shape.columns for shape in projections(hidden, width)))
    held: HummingExperts | None = None
    for start in range(0, count, piece):
        stop = min(start + piece, count)
        packed = pack(w13[start:stop], w13_scale[start:stop], w2[start:stop], w2_scale[start:stop])
        if held is None:
            held = HummingExperts(
                _empty_like(packed.w13, count), _empty_like(packed.w2, count), hidden=packed.hidden, width=packed.width
            )
        for whole, part in ((held.w13, packed.w13), (held.w2, packed.w2)):
            whole.weight[start:stop] = part.weight
            whole.weight_scale.view(torch.uint8)[start:stop] = part.weight_scale.view(torch.uint8)
            whole.weight_scale_2[start:stop] = part.weight_scale_2
    if held is None:
        raise ValueError("found no experts, expected at least one")
    return held


def repack(experts: HoldableExperts) -> str | None:
    """Has `experts` hold Humming's form alone; or why that form cannot hold them, and they stay as they are."""
    if experts.layout == select.LAYOUT:
        return None
    if experts.layout != "checkpoint":
        return f"experts are in the form of {experts.layout}, expected the checkpoint's"
    try:
        held = pack_in_pieces(experts.w13, experts.w13_scale, experts.w2, experts.w2_scale)
    except ValueError as error:
        return str(error)
    experts.hold(HummingForm(held))
    return None


def hold_experts(layers: Sequence[HoldableMoE]) -> None:
    """Repacks, layer by layer, the experts that the kernels then serve; logs how many, their memory, and why not all.

    Values change where `pack` requantizes: the host's own ops compute from what is held, too. Whoever has taken an
    expert's tensors before, an executor or a captured graph, must not go on using them.
    """
    refusals: Counter[str] = Counter()
    before = after = held = 0
    for ffn in layers:
        size = _bytes(ffn.experts)
        reason = select.unsuited(ffn) or repack(ffn.experts)
        if reason is not None:
            refusals[reason] += 1
            continue
        held, before, after = held + 1, before + size, after + _bytes(ffn.experts)
    logger.info(
        "Routed experts: %d of %d layers held in the kernels' form alone: %.1f MB, before %.1f MB",
        *(held, len(layers), after / 1e6, before / 1e6),
    )
    for reason, count in refusals.items():
        logger.warning("Routed experts: layers left in the form that they were loaded in: %d: %s", count, reason)
    if held and layers[0].experts.w13.is_cuda:
        # What the checkpoint's form took has other sizes than what comes next.
        torch.cuda.empty_cache()


def _empty_like(weight: PackedWeight, count: int) -> PackedWeight:
    """Of `count` experts."""
    scales = weight.weight_scale.view(torch.uint8).new_empty(count, *weight.weight_scale.shape[1:])
    return PackedWeight(
        weight.weight.new_empty(count, *weight.weight.shape[1:]),
        scales.view(weight.weight_scale.dtype),
        weight.weight_scale_2.new_empty(count),
    )


def _bytes(experts: HoldableExperts) -> int:
    tensors = (experts.w13, experts.w13_scale, experts.w13_scale_2, experts.w2, experts.w2_scale, experts.w2_scale_2)
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
