"""Low-batch projections: dense layers for a few rows, on weights prepared once."""

from typing import NamedTuple, Protocol

from torch import Tensor

from specialized_decode.attention import projection_tuning as tuning
from specialized_decode.attention import reference
from specialized_decode.boundary import LinearView, StepGates
from specialized_decode.boundary import reference as boundary_reference


class FusedProjection(Protocol):
    """A dense layer [N, K] as a kernel on its own copy of the weight, for up to `tuning.MAX_ROWS` rows."""

    @property
    def nbytes(self) -> int:
        """What the copy takes."""

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x: [T, groups * K] bfloat16 -> [T, N] bfloat16, group by group, in `out` where given."""

    def normed(self, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        """x: [T, K] bfloat16, which may be columns of a wider tensor, RMS-normed by norm [K] first, eps above the mean
        square -> [T, N] bfloat16. Of one group."""

    def warm(self, rows: int = tuning.MAX_ROWS) -> None:
        """Compiles and loads what calls of up to so many rows need. Not in a capture."""


class FusedProjections(NamedTuple):
    """One layer's projections on kernels."""

    fused_wqa_wkv: FusedProjection
    wq_b: FusedProjection
    wo_a: FusedProjection
    wo_b: FusedProjection

    @property
    def nbytes(self) -> int:
        """What the prepared copies take."""
        return sum(projection.nbytes for projection in self)


class LowBatchLinear:
    """A dense layer [N, K] with a prepared copy for low-batch steps; other steps take the stock path."""

    def __init__(self, linear: LinearView, fused: FusedProjection | None = None, grouped: bool = False) -> None:
        """fused: the kernel for low-batch steps, None for the reference op. grouped: x has the columns of several
        groups, and larger steps run here, where the stock path takes no groups."""
        self.linear, self.fused = linear, fused
        # Beside a kernel the reference op is left with the steps that are too large for it, and then with groups alone.
        wanted = fused is None or grouped
        self.prepared = boundary_reference.prepare(linear.weight, linear.scale) if wanted else None

    def __call__(self, x: Tensor, step: StepGates) -> Tensor:
        """x: [T, K] bfloat16 -> [T, N] bfloat16."""
        kernel = self.kernel(step)
        if kernel is not None:
            return kernel(x)
        if step.low_batch and self.prepared is not None:
            return boundary_reference.project(x, self.prepared)
        return self.linear(x)

    def grouped(self, x: Tensor, groups: int, step: StepGates) -> Tensor:
        """x: [T, groups * K] through [groups * N, K], group by group -> [T, groups * N] bfloat16."""
        kernel = self.kernel(step)
        if kernel is not None:
            return kernel(x)
        assert self.prepared is not None, "a grouped layer keeps its prepared weight"
        return reference.grouped_projection(x, self.prepared, groups)

    def publishes(self, step: StepGates) -> Tensor | FusedProjection | None:
        """What a publisher computes the layer with in this step; None where its output is not published."""
        return (self.kernel(step) or self.prepared) if step.low_batch else None

    def kernel(self, step: StepGates) -> FusedProjection | None:
        """The kernel that runs in this step, None where the reference op or the stock path does."""
        return self.fused if step.low_batch and step.rows <= tuning.MAX_ROWS else None
