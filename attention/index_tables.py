"""SparseIndexTables: where the positions that attention reads lie in the caches."""

from typing import Any

from torch import Tensor

from specialized_decode.attention import reference
from specialized_decode.attention.views import AttentionView, CacheView


class SparseIndexTables:
    """Tables of physical slots, built once a step and shared.

    Layers that read one index source's selection through one KV-cache group share a table; so do all layers' windows
    of one group. `reset` starts a step; a table built in another step is never served.
    """

    def __init__(self) -> None:
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
            self._put(key, reference.window_slots(meta, positions, attn.window_size))
        return self._tables[key]

    def selected(self, attn: AttentionView, meta: CacheView, window: CacheView) -> Tensor:
        """[T, topk] slots of the positions that the layer's index source selected, -1 padded."""
        key = ("selected", attn.index_source, meta)
        if key not in self._tables:
            rows = window.slot_mapping.shape[0]
            states = attn.selection.topk_indices[:rows]
            self._put(key, reference.position_slots(meta, states.masked_fill(window.slot_mapping.unsqueeze(1) < 0, -1)))
        return self._tables[key]

    def _put(self, key: tuple[Any, ...], table: Tensor) -> None:
        self._tables[key] = table
        self.built += 1
