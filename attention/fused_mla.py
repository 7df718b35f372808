"""Launches of the sparse MLA kernels. `select` says where they serve; elsewhere this module is not imported."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from specialized_decode.attention import mla_tuning as tuning
from specialized_decode.attention.kernels.index_tables import slots_kernel
from specialized_decode.attention.kernels.norm_insert import norm_insert_kernel
from specialized_decode.attention.kernels.sparse_mla import sparse_mla_kernel
from specialized_decode.attention.mla import Settled
from specialized_decode.attention.views import AttentionView, CacheView

RECORD = 584
# Rows whose records a launch of sparse MLA stores itself: those of a low-batch step. A power of two.
MAX_INSERTED = 8
# How layers launch sparse MLA: with a selection or without, and what is settled. A window alone always is; a selection
# is not where the layer makes it itself. Where all is, the launch may store the step's records.
WAYS = ((False, Settled.ALL), (True, Settled.ALL), (True, Settled.WINDOW), (True, Settled.NOTHING))


def log2_states(states: int) -> int:
    """The binary logarithm of a page's states. Raises ValueError where it has none."""
    if states <= 0 or states & (states - 1):
        raise ValueError(f"KV cache: found {states} states a page, expected a power of two")
    return states.bit_length() - 1


def kv_pages(cache: Tensor) -> tuple[Tensor, int, int]:
    """A KV cache [blocks, states, 584] uint8 as the kernels take it: itself, bytes from page to page, and the binary
    logarithm of its states. Raises ValueError for a cache whose records are not where the kernels look for them."""
    stride = cache.stride(0)
    if cache.dtype != torch.uint8 or cache.shape[2] != RECORD or stride % 16 or cache.data_ptr() % 16:
        raise ValueError(
            f"KV cache: found {cache.dtype} {list(cache.shape)}, strides {list(cache.stride())}, address "
            f"{cache.data_ptr() % 16} mod 16, expected uint8 [blocks, states, {RECORD}], pages at multiples of 16 bytes"
        )
    return cache, stride, log2_states(cache.shape[1])


def check_rows(what: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raises ValueError for a tensor that a kernel would misread."""
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
        found = f"{tensor.dtype} {list(tensor.shape)}, strides {list(tensor.stride())}"
        raise ValueError(f"sparse MLA: {what}: found {found}, expected contiguous {dtype} {list(shape)}")


def check_latents(latents: Tensor, rows: int) -> None:
    """Raises ValueError for latents that a kernel would misread."""
    found = latents.dtype, latents.shape, latents.stride(1)
    if found != (torch.bfloat16, (rows, 512), 1) or rows > MAX_INSERTED or latents.stride(0) % 16:
        raise ValueError(
            f"sparse MLA: latents: found {latents.dtype} {list(latents.shape)}, strides {latents.stride()}, expected "
            f"bfloat16 [1 to {MAX_INSERTED} and {rows}, 512], rows at multiples of 16"
        )


class FusedTables:
    """The ops of `SparseIndexTables` as kernels."""

    def window(self, meta: CacheView, positions: Tensor, window: int) -> Tensor:
        """As `reference.window_slots`."""
        return self._slots(meta, positions, 0, window, meta.slot_mapping, True)

    def selected(self, meta: CacheView, states: Tensor, window: CacheView) -> Tensor:
        """states: [at least T, n] int32, the positions selected -> [T, n] slots, -1 for none and on padding rows, which
        write nothing to `window`."""
        return self._slots(meta, states, states.stride(0), states.shape[1], window.slot_mapping, False)

    @staticmethod
    def _slots(meta: CacheView, source: Tensor, stride: int, n: int, owner: Tensor, window: bool) -> Tensor:
        if source.stride(-1) != 1 or meta.block_table.stride(1) != 1:
            raise ValueError(
                f"index tables: found strides {source.stride()} of the positions, {meta.block_table.stride()} of the "
                "block table, expected columns next to each other"
            )
        rows = owner.shape[0]
        out = torch.empty(rows, n, dtype=torch.int64, device=source.device)
        slots_kernel[(-(-n // tuning.TABLE_BLOCK), rows)](
            source,
            stride,
            owner,
            meta.token_to_req,
            meta.block_table,
            meta.block_table.stride(0),
            log2_states(meta.states),
            out,
            N=n,
            WINDOW=window,
            BLOCK=tuning.TABLE_BLOCK,
            num_warps=4,
            launch_pdl=True,
        )
        return out


class FusedSparseMla:
    """The kernels of a layer's attention around `wq_b`, for `heads` local heads and up to `max_rows` rows.

    Their scratch serves one call at a time: calls of a step follow each other.
    """

    def __init__(self, heads: int, window: int, topk: int, max_rows: int, device: torch.device) -> None:
        self.heads, self.window, self.topk, self.max_rows = heads, window, topk, max_rows
        launches = [
            (rows, tuning.sparse_mla(rows, heads, window, n)) for rows in range(1, max_rows + 1) for n in (0, topk)
        ]
        # Where splits leave what is added up.
        self._partial = self._statistics = torch.empty(1, dtype=torch.float32, device=device)
        self._arrived = torch.zeros(1, dtype=torch.int32, device=device)
        self._outgrown: list[Tensor] = []
        for rows, launch in sorted(launches, key=lambda one: -one[0] * one[1].programs):
            self._reserve(rows, launch)
        # Nothing has been captured yet.
        self._outgrown.clear()

    def inserts(self, rows: int, selected: bool) -> bool:
        """Whether a launch for so many rows, with or without selected positions, stores the step's records itself."""
        if rows > MAX_INSERTED:
            return False
        return tuning.sparse_mla(rows, self.heads, self.window, self.topk if selected else 0).inserts

    def norm_insert(self, attn: AttentionView, projected: Tensor, positions: Tensor, window: CacheView) -> Tensor:
        """projected: [T, q rank + 512] bfloat16, of `fused_wqa_wkv` -> [T, q rank] bfloat16, normed. The latents are
        normed, turned and stored in the window's cache. Raises ValueError for other shapes."""
        rows, rank = projected.shape[0], attn.q_lora_rank
        check_rows("projected", projected, torch.bfloat16, (rows, rank + attn.head_dim))
        assert attn.window_cache is not None
        cache, stride, log2 = kv_pages(attn.window_cache)
        out = projected.new_empty(rows, rank)
        norm_insert_kernel[(2, rows)](
            projected,
            attn.q_norm,
            attn.kv_norm,
            attn.eps,
            positions,
            attn.cos_sin,
            window.slot_mapping,
            cache,
            stride,
            log2,
            out,
            Q=rank,
            Q_PADDED=1 << (rank - 1).bit_length(),
            num_warps=4,
            launch_pdl=True,
            # So that records come out as the reference's, whatever the compiler could have fused.
            enable_fp_fusion=False,
        )
        return out

    def __call__(
        self,
        attn: AttentionView,
        q: Tensor,
        positions: Tensor,
        window: Tensor,
        selected: Tensor | None,
        settled: Settled,
        launch: tuning.SparseMla | None = None,
        latents: Tensor | None = None,
        metadata: CacheView | None = None,
    ) -> Tensor:
        """q: [T, heads, 512] bfloat16 as projected; window: [T, window] and selected: [T, topk] int64 slots, -1 for
        none, the second None without a compressed cache -> head outputs [T, heads, 512] bfloat16, turned back.

        settled: of the tables, records, latents and queries. launch: how the launch is cut, None for `tuning`'s choice.
        latents: [T, 512] bfloat16 columns of a wider tensor, of up to MAX_INSERTED rows: normed, turned and stored in
        the window's cache, whose metadata is there then; None where they are there. Raises ValueError for other shapes.
        """
        rows, heads = q.shape[0], attn.num_heads
        if not 0 < rows <= self.max_rows:
            raise ValueError(f"sparse MLA: found {rows} rows, expected 1 to {self.max_rows}")
        check_rows("q", q, torch.bfloat16, (rows, self.heads, attn.head_dim))
        check_rows("window", window, torch.int64, (rows, self.window))
        topk = 0
        assert attn.window_cache is not None
        pages = kv_pages(attn.window_cache)
        compressed = pages
        if selected is not None:
            topk = self.topk
            check_rows("selected", selected, torch.int64, (rows, topk))
            assert attn.compressed_cache is not None
            compressed = kv_pages(attn.compressed_cache)
        cut = launch or tuning.sparse_mla(rows, heads, self.window, topk)
        if launch is not None:
            self._reserve(rows, launch)
        out, given = torch.empty_like(q), latents is not None
        if latents is None:
            latents, request, slots = q, positions, positions
        else:
            assert metadata is not None, "latents are stored where the window's metadata says"
            check_latents(latents, rows)
            request, slots = metadata.token_to_req, metadata.slot_mapping
        sparse_mla_kernel[(cut.splits, cut.groups * cut.slices, rows)](
            q,
            positions,
            attn.cos_sin,
            attn.sinks,
            *pages[:2],
            window,
            *compressed[:2],
            window if selected is None else selected,
            self._partial,
            self._statistics,
            self._arrived,
            out,
            attn.scale,
            heads,
            pages[2],
            compressed[2],
            0,
            latents,
            latents.stride(0),
            attn.kv_norm,
            attn.eps,
            request,
            slots,
            GROUP=cut.group,
            WINDOW=self.window,
            TOPK=topk,
            KEYS=cut.keys,
            TILES=cut.tiles,
            SPLITS=cut.splits,
            SLICES=cut.slices,
            SETTLED=int(settled),
            EARLY=cut.early,
            SPREAD=cut.spread,
            INSERT=MAX_INSERTED if given else 0,
            num_warps=cut.warps,
            # The compiler's own pipeline would hold a second tile in shared memory.
            num_stages=1,
            launch_pdl=True,
            # So that records come out as `norm_insert`'s.
            enable_fp_fusion=not given,
        )
        return out

    def _reserve(self, rows: int, launch: tuning.SparseMla) -> None:
        """Scratch for a launch. What is too small is kept: captured graphs write to it."""
        programs, device = rows * launch.programs, self._arrived.device
        if programs > self._arrived.numel():
            self._outgrown.append(self._arrived)
            self._arrived = torch.zeros(programs, dtype=torch.int32, device=device)
        for name, size in (("_partial", rows * launch.partial), ("_statistics", programs * launch.group)):
            if size > (scratch := getattr(self, name)).numel():
                self._outgrown.append(scratch)
                setattr(self, name, torch.empty(size, dtype=torch.float32, device=device))

    def warm(self, attn: AttentionView) -> None:
        """Compiles and loads all that a step of up to `max_rows` rows of this layer can launch, over a cache of its
        own. Not in a capture."""
        device, tables = self._arrived.device, FusedTables()
        cache = torch.zeros(1, 32, RECORD, dtype=torch.uint8, device=device)
        cache = cache.as_strided(cache.shape, (32 * RECORD // 16 * 16, RECORD, 1))
        layer: Any = _Warming(attn, cache)
        seen: set[tuple[object, ...]] = set()
        for rows in range(self.max_rows, 0, -1):
            meta: Any = _warm_metadata(rows, device)
            positions = torch.zeros(rows, dtype=torch.int64, device=device)
            selection = torch.full((rows, self.topk), -1, dtype=torch.int32, device=device)
            cuts = tuple(tuning.sparse_mla(rows, self.heads, self.window, n) for n in (0, self.topk))
            # Few rows' records are stored by the launch itself too.
            if (*cuts, rows <= MAX_INSERTED) in seen:
                continue
            seen.add((*cuts, rows <= MAX_INSERTED))
            projected = torch.zeros(rows, attn.q_lora_rank + attn.head_dim, dtype=torch.bfloat16, device=device)
            self.norm_insert(layer, projected, positions, meta)
            window, selected = tables.window(meta, positions, self.window), tables.selected(meta, selection, meta)
            q = torch.zeros(rows, self.heads, attn.head_dim, dtype=torch.bfloat16, device=device)
            latents = projected[:, attn.q_lora_rank :]
            for slots, settled in WAYS:
                self(layer, q, positions, window, selected if slots else None, settled)
                if settled == Settled.ALL and self.inserts(rows, slots):
                    self(layer, q, positions, window, selected if slots else None, settled, None, latents, meta)


def _warm_metadata(rows: int, device: torch.device) -> SimpleNamespace:
    """Padding rows of a batch over a cache of one page."""
    return SimpleNamespace(
        states=32,
        slot_mapping=torch.full((rows,), -1, dtype=torch.int64, device=device),
        token_to_req=torch.zeros(rows, dtype=torch.int32, device=device),
        block_table=torch.zeros(1, 1, dtype=torch.int32, device=device),
    )


class _Warming:
    """A layer before its caches are there: its weights, and one cache for both."""

    def __init__(self, attn: AttentionView, cache: Tensor) -> None:
        self._attn, self.window_cache, self.compressed_cache = attn, cache, cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._attn, name)
