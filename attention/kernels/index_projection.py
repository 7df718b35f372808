"""What a layer's caches and scores take of its input: the compressor's columns and the heads' weights, bfloat16, for up
to sixteen rows; see `projection`, of which this is the sibling whose weights are read in place.

Within a block of 32 columns a lane holds eight neighbours of an output g and of g + 8, and the same ones of a row: any
columns may meet in a sum, so no weight moves.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from specialized_decode.attention.kernels.projection import (
    _barrier,
    _launch_next,
    _wait,
    _wait_group,
    own_row,
    project,
    shared_words,
    store_sums,
)
from specialized_decode.boundary.kernels.fragments import four_words, mma_bfloat16


@gluon.jit
def _block(upper, lower, x, c):
    """Adds 32 columns to the four sums of a tile. upper, lower: words of outputs g and g + 8."""
    c0, c1, c2, c3 = mma_bfloat16(upper[0], lower[0], upper[1], lower[1], x[0], x[1], c[0], c[1], c[2], c[3])
    return mma_bfloat16(upper[2], lower[2], upper[3], lower[3], x[2], x[3], c0, c1, c2, c3)


@gluon.jit
def _weights_of(weight, heads, tile, FIRST: gl.constexpr, K: gl.constexpr):
    """Where a tile's weights begin."""
    own = heads + (tile * 16 - FIRST) * (K // 2)
    if FIRST > 0 and tile * 16 < FIRST:
        own = weight + tile * 16 * (K // 2)
    return own


@gluon.jit(do_not_specialize=["rows"])
def index_projection_kernel(
    x,
    weight,
    heads,
    partial,
    rows,
    FIRST: gl.constexpr,
    HEADS: gl.constexpr,
    N: gl.constexpr,
    SPLITS: gl.constexpr,
    K_WARPS: gl.constexpr,
    PER_WARP: gl.constexpr,
    WIDE: gl.constexpr,
):
    """Grid (SPLITS N / 16), or WIDE that and a second axis for every eight rows. x: [rows, K] bfloat16 as int32 pairs;
    weight: [FIRST, K] likewise, FIRST a
    multiple of 16, or anything where it is 0; heads: [HEADS, K] likewise, whose outputs follow; partial: [SPLITS, rows,
    N] float32, N the next multiple of 16, with zeros behind them. SPLITS K_WARPS PER_WARP blocks of 32 are K. The next
    launch starts when all of x has been asked for."""
    slab = shared_words(PER_WARP * 2, K_WARPS)
    index_project(
        gl.program_id(0), slab, x, weight, heads, partial, rows, FIRST, HEADS, N, SPLITS, K_WARPS, PER_WARP, WIDE
    )


@gluon.jit
def index_project(
    program, slab, x, weight, heads, partial, rows, FIRST: gl.constexpr, HEADS: gl.constexpr, N: gl.constexpr,
    SPLITS: gl.constexpr, K_WARPS: gl.constexpr, PER_WARP: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """What program number `program` does, the wait included. slab: of `shared_words`, 2 PER_WARP or more."""
    K: gl.constexpr = SPLITS * K_WARPS * PER_WARP * 32
    # Programs of a split.
    PROGRAMS: gl.constexpr = N // 16
    lanes: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [K_WARPS, 1], [1, 0])
    vectors: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32, 1], [K_WARPS, 1, 1], [2, 1, 0])
    warp = gl.arange(0, K_WARPS, gl.SliceLayout(1, gl.SliceLayout(2, vectors)))[:, None, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, vectors)))[None, :, None]
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, vectors)))[None, None, :]
    split, tile = program // PROGRAMS, program % PROGRAMS
    column = (split * K_WARPS + warp) * (PER_WARP * 16) + lane % 4 * 4 + word
    output = lane // 4
    own = _weights_of(weight, heads, tile, FIRST, K) + output * (K // 2) + column
    for i in gl.static_range(PER_WARP):
        for half in gl.static_range(2):
            at = own + half * 8 * (K // 2) + i * 16
            if FIRST + HEADS == N:
                async_copy.async_copy_global_to_shared(slab[i * 2 + half], at)
            else:
                inside = tile * 16 + half * 8 + output < FIRST + HEADS
                async_copy.async_copy_global_to_shared(slab[i * 2 + half], at, inside)
    async_copy.commit_group()
    # A lane of a row that is not there reads the last one; nobody stores what becomes of it.
    own_x = x + gl.minimum(own_row(output, WIDE), rows - 1) * (K // 2) + column
    none = gl.zeros((K_WARPS, 32), gl.float32, lanes)
    sums = (none, none, none, none)
    _wait()
    inputs = ()
    for i in gl.static_range(PER_WARP):
        inputs = inputs + (gl.load(own_x + i * 16),)  # type: ignore[assignment]  # noqa: RUF005
    # Else the compiler asks for x only when the weights are there.
    _barrier()
    _launch_next()
    _wait_group(0)
    for i in gl.static_range(PER_WARP):
        upper = four_words(slab[i * 2].load(vectors), K_WARPS, lanes)
        lower = four_words(slab[i * 2 + 1].load(vectors), K_WARPS, lanes)
        sums = _block(upper, lower, four_words(inputs[i], K_WARPS, lanes), sums)
    store_sums(partial + split * rows * N, (sums,), tile, rows, 0.0, N, K, 1, 1, K_WARPS, False, N, WIDE)


@gluon.jit(do_not_specialize=["rows"])
def input_projections_kernel(
    x,
    weights,
    scales,
    y,
    weight,
    heads,
    partial,
    rows,
    N: gl.constexpr,
    K_WARPS: gl.constexpr,
    PER_WARP: gl.constexpr,
    STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
    FIRST: gl.constexpr,
    HEADS: gl.constexpr,
    INDEX_N: gl.constexpr,
    SPLITS: gl.constexpr,
    INDEX_PER_WARP: gl.constexpr,
    TURNED: gl.constexpr,
    WIDE: gl.constexpr,
):
    """Grid (N / 16 + SPLITS INDEX_N / 16), or WIDE that and a second axis for every eight rows: the programs of
    `projection_kernel`, of a tile each, then those of `index_projection_kernel`. Arguments are theirs, INDEX_N and
    INDEX_PER_WARP the latter's; the next launch starts when all of x has been asked for."""
    K: gl.constexpr = K_WARPS * PER_WARP * 32
    BUFFERS: gl.constexpr = max(PER_WARP, 2 * INDEX_PER_WARP)
    slab = shared_words(BUFFERS, K_WARPS)
    if gl.program_id(0) < N // 16:
        project(
            gl.program_id(0), slab, x, weights, scales, y, rows, x, 0.0, N, K, 1, 1, 1, K_WARPS, PER_WARP, 1,
            STAGES, AHEAD, False, True, K // 2, False, N, False, 0, TURNED, WIDE,
        )  # fmt: skip
    else:
        index_project(
            gl.program_id(0) - N // 16, slab, x, weight, heads, partial, rows, FIRST, HEADS, INDEX_N, SPLITS,
            K_WARPS, INDEX_PER_WARP, WIDE,
        )  # fmt: skip
