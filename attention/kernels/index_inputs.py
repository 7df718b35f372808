"""What a source's caches take of its layer's input: the latent with its norm, its KV record, and the index key made of
it. Of the input, `index_projection` leaves sums of parts of the columns, which are added up in their order.
"""

import triton
import triton.language as tl

from specialized_decode.attention.kernels.norm_insert import _normed as normed
from specialized_decode.attention.kernels.norm_insert import insert_record

BLOCKS, BLOCK, WIDTH, HALF = tl.constexpr(8), tl.constexpr(64), tl.constexpr(512), tl.constexpr(32)
# A key's numbers.
KEY = tl.constexpr(128)
LARGEST = tl.constexpr(448.0)


@triton.jit
def _summed(partial, row, rows, first, N: tl.constexpr, SPLITS: tl.constexpr):
    """512 sums [8, 64] of a row from column `first` on."""
    column = tl.arange(0, BLOCKS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :] + first
    total = tl.load(partial + row * N + column)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(partial + (split * rows + row) * N + column)
    return total


@triton.jit
def row_ahead(row, norm, positions, cos_sin, token_to_req, ring, starts, rings, ring_stride, states, RATIO: tl.constexpr):  # fmt: skip  # noqa: E501
    """What a row's programs read ahead of the wait: its position, request and turn; the norm's weight; RATIO 2 alone:
    its slot in the rings, and the row that an earlier step may have left there, values and scores."""
    position, request = tl.load(positions + row), tl.load(token_to_req + row).to(tl.int64)
    # A latent stands for its group's first token.
    turn = cos_sin + (position - position % RATIO) * BLOCK
    column = tl.arange(0, BLOCKS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    weight = tl.load(norm + column).to(tl.float32)
    begin, end = tl.load(starts + request), tl.load(starts + request + 1)
    if RATIO == 1:
        return position, request, turn, weight, begin, end, request, weight, weight
    slot = tl.load(ring + row)
    stored = (
        rings + tl.maximum(slot, 0) // states * ring_stride + (position + states - 1) % states * (2 * WIDTH) + column
    )
    before = row == begin
    value, score = tl.load(stored, before, other=0.0), tl.load(stored + WIDTH, before, other=0.0)
    return position, request, turn, weight, begin, end, slot, value, score


@triton.jit
def _pooled(partial, row, rows, ahead, rings, ring_stride, states, N: tl.constexpr, SPLITS: tl.constexpr, KEEPS: tl.constexpr):  # fmt: skip  # noqa: E501
    """The row and the one before it, pooled by the softmax of their scores; [8, 64]. KEEPS: leaves the row in its
    ring."""
    begin, end, slot, value_before, score_before = ahead[4], ahead[5], ahead[6], ahead[7], ahead[8]
    value = _summed(partial, row, rows, 0, N, SPLITS)
    score = _summed(partial, row, rows, WIDTH, N, SPLITS)
    if row > begin:
        value_before = _summed(partial, row - 1, rows, 0, N, SPLITS)
        score_before = _summed(partial, row - 1, rows, WIDTH, N, SPLITS)
    if KEEPS:  # noqa: SIM102
        # A request has fewer rows in a step than its ring, so none replaces what its first one reads.
        if (slot >= 0) & (end - row <= states):
            column = tl.arange(0, BLOCKS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
            own = rings + slot // states * ring_stride + slot % states * (2 * WIDTH) + column
            tl.store(own, value)
            tl.store(own + WIDTH, score)
    peak = tl.maximum(score_before, score)
    first, second = tl.exp(score_before - peak), tl.exp(score - peak)
    total = first + second
    return first / total * value_before + second / total * value


@triton.jit
def normed_row(partial, row, rows, ahead, eps, rings, ring_stride, states, N: tl.constexpr, SPLITS: tl.constexpr, RATIO: tl.constexpr, KEEPS: tl.constexpr):  # fmt: skip  # noqa: E501
    """The row's latent, normed, [8, 64] float32 of bfloat16 numbers. Behind the wait."""
    if RATIO == 1:
        latent = _summed(partial, row, rows, 0, N, SPLITS)
    else:
        latent = _pooled(partial, row, rows, ahead, rings, ring_stride, states, N, SPLITS, KEEPS)
    return normed(latent, ahead[3], tl.sum(latent * latent), eps, WIDTH).to(tl.float32)


@triton.jit
def store_row(row, rows, partial, norm, eps, positions, cos_sin, token_to_req, ring, starts, rings, ring_stride, states, slots, cache, stride, log2, N: tl.constexpr, SPLITS: tl.constexpr, RATIO: tl.constexpr):  # fmt: skip  # noqa: E501
    """The program that stores a row's record, and the row in its ring; waits included."""
    ahead = row_ahead(row, norm, positions, cos_sin, token_to_req, ring, starts, rings, ring_stride, states, RATIO)
    slot = tl.load(slots + row)
    pair = tl.arange(0, HALF)
    cos, sin = tl.load(ahead[2] + pair), tl.load(ahead[2] + HALF + pair)
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    latent = normed_row(partial, row, rows, ahead, eps, rings, ring_stride, states, N, SPLITS, RATIO, True)
    if slot >= 0:
        insert_record(latent, cos, sin, cache + (slot >> log2) * stride, slot & ((1 << log2) - 1), log2)


@triton.jit
def _halves(x, N: tl.constexpr):
    """The first and the second half of x's N numbers, in a row."""
    return tl.split(tl.trans(tl.reshape(x, (2, N // 2))))


@triton.jit
def _weights_of(wk, i, PARTS: tl.constexpr):
    """Both halves of the columns of every PARTS-th output from i on, each [128 / PARTS, 256]: a warp reads a row of
    them, where there are as many."""
    at = wk + (tl.arange(0, KEY // PARTS) * PARTS + i)[:, None] * WIDTH + tl.arange(0, WIDTH // 2)[None, :]
    return tl.load(at), tl.load(at + WIDTH // 2)


@triton.jit
def key_ahead(wk, k_norm, turn, PARTS: tl.constexpr, EARLY: tl.constexpr):
    """What the program that makes a row's key reads ahead of the wait: EARLY of PARTS parts of `wk`'s outputs, which it
    holds, the norm's weight, cosines and sines."""
    weights = ()
    for i in tl.static_range(EARLY):
        weights = weights + (_weights_of(wk, i, PARTS),)  # type: ignore[assignment]  # noqa: RUF005
    # Into the L2 cache alone, a line each: a load that nobody may leave out.
    line = tl.arange(0, KEY * WIDTH * 2 // 128)
    tl.load(wk + line * 64, volatile=True)
    pair = tl.arange(0, KEY // 2)
    last = pair >= HALF
    cos, sin = tl.load(turn + pair - HALF, last, other=1.0), tl.load(turn + pair, last, other=0.0)
    return weights, tl.load(k_norm + tl.arange(0, KEY)).to(tl.float32), cos, sin


@triton.jit
def _joined(x, HALF: tl.constexpr):
    """2 HALF tensors -> HALF with another axis, the i-th of the i-th and the one HALF behind it."""
    found = ()
    for i in tl.static_range(HALF):
        found = found + (tl.join(x[i], x[i + HALF]),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def made_key(latent, wk, ahead, eps, PARTS: tl.constexpr, EARLY: tl.constexpr):
    """The key made of a latent, in 8 or 16 parts: codes [128] float8e4nv, and their scale."""
    weights, norm, cos, sin = ahead
    first, second = _halves(latent, WIDTH)
    sums = ()
    for i in tl.static_range(PARTS):
        if i < EARLY:
            own = weights[i]
        else:
            own = _weights_of(wk, i, PARTS)
        products = own[0].to(tl.float32) * first[None, :]
        products = tl.fma(own[1].to(tl.float32), second[None, :], products)
        sums = sums + (tl.sum(products, 1),)  # type: ignore[assignment]  # noqa: RUF005
    # Output r PARTS + i is number r of sum i: the bits of i, largest first, are the axes behind that of r.
    if PARTS == 16:
        sums = _joined(sums, 8)
    sums = _joined(_joined(_joined(sums, 4), 2), 1)
    key = tl.reshape(sums[0], (KEY,)).to(tl.bfloat16).to(tl.float32)
    key = normed(key, norm, tl.sum(key * key), eps, KEY).to(tl.float32)
    real, imaginary = tl.split(tl.reshape(key, (KEY // 2, 2)))
    turned = tl.join(real * cos - imaginary * sin, imaginary * cos + real * sin)
    key = tl.reshape(turned, (KEY,)).to(tl.bfloat16).to(tl.float32)
    # A ceiling of a logarithm, taken from the bits.
    bits = (tl.maximum(tl.max(tl.abs(key), 0), 1e-4) * (1.0 / LARGEST)).to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 127 + ((bits & 0x7FFFFF) > 0).to(tl.int32)
    unit = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    codes = tl.clamp(key * unit, -LARGEST, LARGEST).to(tl.float8e4nv)
    return codes, ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def insert_key(codes, factor, slot, cache, stride, log2):
    page, state = cache + (slot >> log2) * stride, slot & ((1 << log2) - 1)
    tl.store(page + state * KEY + tl.arange(0, KEY), codes.to(tl.uint8, bitcast=True))
    tl.store((page + (KEY << log2) + state * 4).to(tl.pointer_type(tl.float32)), factor)


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
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid (rows, 2): one program of a row stores its record, and the row in its ring, the other its key. partial:
    [SPLITS, rows, N] float32, RATIO x 512 columns of it the compressor's; positions: [rows]
    int64; cos_sin: [positions, 64] float32; RATIO 2 alone: ring: [rows] int64 slots, starts: [requests + 1] int32,
    rings: float32 pages of `states` rows of 1024, `ring_stride` numbers apart. slots, index_slots: [rows] int64, -1 for
    no insert; cache, index_cache: uint8 pages of 2**log2 KV records and 2**index_log2 keys (see `attention.reference`),
    strides in bytes; wk: [128, 512] and k_norm: [128] bfloat16. wk is multiplied in PARTS parts, 8 or 16,
    of which EARLY are held ahead of the wait."""
    row = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        store_row(
            row, rows, partial, norm, eps, positions, cos_sin, token_to_req, ring, starts, rings, ring_stride, states,
            slots, cache, stride, log2, N, SPLITS, RATIO,
        )  # fmt: skip
    else:
        ahead = row_ahead(row, norm, positions, cos_sin, token_to_req, ring, starts, rings, ring_stride, states, RATIO)
        slot, early = tl.load(index_slots + row), key_ahead(wk, k_norm, ahead[2], PARTS, EARLY)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
        latent = normed_row(partial, row, rows, ahead, eps, rings, ring_stride, states, N, SPLITS, RATIO, False)
        if slot >= 0:
            codes, factor = made_key(latent, wk, early, k_eps, PARTS, EARLY)
            insert_key(codes, factor, slot, index_cache, index_stride, index_log2)
