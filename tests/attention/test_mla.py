"""SparseMlaDecode: both caches' entries in float64, any number of heads, rows in chunks."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specialized_decode.attention import SparseIndexTables, SparseMlaDecode
from specialized_decode.attention import mla as module
from tests.helpers import exact_formats as exact
from tests.helpers.step_caches import KV, PagedBytes, metadata, random_kv_record, shuffled_table
from tests.helpers.step_mhc import assert_rounded, numbers, random_bf16, same_bits

WINDOW, TOPK, MAX_ROWS = 48, 16, 49
# Rows in the middle of a request, at its start, and at the window's and the pages' edges.
POSITIONS = [70, 0, 47, 48, 31, 32, 63, 64, 95, 1]


class _Case:
    """One layer over `rows` requests of one row each; every seventh row, from the third on, is padding."""

    def __init__(self, rows: int, heads: int = 8, compressed: bool = True) -> None:
        rng = np.random.default_rng(rows)
        self.positions = torch.tensor([POSITIONS[row % len(POSITIONS)] for row in range(rows)])
        self.padding = [row for row in range(rows) if row % 7 == 2]
        writes = [-1 if row in self.padding else 5 for row in range(rows)]
        self.window = metadata(shuffled_table(rows, 3, rows), 32, [1] * rows, writes)
        self.compressed = metadata(shuffled_table(rows, 1, rows + 1), 64, [1] * rows, writes) if compressed else None
        self.window_bytes = _filled(1 + 3 * rows, 32, rng)
        self.compressed_bytes = _filled(1 + rows, 64, rng)
        selected = torch.randint(-1, 64, (rows + 3, TOPK), generator=torch.Generator().manual_seed(rows)).int()
        selected[0] = -1
        self.attn: Any = SimpleNamespace(
            window_cache=self.window_bytes.view,
            compressed_cache=self.compressed_bytes.view if compressed else None,
            window_size=WINDOW,
            head_dim=512,
            index_source=2 if compressed else None,
            selection=SimpleNamespace(topk_indices=selected),
            sinks=torch.randn(heads, generator=torch.Generator().manual_seed(1)),
            scale=512**-0.5,
        )
        self.q = random_bf16(2, rows, heads, 512)
        self.q[self.padding] = math.nan

    def run(self) -> Tensor:
        caches: Any = SimpleNamespace(window=self.window, compressed=self.compressed)
        return SparseMlaDecode(SparseIndexTables(), MAX_ROWS)(self.attn, self.q, self.positions, caches)

    def entries(self, row: int) -> np.ndarray:
        """What a row attends to: its window, then its selection."""
        position = int(self.positions[row])
        found = []
        for state in range(max(0, position - WINDOW + 1), position + 1):
            slot = int(self.window.block_table[row, state // 32]) * 32 + state % 32
            found.append(exact.kv_values(self.window_bytes.read(slot)))
        if self.compressed is not None:
            for state in self.attn.selection.topk_indices[row].tolist():
                if state >= 0:
                    slot = int(self.compressed.block_table[row, 0]) * 64 + state
                    found.append(exact.kv_values(self.compressed_bytes.read(slot)))
        return np.stack(found)


def _filled(blocks: int, states: int, rng: np.random.Generator) -> PagedBytes:
    """Records everywhere but in the null block, out of a few; the null block decodes to NaN."""
    cache = PagedBytes(blocks, states, KV)
    records = [random_kv_record(rng) for _ in range(20)]
    for slot in range(states):
        cache.write(slot, b"\x7f" * 448 + b"\xff" * 128 + b"\x7f" * 8)
    for slot in range(states, blocks * states):
        cache.write(slot, records[int(rng.integers(20))])
    return cache


def _check(case: _Case, found: Tensor) -> None:
    rows, heads = case.q.shape[:2]
    assert found.shape == (rows, heads, 512)
    for row in range(rows):
        if row in case.padding:
            assert not found[row].any()
            continue
        entries = case.entries(row)
        logits = numbers(case.q[row]) @ entries.T * 512**-0.5
        sinks = numbers(case.attn.sinks)[:, None]
        peak = np.maximum(logits.max(1, keepdims=True), sinks)
        weights = np.exp(logits - peak)
        expected = weights @ entries / (weights.sum(1, keepdims=True) + np.exp(sinks - peak))
        # A float32 logit is off by its terms' rounding, a weight by as much.
        size = (np.abs(numbers(case.q[row])) @ np.abs(entries).T).max() * 512**-0.5
        assert_rounded(found[row], expected, 8 * (1 + size) * 2.0**-24 * np.abs(entries).max(0))


@pytest.mark.parametrize("heads", [8, 16, 32, 64])
@pytest.mark.parametrize("rows", [1, 6])
def test_heads(heads: int, rows: int) -> None:
    case = _Case(rows, heads)
    _check(case, case.run())


@pytest.mark.parametrize("rows", [*range(2, 17), 47, 48, 49])
def test_rows(rows: int) -> None:
    case = _Case(rows)
    _check(case, case.run())


@pytest.mark.parametrize("rows", [1, 10])
def test_window_only(rows: int) -> None:
    case = _Case(rows, compressed=False)
    _check(case, case.run())


def test_a_first_token_attends_to_itself_alone() -> None:
    """Position 0, nothing selected: one entry against the sink, in every head."""
    case = _Case(1)
    case.positions[0] = 0
    assert len(case.entries(0)) == 1
    _check(case, case.run())


@pytest.mark.parametrize("rows", [2, 8, 16, 49])
@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("chunk_rows", [1, 3])
def test_chunks_do_not_change_the_bits(monkeypatch: pytest.MonkeyPatch, rows: int, heads: int, chunk_rows: int) -> None:
    case = _Case(rows, heads)
    monkeypatch.setattr(module, "_CHUNK_BYTES", {"cpu": 1 << 40})
    whole = case.run()
    monkeypatch.setattr(module, "_CHUNK_BYTES", {"cpu": chunk_rows * 4 * (WINDOW + TOPK) * 512})
    assert same_bits(case.run(), whole)


def test_chunks_are_as_large_as_they_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """5 rows of 64 entries in pieces of 2; a budget of less than a row still takes one."""
    case, seen = _Case(5), list[int]()
    op = module.reference.sparse_mla

    def watch(q: Tensor, *args: Any) -> Tensor:
        seen.append(q.shape[0])
        return op(q, *args)

    monkeypatch.setattr(module.reference, "sparse_mla", watch)
    for budget in (2 * 4 * (WINDOW + TOPK) * 512 + 1, 1):
        monkeypatch.setattr(module, "_CHUNK_BYTES", {"cpu": budget})
        case.run()
    assert seen == [2, 2, 1, *[1] * 5]


def test_rows_out_of_range() -> None:
    case = _Case(MAX_ROWS + 1)
    with pytest.raises(ValueError, match=r"sparse MLA: found 50 rows, expected at most 49"):
        case.run()


def test_its_tables_are_the_steps() -> None:
    """Built by the first layer, read by the others."""
    case, tables = _Case(6), SparseIndexTables()
    caches: Any = SimpleNamespace(window=case.window, compressed=case.compressed)
    mla = SparseMlaDecode(tables, MAX_ROWS)
    first = mla(case.attn, case.q, case.positions, caches)
    assert tables.built == 2
    case.attn.sinks = case.attn.sinks + 1
    assert not same_bits(mla(case.attn, case.q, case.positions, caches), first)
    assert tables.built == 2
