"""What a source's caches take of its layer's input: the compressor's and the head weights' projection, then the latent
with its norm, its KV record, and the index key made of it.

The first launch leaves sums of parts of the columns, which its readers add up in their order.
"""

import triton
import triton.language as tl

from specialized_decode.attention.kernels.norm_insert import _normed as normed
from specialized_decode.attention.kernels.norm_insert import insert_record

TILE, ROWS = tl.constexpr(16), tl.constexpr(16)
BLOCKS, BLOCK, WIDTH, HALF = tl.constexpr(8), tl.constexpr(64), tl.constexpr(512), tl.constexpr(32)
KEY = tl.constexpr(128)
LARGEST = tl.constexpr(448.0)


@triton.jit(do_not_specialize=["rows"])
def index_projection_kernel(
    x,
    weight,
    heads,
    partial,
    rows,
    FIRST: tl.constexpr,
    HEADS: tl.constexpr,
    N: tl.constexpr,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid (N / 16, SPLITS). x: [rows, K] bfloat16, rows up to 16; weight: [FIRST, K] bfloat16, FIRST a multiple of 16,
    or anything where it is 0; heads: [HEADS, K] bfloat16, whose outputs follow; partial: [SPLITS, rows, N] float32, N
    the next multiple of 16, with zeros behind them. SPLITS CHUNKS PARTS COLUMNS are K; a warp's share of a chunk is a
    part."""
    K: tl.constexpr = SPLITS * CHUNKS * PARTS * COLUMNS
    # What follows reads nothing of this launch's, nor of those before it, ahead of its own wait.
    tl.extra.cuda.gdc_launch_dependents()
    split = tl.program_id(1)
    first = tl.program_id(0) * TILE
    if FIRST > 0:
        own = tl.where(first < FIRST, weight + first * K, heads + (first - FIRST) * K)
    else:
        own = heads + first * K
    output = tl.arange(0, TILE)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, PARTS)[:, None, None] * COLUMNS + tl.arange(0, COLUMNS)[None, None, :]
    column += split * (CHUNKS * PARTS * COLUMNS)
    # Weights depend on nothing: the program's whole share is on its way before the grid dependency resolves.
    weights = ()
    for i in tl.static_range(CHUNKS):
        at = own + output[None, :, None] * K + (column + i * PARTS * COLUMNS)
        if FIRST + HEADS == N:
            weights = weights + (tl.load(at),)  # type: ignore[assignment]  # noqa: RUF005
        else:
            inside = first - FIRST + output < HEADS
            weights = weights + (tl.load(at, inside[None, :, None], other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    tl.extra.cuda.gdc_wait()
    sums = tl.zeros((PARTS, TILE, ROWS), tl.float32)
    for i in tl.static_range(CHUNKS):
        at = x + row[None, :, None] * K + (column + i * PARTS * COLUMNS)
        inputs = tl.load(at, row[None, :, None] < rows, other=0.0)
        sums = tl.dot(weights[i], tl.trans(inputs, (0, 2, 1)), sums)
    place = partial + (split * rows + row)[None, :] * N + (first + output)[:, None]
    tl.store(place, tl.sum(sums, 0), row[None, :] < rows)


@triton.jit
def _summed(partial, row, rows, first, N: tl.constexpr, SPLITS: tl.constexpr):
    """512 sums [8, 64] of a row from column `first` on."""
    column = tl.arange(0, BLOCKS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :] + first
    total = tl.load(partial + row * N + column)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(partial + (split * rows + row) * N + column)
    return total


@triton.jit
def _pooled(partial, row, rows, position, request, ring, starts, rings, ring_stride, states, keeps, N: tl.constexpr, SPLITS: tl.constexpr):  # fmt: skip  # noqa: E501
    """The row and the one before it, pooled by the softmax of their scores; [8, 64]. Leaves the row in its ring where
    the program `keeps` it."""
    column = tl.arange(0, BLOCKS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    slot = tl.load(ring + row)
    begin, end = tl.load(starts + request), tl.load(starts + request + 1)
    owner = rings + tl.maximum(slot, 0) // states * ring_stride
    value = _summed(partial, row, rows, 0, N, SPLITS)
    score = _summed(partial, row, rows, WIDTH, N, SPLITS)
    if row == begin:
        stored = owner + (position + states - 1) % states * (2 * WIDTH) + column
        value_before, score_before = tl.load(stored), tl.load(stored + WIDTH)
    else:
        before = tl.maximum(row - 1, 0)
        value_before = _summed(partial, before, rows, 0, N, SPLITS)
        score_before = _summed(partial, before, rows, WIDTH, N, SPLITS)
    # A request has fewer rows in a step than its ring, so none replaces what its first one reads.
    if keeps & (slot >= 0) & (end - row <= states):
        own = owner + slot % states * (2 * WIDTH) + column
        tl.store(own, value)
        tl.store(own + WIDTH, score)
    peak = tl.maximum(score_before, score)
    first, second = tl.exp(score_before - peak), tl.exp(score - peak)
    total = first + second
    return first / total * value_before + second / total * value


@triton.jit
def _halves(x, N: tl.constexpr):
    """The first and the second half of x's N numbers, in a row."""
    return tl.split(tl.trans(tl.reshape(x, (2, N // 2))))


@triton.jit(do_not_specialize=["rows", "states", "log2", "index_log2"])
def compress_kernel(
    partial,
    rows,
    norm,
    eps,
    positions,
    cos_sin,
    token_to_req,
    ring,
    starts,
    rings,
    ring_stride,
    states,
    slots,
    cache,
    stride,
    log2,
    wk,
    k_norm,
    k_eps,
    index_slots,
    index_cache,
    index_stride,
    index_log2,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    RATIO: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid (rows, 2): one program of a row stores its record, and the row in its ring, the other its key. partial:
    [SPLITS, rows, N] float32, RATIO x 512 columns of it the compressor's; positions: [rows]
    int64; cos_sin: [positions, 64] float32; RATIO 2 alone: ring: [rows] int64 slots, starts: [requests + 1] int32,
    rings: float32 pages of `states` rows of 1024, `ring_stride` numbers apart. slots, index_slots: [rows] int64, -1 for
    no insert; cache, index_cache: uint8 pages of 2**log2 KV records and 2**index_log2 keys (see `attention.reference`),
    strides in bytes; wk: [128, 512] and k_norm: [128] bfloat16. EARLY: quarters of wk that are held ahead of
    the wait."""
    row = tl.program_id(0).to(tl.int64)
    makes_key = tl.program_id(1) == 1
    # Inputs of the step, and weights.
    position = tl.load(positions + row)
    slot, index_slot = tl.load(slots + row), tl.load(index_slots + row)
    request = tl.load(token_to_req + row).to(tl.int64)
    # A latent stands for its group's first token.
    turn = cos_sin + (position - position % RATIO) * BLOCK
    pair = tl.arange(0, HALF)
    cos, sin = tl.load(turn + pair), tl.load(turn + HALF + pair)
    column = tl.arange(0, BLOCKS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    weight = tl.load(norm + column).to(tl.float32)
    output, k = tl.arange(0, KEY), tl.arange(0, WIDTH // 4)
    key_weights = ()
    for i in tl.static_range(4):
        at = wk + output[:, None] * WIDTH + (k + i * WIDTH // 4)[None, :]
        if i < EARLY:
            key_weights = key_weights + (tl.load(at, makes_key, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
        else:
            # Into the L2 cache alone: a load that nobody may leave out.
            tl.load(at, makes_key, other=0.0, volatile=True)
    key_norm = tl.load(k_norm + output).to(tl.float32)
    pair = tl.arange(0, KEY // 2)
    last = pair >= HALF
    key_cos = tl.load(turn + pair - HALF, last, other=1.0)
    key_sin = tl.load(turn + pair, last, other=0.0)
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    if RATIO == 1:
        latent = _summed(partial, row, rows, 0, N, SPLITS)
    else:
        keeps = tl.program_id(1) == 0
        latent = _pooled(
            partial, row, rows, position, request, ring, starts, rings, ring_stride, states, keeps, N, SPLITS
        )
    latent = normed(latent, weight, tl.sum(latent * latent), eps, WIDTH).to(tl.float32)
    if (slot >= 0) & (tl.program_id(1) == 0):
        insert_record(latent, cos, sin, cache + (slot >> log2) * stride, slot & ((1 << log2) - 1), log2)
    if (index_slot >= 0) & makes_key:
        first, second = _halves(latent, WIDTH)
        parts = _halves(first, WIDTH // 2) + _halves(second, WIDTH // 2)
        products = key_weights[0].to(tl.float32) * parts[0][None, :]  # type: ignore[misc]
        for i in tl.static_range(1, EARLY):
            products = tl.fma(key_weights[i].to(tl.float32), parts[i][None, :], products)
        for i in tl.static_range(EARLY, 4):
            late = tl.load(wk + output[:, None] * WIDTH + (k + i * WIDTH // 4)[None, :])
            products = tl.fma(late.to(tl.float32), parts[i][None, :], products)
        key = tl.sum(products, 1).to(tl.bfloat16).to(tl.float32)
        key = normed(key, key_norm, tl.sum(key * key), k_eps, KEY).to(tl.float32)
        real, imaginary = tl.split(tl.reshape(key, (KEY // 2, 2)))
        turned = tl.join(real * key_cos - imaginary * key_sin, imaginary * key_cos + real * key_sin)
        key = tl.reshape(turned, (KEY,)).to(tl.bfloat16).to(tl.float32)
        # A ceiling of a logarithm, taken from the bits.
        bits = (tl.maximum(tl.max(tl.abs(key), 0), 1e-4) * (1.0 / LARGEST)).to(tl.int32, bitcast=True)
        exponent = (bits >> 23) - 127 + ((bits & 0x7FFFFF) > 0).to(tl.int32)
        unit = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
        codes = tl.clamp(key * unit, -LARGEST, LARGEST).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        page, state = index_cache + (index_slot >> index_log2) * index_stride, index_slot & ((1 << index_log2) - 1)
        tl.store(page + state * KEY + output, codes)
        scale = (page + (KEY << index_log2) + state * 4).to(tl.pointer_type(tl.float32))
        tl.store(scale, ((exponent + 127) << 23).to(tl.float32, bitcast=True))
