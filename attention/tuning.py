"""Launch configurations of the attention kernels: pure functions."""

from typing import NamedTuple

# Blocks of 32 columns whose weights and inputs a thread holds at once, 16 bytes of each a block: 80 registers.
MOST_BLOCKS = 10
TILE, BLOCK = 16, 32


class Projection(NamedTuple):
    """How a projection's programs are cut: tiles of 16 outputs a program, warps that share a tile's columns, blocks of
    32 columns that a warp holds at once, and how often it does."""

    tile_warps: int
    k_warps: int
    per_warp: int
    chunks: int

    @property
    def warps(self) -> int:
        """Warps of a program."""
        return self.tile_warps * self.k_warps


def projection(n: int, k: int) -> Projection:
    """The launch of a projection [n, k]. Raises ValueError for widths that do not divide into tiles and warps."""
    if n % (2 * TILE) or k % BLOCK:
        raise ValueError(f"projection: found [{n}, {k}], expected multiples of [{2 * TILE}, {BLOCK}]")
    blocks = k // BLOCK
    per_warp = max(
        count for count in range(1, MOST_BLOCKS + 1) if blocks % count == 0 and _power_of_two(blocks // count)
    )
    k_warps = min(16, blocks // per_warp)
    # At least eight warps, so that a multiprocessor's registers are in use.
    tile_warps = max(1, 8 // k_warps)
    while n // TILE % tile_warps:
        tile_warps //= 2
    return Projection(tile_warps, k_warps, per_warp, blocks // per_warp // k_warps)


def _power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
