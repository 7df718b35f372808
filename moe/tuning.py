"""Launch configurations of the MoE kernels: pure functions. None of the numbers is measured yet."""

from typing import NamedTuple

from specialized_decode.moe.expert_layout import round_up

# Rows of one launch: the multiplication's narrow side.
MAX_ROWS = 8
TILE, BLOCK, COLUMN_TILE = 16, 32, 64
WARPS = 4
# Weights that a lane of the gate asks for ahead of everything: 16 bytes of two rows a block, 64 registers.
FRONT_BLOCKS = 8
# Column tiles, or pairs of blocks of the shared expert, whose weights a lane holds while the next ones are on their
# way: 4 KB a warp.
UP_CHUNK = 4
# The same of the second GEMM, which asks for all of it ahead of its inputs where it can.
MOST_DOWN_TILES, MOST_DOWN_BLOCKS = 9, 9


class Front(NamedTuple):
    """How the gate's columns are cut: programs that share an expert's, and blocks of 32 that a warp has."""

    splits: int
    blocks: int


def front(hidden: int) -> Front | None:
    """The cut for a hidden size; None where none fits."""
    blocks = hidden // BLOCK
    for count in range(FRONT_BLOCKS, 0, -1):
        if hidden % BLOCK == 0 and blocks % (count * WARPS) == 0:
            return Front(blocks // count // WARPS, count)
    return None


def largest_divisor(count: int, most: int) -> int:
    """The largest divisor of `count` up to `most`."""
    return max(part for part in range(1, most + 1) if count % part == 0)


def up_chunk(hidden: int) -> int | None:
    """Column tiles of the first GEMM's chunk; None where the columns do not divide."""
    tiles, rest = divmod(hidden, COLUMN_TILE * WARPS)
    return largest_divisor(tiles, UP_CHUNK) if tiles and not rest else None


class Down(NamedTuple):
    """Column tiles of a routed expert, and blocks of the shared one, that the second GEMM asks for at once."""

    tiles: int
    blocks: int


def down(width: int) -> Down:
    """The chunks of the second GEMM for a rank's width."""
    tiles = round_up(width, COLUMN_TILE) // COLUMN_TILE
    return Down(largest_divisor(tiles, MOST_DOWN_TILES), largest_divisor(width // BLOCK, MOST_DOWN_BLOCKS))


def activation_scale(limit: float) -> float:
    """The power of two that brings the largest output of the clamped SwiGLU below float16's largest number."""
    scale = 1.0
    while 2 * scale * limit * limit < 65504:
        scale *= 2
    return scale


def route_warps(rows: int, topk: int) -> int:
    """One warp selects without barriers; the record's matrix of more than 16 pairs wants more registers than it has."""
    return 1 if rows * topk <= 16 else 4
