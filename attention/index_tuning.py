"""Launch configurations of the index kernels: pure functions. But for `BESIDE`, none of their numbers is measured yet
against others."""

from typing import NamedTuple

# Rows up to which a step runs the index kernels: the head weights and the compressor are projected with rows as the
# multiplication's narrow side.
MAX_ROWS = 8
TILE = 16
# Warps of a projection's program, which share a tile's columns, and bytes of weights that it holds in registers.
PROJECTION_WARPS = 8
MOST_BYTES = 96 * 1024
# Programs that keep an H200's memory busy.
ROUND = 110
MULTIPROCESSORS = 132

# Whether queries, scores and selection run beside `wq_b`, or ahead of it: then no stream is joined right before
# attention, which may read the selection's records while `wq_b` runs, and store the step's own. Beside is faster on an
# H200 for every kind of layer at 1 and 8 rows and a context of 8192: by 0.3 to 13 us.
BESIDE = True

# Warps of a row's programs, and the quarters of `wk` that one holds ahead of its wait: so many that its registers still
# fit beside those of a projection's program.
COMPRESS_WARPS, COMPRESS_EARLY = 8, 2

# Keys of a tile, warps of its program, and programs that run at once, by registers of a thread of up to 32 heads.
KEYS, SCORES_WARPS = 64, 4
SCORES_RESIDENT, SCORES_REGISTERS = 4 * MULTIPROCESSORS, 128

# A row's selection: its warps, a stripe of one score a thread, so that no layout changes ahead of a scattered store,
# and stripes at a time; the longest list whose numbers are compared with each other, so many with so many at a time;
# and of a longer one, numbers taken at a time.
TOP_WARPS, STRIPE, STRIPES = 16, 512, 16
SHORT, TIES, RIVALS, LONG = 512, 128, 32, 512
MAX_TOPK = 2048


class IndexProjection(NamedTuple):
    """How the projection [N, K] is cut: programs that share a tile of 16 outputs, and for each the chunks of its
    columns, the parts of a chunk, one a warp, and columns of a part."""

    splits: int
    chunks: int
    parts: int
    columns: int


def index_projection(n: int, k: int) -> IndexProjection:
    """The launch of a projection [n, k]. Raises ValueError for widths that do not divide into tiles and warps."""
    if n <= 0 or n % TILE or k <= 0 or k % 16:
        raise ValueError(f"projection: found [{n}, {k}], expected multiples of {TILE}")
    parts = max(count for count in (1, 2, 4, PROJECTION_WARPS) if k % (16 * count) == 0)
    share = k // parts
    splits = 1
    # More programs where there are not as many as multiprocessors, fewer columns where they do not fit.
    while share // splits % 32 == 0 and (
        (n // TILE * splits < ROUND and share // splits > 32) or TILE * k // splits * 2 > MOST_BYTES
    ):
        splits *= 2
    columns = min(share // splits & -(share // splits), 64)
    launch = IndexProjection(splits, share // splits // columns, parts, columns)
    if TILE * k // splits * 2 > MOST_BYTES or launch.chunks > 16:
        raise ValueError(f"projection: found [{n}, {k}], expected columns of more powers of two, or fewer")
    return launch


def scores_registers(heads: int, major: int) -> int | None:
    """What the compiler may use, on a GPU of compute capability `major`, a few less than it would; None for what it
    wants: more heads need more, and elsewhere it spills."""
    return SCORES_REGISTERS if heads <= 32 and major == 9 else None


def score_programs(rows: int, width: int) -> int:
    """Programs that share a row's `width` positions: those that run at once, or fewer with as many tiles each."""
    tiles, most = -(-width // KEYS), max(1, SCORES_RESIDENT // rows)
    return max(1, -(-tiles // -(-tiles // most)))
