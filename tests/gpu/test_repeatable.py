"""Launches of Humming's GEMMs that leave no tile to be added up by chance."""

import pytest
import torch

from tests.gpu.repeatable import programs, put_in_order, whole_tiles


@pytest.mark.parametrize(
    ("tiles", "cluster", "at_once", "expected"),
    [(10, 1, 132, 10), (100, 1, 132, 100), (200, 1, 132, 100), (7, 2, 132, 14), (134, 1, 132, 67), (67, 2, 132, 2)],
)
def test_programs(tiles: int, cluster: int, at_once: int, expected: int) -> None:
    assert programs(tiles, cluster, at_once) == expected


def test_a_cluster_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="found 1, expected a cluster of 2"):
        programs(4, 2, 1)


@pytest.mark.parametrize("tiles", range(1, 60))
@pytest.mark.parametrize(("cluster", "resident"), [(1, 1), (1, 2), (2, 1)])
def test_no_tile_is_cut_often(tiles: int, cluster: int, resident: int) -> None:
    """By the scheduler's own arithmetic (humming/scheduler.cuh, 0.33.0's): three parts at most, added up in order."""
    config = {"block_shape": (8, 128, 64), "num_ctas_per_sm": resident, "multi_cast_size_a": cluster}
    launch = whole_tiles(config, tiles * cluster * 128, 132)
    groups = launch["num_sms"] * resident // cluster
    for rows in (1, 2, 3, 7, 16, 48):
        blocks = tiles * rows
        split = blocks
        if blocks > groups:
            split = blocks % groups
            if split and split * 10 <= groups:
                split += groups
        iterations = 80
        each = max(-(-split * iterations // groups), -(-(iterations - 1) // 9))
        most = max((-(-(iterations - start % iterations) // each) + bool(start % iterations)
                    for start in range(0, split * iterations, each)), default=1)  # fmt: skip
        assert most <= 3, (tiles, rows, groups, split)


def test_what_does_not_cut_is_left_alone() -> None:
    config = {"block_shape": (8, 128, 64), "use_stream_k": False, "num_sms": 5}
    assert whole_tiles(config, 1280, 132) == config


def test_positions_are_put_in_order() -> None:
    rows = torch.tensor([[7, -1, 0, 3], [-1, -1, -1, -1], [2, 1, 9, 8], [0, 0, 0, 0]], dtype=torch.int32)
    view = rows[:, :3]
    put_in_order(view)
    assert rows.tolist() == [[0, 7, -1, 3], [-1, -1, -1, -1], [1, 2, 9, 8], [0, 0, 0, 0]]
    put_in_order(rows)
    assert rows.tolist() == [[0, 3, 7, -1], [-1, -1, -1, -1], [1, 2, 8, 9], [0, 0, 0, 0]]
    assert rows.dtype == torch.int32
