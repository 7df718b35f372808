"""A dense FP8 projection of a few rows at memory speed: y = x W^T, W e4m3 with UE8M0 scales per 32 x 32.

Weights depend on nothing: a program asks for its whole share, or for the first of CHUNKS parts of it, before the grid
dependency resolves, and only then reads x. The share goes to shared memory, where it takes no registers, so that the
programs of two launches fit on a multiprocessor: while one launch multiplies, the weights of the next are on their way.
A thread reads back the very bytes that it asked for, so its own wait is all it needs.

Requests are answered in order: rows that one launch asks for wait behind all weights that the next has asked for. So
what starts early asks for a few weights at a time (DEPTH). And all programs read the same rows at once: TURNED, they
begin at different columns, as a part of the second-level cache answers one request after the other.

Numbers are multiplied on the tensor cores, rows as the 8-wide operand, so that eight rows cost what one costs. Of more
(WIDE), up to sixteen, further programs take those from the ninth on; weights come out of the second-level cache then.
A program has TILE_WARPS x TILES tiles of 16 outputs, TILES of them a warp, which share what the warp holds of x;
K_WARPS warps share the columns and add up at the end.

With NORM, rows are RMS-normed on the way: x is multiplied by the norm's weight, the squares of x are summed up beside
the outputs, and each output is multiplied by its row's factor in the end.

Weights are prepared (see `attention.prepared`) as the fragments of mma.m16n8k16, 16 bytes a lane for a tile's 32
columns. Within those, a lane's columns are neighbours in x, which a sum over columns is free to choose.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from specialized_decode.boundary.kernels.fragments import four_words, mma_bfloat16


@gluon.jit
def _launch_next():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _wait():
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def _barrier():
    gl.inline_asm_elementwise("bar.sync 0; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _wait_group(COUNT: gl.constexpr):
    """For all but the last COUNT groups that the thread itself asked for. Of `async_copy` it would be for every thread,
    and end in a barrier."""
    gl.inline_asm_elementwise(
        f"cp.async.wait_group {COUNT}; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _widen(word):
    """A word of `prepared.pack` as two pairs of bfloat16. A number's bits in place are it times 2^-120, subnormals
    too."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 first, second, rest;
        and.b32 first, $2, 0x87f087f0;
        mul.rn.bf16x2 $0, first, $3;
        shf.r.wrap.b32 second, $2, $2, 4;
        shl.b32 rest, $2, 4;
        and.b32 second, second, 0x87808780;
        and.b32 rest, rest, 0x00700070;
        or.b32 second, second, rest;
        mul.rn.bf16x2 $1, second, $3;
        }""",
        "=&r,=&r,r,r", [word, 0x7B807B80], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _product(a, b):
    """Pairs of bfloat16, multiplied."""
    return gl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def _squares(x, c, lanes: gl.constexpr):
    """Adds the squares of a block of x to four sums, which lie as a tile's outputs do: those of ones as weights.
    Squares are rounded to bfloat16, either way alike."""
    ones = gl.full(x[0].shape, 0x3F803F80, gl.int32, lanes)
    c0, c1, c2, c3 = mma_bfloat16(
        ones, ones, ones, ones, _product(x[0], x[0]), _product(x[1], x[1]), c[0], c[1], c[2], c[3]
    )
    return mma_bfloat16(ones, ones, ones, ones, _product(x[2], x[2]), _product(x[3], x[3]), c0, c1, c2, c3)


@gluon.jit
def _block(weight, x, scale, c, WARPS: gl.constexpr, lanes: gl.constexpr):
    """Adds 32 columns to the four sums of a tile: two multiplications, and their scale."""
    w0, w1, w2, w3 = four_words(weight, WARPS, lanes)
    x0, x1, x2, x3 = x
    zero = gl.zeros((WARPS, 32), gl.float32, lanes)
    a0, a2 = _widen(w0)
    a1, a3 = _widen(w1)
    p0, p1, p2, p3 = mma_bfloat16(a0, a1, a2, a3, x0, x1, zero, zero, zero, zero)
    a0, a2 = _widen(w2)
    a1, a3 = _widen(w3)
    p0, p1, p2, p3 = mma_bfloat16(a0, a1, a2, a3, x2, x3, p0, p1, p2, p3)
    factor = (scale.to(gl.int32) << 23).to(gl.float32, bitcast=True)
    return c[0] + p0 * factor, c[1] + p1 * factor, c[2] + p2 * factor, c[3] + p3 * factor


@gluon.jit(do_not_specialize=["rows", "eps"])
def projection_kernel(
    x,
    weights,
    scales,
    y,
    rows,
    norm,
    eps,
    N: gl.constexpr,
    K: gl.constexpr,
    GROUPS: gl.constexpr,
    TILE_WARPS: gl.constexpr,
    TILES: gl.constexpr,
    K_WARPS: gl.constexpr,
    PER_WARP: gl.constexpr,
    CHUNKS: gl.constexpr,
    STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
    EARLY: gl.constexpr,
    LATE: gl.constexpr,
    STRIDE: gl.constexpr,
    NORM: gl.constexpr,
    FIRST: gl.constexpr,
    SETTLED: gl.constexpr,
    DEPTH: gl.constexpr,
    TURNED: gl.constexpr,
    WIDE: gl.constexpr,
):
    """Grid (N / 16 / TILE_WARPS / TILES), or WIDE that and a second axis for every eight rows. x: [rows, GROUPS K]
    bfloat16 as int32 pairs, rows STRIDE pairs apart; weights: [N / 16, K / 32, 32, 4] int32; scales: [N / 32, K / 32]
    uint8; y: [rows, FIRST] bfloat16, and right behind it [rows, N - FIRST] for the other outputs. Outputs of group g
    read x's columns from g K on. PER_WARP CHUNKS K_WARPS blocks of 32 are K; a chunk's weights come in STAGES, of
    which at most DEPTH are on their way at once, or all where that is 0, and AHEAD blocks of x are asked for at once.
    TURNED: a program's first warp and first block depend on its number. EARLY: the next launch may start before this
    one has its input. LATE: only when all of x has been asked for, else behind the wait. NORM: rows are normed first,
    by norm [K] bfloat16 as int32 pairs, eps above the mean square; with one group alone. SETTLED: x was there before
    the launch ahead let this one start, whose end this one's first program waits for in the end."""
    if EARLY:
        _launch_next()
    slab = shared_words(TILES * PER_WARP, TILE_WARPS * K_WARPS)
    project(
        gl.program_id(0), slab, x, weights, scales, y, rows, norm, eps, N, K, GROUPS, TILE_WARPS, TILES, K_WARPS,
        PER_WARP, CHUNKS, STAGES, AHEAD, EARLY, LATE, STRIDE, NORM, FIRST, SETTLED, DEPTH, TURNED, WIDE,
    )  # fmt: skip


@gluon.jit
def shared_words(COUNT: gl.constexpr, WARPS: gl.constexpr):
    """Room for COUNT times four words a lane. One allocation each: copies into parts of one would be kept apart by
    barriers."""
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    slab = ()
    for _ in gl.static_range(COUNT):
        slab = slab + (gl.allocate_shared_memory(gl.int32, [WARPS, 32, 4], shared),)  # type: ignore[assignment]  # noqa: RUF005
    return slab


@gluon.jit
def own_row(row, WIDE: gl.constexpr):
    """A program's row of eight, among all."""
    return row + gl.program_id(1) * 8 if WIDE else row


@gluon.jit
def _turned(i, turn, PER_WARP: gl.constexpr, TURNED: gl.constexpr):
    """The block that comes i-th."""
    return (i + turn) % PER_WARP if TURNED else i


@gluon.jit
def project(
    program, slab, x, weights, scales, y, rows, norm, eps, N: gl.constexpr, K: gl.constexpr,
    GROUPS: gl.constexpr, TILE_WARPS: gl.constexpr, TILES: gl.constexpr, K_WARPS: gl.constexpr, PER_WARP: gl.constexpr,
    CHUNKS: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr, EARLY: gl.constexpr, LATE: gl.constexpr,
    STRIDE: gl.constexpr, NORM: gl.constexpr, FIRST: gl.constexpr, SETTLED: gl.constexpr,
    DEPTH: gl.constexpr, TURNED: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """What program number `program` does, waits included; EARLY has been seen to. slab: of `shared_words`, TILES
    PER_WARP or more."""
    WARPS: gl.constexpr = TILE_WARPS * K_WARPS
    BLOCKS: gl.constexpr = K // 32
    # Without a wait past the first-level cache, which may hold what was there before.
    CACHE: gl.constexpr = ".cg" if SETTLED else ""
    # Tiles that share scales.
    PAIR: gl.constexpr = 2 if TILES % 2 == 0 else 1
    lanes: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    vectors: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32, 1], [WARPS, 1, 1], [2, 1, 0])
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, vectors)))[:, None, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, vectors)))[None, :, None]
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, vectors)))[None, None, :]
    flat_warp = gl.arange(0, WARPS, gl.SliceLayout(1, lanes))[:, None]
    first = program * (TILE_WARPS * TILES)
    tile, flat_tile = first + warp % TILE_WARPS * TILES, first + flat_warp % TILE_WARPS * TILES
    # Which part of the columns is whose, and which of its blocks comes first.
    part, flat_part, turn = warp // TILE_WARPS, flat_warp // TILE_WARPS, 0
    if TURNED:
        part, flat_part, turn = (part + program) % K_WARPS, (flat_part + program) % K_WARPS, program % PER_WARP
    start, flat_start = part * (PER_WARP * CHUNKS), flat_part * (PER_WARP * CHUNKS)
    own_weights = weights + ((tile * BLOCKS + start) * 32 + lane) * 4 + word
    own_scales = scales + flat_tile // 2 * BLOCKS + flat_start + gl.zeros((WARPS, 32), gl.int32, lanes)
    # A lane of a row that is not there reads the last one; nobody stores what becomes of it.
    row = gl.minimum(own_row(lane // 4, WIDE), rows - 1)
    own_x = x + row * STRIDE + tile // (N // 16 // GROUPS) * (K // 2) + start * 16 + lane % 4 * 4 + word
    own_norm = norm + start * 16 + lane % 4 * 4 + word + gl.zeros((WARPS, 32, 4), gl.int32, vectors)
    none = gl.zeros((WARPS, 32), gl.float32, lanes)
    sums = ()
    for _ in gl.static_range(TILES):
        sums = sums + ((none, none, none, none),)  # type: ignore[assignment]  # noqa: RUF005
    squares = (none, none, none, none)
    for chunk in gl.static_range(CHUNKS):
        for stage in gl.static_range(STAGES):
            for i in gl.static_range(PER_WARP * stage // STAGES, PER_WARP * (stage + 1) // STAGES):
                for j in gl.static_range(TILES):
                    at = own_weights + (j * BLOCKS + chunk * PER_WARP + _turned(i, turn, PER_WARP, TURNED)) * 128
                    async_copy.async_copy_global_to_shared(slab[i * TILES + j], at)
            async_copy.commit_group()
            if DEPTH > 0 and stage + 1 >= DEPTH and stage + 1 < STAGES:
                _wait_group(DEPTH - 1)
        factors = ()
        for i in gl.static_range(PER_WARP):
            for j in gl.static_range(TILES // PAIR):
                block = j * BLOCKS + chunk * PER_WARP + _turned(i, turn, PER_WARP, TURNED)
                factors = factors + (gl.load(own_scales + block),)  # type: ignore[assignment]  # noqa: RUF005
        norms = ()
        if NORM:
            for i in gl.static_range(PER_WARP):
                block = chunk * PER_WARP + _turned(i, turn, PER_WARP, TURNED)
                norms = norms + (gl.load(own_norm + block * 16),)  # type: ignore[assignment]  # noqa: RUF005
        if chunk == 0:
            if not SETTLED:
                _wait()
            if not EARLY and not LATE:
                _launch_next()
        inputs = ()
        for i in gl.static_range(AHEAD):
            block = chunk * PER_WARP + _turned(i, turn, PER_WARP, TURNED)
            inputs = inputs + (gl.load(own_x + block * 16, cache_modifier=CACHE),)  # type: ignore[assignment]  # noqa: RUF005
        # Else the compiler asks for x only when the weights are there, or for one block of it after the other.
        _barrier()
        if LATE and chunk == CHUNKS - 1 and AHEAD == PER_WARP:
            _launch_next()
        for stage in gl.static_range(STAGES):
            _wait_group(STAGES - 1 - stage)
            for number in gl.static_range(PER_WARP * stage // STAGES * TILES, PER_WARP * (stage + 1) // STAGES * TILES):
                weight = slab[number].load(vectors)
                if number % TILES == 0 and number // TILES + AHEAD < PER_WARP:
                    block = chunk * PER_WARP + _turned(number // TILES + AHEAD, turn, PER_WARP, TURNED)
                    inputs = inputs + (gl.load(own_x + block * 16, cache_modifier=CACHE),)  # type: ignore[assignment]  # noqa: RUF005
                    if LATE and chunk == CHUNKS - 1 and number // TILES + AHEAD == PER_WARP - 1:
                        _launch_next()
                factor = factors[number // TILES * (TILES // PAIR) + number % TILES // PAIR]  # type: ignore[var-annotated]
                if number % TILES == 0:
                    own = four_words(inputs[number // TILES], WARPS, lanes)
                    if NORM:
                        squares = _squares(own, squares, lanes)
                        by = four_words(norms[number // TILES], WARPS, lanes)
                        own = (
                            _product(own[0], by[0]),
                            _product(own[1], by[1]),
                            _product(own[2], by[2]),
                            _product(own[3], by[3]),
                        )
                # The tile that is due comes first.
                due = _block(weight, own, factor, sums[0], WARPS, lanes)  # type: ignore[misc]
                sums = sums[1:] + (due,)  # type: ignore[assignment]  # noqa: RUF005
    if NORM:
        sums = sums + (squares,)  # type: ignore[assignment]  # noqa: RUF005
    store_sums(y, sums, first, rows, eps, N, K, TILE_WARPS, TILES, K_WARPS, NORM, FIRST, WIDE)
    if SETTLED and program == 0:
        # The others leave room for what is behind.
        _wait()


@gluon.jit
def _quad(c, WARPS: gl.constexpr):
    """A lane's four numbers, [WARPS, 32] each -> [WARPS, 32, 4]; they stay with it. `gl.join` would say the same; what
    `projection_tuning` says of fused_wqa_wkv was measured with this."""
    vectors: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32, 1], [WARPS, 1, 1], [2, 1, 0])
    words: gl.constexpr = gl.SliceLayout(2, vectors)
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, vectors)))[None, None, :]
    c0, c1 = gl.convert_layout(c[0], words)[:, :, None], gl.convert_layout(c[1], words)[:, :, None]
    c2, c3 = gl.convert_layout(c[2], words)[:, :, None], gl.convert_layout(c[3], words)[:, :, None]
    return gl.where(word < 2, gl.where(word == 0, c0, c1), gl.where(word == 2, c2, c3))


@gluon.jit
def store_sums(
    y, sums, first, rows, eps, N: gl.constexpr, K: gl.constexpr,
    TILE_WARPS: gl.constexpr, TILES: gl.constexpr, K_WARPS: gl.constexpr, NORM: gl.constexpr, FIRST: gl.constexpr,
    WIDE: gl.constexpr,
):  # fmt: skip
    """Adds the sums of the warps that share a tile's columns. A lane's four are outputs lane / 4 and 8 more, of rows
    2 (lane mod 4) and the next. NORM: behind the tiles' are the rows' squares. Outputs from FIRST on, where some
    program's begin, lie behind the rows of those below."""
    SUMS: gl.constexpr = TILES + NORM
    WARPS: gl.constexpr = TILE_WARPS * K_WARPS
    WIDTH: gl.constexpr = TILE_WARPS * 128
    # Four lanes add up an output. The four rows that they read at once are swizzled into different banks.
    SHARE: gl.constexpr = min(K_WARPS, 4)
    shared: gl.constexpr = gl.SwizzledSharedLayout(8, 1, SHARE, [1, 0])
    quads: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [K_WARPS, TILE_WARPS], [1, 0])
    across: gl.constexpr = gl.BlockedLayout([1, 1], [SHARE, 32 // SHARE], [1, WARPS], [1, 0])
    partial = gl.allocate_shared_memory(gl.float32, [SUMS, K_WARPS, WIDTH], shared)
    for j in gl.static_range(SUMS):
        four = gl.reshape(_quad(sums[j], WARPS), (K_WARPS, WIDTH))
        partial.index(j).store(gl.convert_layout(four, quads, assert_trivial=True))
    place = gl.arange(0, WIDTH, gl.SliceLayout(0, across))
    row = own_row(place // 4 % 4 * 2 + place % 2, WIDE)
    output = (first + place // 128 * TILES) * 16 + place // 2 % 2 * 8 + place // 16 % 8
    own = y + row * N + output
    if FIRST < N:
        behind = first * 16 >= FIRST
        own = y + row * gl.where(behind, N - FIRST, FIRST) + output + gl.where(behind, (rows - 1) * FIRST, 0)
    if NORM:
        square = gl.sum(partial.index(TILES).load(across), 0)
        scale = gl.rsqrt(square / K + eps)
    for j in gl.static_range(TILES):
        total = gl.sum(partial.index(j).load(across), 0)
        if NORM:
            total = total * scale
        gl.store(own + j * 16, total.to(y.dtype.element_ty), row < rows)
