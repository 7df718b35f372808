"""SparseMlaDecode: attention over the window and the selected compressed positions."""

from enum import IntEnum

import torch
from torch import Tensor

from specialized_decode.attention import reference
from specialized_decode.attention.index_tables import SparseIndexTables
from specialized_decode.attention.views import AttentionView, LayerCaches

# Gathered float32 records at a time; rows go through in chunks of so many bytes.
_CHUNK_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}


class Settled(IntEnum):
    """What launches before the preceding one wrote of what sparse MLA reads, which may thus read it ahead of its wait:
    nothing; all but the queries; all but the selection and its records."""

    NOTHING = 0
    ALL = 1
    WINDOW = 2


class SparseMlaDecode:
    """Sparse MLA of up to `max_rows` rows for any number of local heads."""

    def __init__(self, tables: SparseIndexTables, max_rows: int) -> None:
        self.tables, self.max_rows = tables, max_rows

    def __call__(self, attn: AttentionView, q: Tensor, positions: Tensor, caches: LayerCaches) -> Tensor:
        """q: [T, heads, 512] bfloat16, rotated -> head outputs [T, heads, 512] bfloat16, still rotated."""
        if q.shape[0] > self.max_rows:
            raise ValueError(f"sparse MLA: found {q.shape[0]} rows, expected at most {self.max_rows}")
        reads = [(attn.window_cache, self.tables.window(attn, caches.window, positions))]
        if caches.compressed is not None:
            reads.append((attn.compressed_cache, self.tables.selected(attn, caches.compressed, caches.window)))
        entries = sum(slots.shape[1] for _, slots in reads)
        step = max(1, _CHUNK_BYTES[q.device.type] // (4 * entries * attn.head_dim))
        return torch.cat([self._rows(attn, q, reads, slice(i, i + step)) for i in range(0, q.shape[0], step)])

    @staticmethod
    def _rows(attn: AttentionView, q: Tensor, reads: list[tuple[Tensor | None, Tensor]], rows: slice) -> Tensor:
        records, valid = [], []
        for cache, slots in reads:
            assert cache is not None
            records.append(reference.read_kv(cache, slots[rows]))
            valid.append(slots[rows] >= 0)
        return reference.sparse_mla(q[rows], torch.cat(records, 1), torch.cat(valid, 1), attn.sinks, attn.scale)
