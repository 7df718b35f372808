"""Launch configurations of the low-batch projections: pure functions."""

from typing import NamedTuple

# Rows of one launch: the multiplication's narrow side.
MAX_ROWS = 8
TILE, BLOCK = 16, 32
# Bytes of a tile's 32 columns.
BLOCK_BYTES = TILE * BLOCK
# Shared memory of a program's weights, and registers of a program: half of a multiprocessor's 227 KB and 65536, so that
# the next launch's programs, whose weights come meanwhile, fit beside this one's.
MOST_BYTES = 100 * 1024
MOST_REGISTERS = 32768
MOST_WARPS = 16
# Those of a program that has a multiprocessor to itself.
MOST_BYTES_ALONE = 200 * 1024
# A projection of 8-10 MB is one round of programs with this share each.
ROUND_BYTES = 80 * 1024
# Programs that keep an H200's memory busy: its multiprocessors, but for a few.
ROUND = 110
MULTIPROCESSORS = 132
# Whether the next launch starts early or late.
STARTS = ((False, False), (False, True), (True, False))


class Projection(NamedTuple):
    """How a projection's programs are cut: warps side by side over tiles of 16 outputs, tiles of each, warps that share
    a tile's columns, blocks of 32 columns that a warp holds at once, how often it does, groups in which its weights
    arrive, blocks of the input that it asks for at once, whether the next launch may start at once, and whether only
    when all of the input has been asked for."""

    tile_warps: int
    tiles: int
    k_warps: int
    per_warp: int
    chunks: int
    stages: int
    ahead: int
    early: bool
    late: bool = False

    @property
    def warps(self) -> int:
        """Warps of a program."""
        return self.tile_warps * self.k_warps

    @property
    def program_tiles(self) -> int:
        """Tiles of a program."""
        return self.tile_warps * self.tiles

    @property
    def bytes(self) -> int:
        """Shared memory of a program's weights."""
        return self.program_tiles * self.k_warps * self.per_warp * BLOCK_BYTES


def projection(n: int, k: int, groups: int = 1) -> Projection:
    """The launch of a projection [n, k] whose outputs are split over groups. Raises ValueError for widths that do not
    divide into tiles and warps."""
    tiles, blocks = _checked(n, k, groups)
    chunks = 1
    while blocks // chunks * BLOCK_BYTES > ROUND_BYTES and blocks % (2 * chunks) == 0:
        chunks *= 2
    held = blocks // chunks
    k_warps = max(count for count in (1, 2, 4, 8, 16) if held % count == 0 and (count == 1 or held // count >= 5))
    # At four ranks on an H200 (2026-11-30), us at 1 and 8 rows in a chain: wq_b with one tile a program 3.64 and
    # 4.07, with two side by side 3.60 and 4.30, with two by two 4.32 and 4.74; wo_b with one 3.87 and 4.46, with two
    # 3.66 and 4.45.
    two = 2 * k_warps <= MOST_WARPS and tiles % 2 == 0 and 2 * held * BLOCK_BYTES <= ROUND_BYTES
    tile_warps = 2 if two and tiles * groups // 2 >= ROUND else 1
    # A round of programs is done at once, and what starts early takes their memory: fused_wqa_wkv takes 3.65 and 4.98
    # without, 3.70 and 6.13 with it; wo_a 3.55 and 4.14, 3.68 and 5.10. Of more programs the last gain: wo_b takes 3.66
    # at 1 row with, 4.24 without it.
    early = tiles * groups // tile_warps > MULTIPROCESSORS
    launch = Projection(tile_warps, 1, k_warps, held // k_warps, chunks, 2, 5, early)
    if launch.bytes > MOST_BYTES:
        raise ValueError(f"projection: found [{n}, {k}], expected {BLOCK} times a product of small primes for {k}")
    # Of the largest share all of x is asked for at once, ahead of the next launch's start: fused_wqa_wkv takes 3.53 and
    # 4.41 then, with half of it and the start ahead 4.00 and 4.96 in the same run.
    if not early and launch.program_tiles == 1 and launch.bytes == ROUND_BYTES:
        return _ahead(launch._replace(late=True), 10)
    return _ahead(launch, 5)


def joined(first: int, second: int, k: int) -> Projection:
    """The launch of two projections [first, k] and [second, k] of one input. Raises ValueError for widths that do not
    divide into tiles and warps."""
    _checked(first, k, 1)
    _checked(second, k, 1)
    # Two tiles a warp, which share what it holds of the input: as that was not waited for, it comes from the second-
    # level cache every time. Whole steps of sources then take 1.2 to 2 us less at 8 rows (H200, 2026-11-30), and no
    # more at 1 row; with four tiles a warp they take 0.5 to 1.5 more.
    own = projection(first + second, k)
    return own._replace(tile_warps=1, tiles=2, early=True)


def candidates(n: int, k: int, groups: int = 1) -> list[Projection]:
    """Launches of [n, k] that a benchmark tries: `projection`'s first, then other cuts, then it with its other choices
    changed."""
    best = projection(n, k, groups)
    own = _ahead(best._replace(late=False), 5)
    tiles, blocks = _checked(n, k, groups)
    held, found = blocks // own.chunks, [best, own]
    for k_warps in (4, 8, 16):
        for tile_warps in (1, 2, 4):
            for each in (1, 2, 4):
                cut = own._replace(tile_warps=tile_warps, tiles=each, k_warps=k_warps, per_warp=held // k_warps)
                share, programs = cut.program_tiles, tiles * groups // cut.program_tiles
                if (
                    held % k_warps == 0
                    and 4 <= cut.warps <= MOST_WARPS
                    and share <= 4
                    and tiles % share == 0
                    and cut.bytes <= MOST_BYTES
                    and programs >= min(ROUND, tiles * groups)
                    and 4 <= cut.per_warp <= 20
                ):
                    found += [_ahead(cut, 5), _ahead(cut, 10)]
    found += [own._replace(stages=1), own._replace(stages=4), own._replace(early=not own.early)]
    if not own.early:
        found += [cut._replace(early=False, late=True) for cut in found if cut.tiles == 1 and not cut.early]
    return list(dict.fromkeys(found + _alone(own, tiles * groups)))


def _alone(own: Projection, tiles: int) -> list[Projection]:
    """Launches of at most half the multiprocessors, each program with twice the tiles on one of its own: rows are read
    half as often, and the next launch's weights arrive on the other multiprocessors."""
    cuts = [own._replace(tiles=2 * own.tiles, k_warps=own.k_warps // by, per_warp=own.per_warp * by) for by in (1, 2)]
    fit = [
        cut
        for cut in cuts
        if tiles % cut.program_tiles == 0
        and tiles // cut.program_tiles <= MULTIPROCESSORS // 2
        and MOST_BYTES < cut.bytes <= MOST_BYTES_ALONE
        and cut.warps >= 4
    ]
    wide = [_ahead(cut, blocks) for cut in fit for blocks in (5, 10)]
    return [cut._replace(early=early, late=late) for cut in wide for early, late in STARTS]


def _ahead(launch: Projection, blocks: int) -> Projection:
    return launch._replace(ahead=min(blocks, launch.per_warp), stages=min(launch.stages, launch.per_warp))


def _checked(n: int, k: int, groups: int) -> tuple[int, int]:
    """Tiles of a group and blocks of 32 columns."""
    if n % (2 * TILE * groups) or k % BLOCK:
        raise ValueError(f"projection: found [{n}, {k}], expected multiples of [{2 * TILE * groups}, {BLOCK}]")
    return n // TILE // groups, k // BLOCK
