"""Coefficients: a sublayer's mixes out of the streams."""

from typing import Protocol

from torch import Tensor

from specialized_decode.boundary import reference
from specialized_decode.boundary.streams import SideStream
from specialized_decode.boundary.types import MixerView

Mixes = tuple[Tensor, Tensor, Tensor]


class Coefficients(Protocol):
    """The ops beside a sublayer. finish_on: where on the current stream only the reading of the streams is wanted, the
    side stream that may take the rest; joined before the mixes are read."""

    def prepare(self, mixer: MixerView) -> None:
        """Before any capture: gets `mixer`, any sublayer's, ready for calls."""

    def prepare_first(self, mixer: MixerView) -> None:
        """Before any capture: gets `mixer`, the first sublayer's, ready for `first`."""

    def first(self, x: Tensor, residual: Tensor, mixer: MixerView, finish_on: SideStream | None = None) -> Mixes:
        """Mixes of the first sublayer, whose streams `residual` are all x [T, hidden]."""

    def __call__(self, residual: Tensor, mixer: MixerView, finish_on: SideStream | None = None) -> Mixes:
        """residual: [T, n, hidden] -> pre [T, n], post [T, n], comb [T, n, n], float32."""

    def mean(self, residual: Tensor) -> Tensor:
        """The streams' mean [T, hidden]."""


class ReferenceCoefficients:
    """The reference ops."""

    def prepare(self, mixer: MixerView) -> None:
        """The reference reads the weights as they are."""

    def prepare_first(self, mixer: MixerView) -> None:
        """The reference projects the broadcast streams as they are."""

    def first(self, x: Tensor, residual: Tensor, mixer: MixerView, finish_on: SideStream | None = None) -> Mixes:
        return reference.coefficients(residual, mixer)

    def __call__(self, residual: Tensor, mixer: MixerView, finish_on: SideStream | None = None) -> Mixes:
        return reference.coefficients(residual, mixer)

    def mean(self, residual: Tensor) -> Tensor:
        return reference.stream_mean(residual)
