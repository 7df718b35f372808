"""The launch configurations: every column is covered once, by sizes that a kernel can have."""

import pytest

from specialized_decode.boundary import tuning
from specialized_decode.boundary.select import MAX_HIDDEN, MIN_HIDDEN
from specialized_decode.boundary.tuning import Split

HIDDEN = (64, 96, 128, 256, 1024, 4096, 4128, 5120, 7168, 8160, 8192)
COLUMNS = sorted({k for hidden in HIDDEN for k in (hidden, 4 * hidden)})


def assert_covers(split: Split, k: int) -> None:
    """Programs of `columns` columns hold all k, and none is without any."""
    assert split.splits >= 1 and split.columns >= 1
    assert (split.splits - 1) * split.columns < k <= split.splits * split.columns


def power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


@pytest.mark.parametrize("hidden", range(MIN_HIDDEN, MAX_HIDDEN + 1, 32))
def test_parts_hold_a_row(hidden: int) -> None:
    main, rest = tuning.parts(hidden)
    assert power_of_two(main) and power_of_two(rest)
    # The first part is full, the second at least half full; blocks of 32 columns lie in one of them.
    assert main < hidden <= main + rest < main + 2 * (hidden - main)
    assert main % 32 == 0 and rest % 32 == 0 and rest <= main


def test_parts() -> None:
    assert tuning.parts(5120) == (4096, 1024) and tuning.parts(7168) == (4096, 4096)


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("rows", [1, tuning.EARLY_ROWS, tuning.EARLY_ROWS + 1, 384])
def test_warps(hidden: int, rows: int) -> None:
    warps = tuning.boundary_warps(hidden, rows)
    assert power_of_two(warps) and 1 <= warps <= 32
    # A thread has at least one column, and no more than its registers hold of four streams.
    assert 1 <= sum(tuning.parts(hidden)) // (32 * warps) <= 32


def test_warps_grow_with_the_width() -> None:
    for rows in (1, 384):
        warps = [tuning.boundary_warps(hidden, rows) for hidden in range(MIN_HIDDEN, MAX_HIDDEN + 1, 32)]
        assert warps == sorted(warps)


@pytest.mark.parametrize("k", COLUMNS)
def test_one_launch_split(k: int) -> None:
    split = tuning.one_launch_split(k)
    assert_covers(split, k)
    # The columns are one Triton range.
    assert power_of_two(split.columns)


@pytest.mark.parametrize("k", COLUMNS)
def test_projection_split(k: int) -> None:
    for rows in range(1, 385):
        split, block = tuning.projection_split(k, rows), tuning.projection_rows(rows)
        assert_covers(split, k)
        # A program's loop takes whole steps of 64 columns, so that none of another program's are counted twice.
        assert split.columns % 64 == 0
        blocks = -(-rows // block)
        assert split.splits * blocks <= max(tuning.PROGRAMS, blocks)


def test_fewer_splits_for_more_rows() -> None:
    for first, last in ((1, 64), (65, 384)):
        splits = [tuning.projection_split(20480, rows).splits for rows in range(first, last + 1)]
        assert splits == sorted(splits, reverse=True)


@pytest.mark.parametrize("rows", [1, 9, 16, 17, 48, 64, 65, 384])
def test_projection_rows(rows: int) -> None:
    """Tensor-core tiles have 16 rows; no block is all padding."""
    block = tuning.projection_rows(rows)
    assert power_of_two(block) and block >= 16


def test_one_launch_rows() -> None:
    assert 1 <= tuning.ONE_LAUNCH_ROWS <= 384
