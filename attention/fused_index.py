"""Launches of the index kernels. `select` says where they serve; elsewhere this module is not imported."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specialized_decode.attention import index_tuning as tuning
from specialized_decode.attention.fused import FusedLinear, JoinedLinear, grid, wide
from specialized_decode.attention.fused_mla import check_rows, kv_pages, log2_states
from specialized_decode.attention.kernels.index_inputs import compress_kernel
from specialized_decode.attention.kernels.index_projection import index_projection_kernel, input_projections_kernel
from specialized_decode.attention.kernels.index_scores import BINS, index_scores_kernel
from specialized_decode.attention.kernels.top_positions import top_positions_kernel
from specialized_decode.attention.projection_tuning import Projection
from specialized_decode.attention.projections import FusedProjections
from specialized_decode.attention.views import AttentionView, CacheView, IndexerView, LayerCaches

KEY_RECORD = 132
LATENT = 512
# Rows of scores begin at multiples of so many numbers.
ALIGNED = 16
# Columns that the selection's numbers tell apart.
MAX_WIDTH = 1 << 25
# Tokens of requests whose scores are cut otherwise.
WARM_LENGTHS = (64, 1 << 14)


class IndexInputs(NamedTuple):
    """What the projection leaves: partial [splits, T, N] float32, to be added up; the compressor's columns come first,
    the heads' weights begin at `heads`."""

    partial: Tensor
    heads: int


def key_pages(cache: Tensor) -> tuple[Tensor, int, int]:
    """Index keys [blocks, states, 132] uint8 as the kernels take them; see `fused_mla.kv_pages`."""
    stride = cache.stride(0)
    if cache.dtype != torch.uint8 or cache.shape[2] != KEY_RECORD or stride % 16 or cache.data_ptr() % 16:
        raise ValueError(
            f"index keys: found {cache.dtype} {list(cache.shape)}, strides {list(cache.stride())}, address "
            f"{cache.data_ptr() % 16} mod 16, expected uint8 [blocks, states, {KEY_RECORD}], pages at multiples of "
            "16 bytes"
        )
    return cache, stride, log2_states(cache.shape[1])


def projection_constants(first: int, heads: int, launch: tuning.IndexProjection, rows: int = 1) -> dict[str, int]:
    """The projection's compile-time arguments. first: outputs ahead of the heads' weights."""
    return {
        "FIRST": first,
        "HEADS": heads,
        "N": -(-(first + heads) // tuning.TILE) * tuning.TILE,
        "SPLITS": launch.splits,
        "K_WARPS": launch.k_warps,
        "PER_WARP": launch.per_warp,
        "WIDE": wide(rows),
    }


def all_constants(
    n: int, own: Projection, first: int, heads: int, launch: tuning.IndexProjection, rows: int = 1
) -> dict[str, int]:
    """Compile-time arguments of `fused_wqa_wkv`, with n outputs and its launch, and that projection in one."""
    index = projection_constants(first, heads, launch)
    return {
        "N": n,
        "K_WARPS": own.k_warps,
        "PER_WARP": own.per_warp,
        "STAGES": own.stages,
        "AHEAD": own.ahead,
        "FIRST": first,
        "HEADS": heads,
        "INDEX_N": index["N"],
        "SPLITS": launch.splits,
        "INDEX_PER_WARP": launch.per_warp,
        "TURNED": own.turned,
        "WIDE": wide(rows),
    }


class FusedIndexer:
    """The kernels of one layer that selects positions, for up to `tuning.MAX_ROWS` rows: of its compressor, where it
    has one, and its indexer. `bins` is shared by all layers, whose calls follow each other."""

    def __init__(self, attn: AttentionView, bins: Tensor, projections: FusedProjections | None = None) -> None:
        """bins: [tuning.MAX_ROWS, 4096] int32, zero; projections: the layer's own, of which `fused_wqa_wkv` then runs
        in one launch with what else the layer takes of its input, and `wq_b` with the indexer's, on a copy of both.
        Raises ValueError for layers that the kernels do not serve."""
        indexer, compressor = attn.indexer, attn.compressor
        if indexer is None:
            raise ValueError(f"layer {attn.layer_id}: found no indexer")
        self.bins, self.wq_b = bins, FusedLinear(indexer.wq_b)
        # Read in place; without a compressor nobody reads the first.
        self.heads = indexer.weights_proj.weight
        self.weight = self.heads if compressor is None else compressor.fused_wkv_wgate.weight
        self.first_head = 0 if compressor is None else self.weight.shape[0]
        self.outputs = -(-(self.first_head + self.heads.shape[0]) // tuning.TILE) * tuning.TILE
        self.launch = tuning.index_projection(self.outputs, self.heads.shape[1])
        self.joined: JoinedLinear | None = None
        self.wqa_wkv: FusedLinear | None = None
        self.beside: tuning.IndexProjection | None = None
        if projections is not None:
            wqa_wkv, wq_b = projections.fused_wqa_wkv, projections.wq_b
            assert isinstance(wqa_wkv, FusedLinear) and isinstance(wq_b, FusedLinear)
            self.joined = JoinedLinear(self.wq_b, wq_b)
            self.beside = tuning.beside(self.outputs, self.heads.shape[1], wqa_wkv.launch)
            self.wqa_wkv = wqa_wkv if self.beside is not None else None
        self.major = torch.cuda.get_device_capability(bins.device)[0] if bins.is_cuda else 9

    @property
    def nbytes(self) -> int:
        """What the indexer's prepared copy takes."""
        return self.wq_b.nbytes

    def project(self, x: Tensor) -> IndexInputs:
        """x: [T, hidden] bfloat16."""
        launch, n = self.launch, self.outputs
        partial = self._sums(x, launch)
        index_projection_kernel[grid(launch.splits * n // tuning.TILE, x.shape[0])](
            x.view(torch.int32),
            self.weight.view(torch.int32),
            self.heads.view(torch.int32),
            partial,
            x.shape[0],
            **projection_constants(self.first_head, self.heads.shape[0], launch, x.shape[0]),
            num_warps=launch.k_warps,
            launch_pdl=True,
        )
        return IndexInputs(partial, self.first_head)

    def _sums(self, x: Tensor, launch: tuning.IndexProjection) -> Tensor:
        """Room for what a launch leaves of x [T, hidden] bfloat16. Raises ValueError for another x."""
        rows = x.shape[0]
        if not 0 < rows <= tuning.MAX_ROWS:
            raise ValueError(f"indexer: found {rows} rows, expected 1 to {tuning.MAX_ROWS}")
        check_rows("x", x, torch.bfloat16, (rows, self.heads.shape[1]))
        return torch.empty(launch.splits, rows, self.outputs, dtype=torch.float32, device=x.device)

    def project_all(self, x: Tensor) -> tuple[Tensor, IndexInputs] | None:
        """x: [T, hidden] bfloat16 -> `fused_wqa_wkv`'s outputs [T, rank + 512] bfloat16, and what `project` leaves, of
        one launch; None where they have one each."""
        wqa_wkv, launch = self.wqa_wkv, self.beside
        if wqa_wkv is None or launch is None:
            return None
        partial, (rows, n) = self._sums(x, launch), (x.shape[0], wqa_wkv.weight.shape[0])
        y = torch.empty(rows, n, dtype=torch.bfloat16, device=x.device)
        input_projections_kernel[grid((n + launch.splits * self.outputs) // tuning.TILE, rows)](
            x.view(torch.int32),
            wqa_wkv.weight.words,
            wqa_wkv.weight.scales,
            y,
            self.weight.view(torch.int32),
            self.heads.view(torch.int32),
            partial,
            rows,
            **all_constants(n, wqa_wkv.launch, self.first_head, self.heads.shape[0], launch, rows),
            num_warps=launch.k_warps,
            launch_pdl=True,
        )
        return y, IndexInputs(partial, self.first_head)

    def queries(self, qr: Tensor, settled: bool = False) -> tuple[Tensor, Tensor]:
        """Of a layer that was given its projections. qr: [T, rank] bfloat16; settled: whether it was there before the
        launch ahead lets this one start -> the indexer's queries [T, heads * 128] bfloat16 as projected, and the
        layer's own."""
        assert self.joined is not None
        return self.joined(qr, settled)

    def compress(self, attn: AttentionView, inputs: IndexInputs, positions: Tensor, caches: LayerCaches) -> None:
        """The rows' latents into the compressed cache, the keys made of them into the index cache, and the open group's
        rows into its ring."""
        splits, rows, n = inputs.partial.shape
        compress_kernel[(rows, 2)](
            *_compressing(attn, inputs, positions, caches),
            N=n,
            SPLITS=splits,
            RATIO=attn.indexer.ratio,  # type: ignore[union-attr]
            PARTS=tuning.key_parts(tuning.COMPRESS_WARPS),
            EARLY=tuning.COMPRESS_EARLY,
            num_warps=tuning.COMPRESS_WARPS,
            launch_pdl=True,
            # So that records come out as the reference's, whatever the compiler could have fused.
            enable_fp_fusion=False,
        )

    def _scoring(self, indexer: IndexerView, inputs: IndexInputs, cut: tuning.ScoresCut) -> dict[str, int | None]:
        """What every launch of scores is compiled for."""
        splits, _, n = inputs.partial.shape
        heads = indexer.num_heads
        return {
            "HEADS": heads,
            "PADDED": max(16, 1 << (heads - 1).bit_length()),
            "N": n,
            "SPLITS": splits,
            "RATIO": indexer.ratio,
            "KEYS": cut.keys,
            "HELD": cut.held,
            "SPREAD": tuning.SPREAD,
            "num_warps": cut.warps,
            "maxnreg": tuning.scores_registers(heads, cut, self.major),
            "launch_pdl": True,
            # So that queries come out as the reference's.
            "enable_fp_fusion": False,
        }

    @staticmethod
    def _checked(attn: AttentionView, q: Tensor, rows: int, meta: CacheView | None) -> tuple[IndexerView, int, int]:
        """The indexer, its heads, and columns of scores. Raises ValueError for what the kernels would misread."""
        indexer = attn.indexer
        assert indexer is not None and meta is not None
        check_rows("index queries", q, torch.bfloat16, (rows, indexer.num_heads * indexer.head_dim))
        if meta.block_table.stride(1) != 1:
            raise ValueError(f"index keys: found strides {meta.block_table.stride()} of the block table, expected rows")
        return indexer, indexer.num_heads, score_columns(meta, indexer.ratio)

    def scores(
        self,
        attn: AttentionView,
        q: Tensor,
        inputs: IndexInputs,
        positions: Tensor,
        caches: LayerCaches,
        flags: Tensor | None = None,
    ) -> Tensor:
        """q: [T, heads * 128] bfloat16, of `wq_b` -> scores [T, n] float32 of all positions that a request may hold, as
        `reference.index_scores`; but behind a row's own they are left as they were, and padding rows have none. flags:
        [T, n] bool, where they are not -inf. Counts them for `top`, which must follow."""
        rows, meta = inputs.partial.shape[1], caches.index
        indexer, heads, width = self._checked(attn, q, rows, meta)
        assert meta is not None and indexer.k_cache is not None
        expected = torch.bool, (rows, width), 1
        if flags is not None and (flags.dtype, flags.shape, flags.stride(1)) != expected:
            found = f"{flags.dtype} {list(flags.shape)}, strides {list(flags.stride())}"
            raise ValueError(f"candidates: found {found}, expected bool [{rows}, {width}], rows in one piece")
        cache, stride, log2 = key_pages(indexer.k_cache)
        cut, out = tuning.scores(rows, width), _score_rows(rows, width, q.device)
        index_scores_kernel[(1 + tuning.score_programs(rows, width), rows)](
            q,
            inputs.partial,
            rows,
            inputs.heads,
            positions,
            attn.cos_sin,
            caches.window.slot_mapping,
            meta.token_to_req,
            meta.block_table,
            meta.block_table.stride(0),
            cache,
            stride,
            log2,
            self.bins if flags is None else flags.view(torch.uint8),
            0 if flags is None else flags.stride(0),
            out,
            out.stride(0),
            width,
            self.bins,
            (heads * indexer.head_dim) ** -0.5,
            FLAGS=flags is not None,
            **self._scoring(indexer, inputs, cut),
        )
        return out

    def top(self, attn: AttentionView, scores: Tensor, positions: Tensor, caches: LayerCaches) -> Tensor:
        """The best of `scores`' numbers into the layer's selection, -1 padded -> their slots in the compressed cache
        [T, topk] int64, -1 for none."""
        slots, _ = self._top(attn, scores, positions, caches, None)
        return slots

    def choose(
        self, attn: AttentionView, scores: Tensor, positions: Tensor, caches: LayerCaches, blocks: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `top`, of a candidate source, in the same launch with its choice: as `reference.candidate_blocks`, but in
        order of position, into blocks [T, count] int32 -> the slots, and the blocks' flags [T, n] bool; behind the
        block of a row's newest position they are left as they were."""
        slots, flags = self._top(attn, scores, positions, caches, blocks)
        assert flags is not None
        return slots, flags

    def _top(
        self, attn: AttentionView, scores: Tensor, positions: Tensor, caches: LayerCaches, blocks: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        assert attn.indexer is not None and caches.compressed is not None
        meta, selection = caches.compressed, attn.selection.topk_indices
        (rows, width), topk = scores.shape, selection.shape[1]
        if selection.stride(1) != 1 or meta.block_table.stride(1) != 1:
            raise ValueError(
                f"selection: found strides {selection.stride()}, {meta.block_table.stride()} of the block table, "
                "expected rows"
            )
        if width > MAX_WIDTH:
            raise ValueError(f"scores: found {width} positions a row, expected up to {MAX_WIDTH}")
        slots = torch.empty(rows, topk, dtype=torch.int64, device=scores.device)
        size, count, flags = 1, 0, None
        # What a launch that chooses nothing does not read.
        choice = self.bins, 0, self.bins, 0, self.bins.view(torch.uint8), 0
        if blocks is not None:
            size, count = attn.indexer.candidate_block_size, blocks.shape[1]
            flags, keys = _choice(scores, blocks, size)
            choice = keys, keys.stride(0), blocks, blocks.stride(0), flags.view(torch.uint8), flags.stride(0)
        padded = 1 << (topk - 1).bit_length()
        room = max(padded, 2 * tuning.FEW_TIES)
        top_positions_kernel[(rows, 1 + (count > 0))](
            scores,
            scores.stride(0),
            width,
            positions,
            caches.window.slot_mapping,
            self.bins,
            torch.empty(rows, scores.stride(0) + room, dtype=torch.int64, device=scores.device),
            meta.token_to_req,
            meta.block_table,
            meta.block_table.stride(0),
            log2_states(meta.states),
            selection,
            selection.stride(0),
            slots,
            *choice,
            RATIO=attn.indexer.ratio,
            TOPK=topk,
            TOPK_PADDED=padded,
            STRIPE=32 * tuning.TOP_WARPS,
            STRIPES=tuning.CHUNK // (32 * tuning.TOP_WARPS),
            PART=tuning.PART // (32 * tuning.TOP_WARPS),
            ROOM=room,
            FEW=tuning.FEW_TIES,
            SHORT=tuning.SHORT,
            TILE=tuning.TIES,
            RIVALS=tuning.RIVALS,
            LONG=tuning.LONG,
            SPREAD=tuning.SPREAD,
            SIZE=size,
            COUNT=count,
            BLOCKS=tuning.CANDIDATES,
            num_warps=tuning.TOP_WARPS,
            maxnreg=tuning.top_registers(tuning.TOP_WARPS),
            launch_pdl=True,
        )
        return slots, flags if flags is None else flags[:, :width]

    def warm(self, attn: AttentionView, most: int = tuning.MAX_ROWS) -> None:
        """Compiles and loads all that a step of this layer of up to `most` rows can launch, over caches of its own. Not
        in a capture."""
        device = self.bins.device
        layer: Any = _Warming(attn, device)
        self.wq_b.warm(most)
        if self.joined is not None:
            self.joined.warm(most)
        for rows in {1, most}:
            positions = torch.zeros(rows, dtype=torch.int64, device=device)
            x = torch.zeros(rows, self.heads.shape[1], dtype=torch.bfloat16, device=device)
            together = self.project_all(x)
            # Their readers are compiled for as many parts.
            inputs = self.project(x) if together is None else together[1]
            q = x.new_zeros(rows, self.wq_b.weight.shape[0])
            # Of how many columns scores have depends how they are cut.
            for longest in WARM_LENGTHS:
                caches: Any = _warm_caches(rows, longest, device)
                if attn.compressor is not None:
                    self.compress(layer, inputs, positions, caches)
                width = score_columns(caches.index, layer.indexer.ratio)
                flags = torch.zeros(rows, width, dtype=torch.bool, device=device)
                for given in (None, flags):
                    scores = self.scores(layer, q, inputs, positions, caches, given)
                    self.top(layer, scores, positions, caches)
                blocks = attn.selection.candidate_blocks
                if blocks is not None and layer.indexer.candidate_source:
                    self.choose(layer, scores, positions, caches, blocks.new_empty(rows, blocks.shape[1]))


def _compressing(attn: AttentionView, inputs: IndexInputs, positions: Tensor, caches: LayerCaches) -> tuple[Any, ...]:
    """The compressor's arguments of a launch. Raises ValueError for rings that it would misread."""
    compressor, indexer, ring = attn.compressor, attn.indexer, caches.ring
    assert compressor is not None and indexer is not None and indexer.wk is not None and indexer.k_norm is not None
    assert caches.compressed is not None and caches.index is not None
    assert attn.compressed_cache is not None and indexer.k_cache is not None
    rings, meta = inputs.partial, caches.compressed
    ring_slots, starts, ring_stride, states = meta.slot_mapping, meta.query_start_loc, 0, 1
    if compressor.ratio > 1:
        assert ring is not None and compressor.state_cache is not None
        rings, states = compressor.state_cache, ring.states
        if rings.dtype != torch.float32 or rings.stride()[1:] != (2 * LATENT, 1):
            raise ValueError(
                f"compressor's rings: found {rings.dtype} {list(rings.shape)}, strides {list(rings.stride())}, "
                f"expected float32 [rings, rows, {2 * LATENT}], rows one behind the other"
            )
        ring_slots, starts, ring_stride = ring.slot_mapping, ring.query_start_loc, rings.stride(0)
        meta = ring  # type: ignore[assignment]
    return (
        inputs.partial,
        inputs.partial.shape[1],
        compressor.norm,
        compressor.eps,
        positions,
        attn.cos_sin,
        meta.token_to_req,
        ring_slots,
        starts,
        rings,
        ring_stride,
        states,
        caches.compressed.slot_mapping,
        *kv_pages(attn.compressed_cache),
        indexer.wk.weight,
        indexer.k_norm,
        indexer.eps,
        caches.index.slot_mapping,
        *key_pages(indexer.k_cache),
    )


def _score_rows(rows: int, width: int, device: torch.device) -> Tensor:
    """Room for scores [rows, width] float32."""
    return torch.empty(rows, -(-width // ALIGNED) * ALIGNED, dtype=torch.float32, device=device)[:, :width]


def _choice(scores: Tensor, blocks: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Room for the flags of scores [T, n] bool, whole blocks of `size`, and for the blocks' numbers. Raises ValueError
    for blocks [T, count] that the choice would not fit."""
    rows, width = scores.shape
    if blocks.dtype != torch.int32 or blocks.shape[0] != rows or blocks.stride(1) != 1:
        found = f"{blocks.dtype} {list(blocks.shape)}, strides {list(blocks.stride())}"
        raise ValueError(f"candidate blocks: found {found}, expected int32 [{rows}, count], rows in one piece")
    total = -(-width // size)
    flags = torch.empty(rows, -(-total * size // ALIGNED) * ALIGNED, dtype=torch.bool, device=scores.device)
    # Not read where no row has more blocks than are chosen.
    keys = torch.empty(rows, total if total > blocks.shape[1] else 1, dtype=torch.int32, device=scores.device)
    return flags, keys


def score_columns(meta: CacheView, ratio: int) -> int:
    """Columns of the scores: positions that a request may hold."""
    return max(meta.max_seq_len // ratio, 1)


def fused_bins(device: torch.device) -> Tensor:
    """What the layers' launches count scores in."""
    return torch.zeros(tuning.MAX_ROWS, int(BINS), dtype=torch.int32, device=device)


def _warm_caches(rows: int, longest: int, device: torch.device) -> SimpleNamespace:
    """Padding rows of a batch of up to `longest` tokens over caches of one page."""
    meta = SimpleNamespace(
        states=32,
        max_seq_len=longest,
        slot_mapping=torch.full((rows,), -1, dtype=torch.int64, device=device),
        token_to_req=torch.arange(rows, dtype=torch.int32, device=device),
        query_start_loc=torch.arange(rows + 1, dtype=torch.int32, device=device),
        block_table=torch.zeros(rows, 16, dtype=torch.int32, device=device),
    )
    return SimpleNamespace(window=meta, compressed=meta, index=meta, ring=meta)


class _Warming:
    """A layer before its caches are there: its weights, and caches of one page."""

    def __init__(self, attn: Any, device: torch.device) -> None:
        self._attn = attn
        self.compressed_cache = _page(584, device)
        self.indexer = _Replaced(attn.indexer, k_cache=_page(KEY_RECORD, device))
        rings = torch.zeros(1, 32, 2 * LATENT, device=device)
        self.compressor = _Replaced(attn.compressor, state_cache=rings) if attn.compressor is not None else None
        topk = attn.selection.topk_indices.shape[1]
        rows = torch.empty(tuning.MAX_ROWS, topk, dtype=torch.int32, device=device)
        self.selection = SimpleNamespace(topk_indices=rows)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._attn, name)


class _Replaced:
    """An object but for some of its attributes."""

    def __init__(self, base: Any, **attributes: Any) -> None:
        self._base = base
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)


def _page(record: int, device: torch.device) -> Tensor:
    """A cache of one page of 32 records."""
    size = -(-32 * record // 576) * 576
    return torch.zeros(1, size, dtype=torch.uint8, device=device).as_strided((1, 32, record), (size, record, 1))
