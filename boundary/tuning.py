"""Launch configurations of the boundary kernels: pure functions, each number with its measurement."""

from typing import NamedTuple


class Split(NamedTuple):
    """How the coefficients' projection is cut along K."""

    splits: int
    columns: int


# Up to so many rows a row's projection is a program a split and row, finished by the last to arrive: 6.5 us at 1 row
# on an H200, 9.4 us at 8, where a projection in TF32 and its finish took 8.2 us (2026-11-29).
ONE_LAUNCH_ROWS = 4


def width(hidden: int) -> int:
    """The power of two that a row is held in."""
    return 1 << (hidden - 1).bit_length()


def boundary_warps(hidden: int) -> int:
    """Warps of a boundary's program. At hidden 5120, 1 row, in a graph chain on an H200 (2026-11-29): 16 warps 4.10 us,
    32 warps 4.20 us; at 384 rows 13.4 and 15.0 us."""
    return max(1, min(16, width(hidden) // 512))


def one_launch_split(k: int) -> Split:
    """Programs of 256 columns, whose weights are 24 KB each: 80 of them at K 20480 take 6.7 us at 1 row on an H200
    with 4 warps (2026-11-29)."""
    columns = 256
    return Split(-(-k // columns), columns)


def projection_split(k: int, rows: int) -> Split:
    """Enough programs to fill 132 multiprocessors with blocks of 16 or 64 rows, none of less than 256 columns."""
    blocks = -(-rows // projection_rows(rows))
    splits = max(1, min(k // 256, 132 // blocks))
    columns = -(-k // splits // 64) * 64
    return Split(-(-k // columns), columns)


def projection_rows(rows: int) -> int:
    """Rows of a projection's program: one tile of 16, or four once there are rows to fill them."""
    return 16 if rows <= 64 else 64
