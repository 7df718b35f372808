"""mHC coefficients: a projection of the streams to 24 mixes, split along K, then activations and Sinkhorn.

Few rows: one launch, whose last program to arrive finishes a row. More: a projection of blocks of rows and a launch
that finishes. Both leave float32 sums in `partial`; mix 24 of a row is its sum of squares.
"""

import triton
import triton.language as tl

MIXES = tl.constexpr(24)
PADDED = tl.constexpr(32)


@triton.jit
def coefficients_kernel(
    streams,
    fn,
    base,
    scale,
    partial,
    arrived,
    pre_out,
    post_out,
    comb_out,
    rms_eps,
    hc_eps,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
    ITERATIONS: tl.constexpr,
):
    """Grid (SPLITS, rows). streams: [rows, K] bfloat16; fn: [24, K] float32; partial: [rows, SPLITS, 32] float32;
    arrived: [rows] int32, zero, and zero again afterwards."""
    split = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    k = split * COLUMNS + tl.arange(0, COLUMNS)
    mix = tl.arange(0, PADDED)
    # Weights depend on nothing, so they are on their way before the grid dependency resolves.
    w = tl.load(fn + mix[:, None] * K + k[None, :], (mix[:, None] < MIXES) & (k[None, :] < K), other=0.0)
    bases, scales = constants(base, scale)
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(streams + row * K + k, k < K, other=0.0).to(tl.float32)
    sums = tl.where(mix == MIXES, tl.sum(x * x, 0), tl.sum(w * x[None, :], 1))
    tl.store(partial + (row * SPLITS + split) * PADDED + mix, sums)
    tl.debug_barrier()
    if tl.atomic_add(arrived + row, 1, sem="acq_rel") == SPLITS - 1:
        tl.store(arrived + row, 0)
        finish(
            partial,
            bases,
            scales,
            pre_out,
            post_out,
            comb_out,
            row,
            rms_eps,
            hc_eps,
            K,
            SPLITS,
            SPLITS_PADDED,
            ITERATIONS,
        )


@triton.jit(do_not_specialize=["rows"])
def projection_kernel(
    streams,
    pieces,
    partial,
    rows,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid (SPLITS, row blocks). As above, up to the sums, on the tensor cores at float32's accuracy: streams are
    bfloat16 and a weight is the sum of its three bfloat16 `pieces` [3, 24, K], so products are exact; a tensor core
    truncates as it adds, so its sums are of BLOCK_K columns and go on in float32 arithmetic."""
    split = tl.program_id(0)
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    mix = tl.arange(0, PADDED)
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    sums = tl.zeros((BLOCK_ROWS, PADDED), tl.float32)
    squares = tl.zeros((BLOCK_ROWS, BLOCK_K), tl.float32)
    for start in range(split * COLUMNS, tl.minimum(split * COLUMNS + COLUMNS, K), BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = k < K
        at = streams + row[:, None].to(tl.int64) * K + k[None, :]
        x = tl.load(at, (row[:, None] < rows) & inside[None, :], other=0.0)
        weights, used = pieces + mix[None, :] * K + k[:, None], (mix[None, :] < MIXES) & inside[:, None]
        part = tl.dot(x, tl.load(weights + 2 * MIXES * K, used, other=0.0))
        part = tl.dot(x, tl.load(weights + MIXES * K, used, other=0.0), part)
        sums += tl.dot(x, tl.load(weights, used, other=0.0), part)
        numbers = x.to(tl.float32)
        squares += numbers * numbers
    sums = tl.where(mix[None, :] == MIXES, tl.sum(squares, 1)[:, None], sums)
    out = partial + (row[:, None].to(tl.int64) * SPLITS + split) * PADDED + mix[None, :]
    tl.store(out, sums, row[:, None] < rows)


@triton.jit
def finish_kernel(
    partial,
    base,
    scale,
    pre_out,
    post_out,
    comb_out,
    rms_eps,
    hc_eps,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    ITERATIONS: tl.constexpr,
):
    """Grid (rows): from the sums to the mixes."""
    row = tl.program_id(0).to(tl.int64)
    bases, scales = constants(base, scale)
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    finish(
        partial, bases, scales, pre_out, post_out, comb_out, row, rms_eps, hc_eps, K, SPLITS, SPLITS_PADDED, ITERATIONS
    )


@triton.jit
def constants(base, scale):
    """What the activations read beside the sums; depends on no launch."""
    four, sixteen = tl.arange(0, 4), tl.arange(0, 16)
    bases = tl.load(base + four), tl.load(base + 4 + four), tl.load(base + 8 + sixteen)
    return bases, (tl.load(scale), tl.load(scale + 1), tl.load(scale + 2))


@triton.jit
def finish(
    partial,
    bases,
    scales,
    pre_out,
    post_out,
    comb_out,
    row,
    rms_eps,
    hc_eps,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    ITERATIONS: tl.constexpr,
):
    """Activations and Sinkhorn of one row; see `reference.coefficients`."""
    four, sixteen = tl.arange(0, 4), tl.arange(0, 16)
    split = tl.arange(0, SPLITS_PADDED)[:, None]
    own = partial + (row * SPLITS + split) * PADDED
    # Past the first-level cache, which may hold what another program has replaced since.
    square = tl.sum(tl.load(own + MIXES, split < SPLITS, other=0.0, cache_modifier=".cg"))
    pre = tl.sum(tl.load(own + four[None, :], split < SPLITS, other=0.0, cache_modifier=".cg"), 0)
    post = tl.sum(tl.load(own + 4 + four[None, :], split < SPLITS, other=0.0, cache_modifier=".cg"), 0)
    flat = tl.sum(tl.load(own + 8 + sixteen[None, :], split < SPLITS, other=0.0, cache_modifier=".cg"), 0)
    inverse = tl.rsqrt(square / K + rms_eps)
    pre = tl.sigmoid(pre * inverse * scales[0] + bases[0]) + hc_eps
    post = 2.0 * tl.sigmoid(post * inverse * scales[1] + bases[1])
    comb = tl.reshape(flat * inverse * scales[2] + bases[2], (4, 4))
    comb = tl.exp(comb - tl.max(comb, 1)[:, None])
    comb = comb / tl.sum(comb, 1)[:, None] + hc_eps
    tl.store(pre_out + row * 4 + four, pre)
    tl.store(post_out + row * 4 + four, post)
    tl.store(comb_out + row * 16 + sixteen, tl.reshape(sinkhorn(comb, hc_eps, ITERATIONS), (16,)))


@triton.jit
def sinkhorn(matrix, eps, ITERATIONS: tl.constexpr):
    """[4, 4] -> the same with columns, then rows and columns, divided by their sums + eps.

    What is scaled are a factor a row and one a column, by every thread for itself: a step of the matrix itself is two
    exchanges between threads, and there are 39 of them in a row."""
    m00, m01, m02, m03, m10, m11, m12, m13, m20, m21, m22, m23, m30, m31, m32, m33 = _elements(matrix)
    one = tl.full((), 1.0, tl.float32)
    r0, r1, r2, r3 = one, one, one, one
    c0 = reciprocal(((m00 + m10) + (m20 + m30)) + eps)
    c1 = reciprocal(((m01 + m11) + (m21 + m31)) + eps)
    c2 = reciprocal(((m02 + m12) + (m22 + m32)) + eps)
    c3 = reciprocal(((m03 + m13) + (m23 + m33)) + eps)
    for _ in range(ITERATIONS - 1):
        r0 = _scaled(r0, m00, m01, m02, m03, c0, c1, c2, c3, eps)
        r1 = _scaled(r1, m10, m11, m12, m13, c0, c1, c2, c3, eps)
        r2 = _scaled(r2, m20, m21, m22, m23, c0, c1, c2, c3, eps)
        r3 = _scaled(r3, m30, m31, m32, m33, c0, c1, c2, c3, eps)
        c0 = _scaled(c0, m00, m10, m20, m30, r0, r1, r2, r3, eps)
        c1 = _scaled(c1, m01, m11, m21, m31, r0, r1, r2, r3, eps)
        c2 = _scaled(c2, m02, m12, m22, m32, r0, r1, r2, r3, eps)
        c3 = _scaled(c3, m03, m13, m23, m33, r0, r1, r2, r3, eps)
    four = tl.arange(0, 4)
    rows = tl.where(four < 2, tl.where(four == 0, r0, r1), tl.where(four == 2, r2, r3))
    columns = tl.where(four < 2, tl.where(four == 0, c0, c1), tl.where(four == 2, c2, c3))
    return matrix * rows[:, None] * columns[None, :]


@triton.jit
def _elements(matrix):
    """The sixteen numbers of a [4, 4], row by row."""
    even, odd = tl.split(tl.reshape(matrix, (4, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    m00, m10, m20, m30 = _column(first)
    m01, m11, m21, m31 = _column(second)
    m02, m12, m22, m32 = _column(third)
    m03, m13, m23, m33 = _column(fourth)
    return m00, m01, m02, m03, m10, m11, m12, m13, m20, m21, m22, m23, m30, m31, m32, m33


@triton.jit
def _column(column):
    even, odd = tl.split(tl.reshape(column, (2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _scaled(factor, a, b, c, d, p, q, r, s, eps):
    """A row's factor (or a column's), divided by the row's sum + eps: the sum is the factor's multiple of (a..d) dot
    (p..s), the columns' factors."""
    return factor * reciprocal(tl.fma(factor, tl.fma(a, p, b * q) + tl.fma(c, r, d * s), eps))


@triton.jit
def reciprocal(x):
    """1 / x within a unit in the last place, for normal x: one instruction where a division is eight."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def stream_mean_kernel(streams, out, H: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr):
    """Grid (rows): the mean of four streams, [rows, 4, H] -> [rows, H] bfloat16."""
    row = tl.program_id(0).to(tl.int64)
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    _mean(streams, out, row, tl.arange(0, MAIN), H)
    _mean(streams, out, row, MAIN + tl.arange(0, REST), H)


@triton.jit
def _mean(streams, out, row, column, H: tl.constexpr):
    inside = column < H
    total = tl.zeros(column.shape, tl.float32)
    for j in tl.static_range(4):
        total += tl.load(streams + (row * 4 + j) * H + column, inside, other=0.0).to(tl.float32)
    tl.store(out + row * H + column, (total * 0.25).to(tl.bfloat16), inside)
