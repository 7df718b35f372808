"""Decode batches for the index kernels: caches with blocks in no order, ragged contexts; and what is right."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from specialized_decode.attention import index_tuning, reference
from specialized_decode.attention.index_tables import ReferenceTables
from specialized_decode.backbone.cache import CacheMetadata
from specialized_decode.backbone.linear import Linear
from tests.helpers.decode_batch import DecodeBatch
from tests.helpers.step_linear import fp8_linear

KV_RECORD, KEY_RECORD, RING_ROWS = 584, 132, 8


@dataclass(frozen=True)
class Shape:
    """Of a layer; compressor: whether it has one; count: rows of a request; longest: the batch's padded maximum, 0 for
    no more than it holds; blocks, size: of a candidate source, how many blocks it publishes and their positions."""

    ratio: int = 1
    hidden: int = 5120
    heads: int = 32
    q_rank: int = 1280
    topk: int = 512
    states: int = 64
    compressor: bool = True
    count: int = 1
    longest: int = 0
    blocks: int = 0
    size: int = 8


@dataclass
class IndexCase(DecodeBatch):
    """One layer and one step's batch."""

    shape: Shape

    def __post_init__(self) -> None:
        super().__post_init__()
        shape, device = self.shape, self.device
        self.columns = max(*self.contexts, shape.longest, 1)
        self.kv_cache, compressed = self._cache(KV_RECORD)
        self.key_cache, index = self._cache(KEY_RECORD)
        self._fill_keys()
        positions = self.positions.cpu()
        window = self.metadata(32, torch.zeros(len(self.contexts), 1, dtype=torch.int32), positions, 1, self.columns)
        # Ring 0 is nobody's: the reference writes back what it finds there for rows that write nowhere.
        rings = 1 + torch.randperm(len(self.contexts), generator=self.generator).int().unsqueeze(1)
        ring = self.metadata(RING_ROWS, rings, positions % RING_ROWS, 1, self.columns)
        self.rings = self.normal(1 + len(self.contexts), RING_ROWS, 1024)
        self.caches: Any = SimpleNamespace(window=window, compressed=compressed, index=index, ring=ring)
        self.selection = torch.full((self.rows + 3, shape.topk), 12345, dtype=torch.int32, device=device)
        angles = torch.rand(self.columns + 1, 32, generator=self.generator) * 6.28
        self.attn: Any = SimpleNamespace(
            layer_id=2,
            head_dim=512,
            index_source=2,
            cos_sin=torch.cat((angles.cos(), angles.sin()), 1).to(device),
            compressed_cache=self.kv_cache,
            compressor=self._compressor() if shape.compressor else None,
            indexer=self._indexer(),
            selection=SimpleNamespace(topk_indices=self.selection, candidate_blocks=self._candidate_blocks()),
        )
        self.x = self.normal(self.rows, shape.hidden).bfloat16()
        self.q = (2 * self.normal(self.rows, shape.heads * 128)).bfloat16()
        self.qr = self.normal(self.rows, shape.q_rank).bfloat16()
        for given in (self.x, self.q, self.qr):
            given[~self.live] = torch.nan

    def load(self, other: "IndexCase") -> None:
        """Copies another batch of the same shape into this one's tensors, which a graph reads."""
        pairs = [(self.positions, other.positions), (self.x, other.x), (self.q, other.q), (self.qr, other.qr)]
        for name in ("window", "compressed", "index", "ring"):
            mine, theirs = getattr(self.caches, name), getattr(other.caches, name)
            pairs += [(mine.block_table, theirs.block_table), (mine.slot_mapping, theirs.slot_mapping)]
        for ours, its in pairs:
            ours.copy_(its)
        self.restore(other.cache_bytes())

    def _plain(self, rows: int, columns: int) -> Linear:
        return Linear((self.normal(rows, columns) * columns**-0.5).bfloat16())

    def _compressor(self) -> Any:
        ratio = self.shape.ratio
        return SimpleNamespace(
            ratio=ratio,
            fused_wkv_wgate=self._plain(512 * ratio, self.shape.hidden),
            norm=(1 + 0.2 * self.normal(512)).bfloat16(),
            eps=1e-20,
            state_cache=self.rings if ratio > 1 else None,
        )

    def _indexer(self) -> Any:
        shape = self.shape
        return SimpleNamespace(
            num_heads=shape.heads,
            head_dim=128,
            ratio=shape.ratio,
            candidate_source=shape.blocks > 0,
            candidate_block_size=shape.size,
            eps=1e-20,
            wq_b=fp8_linear(self.seed, shape.heads * 128, shape.q_rank, shape.q_rank**-0.5, self.device),
            weights_proj=self._plain(shape.heads, shape.hidden),
            wk=self._plain(128, 512) if shape.compressor else None,
            k_norm=(1 + 0.2 * self.normal(128)).bfloat16() if shape.compressor else None,
            k_cache=self.key_cache,
        )

    def _candidate_blocks(self) -> Tensor | None:
        """Rows behind the batch's too; None of a layer that is no candidate source."""
        shape = self.rows + 3, self.shape.blocks
        return torch.full(shape, 12345, dtype=torch.int32, device=self.device) if self.shape.blocks else None

    def _cache(self, record: int) -> tuple[Tensor, CacheMetadata]:
        """A cache that is the middle one of three in its blocks, all of whose bytes are 255, and its metadata. Blocks
        are a request's own, in no order; block 0 is nobody's."""
        shape, requests = self.shape, len(self.contexts)
        columns = -(-self.columns // shape.ratio // shape.states) + 1
        table = torch.zeros(requests, columns, dtype=torch.int32)
        held = torch.zeros(requests, columns, dtype=torch.bool)
        for request, context in enumerate(self.contexts):
            held[request, : -(-(context // shape.ratio) // shape.states)] = True
        blocks = 1 + int(held.sum())
        table[held] = 1 + torch.randperm(blocks - 1, generator=self.generator).int()
        page = -(-shape.states * record // 576) * 576
        buffer = torch.full((blocks, 3 * page), 0xFF, dtype=torch.uint8, device=self.device)
        view = buffer.view(-1).as_strided((blocks, shape.states, record), (3 * page, record, 1), page)
        return view, self.metadata(shape.states, table, self.positions.cpu(), shape.ratio, self.columns)

    def _fill_keys(self) -> None:
        """Index keys of any numbers in all blocks but the first."""
        blocks, states = self.key_cache.shape[:2]
        values, scales = reference.page_planes(self.key_cache, 128, 4)
        codes = torch.randint(0, 256, (blocks - 1, states, 128), generator=self.generator, dtype=torch.uint8)
        codes[(codes & 0x7F) == 0x7F] = 0
        values[1:] = codes.to(self.device)
        exponents = torch.randint(-10, -6, (blocks - 1, states, 1), generator=self.generator)
        scales[1:] = torch.exp2(exponents.float()).view(torch.uint8).to(self.device)

    def cache_bytes(self) -> dict[str, Tensor]:
        """What the compressor leaves: all bytes around the caches' pages too, and its rings."""
        whole = {}
        for name, cache in (("records", self.kv_cache), ("keys", self.key_cache)):
            size = cache.untyped_storage().nbytes()
            whole[name] = cache.as_strided((size,), (1,), 0).clone()
        return {**whole, "rings": self.rings.clone()}

    def restore(self, before: dict[str, Tensor]) -> None:
        for name, cache in (("records", self.kv_cache), ("keys", self.key_cache)):
            cache.as_strided((cache.untyped_storage().nbytes(),), (1,), 0).copy_(before[name])
        self.rings.copy_(before["rings"])

    def compress_by_reference(self, kv_score: Tensor) -> None:
        """As `AttentionStep._compress`. kv_score: [T, ratio * 512] float32."""
        compressor, indexer, caches = self.attn.compressor, self.attn.indexer, self.caches
        latent = reference.compress(compressor, kv_score, self.positions, caches.ring)
        cos_sin = self.attn.cos_sin[self.positions - self.positions % compressor.ratio]
        reference.insert_kv(self.kv_cache, caches.compressed.slot_mapping, latent, cos_sin)
        key = reference.rms_norm(indexer.wk(latent), indexer.k_norm, indexer.eps)
        reference.insert_index_keys(self.key_cache, caches.index.slot_mapping, key, cos_sin)


def assert_projected(case: IndexCase, partial: Tensor) -> Tensor:
    """partial: [splits, T, N] -> its sums, float32 products' within their rounding; [T, N]."""
    weights = [case.attn.indexer.weights_proj.weight]
    if case.attn.compressor is not None:
        weights.insert(0, case.attn.compressor.fused_wkv_wgate.weight)
    weight = torch.cat(weights).double()
    exact = case.x.double() @ weight.T
    found = partial.sum(0)[:, : weight.shape[0]]
    assert not partial.sum(0)[case.live, weight.shape[0] :].any(), "padding columns are not zero"
    # Of sums of as many products, and a little of what they cancel.
    size = case.x.double().abs() @ weight.abs().T
    error = ((found.double() - exact).abs() / size)[case.live]
    assert (error < 1e-6).all(), f"found an error of {error.max().item():g} of the products' size"
    return found


def assert_compressed(case: IndexCase, before: dict[str, Tensor], kv_score: Tensor) -> None:
    """The caches as the kernels left them, against the reference from the same projection: records and keys but for a
    last bit, which another order of a sum may turn, and rings bit by bit. Restores them as they were `before`."""
    ours = case.cache_bytes()
    case.restore(before)
    case.compress_by_reference(kv_score)
    theirs = case.cache_bytes()
    assert torch.equal(ours["rings"].view(torch.int32), theirs["rings"].view(torch.int32)), "rings differ"
    closed = case.caches.compressed.slot_mapping >= 0
    written = int(closed.sum())
    for name in ("records", "keys"):
        different = int((ours[name] != theirs[name]).sum())
        assert different <= 6 * written, f"{name}: {different} bytes differ in {written} rows"
    assert written == 0 or not torch.equal(theirs["records"], before["records"])
    read = {}
    for state in (theirs, ours):
        case.restore(state)
        slots = case.caches.compressed.slot_mapping[closed].unsqueeze(0)
        values, scales = reference.page_planes(case.key_cache, 128, 4)
        states = case.key_cache.shape[1]
        at = case.caches.index.slot_mapping[closed]
        keys = reference.fp8_values(values[at // states, at % states], torch.float32)
        keys = keys * scales[at // states, at % states].contiguous().view(torch.float32)
        read[id(state)] = reference.read_kv(case.kv_cache, slots), keys
    for found, expected in zip(read[id(ours)], read[id(theirs)], strict=True):
        torch.testing.assert_close(found, expected, rtol=2.0**-3, atol=1e-3)
    case.restore(before)


def expected_scores(case: IndexCase, head_weights: Tensor, flags: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """[T, n] float32 scores by the reference from the kernels' head weights [T, heads] float32, -inf in padding rows,
    and the sums of their terms' sizes, by which they may be off."""
    indexer, meta = case.attn.indexer, case.caches.index
    q = case.q.unflatten(1, (indexer.num_heads, 128))
    codes, weights = reference.index_queries(q, head_weights.bfloat16(), case.attn.cos_sin[case.positions])
    arguments = case.key_cache, meta, case.shape.ratio, codes
    scores = reference.index_scores(*arguments, weights, case.positions)
    size = reference.index_scores(*arguments, weights.abs(), case.positions)
    scores = scores.masked_fill(~case.live.unsqueeze(1), float("-inf"))
    return scores if flags is None else scores.masked_fill(~flags, float("-inf")), size


def assert_scored(case: IndexCase, found: Tensor, head_weights: Tensor, flags: Tensor | None = None) -> Tensor:
    """found: [T, n] as the kernel left it, behind a row's own anything -> the same with -inf there."""
    expected, size = expected_scores(case, head_weights, flags)
    assert found.shape == expected.shape
    held = torch.arange(found.shape[1], device=found.device) < closed_groups(case).unsqueeze(1)
    found = torch.where(held, found, float("-inf"))
    finite = expected > float("-inf")
    assert torch.equal(found > float("-inf"), finite), "scores are -inf elsewhere"
    # No smaller than a row's usual: terms of little are left where large products cancelled.
    usual = torch.where(finite, size, 0.0).sum(1, keepdim=True) / finite.sum(1, keepdim=True).clamp_min(1)
    error = ((found - expected).abs() / torch.maximum(size, usual))[finite]
    assert error.numel() == 0 or error.max() < 1e-5, f"found an error of {error.max().item():g} of the terms' size"
    return found


def closed_groups(case: IndexCase) -> Tensor:
    """[T] positions that a row may select; none in padding rows."""
    return ((case.positions + 1) // case.shape.ratio) * case.live


def assert_selected(case: IndexCase, scores: Tensor, slots: Tensor) -> None:
    """The selection that the kernel left, and its slots: the very positions that the reference selects from the same
    scores [T, n], in any order, -1 behind them; nothing behind the batch's rows is touched."""
    rows, topk = case.rows, case.shape.topk
    found, expected = case.selection[:rows], reference.top_positions(scores, topk)
    chosen = (expected >= 0).sum(1, keepdim=True)
    places = torch.arange(topk, device=found.device)
    assert torch.equal(found >= 0, places < chosen), "positions are not in front"
    assert torch.equal(found.sort(1).values, expected.sort(1).values), "other positions are selected"
    assert (case.selection[rows:] == 12345).all(), "a row behind the batch's was written"
    table = ReferenceTables().selected(case.caches.compressed, found.contiguous(), case.caches.window)
    assert torch.equal(slots, table), "slots are elsewhere"


def assert_in_place(case: IndexCase, slots: Tensor) -> None:
    """Whatever was selected are the rows' own positions, and their slots; nothing lies behind the rows."""
    found = case.selection[: case.rows]
    assert (found >= -1).all() and (found < closed_groups(case).unsqueeze(1)).all(), "positions of nobody"
    assert (case.selection[case.rows :] == 12345).all(), "a row behind the batch's was written"
    table = ReferenceTables().selected(case.caches.compressed, found.contiguous(), case.caches.window)
    assert torch.equal(slots, table), "slots are elsewhere"


def assert_chosen(case: IndexCase, scores: Tensor, flags: Tensor) -> None:
    """The candidate blocks that the kernel left of scores [T, n], -inf behind a row's own, and the flags that it made:
    those that the reference chooses, in order of position, -1 behind them; nothing behind the batch's rows is
    touched."""
    blocks, size, closed = case.attn.selection.candidate_blocks, case.shape.size, closed_groups(case)
    expected = reference.candidate_blocks(scores, closed, size, blocks.shape[1])
    last = torch.iinfo(torch.int32).max
    ordered = torch.where(expected < 0, last, expected).sort(1).values
    assert torch.equal(blocks[: case.rows], torch.where(ordered == last, -1, ordered)), "other blocks are chosen"
    assert (blocks[case.rows :] == 12345).all(), "a row behind the batch's was written"
    assert flags.dtype == torch.bool and flags.shape == scores.shape
    held = torch.arange(flags.shape[1], device=flags.device) < closed.unsqueeze(1)
    wanted = reference.candidate_flags(expected, size, flags.shape[1])
    assert torch.equal(flags & held, wanted & held), "other positions are flagged"


def tied_scores(case: IndexCase) -> dict[str, Tensor]:
    """[T, n] scores by name, -inf behind a row's own."""
    rows, width = case.rows, max(case.caches.index.max_seq_len // case.shape.ratio, 1)
    normal = torch.randn(rows, width, generator=case.generator).to(case.device)
    held = torch.arange(width, device=case.device) < closed_groups(case).unsqueeze(1)
    found = {
        "equal": torch.full_like(normal, 0.25),
        "few": (normal * 2).round(),
        "zeros": torch.where(normal > 1.5, normal, torch.where(normal > 0, 0.0, -0.0)),
        "no numbers": normal.masked_fill(normal > 0.5, torch.nan),
        "infinities": normal.masked_fill(normal > 1.0, torch.inf).masked_fill(normal < 0.0, -torch.inf),
        "close": 1 + normal * 2.0**-20,
        "subnormal": normal * 1e-40,
    }
    return {name: scores.masked_fill(~held, -torch.inf) for name, scores in found.items()}


def bins_of(scores: Tensor, closed: Tensor, like: Tensor) -> Tensor:
    """How many of each row's numbers are in which bin, 64 to an octave from 2**-20 on of either sign, largest first,
    where the scores' launch counts them."""
    steps = (scores.abs().view(torch.int32) >> 17) - (107 << 6)
    steps = torch.where(scores < 0, -1 - steps.clamp(0, 2047), steps.clamp(0, 2047))
    place = 2047 - steps
    found = torch.zeros_like(like)
    for row in range(scores.shape[0]):
        real = scores[row] > -torch.inf
        real[int(closed[row]) :] = False
        counts = torch.bincount(place[row][real], minlength=4096)
        found[row] = counts.view(-1, index_tuning.SPREAD).T.flatten()
    return found
