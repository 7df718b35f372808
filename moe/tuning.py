"""Launch configurations of the MoE kernels: pure functions, each number with its measurement.

Microseconds of one launch in a chain of layers of TP 4's width 576 on an H200 (2026-11-30), if nothing else is said.
"""

from typing import NamedTuple

from specialized_decode.moe.expert_layout import round_up

# Rows of one launch: the multiplication's narrow side.
MAX_ROWS = 8
TILE, BLOCK, COLUMN_TILE = 16, 32, 64
# Of the gate, whose logits and routing take 5.3 us at 1 row; 6.2 with 8 warps.
FRONT_WARPS = 4
# Weights that a lane of the gate asks for ahead of everything: 16 bytes of two rows a block, 64 registers. At 1 row 5.3
# us, 6.2 with 5 blocks, 8.3 with 2; at 8 rows 8.2, 8.1 and 9.3.
FRONT_BLOCKS = 8
# Bytes that a lane of the gate's launch brings into the second-level cache.
PIECE = 1024
# Bytes of float16 are put in place by the multiplier as well, instead of by permutations alone. The loop over four
# tiles of gate and up has 292 instructions of the integer pipe so, 356 else, each of two cycles.
MULTIPLY = True
# How long the caches are to keep weights: "", "evict_first" or "evict_last".
KEEP = ""


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


class Ahead(NamedTuple):
    """Pieces of the shared expert's first and second projections that the gate's launch brings into the cache."""

    up: int
    down: int


# Up to so many rows the shared expert's weights are brought ahead; the second projection's then outlive the first GEMM.
AHEAD_UP_ROWS, AHEAD_DOWN_ROWS = 8, 4


def ahead(hidden: int, width: int, rows: int) -> Ahead:
    """What is brought ahead; whole pieces, so that none reaches past its tensor."""
    return Ahead(
        2 * width * hidden // PIECE if rows <= AHEAD_UP_ROWS else 0,
        width * hidden // PIECE if rows <= AHEAD_DOWN_ROWS else 0,
    )


class Up(NamedTuple):
    """The first GEMM: warps of a program, column tiles of a routed expert, blocks of the shared one, in a chunk."""

    warps: int
    tiles: int
    blocks: int


# Up to so many rows the first GEMM's columns are spread over the most warps.
FEW_ROWS = 2
# Registers of a thread of the first GEMM at most, so that 16 warps fit a multiprocessor.
REGISTERS = 128
# Warps and column tiles, for few rows and for more.
UP_FEW, UP_MANY = (4, 4), (2, 4)


def up(hidden: int, rows: int) -> Up | None:
    """The first GEMM's cut; None where the columns do not divide.

    Few rows have too few programs to fill the GPU: more warps share a program's columns. With many rows all programs
    run at once if they are small: at 8 rows 51.2 us with 2 warps, 56.1 with 4; at 1 row 19.0 and 15.6.
    """
    most, chunk = UP_FEW if rows <= FEW_ROWS else UP_MANY
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


# Warps, most tiles, most blocks and repeats, for few rows and for more.
DOWN_FEW, DOWN_MANY = (4, 3, 6, 1), (4, 3, 3, 4)


def down(hidden: int, width: int, rows: int) -> Down:
    """The second GEMM's cut: at 1 row 5.6 us with chunks of 3 tiles and 6 blocks, 5.7 with all 9 and 9; at 8 rows 25.4
    with 3 and 3, 29.9 with 9 and 9."""
    warps, most_tiles, most_blocks, repeat = DOWN_FEW if rows <= FEW_ROWS else DOWN_MANY
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
