"""A dense FP8 projection of up to eight rows at memory speed: y = x W^T, W e4m3 with UE8M0 scales per 32 x 32.

Weights depend on nothing: each thread issues the loads of its whole share before the grid dependency resolves, and
only then reads x. They are multiplied on the tensor cores, rows as the 8-wide operand, so that eight rows cost what
one costs. A program has TILE_WARPS tiles of 16 outputs; K_WARPS warps share a tile's columns of the weight and add up
at the end.

Weights are prepared (see `attention.prepared`) as the fragments of mma.m16n8k16, 16 bytes a lane for a tile's 32
columns. Within those, a lane's columns are neighbours in x, which a sum over columns is free to choose.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _wait():
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.u32 $0, 0;",
        "=r", [], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _widen(word):
    """Four e4m3 bytes as two pairs of bfloat16. A byte's bits in place are the number times 2^-120, subnormals too."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 low, high, rest;
        prmt.b32 low, $2, 0, 0x1404;
        prmt.b32 high, $2, 0, 0x3424;
        shr.u32 rest, low, 4;
        and.b32 rest, rest, 0x07f007f0;
        and.b32 low, low, 0x80008000;
        or.b32 low, low, rest;
        mul.rn.bf16x2 $0, low, $3;
        shr.u32 rest, high, 4;
        and.b32 rest, rest, 0x07f007f0;
        and.b32 high, high, 0x80008000;
        or.b32 high, high, rest;
        mul.rn.bf16x2 $1, high, $3;
        }""",
        "=&r,=&r,r,r", [word, 0x7B807B80], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _mma(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
    """mma.m16n8k16 over the lanes of each warp."""
    return gl.inline_asm_elementwise(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [a0, a1, a2, a3, b0, b1, c0, c1, c2, c3],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _words(vector, WARPS: gl.constexpr, lanes: gl.constexpr):
    """[WARPS, 32, 4] -> its four words, [WARPS, 32] each; all stay with their thread."""
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
def _block(weight, x, scale, c0, c1, c2, c3, WARPS: gl.constexpr, lanes: gl.constexpr):
    """Adds 32 columns: two multiplications, and their scale."""
    w0, w1, w2, w3 = _words(weight, WARPS, lanes)
    x0, x1, x2, x3 = _words(x, WARPS, lanes)
    zero = gl.zeros((WARPS, 32), gl.float32, lanes)
    a0, a2 = _widen(w0)
    a1, a3 = _widen(w1)
    p0, p1, p2, p3 = _mma(a0, a1, a2, a3, x0, x1, zero, zero, zero, zero)
    a0, a2 = _widen(w2)
    a1, a3 = _widen(w3)
    p0, p1, p2, p3 = _mma(a0, a1, a2, a3, x2, x3, p0, p1, p2, p3)
    factor = (scale.to(gl.int32) << 23).to(gl.float32, bitcast=True)
    return c0 + p0 * factor, c1 + p1 * factor, c2 + p2 * factor, c3 + p3 * factor


@gluon.jit
def _total(c, TILE_WARPS: gl.constexpr, K_WARPS: gl.constexpr, out: gl.constexpr):
    """The sum over the warps of a tile, [TILE_WARPS, 32] bfloat16."""
    return gl.convert_layout(gl.sum(gl.reshape(c, (TILE_WARPS, K_WARPS, 32)), 1), out).to(gl.bfloat16)


@gluon.jit(do_not_specialize=["rows", "zero"])
def projection_kernel(
    x,
    weights,
    scales,
    y,
    rows,
    zero,
    N: gl.constexpr,
    K: gl.constexpr,
    GROUPS: gl.constexpr,
    TILE_WARPS: gl.constexpr,
    K_WARPS: gl.constexpr,
    PER_WARP: gl.constexpr,
    CHUNKS: gl.constexpr,
):
    """Grid (N / 16 / TILE_WARPS). x: [rows, GROUPS K] bfloat16 as int32 pairs; weights: [N / 16, K / 32, 32, 4] int32;
    scales: [N / 32, K / 32] uint8; y: [rows, N] bfloat16. zero: 0, which the compiler must not know. Outputs of group
    g read x's columns from g K on. PER_WARP CHUNKS K_WARPS blocks of 32 are K."""
    WARPS: gl.constexpr = TILE_WARPS * K_WARPS
    BLOCKS: gl.constexpr = K // 32
    lanes: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    vectors: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32, 1], [WARPS, 1, 1], [2, 1, 0])
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, vectors)))[:, None, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, vectors)))[None, :, None]
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, vectors)))[None, None, :]
    flat_warp = gl.arange(0, WARPS, gl.SliceLayout(1, lanes))[:, None]
    first = gl.program_id(0) * TILE_WARPS
    tile, flat_tile = first + warp // K_WARPS, first + flat_warp // K_WARPS
    start, flat_start = (warp % K_WARPS) * PER_WARP * CHUNKS, (flat_warp % K_WARPS) * PER_WARP * CHUNKS
    own_weights = weights + ((tile * BLOCKS + start) * 32 + lane) * 4 + word
    own_scales = scales + flat_tile // 2 * BLOCKS + flat_start + gl.zeros((WARPS, 32), gl.int32, lanes)
    # A lane of a row that is not there reads the last one; nobody stores what becomes of it.
    row = gl.minimum(lane // 4, rows - 1)
    own_x = x + (row * GROUPS + tile // (N // 16 // GROUPS)) * (K // 2) + start * 16 + lane % 4 * 4 + word
    c0 = gl.zeros((WARPS, 32), gl.float32, lanes)
    c1, c2, c3 = c0, c0, c0
    for chunk in gl.static_range(CHUNKS):
        slab, factors, inputs = (), (), ()
        for i in gl.static_range(PER_WARP):
            slab = slab + (gl.load(own_weights + (chunk * PER_WARP + i) * 128),)  # type: ignore[assignment]  # noqa: RUF005
            factors = factors + (gl.load(own_scales + chunk * PER_WARP + i),)  # type: ignore[assignment]  # noqa: RUF005
        if chunk == 0:
            _wait()
        for i in gl.static_range(PER_WARP):
            inputs = inputs + (gl.load(own_x + (chunk * PER_WARP + i) * 16),)  # type: ignore[assignment]  # noqa: RUF005
        # All of x is asked for at once: the first multiplication needs the last load, as far as the compiler can tell.
        held = inputs[0]  # type: ignore[misc]
        for i in gl.static_range(1, PER_WARP):
            held = held ^ inputs[i]
        held = held & zero
        for i in gl.static_range(PER_WARP):
            c0, c1, c2, c3 = _block(slab[i], inputs[i] | held, factors[i], c0, c1, c2, c3, WARPS, lanes)
    _store(y, c0, c1, c2, c3, first, rows, N, TILE_WARPS, K_WARPS)


@gluon.jit
def _store(
    y, c0, c1, c2, c3, first, rows, N: gl.constexpr, TILE_WARPS: gl.constexpr, K_WARPS: gl.constexpr
):  # fmt: skip
    """A lane's four sums: outputs lane / 4 and 8 more, of rows 2 (lane mod 4) and the next."""
    out: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, TILE_WARPS * K_WARPS], [1, 0])
    tile = first + gl.arange(0, TILE_WARPS, gl.SliceLayout(1, out))[:, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, out))[None, :]
    row = lane % 4 * 2
    at = y + row * N + tile * 16 + lane // 4
    gl.store(at, _total(c0, TILE_WARPS, K_WARPS, out), row < rows)
    gl.store(at + N, _total(c1, TILE_WARPS, K_WARPS, out), row + 1 < rows)
    gl.store(at + 8, _total(c2, TILE_WARPS, K_WARPS, out), row < rows)
    gl.store(at + N + 8, _total(c3, TILE_WARPS, K_WARPS, out), row + 1 < rows)
