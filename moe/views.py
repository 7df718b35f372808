"""What the MoE step reads of the model."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from specialized_decode.boundary import LinearView


class ExpertsView(Protocol):
    """Routed experts in place: w13 [E, 2 I, K/2], w2 [E, K, I/2] packed e2m1 with the low nibble first and gate rows
    before up rows; scales UE8M0, one per 32 along K."""

    count: int
    w13: Tensor
    w13_scale: Tensor
    w2: Tensor
    w2_scale: Tensor


class MoEView(Protocol):
    """One layer's mixture of experts; gate [E, K], bias and image_bias [E] float32, shared_up [2 I, K] gate first,
    shared_down [K, I]. Calling it is the stock path: [T, K], input ids [T] -> finalized [T, K]."""

    topk: int
    scaling: float
    limit: float
    gate: LinearView
    bias: Tensor
    image_bias: Tensor | None
    shared_up: LinearView
    shared_down: LinearView
    routing_hook: Callable[[Tensor], None] | None

    @property
    def experts(self) -> ExpertsView: ...

    def __call__(self, x: Tensor, input_ids: Tensor) -> Tensor: ...
