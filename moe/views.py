"""What the MoE step reads of the model."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from specialized_decode.boundary import LinearView

if TYPE_CHECKING:
    from specialized_decode.moe.held import HummingForm


class ExpertsView(Protocol):
    """Routed experts in place: w13 [E, 2 I, K/2], w2 [E, K, I/2] packed e2m1 with the low nibble first and gate rows
    before up rows; scales UE8M0, one per 32 along K. layout: "checkpoint" where they are in that form, else who holds
    them in a form of its own. "HUMMING" has w13_scale_2 and w2_scale_2 besides; see `moe.expert_layout`."""

    @property
    def layout(self) -> str: ...

    @property
    def count(self) -> int: ...
    @property
    def w13(self) -> Tensor: ...
    @property
    def w13_scale(self) -> Tensor: ...
    @property
    def w2(self) -> Tensor: ...
    @property
    def w2_scale(self) -> Tensor: ...


class MoEView(Protocol):
    """One layer's mixture of experts; gate [E, K], bias and image_bias [E] float32, shared_up [2 I, K] gate first,
    shared_down [K, I]. Calling it is the stock path: [T, K], input ids [T] -> finalized [T, K]."""

    @property
    def topk(self) -> int: ...
    @property
    def scaling(self) -> float: ...
    @property
    def limit(self) -> float: ...
    @property
    def gate(self) -> LinearView: ...
    @property
    def bias(self) -> Tensor: ...
    @property
    def image_bias(self) -> Tensor | None: ...
    @property
    def shared_up(self) -> LinearView: ...
    @property
    def shared_down(self) -> LinearView: ...
    @property
    def routing_hook(self) -> Callable[[Tensor], None] | None: ...

    @property
    def experts(self) -> ExpertsView: ...

    def __call__(self, x: Tensor, input_ids: Tensor) -> Tensor: ...


class HoldableExperts(ExpertsView, Protocol):
    """Experts whose owner can exchange what it holds; w13_scale_2, w2_scale_2 [E] float32 or None."""

    @property
    def w13_scale_2(self) -> Tensor | None: ...
    @property
    def w2_scale_2(self) -> Tensor | None: ...

    def hold(self, form: "HummingForm") -> None:
        """From here on the experts are `form`, and what they were before is released."""


class HoldableMoE(MoEView, Protocol):
    """A layer whose experts are those."""

    @property
    def experts(self) -> HoldableExperts: ...
