"""Launch configurations of the index kernels: pure functions."""

from typing import NamedTuple

from specialized_decode.attention.projection_tuning import Projection

# Rows up to which a step runs the index kernels: those of their projections, and no more than `index_scores.NEWEST`.
MAX_ROWS = 16
TILE, BLOCK = 16, 32
# Bytes of a tile's block of columns.
BLOCK_BYTES = TILE * BLOCK * 2
MULTIPROCESSORS = 132


# The compressor's warps, and the parts of `wk` that a program holds ahead of its wait: all. At 1 row 8 and 12, 16 and 8
# take 0.1 to 0.5 us less, at 8 rows 0.5 more (H200, 2026-11-30, whole steps).
COMPRESS_WARPS, COMPRESS_EARLY = 8, 16

# Neighbouring bins lie in so many stretches of memory, since those in use are neighbours, and each cache line takes one
# count after the other. As many as there are bins for each of a selection's threads (of its TOPS): then each has
# neighbours.
SPREAD, SPREADS = 16, (16, 8)


# A row's selection: its warps, of those that may serve, and scores taken at a time, in stripes of one a thread, so that
# no layout changes ahead of a scattered store, and as many stored at a time as is worth a look whether there are any;
# the longest list that is compared with itself at once, and by tiles, so many with so many at a time; and of a longer
# one, numbers taken at a time.
TOP_WARPS, TOPS, CHUNK, PART = 8, (8, 16), 8192, 2048
FEW_TIES, SHORT, TIES, RIVALS, LONG = 64, 512, 128, 32, 512
MAX_TOPK = 2048


def top_registers(warps: int) -> int:
    """Of a selection's thread: half a multiprocessor's, so that it starts beside a program of the scores'."""
    return 65536 // 2 // (32 * warps)


# Candidate blocks that a row's program takes at a time.
CANDIDATES = 1024


class ScoresCut(NamedTuple):
    """How scores are cut: keys of a tile, warps of its program, programs of a multiprocessor, of up to 32 heads; tiles
    that a program holds ahead of its wait."""

    keys: int
    warps: int
    programs: int
    held: int = 1

    @property
    def resident(self) -> int:
        """Programs that run at once."""
        return self.programs * MULTIPROCESSORS

    @property
    def registers(self) -> int:
        """Of a thread."""
        return min(65536 // (32 * self.warps * self.programs), 255)


# What serves up to FEW_ROWS rows, more where every tile has a program of its own that runs at once, and the rest. On an
# H200 (2026-11-30), us of a whole step above a reader's, at context 8192: at 1 row 13.0, 13.3, 14.0 for a source of
# ratio 2, at 8 rows 15.8, 13.0, 14.5; of ratio 1 at 8 rows 21.4, 18.2, 16.7.
FEW, SHORT_ROWS, MANY = CUTS = ScoresCut(64, 8, 2), ScoresCut(64, 4, 4), ScoresCut(128, 8, 2, 2)
FEW_ROWS = 1


class IndexProjection(NamedTuple):
    """How the projection [N, K] is cut: programs that share the columns of a tile of 16 outputs, and for each the warps
    that share its columns, and blocks of 32 columns of a warp."""

    splits: int
    k_warps: int
    per_warp: int

    @property
    def bytes(self) -> int:
        """Shared memory of a program's weights."""
        return self.k_warps * self.per_warp * BLOCK_BYTES


# Of a projection that has a launch of its own: bytes of a program's weights at the most, and blocks of a warp.
PROJECTION_BYTES, PROJECTION_BLOCKS = 40 * 1024, 5
MOST_WARPS, MOST_SPLITS = 16, 16


def index_projection(n: int, k: int) -> IndexProjection:
    """The launch of a projection [n, k]. Raises ValueError for widths that do not divide into tiles and warps."""
    if n <= 0 or n % TILE or k <= 0 or k % BLOCK:
        raise ValueError(f"projection: found [{n}, {k}], expected multiples of [{TILE}, {BLOCK}]")
    blocks, most = k // BLOCK, PROJECTION_BYTES // BLOCK_BYTES
    found = [
        (held, -warps)
        for held in range(1, most + 1)
        for warps in (1, 2, 4, 8, MOST_WARPS)
        if blocks % held == 0 and held % warps == 0 and held // warps <= PROJECTION_BLOCKS
    ]
    held, warps = max(found)
    if blocks // held > MOST_SPLITS:
        raise ValueError(f"projection: found [{n}, {k}], expected {BLOCK} times a product of small primes for {k}")
    return IndexProjection(blocks // held, -warps, held // -warps)


def beside(n: int, k: int, launch: Projection) -> IndexProjection | None:
    """The programs of a projection [n, k] in the launch of another, which has `launch`, with as many warps and no more
    memory; None where they cannot be."""
    blocks, most = k // BLOCK, launch.per_warp // 2
    if launch.tile_warps != 1 or launch.tiles != 1 or launch.chunks != 1 or blocks % launch.k_warps:
        return None
    each = blocks // launch.k_warps
    for per_warp in range(most, 0, -1):
        if each % per_warp == 0 and each // per_warp <= MOST_SPLITS:
            return IndexProjection(each // per_warp, launch.k_warps, per_warp)
    return None


def key_parts(warps: int) -> int:
    """In how many parts a program multiplies by `wk`: each has an output a warp."""
    return 128 // warps


def scores(rows: int, width: int) -> ScoresCut:
    """The cut of a launch of so many rows, of `width` positions each."""
    if rows <= FEW_ROWS:
        return FEW
    return SHORT_ROWS if rows * (1 + -(-width // SHORT_ROWS.keys)) <= SHORT_ROWS.resident else MANY


def scores_registers(heads: int, cut: ScoresCut, major: int) -> int | None:
    """What the compiler may use, on a GPU of compute capability `major`, a few less than it would; None for what it
    wants: more heads need more, and elsewhere it spills."""
    return cut.registers if heads <= 32 and major == 9 else None


def score_programs(rows: int, width: int) -> int:
    """Programs that share a row's `width` positions: those that run at once, less the one of a row that has the newest
    keys, or fewer with as many tiles each."""
    cut = scores(rows, width)
    tiles, most = -(-width // cut.keys), max(1, cut.resident // rows - 1)
    return max(1, -(-tiles // -(-tiles // most)))
