"""Low-batch projections: dense layers for a few rows, on weights prepared once."""

from torch import Tensor

from specialized_decode.attention import reference
from specialized_decode.boundary import LinearView, StepGates
from specialized_decode.boundary import reference as boundary_reference


class LowBatchLinear:
    """A dense layer [N, K] with a prepared copy for low-batch steps; other steps take the stock path."""

    def __init__(self, linear: LinearView) -> None:
        self.linear = linear
        self.prepared = boundary_reference.prepare(linear.weight, linear.scale)

    def __call__(self, x: Tensor, step: StepGates) -> Tensor:
        """x: [T, K] bfloat16 -> [T, N] bfloat16."""
        return boundary_reference.project(x, self.prepared) if step.low_batch else self.linear(x)

    def grouped(self, x: Tensor, groups: int) -> Tensor:
        """x: [T, groups * K] through [groups * N, K], group by group -> [T, groups * N] bfloat16."""
        return reference.grouped_projection(x, self.prepared, groups)
