"""Every attention op against scalar formulas in float64, and caches against their records' bytes."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specialized_decode.attention import reference
from specialized_decode.backbone.cache import CacheMetadata
from tests.helpers import exact_formats as exact
from tests.helpers import step_mhc as mhc
from tests.helpers.step_caches import (
    INDEX,
    KV,
    PagedBytes,
    any_turns,
    index_values,
    metadata,
    quarter_turns,
    random_index_record,
    random_kv_record,
    shuffled_table,
    turned,
)
from tests.helpers.step_mhc import assert_rounded, assert_within, numbers, random_bf16, same_bits

ROWS = [*range(1, 17), 47, 48, 49]
INF, NAN = math.inf, math.nan
FLOAT = 2.0**-24


# --- norm and rotation ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("size", [1.0, 1e-10, 1e-25])
def test_rms_norm(rows: int, size: float) -> None:
    """Of float32 too, which a compressor's rows are; at 1e-10 the epsilon of 1e-20 weighs half."""
    weight = random_bf16(0, 512)
    generator = torch.Generator().manual_seed(rows)
    for x in (random_bf16(1, rows, 512, size=size), torch.randn(rows, 512, generator=generator) * size):
        expected = mhc.normed(numbers(x), numbers(weight), 1e-20)
        assert_rounded(reference.rms_norm(x, weight, 1e-20), expected, 1e-5 * np.abs(expected))


@pytest.mark.parametrize("inverse", [False, True])
def test_rope(inverse: bool) -> None:
    x, table = torch.randn(5, 64, generator=torch.Generator().manual_seed(2)), any_turns(5, 3)
    found = reference.rope(x, table, inverse)
    assert found.dtype == torch.float32
    assert_within(numbers(found), turned(numbers(x), numbers(table), inverse), 4 * FLOAT * 8)


def test_rope_pairs_neighbours() -> None:
    """A quarter turn of the second pair alone."""
    table = torch.tensor([1.0, 0.0, 0.0, 1.0])
    assert reference.rope(torch.tensor([1.0, 2.0, 3.0, 4.0]), table).tolist() == [1.0, 2.0, -4.0, 3.0]
    assert reference.rope(torch.tensor([1.0, 2.0, 3.0, 4.0]), table, inverse=True).tolist() == [1.0, 2.0, 4.0, -3.0]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("inverse", [False, True])
def test_rope_tail(rows: int, inverse: bool) -> None:
    """The last 64 dimensions of every head, each row by its own angles; the input and the others stay."""
    x, table = random_bf16(4, rows, 3, 160), any_turns(rows, 5)
    before = x.clone()
    found = reference.rope_tail(x, table.unsqueeze(1), inverse)
    assert same_bits(x, before) and same_bits(found[..., :96], x[..., :96])
    for head in range(3):
        expected = turned(numbers(x[:, head, 96:]), numbers(table), inverse)
        assert_rounded(found[:, head, 96:], expected, 4 * FLOAT * 8)


def test_rotating_there_and_back_is_exact_by_quarter_turns() -> None:
    x, table = random_bf16(6, 7, 128), quarter_turns(7, 7)
    assert torch.equal(reference.rope_tail(reference.rope_tail(x, table), table, inverse=True), x)


# --- quantization -----------------------------------------------------------------------------------------------


def test_scale_exponent_of_every_bfloat16() -> None:
    """Positive and finite ones; 448 times a power of two takes that power, its neighbour above the next."""
    amax = torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    found = reference.scale_exponent(amax)
    assert found.dtype == torch.int32
    # v <= 448 * 2**e exactly where frexp's exponent of v / 448 is at most e, a bare power of two one less.
    mantissa, exponent = np.frexp(np.maximum(numbers(amax), float(np.float32(1e-4))) / 448)
    np.testing.assert_array_equal(found.numpy(), exponent - (mantissa == 0.5))
    for value in (0.0, 1e-4, 1.0, 447.0, 448.0, 450.0, 2.0**-5 * 448, 3.3e38):
        assert int(reference.scale_exponent(torch.tensor(value))) == exact.scale_exponent(float(np.float32(value)))


def test_power_of_two() -> None:
    exponents = torch.arange(-126, 128, dtype=torch.int32)
    np.testing.assert_array_equal(numbers(reference.power_of_two(exponents)), 2.0 ** np.arange(-126, 128))


@pytest.mark.parametrize("exponent", [-22, 0, 5, 119])
def test_quantize(exponent: int) -> None:
    """Ties to even, subnormals, signed zeros, and clamped past 448."""
    codes = np.array([code for code in range(256) if code & 127 != 127], dtype=np.uint8)
    values = exact.fp8_values(codes)
    between = (values[:-1] + values[1:]) / 2
    x = np.concatenate((values, between[np.sign(values[:-1]) == np.sign(values[1:])], [500.0, -1e4, INF, -INF]))
    found = reference.quantize(torch.from_numpy(x).float() * 2.0**exponent, torch.tensor(exponent, dtype=torch.int32))
    np.testing.assert_array_equal(found.view(torch.uint8).numpy(), exact.fp8_codes(np.clip(x, -448, 448)))


# --- pages ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("planes", "states"), [(KV, 32), (KV, 64), (INDEX, 32), (INDEX, 64), (INDEX, 1)])
def test_page_planes(planes: tuple[int, int], states: int) -> None:
    cache = PagedBytes(3, states, planes)
    found = reference.page_planes(cache.view, *planes)
    for slot in range(3 * states):
        for plane, place in zip(found, cache.places(slot), strict=True):
            assert torch.equal(plane[slot // states, slot % states], cache.buffer[place])


def test_write_rows() -> None:
    """Rows without a slot write nothing, not even to the null block; no other byte is touched."""
    cache, slots = PagedBytes(3, 32, INDEX), [70, -1, 33, 95, -1]
    before = cache.buffer.clone()
    rows = (torch.arange(5 * 128).view(5, 128).to(torch.uint8), torch.arange(20).view(5, 4).to(torch.uint8))
    reference.write_rows(reference.page_planes(cache.view, *INDEX), torch.tensor(slots), rows)
    for row, slot in enumerate(slots):
        if slot >= 0:
            assert cache.read(slot) == rows[0][row].numpy().tobytes() + rows[1][row].numpy().tobytes()
    assert cache.untouched(before, [70, 33, 95])


def _latents(rows: int) -> Tensor:
    """Blocks of sizes from under the scale's floor to large, zeros with both signs among them."""
    sizes = 2.0 ** torch.randint(-24, 12, (rows, 8, 1), generator=torch.Generator().manual_seed(rows))
    x = (random_bf16(8, rows, 8, 64).float() * sizes).to(torch.bfloat16).flatten(1)
    x[0, :64], x[0, 1], x[0, 64] = 0.0, -0.0, 448.0
    return x


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("states", [32, 64])
def test_insert_kv(rows: int, states: int) -> None:
    """By quarter turns the rotation is exact, and a record's bytes are the format's; every third row has no slot."""
    cache, x, table = PagedBytes(4, states, KV), _latents(rows), quarter_turns(rows, 9)
    slots = np.random.default_rng(rows).permutation(np.arange(states, 4 * states))[:rows]
    slots[2::3] = -1
    before = cache.buffer.clone()
    x[2::3] = NAN
    reference.insert_kv(cache.view, torch.from_numpy(slots), x, table)
    for row, slot in enumerate(slots):
        if slot >= 0:
            tail = turned(numbers(x[row, 448:]), numbers(table[row]))
            # -0 + 0 is 0 in either order, but which of the two terms is -0 is the formula's choice.
            found = cache.read(int(slot))
            expected = exact.kv_record(numbers(x[row, :448]), tail)
            assert found[:448] == expected[:448] and found[576:] == expected[576:], f"row {row}"
            np.testing.assert_array_equal(exact.kv_values(found)[448:], exact.kv_values(expected)[448:])
    assert cache.untouched(before, [int(slot) for slot in slots if slot >= 0])


def test_insert_kv_rotates_and_rounds_the_tail() -> None:
    cache, x, table = PagedBytes(2, 32, KV), random_bf16(10, 20, 512), any_turns(20, 11)
    reference.insert_kv(cache.view, torch.arange(32, 52), x, table)
    for row in range(20):
        tail = torch.from_numpy(exact.kv_values(cache.read(32 + row))[448:]).to(torch.bfloat16)
        assert_rounded(tail, turned(numbers(x[row, 448:]), numbers(table[row])), 4 * FLOAT * 8)


@pytest.mark.parametrize("states", [32, 64])
def test_read_kv(states: int) -> None:
    cache, rng = PagedBytes(4, states, KV), np.random.default_rng(12)
    slots = rng.permutation(np.arange(states, 4 * states))[:15].reshape(3, 5)
    for slot in slots.ravel():
        cache.write(int(slot), random_kv_record(rng))
    wanted = slots.copy()
    wanted[1, 2:], wanted[2] = -1, -1
    found = reference.read_kv(cache.view, torch.from_numpy(wanted))
    assert found.shape == (3, 5, 512) and found.dtype == torch.float32
    for at, slot in np.ndenumerate(wanted):
        if slot >= 0:
            np.testing.assert_array_equal(numbers(found[at]), exact.kv_values(cache.read(int(slot))))


@pytest.mark.parametrize("rows", ROWS)
def test_insert_index_keys(rows: int) -> None:
    cache, table = PagedBytes(4, 32, INDEX), quarter_turns(rows, 13)
    key = (random_bf16(14, rows, 128).float() * 10.0 ** (torch.arange(rows) % 9 - 6).unsqueeze(1)).to(torch.bfloat16)
    slots = np.random.default_rng(rows).permutation(np.arange(32, 128))[:rows]
    slots[1::3], key[1::3] = -1, NAN
    before = cache.buffer.clone()
    reference.insert_index_keys(cache.view, torch.from_numpy(slots), key, table)
    for row, slot in enumerate(slots):
        if slot >= 0:
            rotated = np.concatenate((numbers(key[row, :64]), turned(numbers(key[row, 64:]), numbers(table[row]))))
            values, scale = exact.index_record(rotated)
            found = cache.read(int(slot))
            assert found[128:] == scale
            np.testing.assert_array_equal(index_values(found), index_values(values + scale))
    assert cache.untouched(before, [int(slot) for slot in slots if slot >= 0])


def test_index_keys_of_zeros() -> None:
    """The scale stays at its floor: the smallest power of two that brings 1e-4 within 448."""
    cache = PagedBytes(2, 32, INDEX)
    reference.insert_index_keys(
        cache.view, torch.tensor([40]), torch.zeros(1, 128, dtype=torch.bfloat16), quarter_turns(1, 15)
    )
    record = cache.read(40)
    assert not index_values(record).any() and np.frombuffer(record[128:], "<f4")[0] == 2.0**-22


# --- compressor -------------------------------------------------------------------------------------------------


def _compressor(ratio: int, requests: int = 4) -> Any:
    """State rows start as NaN: what nobody wrote must not be used."""
    state = torch.full((requests + 1, 8, 1024), NAN) if ratio == 2 else None
    return SimpleNamespace(ratio=ratio, norm=random_bf16(16, 512), eps=1e-20, state_cache=state)


def _rings(chunks: list[tuple[int, int, int]]) -> tuple[Tensor, CacheMetadata]:
    """(request, or -1 for padding; start; count) -> positions and metadata; request r owns ring r + 1 of 8 rows."""
    positions = [start + i for _, start, count in chunks for i in range(count)]
    slots = [-1 if r < 0 else 8 * (r + 1) + (start + i) % 8 for r, start, count in chunks for i in range(count)]
    table = np.array([[max(r, -1) + 1] for r, _, _ in chunks], dtype=np.int32)
    return torch.tensor(positions), metadata(table, 8, [count for _, _, count in chunks], slots)


def _assert_pooled(found: Tensor, pair: Tensor, norm: Tensor) -> None:
    """pair: [2, 1024] rows of a group; a softmax over the two for every dimension."""
    rows = numbers(pair)
    weights = np.exp(rows[:, 512:] - rows[:, 512:].max(0))
    pooled = (weights * rows[:, :512]).sum(0) / weights.sum(0)
    expected = mhc.normed(pooled, numbers(norm), 1e-20)
    size = np.abs(numbers(norm)) * np.abs(rows[:, :512]).max(0) / np.sqrt((pooled**2).mean())
    assert_rounded(found, expected, 1e-5 * (size + np.abs(expected)))


@pytest.mark.parametrize("rows", ROWS)
def test_ratio_1_only_norms(rows: int) -> None:
    compressor, kv = _compressor(1), torch.randn(rows, 512, generator=torch.Generator().manual_seed(17))
    expected = mhc.normed(numbers(kv), numbers(compressor.norm), 1e-20)
    assert_rounded(reference.compress(compressor, kv, torch.arange(rows), None), expected, 1e-5 * np.abs(expected))


STEPS = {
    "one token a step": [[(0, p, 1), (1, 2 * p, 2)] for p in range(12)],
    "drafts": [[(0, 0, 6), (1, 0, 5)], [(0, 6, 6), (1, 5, 6)], [(1, 11, 6), (0, 12, 6)]],
    "padding and empty requests": [
        [(0, 0, 3), (-1, 0, 2), (1, 0, 1), (2, 0, 0)],
        [(-1, 0, 1), (2, 0, 4), (0, 3, 1), (1, 1, 0), (-1, 0, 0)],
        [(2, 4, 0), (1, 1, 5), (0, 4, 1), (2, 4, 2), (-1, 0, 3)],
    ],
    "longer than the ring": [[(0, 0, 9), (1, 0, 23)], [(1, 23, 1), (0, 9, 17)], [(0, 26, 1), (1, 24, 8)]],
    "47 to 49 rows": [[(0, 0, 47)], [(0, 47, 48)], [(0, 95, 49), (1, 0, 1)], [(1, 1, 1)]],
}


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS.keys())
def test_ratio_2_pools_pairs(steps: list[list[tuple[int, int, int]]]) -> None:
    """Each request by itself, over steps of any split; the ring keeps its last rows, padding's stays as it was."""
    compressor, generator = _compressor(2), torch.Generator().manual_seed(18)
    history = [torch.randn(150, 1024, generator=generator) * 2 for _ in range(3)]
    for chunks in steps:
        rows = [torch.full((n, 1024), NAN) if r < 0 else history[r][start : start + n] for r, start, n in chunks]
        positions, ring = _rings(chunks)
        found, at = reference.compress(compressor, torch.cat(rows), positions, ring), 0
        for request, start, count in chunks:
            for position in range(start, start + count):
                if request >= 0 and position % 2:
                    _assert_pooled(found[at], history[request][position - 1 : position + 1], compressor.norm)
                at += 1
            for position in range(max(start, start + count - 8), start + count):
                if request >= 0:
                    assert same_bits(compressor.state_cache[request + 1, position % 8], history[request][position])
    assert compressor.state_cache[0].isnan().all()


def test_ratio_2_forgets_rejected_drafts() -> None:
    compressor, generator = _compressor(2), torch.Generator().manual_seed(19)
    rows, drafts = torch.randn(20, 1024, generator=generator), torch.randn(5, 1024, generator=generator)
    reference.compress(compressor, rows[:10], *_rings([(0, 0, 10)]))
    reference.compress(compressor, torch.cat((rows[10:11], drafts)), *_rings([(0, 10, 6)]))
    found = reference.compress(compressor, rows[11:17], *_rings([(0, 11, 6)]))
    for last in (11, 13, 15):
        _assert_pooled(found[last - 11], rows[last - 1 : last + 1], compressor.norm)


def test_ratio_2_softmax_does_not_overflow() -> None:
    compressor, rows = _compressor(2), torch.ones(2, 1024)
    rows[0, :512], rows[0, 512:], rows[1, 512:] = torch.linspace(1, 2, 512), 3e38, -3e38
    found = reference.compress(compressor, rows, *_rings([(0, 0, 2)]))
    expected = mhc.normed(numbers(rows[0, :512]), numbers(compressor.norm), 1e-20)
    assert_rounded(found[1], expected, 1e-5 * np.abs(expected))


# --- indexer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 8, 16, 49])
@pytest.mark.parametrize("heads", [4, 32])
def test_index_queries(rows: int, heads: int) -> None:
    """Codes of the rotated queries, one scale a head, which goes into the head's weight."""
    q, weights, table = random_bf16(20, rows, heads, 128, size=5), random_bf16(21, rows, heads), quarter_turns(rows, 22)
    q[0, 0], q[0, 1], q[0, 2, 3] = 0.0, 448.0 * 2.0**-3, 1e4
    fp8, scaled = reference.index_queries(q, weights, table)
    assert fp8.dtype == torch.float8_e4m3fn and scaled.dtype == torch.float32
    for row in range(rows):
        for head in range(heads):
            x = numbers(q[row, head])
            x = np.concatenate((x[:64], turned(x[64:], numbers(table[row]))))
            scale = 2.0 ** exact.scale_exponent(float(np.abs(x).max()))
            expected = exact.fp8_values(exact.fp8_codes(x / scale))
            np.testing.assert_array_equal(numbers(fp8[row, head].float()), expected)
            weight = float(weights[row, head]) * scale / math.sqrt(heads * 128)
            assert float(scaled[row, head]) == pytest.approx(weight, rel=1e-6)


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("chunk_bytes", [4 << 20, 1], ids=["at once", "row by row"])
def test_index_scores(monkeypatch: pytest.MonkeyPatch, ratio: int, chunk_bytes: int) -> None:
    """Requests of 0 to 6 rows in shuffled blocks, up to their pages' edges; -inf from the first open group on."""
    monkeypatch.setattr(reference, "_CHUNK_BYTES", {"cpu": chunk_bytes})
    states, heads, rng = 32, 4, np.random.default_rng(23)
    counts, contexts = [1, 0, 6, 1, 1], [1, 50, 70, 64, 128]
    table = shuffled_table(5, 4, 24)
    cache = PagedBytes(21, states, INDEX)
    keys: dict[int, np.ndarray] = {}
    for slot in range(states, 21 * states):
        record = random_index_record(rng)
        cache.write(slot, record)
        keys[slot] = index_values(record)
    positions = [c - n + i for c, n in zip(contexts, counts, strict=True) for i in range(n)]
    meta = metadata(table, states, counts, [0] * 9, max_seq_len=128)
    generator = torch.Generator().manual_seed(25)
    q = torch.randn(9, heads, 128, generator=generator).to(torch.float8_e4m3fn)
    weights = torch.randn(9, heads, generator=generator)
    found = reference.index_scores(cache.view, meta, ratio, q, weights, torch.tensor(positions))
    assert found.shape == (9, 128 // ratio) and found.dtype == torch.float32
    owner = np.repeat(np.arange(5), counts)
    for row, position in enumerate(positions):
        closed = (position + 1) // ratio
        for column in range(128 // ratio):
            if column >= closed:
                assert found[row, column] == -INF
                continue
            key = keys[int(table[owner[row], column // states]) * states + column % states]
            dots = numbers(q[row].float()) @ key
            size = np.abs(numbers(weights[row])) @ (np.abs(numbers(q[row].float())) @ np.abs(key))
            expected = float(numbers(weights[row]) @ np.maximum(dots, 0.0))
            # Dots of FP8 values are exact in float64; the score is rounded to float32 once.
            assert abs(float(found[row, column]) - expected) <= FLOAT * abs(expected) + 2.0**-50 * size


def test_index_scores_of_contexts_shorter_than_a_group() -> None:
    """One column at least, even where no group is closed."""
    meta = metadata(shuffled_table(1, 1, 26), 32, [1], [0], max_seq_len=1)
    q = torch.ones(1, 2, 128).to(torch.float8_e4m3fn)
    found = reference.index_scores(PagedBytes(2, 32, INDEX).view, meta, 2, q, torch.ones(1, 2), torch.tensor([0]))
    assert found.tolist() == [[-INF]]


def _best(scores: list[float], count: int) -> list[int]:
    """The `count` best, without those of -inf, in ascending order of their index; scores differ."""
    ranked = sorted((i for i in range(len(scores)) if scores[i] > -INF), key=lambda i: -scores[i])
    return sorted(ranked[:count])


def _chosen(row: Tensor) -> list[int]:
    """The indices of a row of -1-padded ones, which must follow each other before the padding."""
    values = row.tolist()
    count = sum(value >= 0 for value in values)
    assert all(value >= 0 for value in values[:count]) and values[count:] == [-1] * (len(values) - count)
    return sorted(values[:count])


@pytest.mark.parametrize("width", [1, 3, 4, 37, 38, 64])
@pytest.mark.parametrize(("size", "count"), [(4, 6), (8, 1), (1, 40), (64, 2)])
def test_candidate_blocks(width: int, size: int, count: int) -> None:
    """Best by their best score, and the newest block whatever it scores; rows without any closed position."""
    closed = [0, 1, width // 2, max(width - 1, 0), width]
    scores = torch.randn(5, width, generator=torch.Generator().manual_seed(width))
    for row, end in enumerate(closed):
        scores[row, end:] = -INF
        scores[row, (end - 1) // size * size if end else 0 : end] -= 100.0
    found = reference.candidate_blocks(scores, torch.tensor(closed), size, count)
    assert found.shape == (5, count) and found.dtype == torch.int32
    for row, end in enumerate(closed):
        best = [max(scores[row, b : b + size].tolist()) for b in range(0, width, size)]
        if end:
            best[(end - 1) // size] = INF
        assert _chosen(found[row]) == _best(best, count)


@pytest.mark.parametrize("width", [1, 4, 37, 38, 40])
def test_candidate_flags(width: int) -> None:
    """Padding, blocks of no position and blocks past the end flag nothing."""
    blocks = torch.tensor([[0, 9, 4, -1], [-1] * 4, [10, 99, 11, 1], [3, 3, 3, 3]], dtype=torch.int32)
    found = reference.candidate_flags(blocks, 4, width)
    assert found.dtype == torch.bool
    expected = [[column // 4 in row for column in range(width)] for row in blocks.tolist()]
    assert found.tolist() == expected


@pytest.mark.parametrize(("width", "count"), [(40, 16), (16, 16), (15, 16), (1, 16), (40, 1)])
def test_top_positions(width: int, count: int) -> None:
    scores = torch.randn(4, width, generator=torch.Generator().manual_seed(27))
    scores[1, min(5, width) :], scores[2], scores[3, ::2] = -INF, -INF, -INF
    found = reference.top_positions(scores, count)
    assert found.shape == (4, count) and found.dtype == torch.int32
    for row in range(4):
        assert _chosen(found[row]) == _best(scores[row].tolist(), count)


@pytest.mark.parametrize("width", [16, 20, 300, 3000])
def test_of_equal_scores_the_earlier_one_is_chosen(width: int) -> None:
    """However wide the row is, so that a graph's padded columns do not move a choice."""
    scores = torch.zeros(3, width)
    scores[1, 7:], scores[2, :3] = -INF, -1.0
    assert [_chosen(row) for row in reference.top_positions(scores, 8)] == [
        list(range(8)),
        list(range(7)),
        list(range(3, 11)),
    ]
    blocks = reference.candidate_blocks(scores[:1], torch.tensor([16]), 2, 3)
    assert _chosen(blocks[0]) == [0, 1, 7]


def test_top_positions_of_poisoned_rows_are_positions() -> None:
    """They will be looked up, then masked: NaN must not give an index out of range."""
    scores = torch.full((2, 20), NAN)
    scores[1, 3] = INF
    found = reference.top_positions(scores, 16)
    assert ((found >= -1) & (found < 20)).all()


# --- slots ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 48, 128])
@pytest.mark.parametrize("states", [32, 64])
def test_window_slots(window: int, states: int) -> None:
    """Around the window's and the blocks' edges; rows in requests of several, padding rows between them."""
    positions = [0, 1, 30, 31, 32, 33, 46, 47, 48, 49, 63, 64, 65, 127, 128, 129]
    counts = [1] * 14 + [0, 2]
    table = shuffled_table(16, 5, 28)
    owner = np.repeat(np.arange(16), counts)
    slots = [-1 if row % 5 == 4 else 7 for row in range(16)]
    found = reference.window_slots(metadata(table, states, counts, slots), torch.tensor(positions), window)
    assert found.shape == (16, window) and found.dtype == torch.int64
    for row, position in enumerate(positions):
        for column in range(window):
            wanted = position - window + 1 + column
            block = int(table[owner[row], max(wanted, 0) // states])
            expected = -1 if wanted < 0 or slots[row] < 0 else block * states + wanted % states
            assert int(found[row, column]) == expected


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_position_slots(dtype: torch.dtype) -> None:
    table, counts = shuffled_table(3, 4, 29), [2, 0, 3]
    states = torch.randint(-1, 4 * 32, (5, 9), generator=torch.Generator().manual_seed(30)).to(dtype)
    states[0, 0], states[1], states[2, 0] = 127, -1, 0
    found = reference.position_slots(metadata(table, 32, counts, [0] * 5), states)
    assert found.dtype == torch.int64
    owner = [0, 0, 2, 2, 2]
    for (row, column), state in np.ndenumerate(states.numpy()):
        expected = -1 if state < 0 else int(table[owner[row], state // 32]) * 32 + state % 32
        assert int(found[row, column]) == expected


def test_slots_of_large_caches_do_not_wrap() -> None:
    """Block numbers are int32; their slots need int64."""
    table = np.array([[2**27]], dtype=np.int32)
    found = reference.position_slots(metadata(table, 64, [1], [0]), torch.tensor([[63]], dtype=torch.int32))
    assert found.tolist() == [[2**33 + 63]]


# --- attention --------------------------------------------------------------------------------------------------


def _assert_attention(found: Tensor, q: Tensor, kv: Tensor, valid: Tensor, sinks: Tensor, scale: float) -> None:
    for row in range(q.shape[0]):
        entries = numbers(kv[row][valid[row]])
        for head in range(q.shape[1]):
            logits = entries @ numbers(q[row, head]) * scale
            peak = max([*logits, float(sinks[head])])
            weights = np.exp(logits - peak)
            total = weights.sum() + math.exp(float(sinks[head]) - peak)
            largest = np.abs(entries).max(0, initial=0.0)
            assert_rounded(found[row, head], weights @ entries / total, 2e-5 * largest)


@pytest.mark.parametrize("rows", [1, 2, 16, 49])
@pytest.mark.parametrize(("heads", "entries"), [(8, 1), (8, 40), (64, 7)])
def test_sparse_mla(rows: int, heads: int, entries: int) -> None:
    """What is not valid holds NaN; a row without anything valid is zero."""
    generator = torch.Generator().manual_seed(rows)
    q, kv = random_bf16(31, rows, heads, 512), torch.randn(rows, entries, 512, generator=generator)
    valid = torch.rand(rows, entries, generator=generator) > 0.3
    valid[-1] = False
    kv[~valid] = NAN
    sinks = torch.randn(heads, generator=generator) * 2
    found = reference.sparse_mla(q, kv, valid, sinks, 512**-0.5)
    _assert_attention(found, q, kv, valid, sinks, 512**-0.5)
    assert not found[-1].any()


@pytest.mark.parametrize(
    ("size", "sink"),
    [(100.0, 0.0), (100.0, 1e4), (0.0, 0.0), (1.0, -INF), (100.0, -1e30)],
    ids=["large logits", "the sink takes all", "equal logits", "no sink", "a vanishing sink"],
)
def test_sparse_mla_of_extreme_logits(size: float, sink: float) -> None:
    q, kv = random_bf16(32, 2, 8, 512, size=size), random_bf16(33, 2, 9, 512).float()
    valid, sinks = torch.ones(2, 9, dtype=torch.bool), torch.full((8,), sink)
    scale = 512**-0.5
    found = reference.sparse_mla(q, kv, valid, sinks, scale)
    logits = np.einsum("thd,tnd->thn", numbers(q), numbers(kv)) * scale
    peak = np.maximum(logits.max(2, keepdims=True), sink)
    weights = np.exp(logits - peak)
    expected = np.einsum("thn,tnd->thd", weights / (weights.sum(2, keepdims=True) + np.exp(sink - peak)), numbers(kv))
    # A logit of float32 is off by its size's rounding, which moves a weight by as much.
    sizes = np.einsum("thd,tnd->thn", np.abs(numbers(q)), np.abs(numbers(kv))).max() * scale
    assert_rounded(found, expected, 4 * (1 + sizes) * 8 * FLOAT * np.abs(numbers(kv)).max())


@pytest.mark.parametrize("sink", [-INF, -1e30, 0.0, 1e30])
def test_sparse_mla_of_nothing_is_zero(sink: float) -> None:
    """Whatever the sink is; a padding head's is -inf."""
    q, kv = random_bf16(38, 2, 3, 512), torch.full((2, 5, 512), NAN)
    found = reference.sparse_mla(q, kv, torch.zeros(2, 5, dtype=torch.bool), torch.full((3,), sink), 512**-0.5)
    assert found.eq(0.0).all()


@pytest.mark.parametrize("poison", [NAN, INF])
def test_sparse_mla_of_padded_rows(poison: float) -> None:
    """A padded row has nothing valid: whatever its query is, its output is zero, and the others' bits stay."""
    q, kv = random_bf16(34, 6, 8, 512), random_bf16(35, 6, 9, 512).float()
    valid, sinks = torch.ones(6, 9, dtype=torch.bool), torch.zeros(8)
    clean = reference.sparse_mla(q, kv, valid, sinks, 0.05)
    q[1::2], kv[1::2], valid[1::2] = poison, poison, False
    found = reference.sparse_mla(q, kv, valid, sinks, 0.05)
    assert same_bits(found[::2], clean[::2]) and not found[1::2].any()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("groups", [1, 2, 8])
def test_grouped_projection(rows: int, groups: int) -> None:
    x, weight = random_bf16(36, rows, groups * 24), random_bf16(37, groups * 10, 24).float()
    found = reference.grouped_projection(x, weight, groups)
    assert found.shape == (rows, groups * 10)
    for group in range(groups):
        inputs, part = numbers(x[:, 24 * group : 24 * group + 24]), numbers(weight[10 * group : 10 * group + 10])
        expected = inputs @ part.T
        assert_rounded(found[:, 10 * group : 10 * group + 10], expected, 24 * FLOAT * (np.abs(inputs) @ np.abs(part).T))
