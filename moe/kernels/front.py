"""Ahead of the routing: partial sums of the gate's logits, and the input as the experts' GEMMs read it.

Gate weights depend on nothing, so a lane's whole share is on its way before the grid dependency resolves. Products of
bfloat16 numbers are exact and are summed in float32.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from specialized_decode.boundary.kernels.fragments import four_words, mma_bfloat16
from specialized_decode.moe.kernels.fragments import quad_column, wait


@gluon.jit(do_not_specialize=["rows"])
def front_kernel(
    x,
    x_pairs,
    gate,
    partial,
    plain,
    quads,
    factors,
    members,
    rows,
    K: gl.constexpr,
    PADDED: gl.constexpr,
    EXPERTS: gl.constexpr,
    SPLITS: gl.constexpr,
    WARPS: gl.constexpr,
    BLOCKS: gl.constexpr,
):
    """Grid (EXPERTS / 16 SPLITS + rows), one row of the input a program at the end. x: [rows, K] bfloat16, x_pairs the
    same as int32; gate: [EXPERTS, K] bfloat16 as int32 pairs; partial: [SPLITS, rows, EXPERTS] float32; plain, quads
    and factors: see `_as_float16`; members: [EXPERTS] int64, zero afterwards. WARPS BLOCKS SPLITS blocks of 32 columns
    are K."""
    program = gl.program_id(0)
    if program < EXPERTS // 16 * SPLITS:
        _logits(x_pairs, gate, partial, members, rows, program, K, EXPERTS, SPLITS, WARPS, BLOCKS)
    else:
        _as_float16(x, plain, quads, factors, program - EXPERTS // 16 * SPLITS, K, PADDED, WARPS)


@gluon.jit
def _logits(
    x, gate, partial, members, rows, program, K: gl.constexpr, EXPERTS: gl.constexpr, SPLITS: gl.constexpr,
    WARPS: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """Sixteen experts, a part of the columns."""
    lanes: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    vectors: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32, 1], [WARPS, 1, 1], [2, 1, 0])
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, vectors)))[:, None, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, vectors)))[None, :, None]
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, vectors)))[None, None, :]
    tile, split = program // SPLITS, program % SPLITS
    start = ((split * WARPS + warp) * BLOCKS) * 16 + lane % 4 * 4 + word
    own = gate + (tile * 16 + lane // 4) * (K // 2) + start
    first, second = (), ()
    for i in gl.static_range(BLOCKS):
        first = first + (gl.load(own + i * 16),)  # type: ignore[assignment]  # noqa: RUF005
        second = second + (gl.load(own + 4 * K + i * 16),)  # type: ignore[assignment]  # noqa: RUF005
    wait()
    if split == 0:
        flat: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
        expert = tile * 16 + gl.arange(0, 16, flat)
        gl.store(members + expert, gl.zeros((16,), gl.int64, flat))
    # A lane of a row that is not there reads the last one; nobody stores what becomes of it.
    inputs = x + gl.minimum(lane // 4, rows - 1) * (K // 2) + start
    c0 = gl.zeros((WARPS, 32), gl.float32, lanes)
    c1, c2, c3 = c0, c0, c0
    for i in gl.static_range(BLOCKS):
        x0, x1, x2, x3 = four_words(gl.load(inputs + i * 16), WARPS, lanes)
        a0, a2, b0, b2 = four_words(first[i], WARPS, lanes)
        a1, a3, b1, b3 = four_words(second[i], WARPS, lanes)
        c0, c1, c2, c3 = mma_bfloat16(a0, a1, a2, a3, x0, x1, c0, c1, c2, c3)
        c0, c1, c2, c3 = mma_bfloat16(b0, b1, b2, b3, x2, x3, c0, c1, c2, c3)
    sums = gl.sum(gl.join(gl.join(c0, c2), gl.join(c1, c3)), 0)
    # [lane, row of 2, token of 2], spread over the warps.
    out: gl.constexpr = gl.BlockedLayout([1, 1, 1], [32, 1, 1], [1, 2, WARPS // 2], [2, 1, 0])
    sums = gl.convert_layout(sums, out)
    lane = gl.arange(0, 32, gl.SliceLayout(1, gl.SliceLayout(2, out)))[:, None, None]
    place = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, out)))[None, :, None]
    parity = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, out)))[None, None, :]
    token = lane % 4 * 2 + parity
    expert = tile * 16 + place * 8 + lane // 4
    gl.store(partial + (split * rows + token) * EXPERTS + expert, sums, token < rows)


@gluon.jit
def _as_float16(x, plain, quads, factors, row, K: gl.constexpr, PADDED: gl.constexpr, WARPS: gl.constexpr):
    """A row of x as float16, times a power of two that brings its largest number to 2**14 or just above; `factors`
    has that power's inverse. plain: [rows, K]; quads: the same, in the order of `quad_column`."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    column = gl.arange(0, PADDED, layout)
    inside = column < K
    wait()
    numbers = gl.load(x + row * K + column, inside, other=0.0).to(gl.float32)
    largest = (gl.max(gl.abs(numbers), 0).to(gl.int32, bitcast=True) >> 23) & 0xFF
    # Zeros and the smallest numbers: a factor of float32's smallest exponent will do.
    exponent = gl.minimum(268 - largest, 253)
    halves = (numbers * (exponent << 23).to(gl.float32, bitcast=True)).to(gl.float16)
    gl.store(plain + row * K + column, halves, inside)
    gl.store(quads + row * K + quad_column(column), halves, inside)
    gl.store(factors + row, ((254 - exponent) << 23).to(gl.float32, bitcast=True))
