"""SparseIndexTables: one table for each index source and cache group, built once a step and never from an older one."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specialized_decode.attention import SparseIndexTables
from specialized_decode.backbone.cache import CacheMetadata
from specialized_decode.backbone.graphs import EmulatedDevice, capture
from tests.helpers.step_caches import metadata, shuffled_table

WINDOW, TOPK, STATES = 48, 16, 32
POSITIONS = torch.tensor([0, 47, 48, 49, 95])
WRITES = [5, 5, -1, 5, 5]


def _meta(seed: int) -> CacheMetadata:
    """Five requests of one row, the third of them padding."""
    return metadata(shuffled_table(5, 3, seed), STATES, [1] * 5, WRITES, max_seq_len=96)


def _attn(source: int | None = None, selected: Tensor | None = None, window: int = WINDOW) -> Any:
    return SimpleNamespace(window_size=window, index_source=source, selection=SimpleNamespace(topk_indices=selected))


def _selection(seed: int) -> Tensor:
    """Rows for more tokens than the batch has; -1 among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 96, (9, TOPK), generator=generator, dtype=torch.int32)


def _slot(meta: CacheMetadata, request: int, state: int) -> int:
    return int(meta.block_table[request, state // STATES]) * STATES + state % STATES


def _window(meta: CacheMetadata, window: int = WINDOW) -> list[list[int]]:
    rows = []
    for row, position in enumerate(POSITIONS.tolist()):
        wanted = range(position - window + 1, position + 1)
        rows.append([-1 if state < 0 or WRITES[row] < 0 else _slot(meta, row, state) for state in wanted])
    return rows


def _selected(meta: CacheMetadata, selection: Tensor) -> list[list[int]]:
    return [
        [-1 if state < 0 or WRITES[row] < 0 else _slot(meta, row, state) for state in selection[row].tolist()]
        for row in range(5)
    ]


def test_layers_of_a_group_share_the_windows_table() -> None:
    tables, meta = SparseIndexTables(), _meta(0)
    found = tables.window(_attn(), meta, POSITIONS)
    assert found.tolist() == _window(meta)
    assert tables.window(_attn(source=2), meta, POSITIONS) is found
    assert tables.built == 1


def test_another_group_or_window_has_a_table_of_its_own() -> None:
    tables, first, second = SparseIndexTables(), _meta(0), _meta(1)
    assert tables.window(_attn(), first, POSITIONS).tolist() == _window(first)
    assert tables.window(_attn(), second, POSITIONS).tolist() == _window(second)
    assert tables.window(_attn(window=7), first, POSITIONS).tolist() == _window(first, 7)
    assert tables.built == 3
    for meta in (first, second):
        tables.window(_attn(), meta, POSITIONS)
    assert tables.built == 3


def test_readers_of_a_source_share_its_table() -> None:
    """Whatever their layer is; another source or group has its own."""
    tables, meta, other, window = SparseIndexTables(), _meta(0), _meta(1), _meta(2)
    one, two = _selection(3), _selection(4)
    found = tables.selected(_attn(2, one), meta, window)
    assert found.tolist() == _selected(meta, one)
    assert tables.selected(_attn(2, one), meta, window) is found
    assert tables.selected(_attn(6, two), meta, window).tolist() == _selected(meta, two)
    assert tables.selected(_attn(2, one), other, window).tolist() == _selected(other, one)
    assert tables.built == 3


def test_a_selection_of_nothing() -> None:
    tables, meta = SparseIndexTables(), _meta(0)
    empty = torch.full((9, TOPK), -1, dtype=torch.int32)
    assert tables.selected(_attn(2, empty), meta, _meta(1)).tolist() == [[-1] * TOPK] * 5


def test_a_new_selection_makes_the_sources_tables_stale_and_no_others() -> None:
    tables, meta, window = SparseIndexTables(), _meta(0), _meta(1)
    one, two = _selection(3), _selection(4)
    old = tables.selected(_attn(2, one), meta, window)
    kept = tables.selected(_attn(6, two), meta, window), tables.window(_attn(), window, POSITIONS)
    one.copy_(_selection(5))
    assert tables.selected(_attn(2, one), meta, window) is old, "nothing was published"
    tables.publish(2)
    assert tables.selected(_attn(2, one), meta, window).tolist() == _selected(meta, one)
    assert tables.selected(_attn(6, two), meta, window) is kept[0]
    assert tables.window(_attn(), window, POSITIONS) is kept[1]
    assert tables.built == 4


def test_publish_makes_a_sources_tables_of_all_groups_stale() -> None:
    tables, first, second, selection = SparseIndexTables(), _meta(0), _meta(1), _selection(3)
    for meta in (first, second):
        tables.selected(_attn(2, selection), meta, first)
    selection.copy_(_selection(4))
    tables.publish(2)
    for meta in (first, second):
        assert tables.selected(_attn(2, selection), meta, first).tolist() == _selected(meta, selection)


@pytest.mark.parametrize("kind", ["window", "selected"])
def test_reset_forgets_every_table(kind: str) -> None:
    """The same metadata objects hold another batch in the next step."""
    tables, meta, selection = SparseIndexTables(), _meta(0), _selection(3)

    def build() -> list[list[int]]:
        if kind == "window":
            return tables.window(_attn(), meta, POSITIONS).tolist()
        return tables.selected(_attn(2, selection), meta, _meta(7)).tolist()

    before = build()
    meta.block_table.copy_(_meta(1).block_table)
    tables.reset()
    assert tables.built == 0
    found = build()
    assert found == (_window(meta) if kind == "window" else _selected(meta, selection)) != before
    assert tables.built == 1


def test_tables_of_a_replay_are_of_its_block_tables() -> None:
    """A graph's tables follow the metadata in place: blocks, positions, selection and padding."""
    tables, device, meta, window = SparseIndexTables(), EmulatedDevice(), _meta(0), _meta(1)
    selection, positions, found = _selection(2), POSITIONS.clone(), []

    def run() -> None:
        tables.reset()
        found.append(tables.window(_attn(), window, positions))
        found.append(tables.selected(_attn(2, selection), meta, window))

    graph = capture(device, run)
    for seed in (10, 20):
        for tensor, other in (
            (meta.block_table, _meta(seed).block_table),
            (window.block_table, _meta(seed + 1).block_table),
            (selection, _selection(seed + 2)),
        ):
            tensor.copy_(other)
        graph.replay()
        assert found[0].tolist() == _window(window)
        assert found[1].tolist() == _selected(meta, selection)
    window.slot_mapping.fill_(-1)
    graph.replay()
    assert all(table.eq(-1).all() for table in found)


def test_tables_are_int64_and_of_the_batchs_rows() -> None:
    """The selection has rows for the largest batch; a table has this one's."""
    tables, meta = SparseIndexTables(), _meta(0)
    for table, width in (
        (tables.window(_attn(), meta, POSITIONS), WINDOW),
        (tables.selected(_attn(2, _selection(3)), meta, meta), TOPK),
    ):
        assert table.shape == (5, width) and table.dtype == torch.int64
        assert np.all(table.numpy() < 16 * STATES)


def test_a_table_that_is_kept_is_served_until_its_source_selects_again() -> None:
    tables, meta, window, selection = SparseIndexTables(), _meta(1), _meta(2), _selection(0)
    made = torch.full((5, TOPK), 7)
    tables.keep(_attn(2), meta, made)
    assert tables.built == 1
    assert tables.selected(_attn(2, selection), meta, window) is made
    assert tables.selected(_attn(4, selection), meta, window) is not made
    tables.publish(2)
    assert tables.selected(_attn(2, selection), meta, window).tolist() == _selected(meta, selection)
