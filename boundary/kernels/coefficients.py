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
            base,
            scale,
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
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    finish(
        partial, base, scale, pre_out, post_out, comb_out, row, rms_eps, hc_eps, K, SPLITS, SPLITS_PADDED, ITERATIONS
    )


@triton.jit
def finish(
    partial,
    base,
    scale,
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
    pre = tl.sigmoid(pre * inverse * tl.load(scale) + tl.load(base + four)) + hc_eps
    post = 2.0 * tl.sigmoid(post * inverse * tl.load(scale + 1) + tl.load(base + 4 + four))
    comb = tl.reshape(flat * inverse * tl.load(scale + 2) + tl.load(base + 8 + sixteen), (4, 4))
    comb = tl.exp(comb - tl.max(comb, 1)[:, None])
    comb = comb / tl.sum(comb, 1)[:, None] + hc_eps
    comb = comb / (tl.sum(comb, 0)[None, :] + hc_eps)
    for _ in range(ITERATIONS - 1):
        comb = comb / (tl.sum(comb, 1)[:, None] + hc_eps)
        comb = comb / (tl.sum(comb, 0)[None, :] + hc_eps)
    tl.store(pre_out + row * 4 + four, pre)
    tl.store(post_out + row * 4 + four, post)
    tl.store(comb_out + row * 16 + sixteen, tl.reshape(comb, (16,)))


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
