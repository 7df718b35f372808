"""Launch configurations of the index kernels: pure functions. Most of their numbers are not measured yet against
others."""

from typing import NamedTuple

# Rows up to which a step runs the index kernels: the head weights and the compressor are projected with rows as the
# multiplication's narrow side.
MAX_ROWS = 8
TILE, BLOCK = 16, 32
# Bytes of a tile's block of columns.
BLOCK_BYTES = TILE * BLOCK * 2
MULTIPROCESSORS = 132


# Whether the compressor's programs run in the scores' launch, which then waits for the projection alone, or in a launch
# of their own ahead of it. Apart was faster on an H200 (2026-11-30, 6f920ae): by 2 us at 1 row, 2.1 to 3.6 at 8. Both
# launches are others since.
INSIDE = False

# The compressor's warps in a launch of its own, and the parts of `wk` that a program holds ahead of its wait: so many
# that its registers still fit beside those of a projection's program.
COMPRESS_WARPS, COMPRESS_EARLY = 8, 12

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


class ScoresCut(NamedTuple):
    """How scores are cut: keys of a tile, warps of its program, programs of a multiprocessor, of up to 32 heads; tiles
    that a program holds ahead of its wait; and the parts of `wk` that the compressor's does."""

    keys: int
    warps: int
    programs: int
    held: int = 1
    early: int = 0

    @property
    def resident(self) -> int:
        """Programs that run at once."""
        return self.programs * MULTIPROCESSORS

    @property
    def registers(self) -> int:
        """Of a thread."""
        return min(65536 // (32 * self.warps * self.programs), 255)


# Those that may serve a launch with the compressor's programs, and one without; what does, for up to FEW_ROWS rows and
# for more. Not measured.
INSIDE_CUTS = (
    ScoresCut(64, 8, 2, 1, 8),
    ScoresCut(64, 16, 1, 1, 8),
    ScoresCut(128, 8, 2, 2, 4),
    ScoresCut(128, 8, 2, 2, 8),
)
CUTS = ScoresCut(64, 8, 2), ScoresCut(64, 4, 4), ScoresCut(128, 8, 2, 2), ScoresCut(64, 4, 4, 2)
FEW_ROWS = 1
INSIDE_FEW, INSIDE_MANY = INSIDE_CUTS[0], INSIDE_CUTS[2]
FEW, MANY = CUTS[0], CUTS[2]


class IndexProjection(NamedTuple):
    """How the projection [N, K] is cut: programs that share the columns of a tile of 16 outputs, and for each its
    tiles, the warps that share its columns, blocks of 32 columns of a warp, and whether the next launch may start at
    once."""

    splits: int
    tiles: int
    k_warps: int
    per_warp: int
    early: bool

    @property
    def bytes(self) -> int:
        """Shared memory of a program's weights."""
        return self.tiles * self.k_warps * self.per_warp * BLOCK_BYTES


class ProjectionCut(NamedTuple):
    """What `index_projection` goes by: bytes of a program's weights at the most, its tiles, where they divide into
    them, the most blocks of a warp, and whether the next launch may start at once."""

    bytes: int
    tiles: int
    blocks: int
    early: bool


# Those that may serve, and what does. On an H200 (2026-11-30), us in a chain at 1 and 8 rows: the chosen one 3.87 and
# 5.34 for a source of ratio 2, with the compressor's launch behind 8.63 and 9.47; the second, whose next launch starts
# at once, 3.15 and 3.73, but 9.18 and 8.97 with it; the last 3.50 and 4.61, 8.15 and 9.15. No whole step is measured.
PROJECTION_CUTS = (
    ProjectionCut(40 * 1024, 1, 5, False),
    ProjectionCut(40 * 1024, 1, 5, True),
    ProjectionCut(80 * 1024, 1, 5, False),
    ProjectionCut(80 * 1024, 1, 5, True),
    ProjectionCut(80 * 1024, 2, 5, False),
    ProjectionCut(80 * 1024, 2, 5, True),
    ProjectionCut(40 * 1024, 1, 10, False),
    ProjectionCut(32 * 1024, 1, 4, False),
    ProjectionCut(20 * 1024, 1, 5, False),
    ProjectionCut(160 * 1024, 1, 10, False),
)
PROJECTION = PROJECTION_CUTS[0]
MOST_WARPS, MOST_SPLITS = 16, 16


def index_projection(n: int, k: int, cut: ProjectionCut | None = None) -> IndexProjection:
    """The launch of a projection [n, k]. cut: another than PROJECTION. Raises ValueError for widths that do not divide
    into tiles and warps."""
    if n <= 0 or n % TILE or k <= 0 or k % BLOCK:
        raise ValueError(f"projection: found [{n}, {k}], expected multiples of [{TILE}, {BLOCK}]")
    cut, blocks = cut or PROJECTION, k // BLOCK
    tiles = cut.tiles if n // TILE % cut.tiles == 0 else 1
    most = cut.bytes // BLOCK_BYTES // tiles
    found = [
        (held, -warps)
        for held in range(1, most + 1)
        for warps in (1, 2, 4, 8, MOST_WARPS)
        if blocks % held == 0 and held % warps == 0 and held // warps <= cut.blocks
    ]
    held, warps = max(found)
    if blocks // held > MOST_SPLITS:
        raise ValueError(f"projection: found [{n}, {k}], expected {BLOCK} times a product of small primes for {k}")
    return IndexProjection(blocks // held, tiles, -warps, held // -warps, cut.early)


def key_parts(warps: int) -> int:
    """In how many parts a program multiplies by `wk`: each has an output a warp."""
    return 128 // warps


def scores(rows: int, inside: bool = False) -> ScoresCut:
    """The cut of a launch of so many rows; inside: with the compressor's programs."""
    if inside:
        return INSIDE_FEW if rows <= FEW_ROWS else INSIDE_MANY
    return FEW if rows <= FEW_ROWS else MANY


def scores_registers(heads: int, cut: ScoresCut, major: int) -> int | None:
    """What the compiler may use, on a GPU of compute capability `major`, a few less than it would; None for what it
    wants: more heads need more, and elsewhere it spills."""
    return cut.registers if heads <= 32 and major == 9 else None


def score_programs(rows: int, width: int, inside: bool = False) -> int:
    """Programs that share a row's `width` positions: those that run at once, less the one of a row that has the newest
    keys, or fewer with as many tiles each."""
    cut = scores(rows, inside)
    tiles, most = -(-width // cut.keys), max(1, cut.resident // rows - 1)
    return max(1, -(-tiles // -(-tiles // most)))
