"""Routed experts of a host that loads its own, in the form that the kernels read."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from specialized_decode import moe
from specialized_decode.runtime.executor import DecodeConfig


class HoldableLayer(Protocol):
    """A layer whose routed experts can be held in another form."""

    @property
    def ffn(self) -> moe.HoldableMoE: ...


class HoldableTarget(Protocol):
    """A backbone of such layers."""

    @property
    def norm(self) -> Tensor: ...
    @property
    def layers(self) -> Sequence[HoldableLayer]: ...


def hold_experts(target: HoldableTarget, config: DecodeConfig) -> None:
    """Where `config` asks for the MoE kernels and `target` is on a GPU: has it hold its routed experts in their form.

    Once the weights are loaded, and before anything is computed, captured or built over them. There is then one copy of
    the experts, which the kernels and the backbone's own layers read; see `moe.hold_experts`.
    """
    if "moe" in config.kernels and target.norm.device.type == "cuda":
        moe.hold_experts([layer.ffn for layer in target.layers])
