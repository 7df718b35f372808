"""Launch configurations of the low-batch projections: pure functions."""

from typing import NamedTuple

# Rows of a program: the multiplication's narrow side. And of a launch, whose programs are as many for each of these.
ROWS, MAX_ROWS = 8, 16
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
# A projection's weights whose way takes longer than what a launch does behind its wait.
EARLY_BYTES = 8_000_000
# Programs that keep an H200's memory busy: its multiprocessors, but for a few.
ROUND = 110
MULTIPROCESSORS = 132


class Projection(NamedTuple):
    """How a projection's programs are cut: warps side by side over tiles of 16 outputs, tiles of each, warps that share
    a tile's columns, blocks of 32 columns that a warp holds at once, how often it does, groups in which its weights
    arrive, blocks of the input that it asks for at once, whether the next launch may start at once, and whether only
    when all of the input has been asked for; groups that are on their way at once, 0 for all; whether programs begin at
    different columns."""

    tile_warps: int
    tiles: int
    k_warps: int
    per_warp: int
    chunks: int
    stages: int
    ahead: int
    early: bool
    late: bool = False
    depth: int = 0
    turned: bool = False

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
    k_warps = max(count for count in (1, 2, 4, 8, 16) if held % count == 0 and (count == 1 or held // count >= 4))
    # All figures are us at 1 and 8 rows in chains on an H200 (2026-12-01).
    # Two tiles a warp, which share what it holds of the rows, where that leaves programs enough: wq_b of four ranks
    # takes 3.15 and 3.48, with one 3.36 and 3.89.
    each = 2 if tiles % 2 == 0 and held * BLOCK_BYTES <= ROUND_BYTES // 4 and tiles * groups // 2 >= ROUND else 1
    programs = tiles * groups // each
    # The next launch starts at once, where its weights, a fourth or a fifth of them at a time, are on their way for
    # longer than rows: of four ranks wq_b takes 3.15 and 3.48 then, else 3.84 and 3.72; wo_b 3.34 and 3.81, with all
    # its weights at a time 3.87 and 4.46; wo_a 3.18 and 4.29, behind the rows 3.49 and 3.9 to 4.3, as they lie, and a
    # whole step takes 0.6 to 2 less. fused_wqa_wkv with the longest rows takes 3.82 and 5.6 then, behind its own wait
    # 3.8 and 4.3; of fewer weights wq_b of eight ranks 3.36 and 3.85, 2.64 and 2.80.
    early = n * k >= EARLY_BYTES and held * BLOCK_BYTES < ROUND_BYTES
    # More programs of 8 warps than of 16 fit on a multiprocessor, so that few are left over: wo_b of two ranks takes
    # 6.12 and 7.86, with 16 warps 7.71 and 8.75.
    halved = k_warps == 16 and chunks * groups == 1 and programs > 2 * MULTIPROCESSORS and held >= 8 * k_warps
    k_warps //= 1 + halved
    # Where rows take the longest, their order matters: without it fused_wqa_wkv takes 3.7 and 4.9.
    turned = not early and held * BLOCK_BYTES == ROUND_BYTES
    launch = Projection(1, each, k_warps, held // k_warps, chunks, 2, 10, early, turned=turned)
    if early and chunks == 1:
        launch = launch._replace(stages=5, depth=1)
    if launch.bytes > MOST_BYTES:
        raise ValueError(f"projection: found [{n}, {k}], expected {BLOCK} times a product of small primes for {k}")
    # With all of them ahead wo_b of one rank, in two halves, takes 15.5 and 21.0, with five 15.5 and 18.3.
    return _ahead(launch, 10 if chunks == 1 else 5)


def registers(launch: Projection) -> int | None:
    """Of a thread at most, None for as many as the compiler takes: turned, it takes more than leave room on Blackwell,
    and none that it needs. Other launches it cuts worse for a bound that they keep without."""
    return MOST_REGISTERS // (32 * launch.warps) if launch.turned and launch.bytes <= MOST_BYTES else None


def waiting(launch: Projection) -> Projection:
    """It, but the next launch may start only when its wait is over."""
    return launch._replace(early=False, late=False, stages=min(2, launch.per_warp), depth=0)


def joined(first: int, second: int, k: int) -> Projection:
    """The launch of two projections [first, k] and [second, k] of one input. Raises ValueError for widths that do not
    divide into tiles and warps."""
    _checked(first, k, 1)
    _checked(second, k, 1)
    # Two tiles a warp, which share what it holds of the input: as that was not waited for, it comes from the second-
    # level cache every time. Whole steps of sources then take 1.2 to 2 us less at 8 rows (H200, 2026-11-30), and no
    # more at 1 row; with four tiles a warp they take 0.5 to 1.5 more.
    # With a fifth of the weights at a time 1 to 2 us more.
    return waiting(projection(first + second, k))._replace(tile_warps=1, tiles=2, early=True)


def candidates(n: int, k: int, groups: int = 1) -> list[Projection]:
    """Launches of [n, k] that a benchmark tries: `projection`'s first, then each cut with its choices of when the next
    launch starts and in what order and number weights are asked for."""
    tiles, blocks = _checked(n, k, groups)
    own = projection(n, k, groups)
    held, found = blocks // own.chunks, [own]
    cuts = [
        Projection(tile_warps, each, k_warps, held // k_warps, own.chunks, 2, 10, early=False)
        for k_warps in (4, 8, 16)
        for tile_warps in (1, 2)
        for each in (1, 2, 4)
        if held % k_warps == 0 and 4 <= held // k_warps <= 20 and tiles % (tile_warps * each) == 0
    ]
    for cut in cuts:
        share, programs = cut.program_tiles, tiles * groups // cut.program_tiles
        beside = cut.bytes <= MOST_BYTES and programs >= min(ROUND, tiles * groups)
        # Rows are read half as often, and the next launch's weights arrive on the other multiprocessors.
        alone = programs <= MULTIPROCESSORS // 2 and MOST_BYTES < cut.bytes <= MOST_BYTES_ALONE and cut.tile_warps == 1
        if not 4 <= cut.warps <= MOST_WARPS or share > 4 or not (beside or alone):
            continue
        found += [_ahead(cut, number)._replace(turned=turned) for number in (5, 10) for turned in (False, True)]
        found.append(_ahead(cut, 10)._replace(late=True))
        found += [
            _ahead(cut._replace(early=True, stages=stages, depth=depth), 10)
            for stages, depth in ((2, 0), (5, 1), (5, 2))
            if depth == 0 or own.chunks == 1
        ]
    return list(dict.fromkeys(found))


def _ahead(launch: Projection, blocks: int) -> Projection:
    return launch._replace(ahead=min(blocks, launch.per_warp), stages=min(launch.stages, launch.per_warp))


def _checked(n: int, k: int, groups: int) -> tuple[int, int]:
    """Tiles of a group and blocks of 32 columns."""
    if n % (2 * TILE * groups) or k % BLOCK:
        raise ValueError(f"projection: found [{n}, {k}], expected multiples of [{2 * TILE * groups}, {BLOCK}]")
    return n // TILE // groups, k // BLOCK
