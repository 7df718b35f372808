"""SparseIndexTables: where the positions that attention reads lie in the caches."""

from typing import Any, Protocol

from torch import Tensor

from specialized_decode.attention import reference
from specialized_decode.attention.views import AttentionView, CacheView


class TableOps(Protocol):
    """How a table is worked out."""

    def window(self, meta: CacheView, positions: Tensor, window: int) -> Tensor:
        """[T, window] slots of the sliding window, -1 where it is empty."""

    def selected(self, meta: CacheView, states: Tensor, window: CacheView) -> Tensor:
        """Slots [T, n] of the states [at least T, n] selected, -1 for none and on `window`'s padding rows."""


class ReferenceTables:
    """The reference ops."""

    def window(self, meta: CacheView, positions: Tensor, window: int) -> Tensor:
        return reference.window_slots(meta, positions, window)

    def selected(self, meta: CacheView, states: Tensor, window: CacheView) -> Tensor:
        rows = window.slot_mapping.shape[0]
        return reference.position_slots(meta, states[:rows].masked_fill(window.slot_mapping.unsqueeze(1) < 0, -1))


class SparseIndexTables:
    """Tables of physical slots, built once a step and shared.

    Layers that read one index source's selection through one KV-cache group share a table; so do all layers' windows
    of one group. `reset` starts a step; a table built in another step is never served.
    """

    def __init__(self, ops: TableOps | None = None) -> None:
        """ops: None for the reference."""
        self._ops: TableOps = ops or ReferenceTables()
        self._tables: dict[tuple[Any, ...], Tensor] = {}
        self.built = 0

    def reset(self) -> None:
        """Starts a step: forgets every table."""
        self._tables.clear()
        self.built = 0

    def publish(self, source: int) -> None:
        """Index source `source` has written a new selection: tables of an older one are stale."""
        self._tables = {key: table for key, table in self._tables.items() if key[:2] != ("selected", source)}

    def window(self, attn: AttentionView, meta: CacheView, positions: Tensor) -> Tensor:
        """[T, window] slots of the sliding window, -1 where it is empty."""
        key = ("window", attn.window_size, meta)
        if key not in self._tables:
            self._put(key, self._ops.window(meta, positions, attn.window_size))
        return self._tables[key]

    def selected(self, attn: AttentionView, meta: CacheView, window: CacheView) -> Tensor:
        """[T, topk] slots of the positions that the layer's index source selected, -1 padded."""
        key = ("selected", attn.index_source, meta)
        if key not in self._tables:
            self._put(key, self._ops.selected(meta, attn.selection.topk_indices, window))
        return self._tables[key]

    def keep(self, attn: AttentionView, meta: CacheView, table: Tensor) -> None:
        """As `selected`, of a table [T, topk] that the launch of the selection has made."""
        self._put(("selected", attn.index_source, meta), table)

    def _put(self, key: tuple[Any, ...], table: Tensor) -> None:
        self._tables[key] = table
        self.built += 1
