"""EngramPrefetch: each Engram layer's WKV chain, run beside the layers before it."""

from collections.abc import Callable, Mapping

from torch import Tensor

from specialized_decode.boundary import SideStream
from specialized_decode.boundary import reference as boundary_reference
from specialized_decode.engram import reference
from specialized_decode.engram.views import EngramView


class EngramPrefetch:
    """engrams: layer id -> Engram; streams: a side stream for each, so that one layer's wait is not another's."""

    def __init__(self, engrams: Mapping[int, EngramView], streams: Mapping[int, SideStream], max_rows: int) -> None:
        self.engrams, self.streams, self.max_rows = engrams, streams, max_rows
        self._prepared = {i: boundary_reference.prepare(e.wkv.weight, e.wkv.scale) for i, e in engrams.items()}
        self._kv: dict[int, Tensor] = {}

    def start(self, rows: int) -> None:
        """Starts every layer's WKV on the `rows` rows that its lookup staged."""
        if not 0 < rows <= self.max_rows:
            raise ValueError(f"Engram prefetch: found {rows} rows, expected 1 to {self.max_rows}")
        for layer in self.engrams:
            with self.streams[layer].fork():
                self._kv[layer] = self._wkv(layer, rows)

    def forward(self, layer: int, residual: Tensor, keep: Tensor) -> Tensor:
        """Injects layer `layer`'s rows into residual [T, n, hidden]; waits for its WKV, or runs it here."""
        self.streams[layer].join()
        kv = self._kv.pop(layer, None)
        if kv is None:
            kv = self._wkv(layer, residual.shape[0])
        engram = self.engrams[layer]
        return reference.inject(residual, kv, engram.q_weight, engram.k_weight, keep, engram.eps)

    def join(self) -> None:
        """Collects what no layer waited for."""
        for stream in self.streams.values():
            stream.join()
        self._kv.clear()

    def _wkv(self, layer: int, rows: int) -> Tensor:
        return boundary_reference.project(self.engrams[layer].staged[:rows], self._prepared[layer])


class StockEngram:
    """The host engine's own Engram layers in the place of EngramPrefetch: nothing of theirs runs ahead."""

    def __init__(self, inject: Callable[[int, Tensor, Tensor], Tensor]) -> None:
        """inject: (layer, residual [T, n, hidden], keep [T]) -> the streams with the layer's rows injected."""
        self.forward = inject
        self.streams: Mapping[int, SideStream] = {}

    def start(self, rows: int) -> None:
        """The engine multiplies at the injection."""

    def join(self) -> None:
        """Nothing is left."""
