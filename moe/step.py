"""MoEStep: the schedule of one layer's MoE."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from specialized_decode.boundary import StepGates, UnfinalizedRows
from specialized_decode.boundary import reference as boundary_reference
from specialized_decode.moe import reference
from specialized_decode.moe.gemm import RoutedExpertGemms
from specialized_decode.moe.views import MoEView

if TYPE_CHECKING:
    from specialized_decode.moe.fused import FusedMoE


class MoEStep:
    """One layer's MoE in a captured step: low-batch up to `max_rows` rows, the stock path otherwise.

    gemm: None keeps the layer on the stock path, as a routing hook does, and kernels lower `max_rows` to theirs;
    before_last: called ahead of the low-batch path's last launch, on the reference's ops of the routed experts, where
    the next boundary's side stream is joined.
    """

    def __init__(
        self,
        ffn: MoEView,
        gemm: RoutedExpertGemms | None,
        max_rows: int,
        before_last: Callable[[], None] = lambda: None,
    ) -> None:
        self.before_last = before_last
        self.ffn, self.gemm, self.max_rows = ffn, gemm, max_rows
        if gemm is not None and gemm.max_rows is not None:
            self.max_rows = min(max_rows, gemm.max_rows)
        if gemm is not None and gemm.fused is None:
            self.gate = boundary_reference.prepare(ffn.gate.weight, ffn.gate.scale)
            self.shared_up = boundary_reference.prepare(ffn.shared_up.weight, ffn.shared_up.scale)
            self.shared_down = boundary_reference.prepare(ffn.shared_down.weight, ffn.shared_down.scale)

    def takes_low_batch(self, step: StepGates) -> bool:
        """Whether `step` runs the low-batch path here."""
        return step.low_batch and step.rows <= self.max_rows and self.gemm is not None and self.ffn.routing_hook is None

    def run(self, x: Tensor, input_ids: Tensor, step: StepGates) -> UnfinalizedRows | Tensor:
        """x: [T, K] bfloat16, the normed input; input_ids: [T] -> the TP-partial output, unfinalized if it can be."""
        if not self.takes_low_batch(step):
            return self.ffn(x, input_ids)
        assert self.gemm is not None
        if self.gemm.fused is not None:
            return self._fused(self.gemm.fused, x, input_ids)
        ffn = self.ffn
        # Selection must not see a bfloat16 rounding.
        logits = boundary_reference.project_float(x, self.gate)
        ids, weights = reference.select_experts(logits, ffn.bias, ffn.image_bias, input_ids, ffn.topk, ffn.scaling)
        up = boundary_reference.project(x, self.shared_up)
        shared = boundary_reference.project(reference.swiglu(up, ffn.limit), self.shared_down)
        self.before_last()
        return UnfinalizedRows(self.gemm(x, ids), weights, shared)

    def _fused(self, fused: "FusedMoE", x: Tensor, input_ids: Tensor) -> UnfinalizedRows:
        routing = fused.route(x, input_ids)
        hidden = fused.up(routing)
        self.before_last()
        return fused.down(routing, hidden)
