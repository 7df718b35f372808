"""Launch configurations of the boundary kernels: pure functions, each number with its measurement."""

from typing import NamedTuple


class Split(NamedTuple):
    """How the coefficients' projection is cut along K."""

    splits: int
    columns: int


# Up to so many rows a row's projection is a program a split and row, finished by the last to arrive: 5.7 us at 1 row
# on an H200, where a projection and its finish take 7.5 us at 8 (2026-11-30).
ONE_LAUNCH_ROWS = 4


class Parts(NamedTuple):
    """How a row is held: its first columns and the others, powers of two, the second padded."""

    main: int
    rest: int


def parts(hidden: int) -> Parts:
    """The largest power of two below `hidden`, and enough for what it leaves: 5120 columns are 4096 and 1024."""
    main = 1 << (hidden - 1).bit_length() - 1
    return Parts(main, 1 << (hidden - main - 1).bit_length())


# Up to so many rows the launch after a boundary may start beside it. Beside more rows it would crowd on the few
# multiprocessors that are free: at 384 rows on an H200 boundary and coefficients take 24.0 us so, 21.9 else
# (2026-11-30).
EARLY_ROWS = 128


def boundary_warps(hidden: int, rows: int) -> int:
    """Warps of a boundary's program. At hidden 5120 in a graph chain on an H200 (2026-11-30) 16 warps take 2.85 us at 1
    row and 3.12 at 48, 32 warps 3.06 and 3.23; at 384 rows 8 warps take 10.9, 16 warps 12.5."""
    return max(1, min(16 if rows <= EARLY_ROWS else 8, parts(hidden).main // 256))


def boundary_registers(hidden: int, rows: int, plain: bool) -> int | None:
    """Registers of a boundary's thread at most; None leaves it to the compiler. plain: all of it and no more, for one
    rank, of a tensor: the others would spill, as would wider rows. With 80 three programs fit a multiprocessor, and 384
    rows run at once: boundary and coefficients take 21.9 us of an H200, 22.6 without (2026-11-30)."""
    return 80 if rows > EARLY_ROWS and plain and sum(parts(hidden)) <= 5120 else None


# Buffers of a projection's step, of 64 rows at many rows.
PROJECTION_STAGES = 3


# Programs of a projection at most: two a multiprocessor of an H200. At 384 rows 8.2 us, 10.4 with one; at 48 rows 4.9
# and 6.0 (2026-11-30).
PROGRAMS = 264


def one_launch_split(k: int) -> Split:
    """Programs of 256 columns, whose weights are 24 KB each: 80 of them at K 20480 take 5.7 us at 1 row on an H200
    with 4 warps (2026-11-30)."""
    columns = 256
    return Split(-(-k // columns), columns)


def projection_split(k: int, rows: int) -> Split:
    """Enough programs to fill the GPU with blocks of 16 or 64 rows, none of less than 256 columns."""
    blocks = -(-rows // projection_rows(rows))
    splits = max(1, min(k // 256, PROGRAMS // blocks))
    columns = -(-k // splits // 64) * 64
    return Split(-(-k // columns), columns)


# Columns of a projection's step.
PROJECTION_COLUMNS = 64


def projection_rows(rows: int) -> int:
    """Rows of a projection's program: one tile of 16, or four once there are rows to fill them."""
    return 16 if rows <= 64 else 64


def projection_warps(rows: int) -> int:
    """Warps of a projection's program: at 48 rows 4.9 us with 2 on an H200, 5.7 with 4; at 8 rows 3.9 and 4.1
    (2026-11-30)."""
    return 2 if projection_rows(rows) == 16 else 4
