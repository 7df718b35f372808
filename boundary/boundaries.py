"""Boundaries: the schedule between sublayers. The critical path reduces, mixes, collapses and norms; the next
coefficients and aux means run beside the sublayer that follows."""

from typing import Protocol

from torch import Tensor

from specialized_decode.boundary import reference
from specialized_decode.boundary.all_reduce import BoundaryAllReduce
from specialized_decode.boundary.coefficients import Coefficients, ReferenceCoefficients
from specialized_decode.boundary.streams import SideStream
from specialized_decode.boundary.types import BoundaryLayer, BoundaryState, MixerView, QuantizedInput, StepGates


class StepBoundaries(Protocol):
    """What a step calls between its sublayers: `Boundaries`, which documents it, or an engine's own mHC."""

    def first(self, layer: BoundaryLayer, x: Tensor, step: StepGates) -> tuple[Tensor, BoundaryState]: ...
    def pre(self, layer: BoundaryLayer, residual: Tensor, state: BoundaryState, step: StepGates) -> Tensor: ...
    def sublayer(
        self,
        layer: BoundaryLayer,
        ffn: bool,
        state: BoundaryState,
        step: StepGates,
        *,
        quantize: bool = False,
        capture_aux: bool = False,
    ) -> tuple[Tensor, QuantizedInput | None, Tensor | None]: ...
    def post_only(self, state: BoundaryState) -> Tensor: ...
    def mean(self, residual: Tensor) -> Tensor: ...
    def join(self) -> None: ...


class Boundaries:
    """The boundaries of one step after another. `stream` carries the coefficients where the step's gates say so."""

    def __init__(
        self,
        all_reduce: BoundaryAllReduce,
        stream: SideStream,
        streams: int,
        coefficients: Coefficients | None = None,
    ) -> None:
        """coefficients: the ops beside a sublayer, None for the reference."""
        self.all_reduce, self.stream, self.streams = all_reduce, stream, streams
        self.coefficients: Coefficients = coefficients or ReferenceCoefficients()

    def first(self, layer: BoundaryLayer, x: Tensor, step: StepGates) -> tuple[Tensor, BoundaryState]:
        """x: [T, hidden] embeddings. The first attention reads stream 0 of the broadcast; returns its input."""
        residual = reference.broadcast_streams(x, self.streams)
        state = self._mix(layer.attn_mixer, x, residual, step)
        return reference.rms_norm(x, layer.attn_norm, layer.eps), state

    def pre(self, layer: BoundaryLayer, residual: Tensor, state: BoundaryState, step: StepGates) -> Tensor:
        """The attention input collapsed out of streams that were changed after the post-mix (an Engram layer's)."""
        x = reference.rms_norm(reference.collapse(residual, state.pre), layer.attn_norm, layer.eps)
        self._advance(layer.attn_mixer, residual, state, step)
        return x

    def sublayer(
        self,
        layer: BoundaryLayer,
        ffn: bool,
        state: BoundaryState,
        step: StepGates,
        *,
        quantize: bool = False,
        capture_aux: bool = False,
    ) -> tuple[Tensor, QuantizedInput | None, Tensor | None]:
        """From the pending output to the input of `layer`'s FFN or attention.

        Returns the input [T, hidden], its MXFP8 form if asked, and the mean of the new streams if asked; that mean
        is ready after the next `join`.
        """
        mixer, norm = (layer.ffn_mixer, layer.ffn_norm) if ffn else (layer.attn_mixer, layer.attn_norm)
        assert state.pending is not None, "a boundary follows a sublayer's output"
        # Settled: between the boundary that wrote the streams and this one lie a sublayer's launches.
        residual, x, quant = self.all_reduce.full(
            state.pending, state.residual, state.post, state.comb, state.pre, norm, layer.eps, quantize, settled=True
        )
        aux = self._advance(mixer, residual, state, step, capture_aux)
        return x, quant, aux

    def post_only(self, state: BoundaryState) -> Tensor:
        """The streams [T, n, hidden] after the pending output, where no sublayer reads them next."""
        assert state.pending is not None, "a boundary follows a sublayer's output"
        residual = self.all_reduce.residual_only(state.pending, state.residual, state.post, state.comb, settled=True)
        state.pending = None
        return residual

    def join(self) -> None:
        """Waits for the coefficients and aux means that run beside the sublayer."""
        self.stream.join()

    def _advance(
        self, mixer: MixerView, residual: Tensor, state: BoundaryState, step: StepGates, capture_aux: bool = False
    ) -> Tensor | None:
        """Replaces the state by the next sublayer's; returns the aux mean if asked."""
        if step.side_stream:
            with self.stream.fork():
                return self._update(mixer, residual, state, capture_aux)
        # Of many rows what reads the streams would only be in the sublayer's way; what follows is small.
        return self._update(mixer, residual, state, capture_aux, self.stream)

    def mean(self, residual: Tensor) -> Tensor:
        """The aux hidden state of streams [T, n, hidden], [T, hidden] bfloat16."""
        return self.coefficients.mean(residual)

    def _update(
        self,
        mixer: MixerView,
        residual: Tensor,
        state: BoundaryState,
        capture_aux: bool,
        finish_on: SideStream | None = None,
    ) -> Tensor | None:
        state.residual, state.pending = residual, None
        state.pre, state.post, state.comb = self.coefficients(residual, mixer, finish_on)
        return self.coefficients.mean(residual) if capture_aux else None

    def _mix(self, mixer: MixerView, x: Tensor, residual: Tensor, step: StepGates) -> BoundaryState:
        if step.side_stream:
            with self.stream.fork():
                return BoundaryState(residual, *self.coefficients.first(x, residual, mixer))
        return BoundaryState(residual, *self.coefficients.first(x, residual, mixer, self.stream))
