"""What a layer's caches and scores take of its input: the compressor's columns and the heads' weights, bfloat16, for up
to eight rows at memory speed; see `projection`, of which this is the sibling whose weights are read in place.

Within a block of 32 columns a lane holds eight neighbours of an output g and of g + 8, and the same ones of a row: any
columns may meet in a sum, so no weight moves.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from specialized_decode.attention.kernels.projection import _barrier, _launch_next, _wait, store_sums
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
    TILES: gl.constexpr,
    K_WARPS: gl.constexpr,
    PER_WARP: gl.constexpr,
    EARLY: gl.constexpr,
):
    """Grid (SPLITS N / 16 / TILES). x: [rows, K] bfloat16 as int32 pairs, rows up to 8; weight: [FIRST, K] likewise,
    FIRST a multiple of 16, or anything where it is 0; heads: [HEADS, K] likewise, whose outputs follow; partial:
    [SPLITS, rows, N] float32, N the next multiple of 16, with zeros behind them. SPLITS K_WARPS PER_WARP blocks of 32
    are K. EARLY: the next launch may start before this one has its input, else when all of it has been asked for."""
    K: gl.constexpr = SPLITS * K_WARPS * PER_WARP * 32
    # Programs of a split.
    PROGRAMS: gl.constexpr = N // 16 // TILES
    lanes: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [K_WARPS, 1], [1, 0])
    vectors: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32, 1], [K_WARPS, 1, 1], [2, 1, 0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    if EARLY:
        _launch_next()
    # Two allocations a block: copies into parts of one would be kept apart by barriers.
    slab = ()
    for _ in gl.static_range(TILES * PER_WARP * 2):
        slab = slab + (gl.allocate_shared_memory(gl.int32, [K_WARPS, 32, 4], shared),)  # type: ignore[assignment]  # noqa: RUF005
    warp = gl.arange(0, K_WARPS, gl.SliceLayout(1, gl.SliceLayout(2, vectors)))[:, None, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, vectors)))[None, :, None]
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, vectors)))[None, None, :]
    split = gl.program_id(0) // PROGRAMS
    first = gl.program_id(0) % PROGRAMS * TILES
    column = (split * K_WARPS + warp) * (PER_WARP * 16) + lane % 4 * 4 + word
    output = lane // 4
    for j in gl.static_range(TILES):
        tile = first + j
        own = _weights_of(weight, heads, tile, FIRST, K) + output * (K // 2) + column
        for i in gl.static_range(PER_WARP):
            for half in gl.static_range(2):
                place = slab[(j * PER_WARP + i) * 2 + half]  # type: ignore[var-annotated]
                at = own + half * 8 * (K // 2) + i * 16
                if FIRST + HEADS == N:
                    async_copy.async_copy_global_to_shared(place, at)
                else:
                    inside = tile * 16 + half * 8 + output < FIRST + HEADS
                    async_copy.async_copy_global_to_shared(place, at, inside)
    async_copy.commit_group()
    # A lane of a row that is not there reads the last one; nobody stores what becomes of it.
    own_x = x + gl.minimum(output, rows - 1) * (K // 2) + column
    none = gl.zeros((K_WARPS, 32), gl.float32, lanes)
    sums = ()
    for _ in gl.static_range(TILES):
        sums = sums + ((none, none, none, none),)  # type: ignore[assignment]  # noqa: RUF005
    _wait()
    inputs = ()
    for i in gl.static_range(PER_WARP):
        inputs = inputs + (gl.load(own_x + i * 16),)  # type: ignore[assignment]  # noqa: RUF005
    # Else the compiler asks for x only when the weights are there.
    _barrier()
    if not EARLY:
        _launch_next()
    async_copy.wait_group(0)
    for i in gl.static_range(PER_WARP):
        own_words = four_words(inputs[i], K_WARPS, lanes)
        for j in gl.static_range(TILES):
            upper = slab[(j * PER_WARP + i) * 2].load(vectors)  # type: ignore[var-annotated]
            lower = slab[(j * PER_WARP + i) * 2 + 1].load(vectors)
            upper, lower = four_words(upper, K_WARPS, lanes), four_words(lower, K_WARPS, lanes)
            # The tile that is due comes first.
            sums = sums[1:] + (_block(upper, lower, own_words, sums[0]),)  # noqa: RUF005
    store_sums(partial + split * rows * N, sums, first, rows, 0.0, N, K, 1, TILES, K_WARPS, False)
