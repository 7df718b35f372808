"""Between the first projection and `wq_b`: the query's RMSNorm, and the latent's with RoPE, quantization and insert."""

import triton
import triton.language as tl

BLOCKS, BLOCK, HALF = tl.constexpr(8), tl.constexpr(64), tl.constexpr(32)
QUANTIZED, WIDTH = tl.constexpr(448), tl.constexpr(512)
DATA, SCALES = tl.constexpr(576), tl.constexpr(8)
LARGEST = tl.constexpr(448.0)


@triton.jit
def _normed(x, weight, square, eps, N: tl.constexpr):
    return (x * tl.rsqrt(square / N + eps) * weight).to(tl.bfloat16)


@triton.jit(do_not_specialize=["log2"])
def norm_insert_kernel(
    projected,
    q_norm,
    kv_norm,
    eps,
    positions,
    cos_sin,
    slot_mapping,
    cache,
    stride,
    log2,
    q_out,
    Q: tl.constexpr,
    Q_PADDED: tl.constexpr,
):
    """Grid (2, rows). projected: [rows, Q + 512] bfloat16, queries' low rank and latents; q_out: [rows, Q] bfloat16;
    slot_mapping: [rows] int64, -1 for no insert; cos_sin: [positions, 64] float32; cache: uint8 pages of 2**log2 KV
    records (see `attention.reference`), `stride` bytes from page to page."""
    # What follows reads weights alone ahead of its own wait, and wants them all.
    tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(1).to(tl.int64)
    x = projected + row * (Q + WIDTH)
    if tl.program_id(0) == 0:
        _query(x, q_norm, q_out + row * Q, eps, Q, Q_PADDED)
    else:
        slot = tl.load(slot_mapping + row)
        turn = cos_sin + tl.load(positions + row) * BLOCK
        cos, sin = tl.load(turn + tl.arange(0, HALF)), tl.load(turn + HALF + tl.arange(0, HALF))
        weight = latent_weight(kv_norm)
        tl.extra.cuda.gdc_wait()
        latent = normed_latent(x + Q, weight, eps)
        if slot >= 0:
            insert_record(latent, cos, sin, cache + (slot >> log2) * stride, slot & ((1 << log2) - 1), log2)


@triton.jit
def _query(x, norm, out, eps, Q: tl.constexpr, Q_PADDED: tl.constexpr):
    """Reads what depends on nothing ahead of the wait, as the latent's program does."""
    column = tl.arange(0, Q_PADDED)
    inside = column < Q
    weight = tl.load(norm + column, inside, other=0.0).to(tl.float32)
    tl.extra.cuda.gdc_wait()
    query = tl.load(x + column, inside, other=0.0).to(tl.float32)
    tl.store(out + column, _normed(query, weight, tl.sum(query * query), eps, Q), inside)


@triton.jit
def _latent_columns():
    return tl.arange(0, BLOCKS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]


@triton.jit
def latent_weight(norm):
    """The latent's norm weight, [8, 64] float32."""
    return tl.load(norm + _latent_columns()).to(tl.float32)


@triton.jit
def normed_latent(x, weight, eps):
    """The normed latent [8, 64], bfloat16's numbers as float32."""
    # Past the first-level cache, for those that read it before a wait of their own.
    latent = tl.load(x + _latent_columns(), cache_modifier=".cg").to(tl.float32)
    return _normed(latent, weight, tl.sum(latent * latent), eps, WIDTH).to(tl.float32)


@triton.jit
def insert_record(latent, cos, sin, page, state, log2):
    """Stores a latent [8, 64] float32 as record `state` of a page; see `reference.insert_kv`."""
    block = tl.arange(0, BLOCKS)
    # The smallest power of two that brings a block within FP8's 448: a ceiling of a logarithm, taken from the bits.
    ratio = tl.maximum(tl.max(tl.abs(latent), 1), 1e-4) * (1.0 / LARGEST)
    bits = ratio.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 127 + ((bits & 0x7FFFFF) > 0).to(tl.int32)
    unit = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    codes = tl.clamp(latent * unit[:, None], -LARGEST, LARGEST).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    data = page + state * DATA
    place = data + block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(place, codes, block[:, None] < 7)
    scales = page + (DATA << log2) + state * SCALES
    tl.store(scales + block, tl.where(block < 7, exponent + 127, 0).to(tl.uint8))
    tail = tl.sum(tl.where(block[:, None] == 7, latent, 0.0), 0)
    real, imaginary = tl.split(tl.reshape(tail, (HALF, 2)))
    turned = tl.join(real * cos - imaginary * sin, imaginary * cos + real * sin)
    place = (data + QUANTIZED).to(tl.pointer_type(tl.bfloat16)) + tl.arange(0, BLOCK)
    tl.store(place, tl.reshape(turned, (BLOCK,)).to(tl.bfloat16))
