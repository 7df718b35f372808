"""Launch configurations of the MoE kernels: pure functions, each number with its measurement.

Microseconds of one launch in a chain of layers of TP 4's width 576 on an H200 (2026-11-30), if nothing else is said.
"""

from typing import NamedTuple

from specialized_decode.moe.expert_layout import round_up

# Rows of one launch: the multiplication's narrow side.
MAX_ROWS = 8
TILE, BLOCK, COLUMN_TILE = 16, 32, 64
# Of the gate, whose logits and routing took 5.3 us at 1 row; 6.2 with 8 warps.
FRONT_WARPS = 4
# Weights that a lane of the gate asks for ahead of everything: 16 bytes of two rows a block, 64 registers. At 1 row 5.3
# us, 6.2 with 5 blocks, 8.3 with 2; at 8 rows 8.2, 8.1 and 9.3. All with a record that the last row's program wrote for
# all; without any 4.5 us at 1 row and 5.0 at 8. With the present one not measured.
FRONT_BLOCKS = 8


class Front(NamedTuple):
    """How the gate's columns are cut: programs that share an expert's, and blocks of 32 that a warp has."""

    splits: int
    blocks: int


def front(hidden: int) -> Front | None:
    """The cut for a hidden size; None where none fits."""
    blocks = hidden // BLOCK
    for count in range(FRONT_BLOCKS, 0, -1):
        if hidden % BLOCK == 0 and blocks % (count * FRONT_WARPS) == 0:
            return Front(blocks // count // FRONT_WARPS, count)
    return None


def largest_divisor(count: int, most: int) -> int:
    """The largest divisor of `count` up to `most`."""
    return max(part for part in range(1, most + 1) if count % part == 0)


# One warp selects a row's experts without barriers.
ROUTE_WARPS = 1


class Up(NamedTuple):
    """The first GEMM: warps of a program, column tiles of a routed expert, blocks of the shared one, in a chunk."""

    warps: int
    tiles: int
    blocks: int


# Registers of a thread of the first GEMM at most, so that 16 warps fit a multiprocessor.
REGISTERS = 128
# Warps and column tiles, for one row, for more, and for seven and eight.
UP_ONE, UP_MANY, UP_MOST = (4, 4), (2, 4), (1, 4)
FEWEST_OF_MOST = 7


def up(hidden: int, rows: int) -> Up | None:
    """The first GEMM's cut; None where the columns do not divide.

    One row has too few programs to fill the GPU: more warps share a program's columns. With more rows all programs run
    at once if they are small. The whole MoE on an H200, width 576, with 4, 2 and 1 warps: 26.1, 27.3 and 35.8 us at 1
    row, 51.1, 45.0 and 50.1 at 4, and at 8 rows 78.6 with 2 and 75.2 with 1 (2026-11-30). Not measured: 5 to 7 rows.
    """
    most, chunk = UP_ONE if rows == 1 else UP_MANY if rows < FEWEST_OF_MOST else UP_MOST
    tiles = hidden // COLUMN_TILE
    for warps in (most, 2, 1):
        if hidden % COLUMN_TILE == 0 and tiles % warps == 0:
            return Up(warps, largest_divisor(tiles // warps, chunk), largest_divisor(2 * tiles // warps, 2 * chunk))
    return None


class Down(NamedTuple):
    """The second GEMM: warps of a program, column tiles of a routed expert, and blocks of the shared one, that it asks
    for at once; how many rows of tiles a routed expert's warp has, one behind the other."""

    warps: int
    tiles: int
    blocks: int
    repeat: int


# Warps, most tiles, most blocks and repeats: of one row, by the width up to which, and of more rows.
DOWN_ONE, DOWN_MANY = {576: (4, 9, 9, 1)}, (4, 3, 3, 1)
# Of one row, of wider shards, which have no registers for nine tiles twice.
DOWN_WIDE = (4, 3, 6, 1)


def down(hidden: int, width: int, rows: int) -> Down:
    """The second GEMM's cut.

    The whole MoE on an H200 at 1 row: 25.9 us with chunks of 9 tiles and 9 blocks, 26.1 with 3 and 3; of width 288 19.7
    and 20.5, 22.4 with four times the rows a warp. This launch at 2, 4 and 8 rows: 8.1, 13.8 and 24.4 us with chunks of
    3 and 3, 9.4, 15.7 and 28.0 with 9 and 9 (2026-11-30). Not measured: wider shards.
    """
    one = next((cut for widest, cut in DOWN_ONE.items() if width <= widest), DOWN_WIDE)
    warps, most_tiles, most_blocks, repeat = one if rows == 1 else DOWN_MANY
    tiles = round_up(width, COLUMN_TILE) // COLUMN_TILE
    # Five tiles, of TP 8's width, have no divisor but one: all of them then.
    most_tiles = tiles if tiles < 2 * most_tiles else most_tiles
    programs = hidden // TILE // warps
    return Down(
        warps,
        largest_divisor(tiles, most_tiles),
        largest_divisor(width // BLOCK, most_blocks),
        largest_divisor(programs, repeat),
    )


def activation_scale(limit: float) -> float:
    """The power of two that brings the largest output of the clamped SwiGLU below float16's largest number."""
    scale = 1.0
    while 2 * scale * limit * limit < 65504:
        scale *= 2
    return scale
