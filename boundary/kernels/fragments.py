"""What the Gluon kernels of the step packages share: operands of mma.m16n8k16 in a warp's registers, tensors of [WARPS,
32], one number a lane."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def four_words(vector, WARPS: gl.constexpr, lanes: gl.constexpr):
    """[WARPS, 32, 4] -> its four words; they stay with their lane."""
    even, odd = gl.split(gl.reshape(vector, (WARPS, 32, 2, 2)))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return (
        gl.convert_layout(first, lanes),
        gl.convert_layout(second, lanes),
        gl.convert_layout(third, lanes),
        gl.convert_layout(fourth, lanes),
    )


@gluon.jit
def mma_bfloat16(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
    """mma.m16n8k16 over the lanes of each warp."""
    return gl.inline_asm_elementwise(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [a0, a1, a2, a3, b0, b1, c0, c1, c2, c3],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32), is_pure=True, pack=1,
    )  # fmt: skip
