"""What the MoE's Gluon kernels share: operands of mma.m16n8k16 in a warp's registers.

Tensors are [WARPS, 32] in `lanes`, one number a lane. Rows of a weight are the 16-wide operand, tokens the 8-wide one,
so eight tokens cost what one costs. Lane 4 g + q holds rows g and g + 8 of a tile, token g, and afterwards the sums of
both rows for tokens 2 q and 2 q + 1. Which columns a lane holds is free, if weight and input agree on it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from specialized_decode.boundary.kernels.fragments import four_words

# FP4's table, scaled: bytes of float16 whose low bytes are zero, of e2m1(code) * 2**(held scale - SCALE_BIAS), codes 0
# to 3 and 4 to 7, and what each held scale adds. Scales are held as 1 to 12.
SCALE_BIAS = gl.constexpr(13)
TABLE_LOW, TABLE_HIGH = gl.constexpr(0x0A080400), gl.constexpr(0x12100E0C)
STEP_LOW, STEP_HIGH = gl.constexpr(0x04040400), gl.constexpr(0x04040404)


@gluon.jit
def wait():
    """What earlier launches wrote is there; the next launch may start."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.u32 $0, 0;",
        "=r", [], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def two_words(vector, WARPS: gl.constexpr, lanes: gl.constexpr):
    """[WARPS, 32, 2] -> its two words; they stay with their lane."""
    first, second = gl.split(vector)
    return gl.convert_layout(first, lanes), gl.convert_layout(second, lanes)


@gluon.jit
def mma_float16(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
    """mma.m16n8k16 over the lanes of each warp."""
    return gl.inline_asm_elementwise(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [a0, a1, a2, a3, b0, b1, c0, c1, c2, c3],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def widen_fp8(word):
    """Four e4m3 bytes as two pairs of float16, exact."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        mov.b32 {low, high}, $2;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
        }""",
        "=r,=r,r", [word], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def widen_fp4(word, low_table, high_table):
    """A word of eight codes as four pairs of float16: columns 0 and 2, 1 and 3 of the first 16, then of the second.

    Looks the magnitudes up as bytes, four at a time, and adds the signs where the layout keeps them; see
    `moe.expert_layout`, 4. Bytes are then moved to the upper halves, of each two pairs one by masking and one by
    multiplying what is left: the multiplier's pipe is free, the permuter's is not. The loop over four tiles of gate and
    up has 292 instructions of the integer pipe so, with permutations alone 356.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 low, high, rest;
        and.b32 rest, $4, 0x77777777;
        prmt.b32 low, $5, $6, rest;
        shr.u32 rest, rest, 16;
        prmt.b32 high, $5, $6, rest;
        shl.b32 rest, $4, 4;
        lop3.b32 low, rest, 0x80808080, low, 0xEA;
        lop3.b32 high, $4, 0x80808080, high, 0xEA;
        and.b32 $1, low, 0xFF00FF00;
        mul.lo.u32 rest, $1, 0xFFFFFF00;
        mad.lo.u32 $0, low, 256, rest;
        and.b32 $3, high, 0xFF00FF00;
        mul.lo.u32 rest, $3, 0xFFFFFF00;
        mad.lo.u32 $2, high, 256, rest;
        }""",
        "=&r,=&r,=&r,=&r,r,r,r", [word, low_table, high_table],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def quad_column(column):
    """Where a column lies in a row of float16 as the packed weights want it: in each 64 columns the quads of a lane are
    neighbours, and in a quad columns 0 and 2, 1 and 3."""
    within = column % 64
    place = column % 2 * 2 + column % 4 // 2
    return column // 64 * 64 + within % 16 // 4 * 16 + within // 16 * 4 + place


@gluon.jit
def _half_tile(first, second, scales, x0, x1, x2, x3, c0, c1, c2, c3):
    """32 columns: a word of row g, one of row g + 8, the scales of both in one number, low byte first."""
    own = scales & 0xFF
    a0, a2, b0, b2 = widen_fp4(first, own * STEP_LOW + TABLE_LOW, own * STEP_HIGH + TABLE_HIGH)
    own = scales >> 8
    a1, a3, b1, b3 = widen_fp4(second, own * STEP_LOW + TABLE_LOW, own * STEP_HIGH + TABLE_HIGH)
    c0, c1, c2, c3 = mma_float16(a0, a1, a2, a3, x0, x1, c0, c1, c2, c3)
    return mma_float16(b0, b1, b2, b3, x2, x3, c0, c1, c2, c3)


@gluon.jit
def add_fp4(
    weight, scales, more_scales, x, more_x, c0, c1, c2, c3, WHOLE: gl.constexpr,
    WARPS: gl.constexpr, lanes: gl.constexpr,
):  # fmt: skip
    """Adds a packed tile of 64 columns, or the first 32 of them where it is not WHOLE. weight: its words, [WARPS, 32,
    4]; x: a lane's input, first and second half."""
    w0, w1, w2, w3 = four_words(weight, WARPS, lanes)
    x0, x1, x2, x3 = four_words(x, WARPS, lanes)
    c0, c1, c2, c3 = _half_tile(w0, w1, scales, x0, x1, x2, x3, c0, c1, c2, c3)
    if WHOLE:
        x0, x1, x2, x3 = four_words(more_x, WARPS, lanes)
        c0, c1, c2, c3 = _half_tile(w2, w3, more_scales, x0, x1, x2, x3, c0, c1, c2, c3)
    return c0, c1, c2, c3


@gluon.jit
def add_fp8(first, second, x, scale, more_scale, c0, c1, c2, c3, WARPS: gl.constexpr, lanes: gl.constexpr):
    """Adds 32 columns of rows g and g + 8, eight a lane: [WARPS, 32, 2] each; x: [WARPS, 32, 4], the same columns.
    scale, more_scale: of the two rows, UE8M0."""
    f0, f1 = two_words(first, WARPS, lanes)
    s0, s1 = two_words(second, WARPS, lanes)
    x0, x1, x2, x3 = four_words(x, WARPS, lanes)
    zero = gl.zeros((WARPS, 32), gl.float32, lanes)
    a0, a2 = widen_fp8(f0)
    a1, a3 = widen_fp8(s0)
    p0, p1, p2, p3 = mma_float16(a0, a1, a2, a3, x0, x1, zero, zero, zero, zero)
    a0, a2 = widen_fp8(f1)
    a1, a3 = widen_fp8(s1)
    p0, p1, p2, p3 = mma_float16(a0, a1, a2, a3, x2, x3, p0, p1, p2, p3)
    factor, more = power_of_two(scale), power_of_two(more_scale)
    return c0 + p0 * factor, c1 + p1 * factor, c2 + p2 * more, c3 + p3 * more


@gluon.jit
def power_of_two(scale):
    """UE8M0 as float32; 0, which is 2**-127, as 0."""
    return (scale.to(gl.int32) << 23).to(gl.float32, bitcast=True)
