"""A dense FP8 projection of up to eight rows at memory speed: y = x W^T, W e4m3 with UE8M0 scales per 32 x 32.

Weights depend on nothing: a program asks for its whole share before the grid dependency resolves, and only then reads
x. The share goes to shared memory, where it takes no registers, so that the programs of two launches fit on a
multiprocessor: while one launch multiplies, the weights of the next are on their way. A thread reads back the very
bytes that it asked for, so its own wait is all it needs.

Numbers are multiplied on the tensor cores, rows as the 8-wide operand, so that eight rows cost what one costs. A
program has TILE_WARPS x TILES tiles of 16 outputs, TILES of them a warp, which share what the warp holds of x; K_WARPS
warps share the columns and add up at the end. So may CLUSTER programs, each of which reads a part of x only; at the end
each sends the others their tiles' sums.

With NORM, rows are RMS-normed first, and rounded as a launch of its own would: each warp sums up the squares of what
it holds of x, and the program's warps exchange those once.

Weights are prepared (see `attention.prepared`) as the fragments of mma.m16n8k16, 16 bytes a lane for a tile's 32
columns. Within those, a lane's columns are neighbours in x, which a sum over columns is free to choose.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from specialized_decode.boundary.kernels.fragments import four_words, mma_bfloat16


@gluon.constexpr_function
def _spread(numbers, threads, warps, cluster, apart=False):
    """A tensor's layout, last dimension fastest. Of a cluster's programs each holds all of it, or, apart, its own part
    of the first dimension."""
    bases = [[(1 << bit) * apart] + [0] * (len(numbers) - 1) for bit in range(cluster.bit_length() - 1)]
    return gl.BlockedLayout(numbers, threads, warps, list(range(len(numbers)))[::-1], bases)


@gluon.constexpr_function
def _shared(vector, phases, dimensions, cluster):
    """A layout in the shared memory of each of a cluster's programs."""
    bases = [[0] * dimensions for _ in range(cluster.bit_length() - 1)]
    return gl.SwizzledSharedLayout(vector, 1, phases, list(range(dimensions))[::-1], bases)


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
def _cluster_rank():
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %cluster_ctarank;", "=r", [], dtype=gl.int32, is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def _cluster_arrive():
    gl.inline_asm_elementwise(
        "barrier.cluster.arrive.release; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def _cluster_wait():
    gl.inline_asm_elementwise(
        "barrier.cluster.wait.acquire; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def _room():
    """Where a program keeps what the others of its cluster send it; 4 KB, of which Triton knows nothing."""
    return gl.inline_asm_elementwise(
        "{ .shared .align 16 .b8 room[4096]; mov.u32 $0, room; }", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def _send(address, rank, value, THREADS: gl.constexpr):
    """value to a place in the memory of another program of the cluster; by the first THREADS of a warp alone, since the
    others have the same values."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .b32 lane, there;
        mov.u32 lane, %laneid;
        setp.lt.u32 first, lane, $4;
        mapa.shared::cluster.u32 there, $1, $2;
        @first st.shared::cluster.f32 [there], $3;
        mov.u32 $0, 0;
        }""",
        "=r,r,r,f,r", [address, rank, value, THREADS], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _received(address):
    return gl.inline_asm_elementwise(
        "ld.shared.f32 $0, [$1];", "=f,r", [address], dtype=gl.float32, is_pure=False, pack=1
    )  # fmt: skip


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
def _pair(word):
    """A word's two numbers, float32."""
    return (word << 16).to(gl.float32, bitcast=True), (word & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def _again(word):
    """The same word, whose numbers the compiler does not keep from an earlier use."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [word], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def _word(low, high):
    """Two numbers, rounded to bfloat16, in a word."""
    low = low.to(gl.bfloat16).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    return low | high.to(gl.bfloat16).to(gl.int16, bitcast=True).to(gl.int32) << 16


@gluon.jit
def _scaled(words, by, scale):
    """Numbers times their row's scale and then the norm's weight."""
    low, high = _pair(_again(words))
    low_by, high_by = _pair(_again(by))
    return _word(low * scale * low_by, high * scale * high_by)


@gluon.jit
def _scale(inputs, eps, K: gl.constexpr, TILE_WARPS: gl.constexpr, K_WARPS: gl.constexpr, lanes: gl.constexpr):
    """One over the root mean square of a lane's row, lane / 4, whose columns lie with its four lanes of K_WARPS
    warps; inputs: a warp's blocks of x."""
    WARPS: gl.constexpr = TILE_WARPS * K_WARPS
    squares = gl.zeros((WARPS, 32), gl.float32, lanes)
    for i in gl.static_range(len(inputs)):
        words = four_words(inputs[i], WARPS, lanes)
        for j in gl.static_range(4):
            low, high = _pair(words[j])
            squares += low * low + high * high
    apart = gl.reshape(squares, (K_WARPS, TILE_WARPS, 8, 4))
    scale = gl.rsqrt(gl.sum(gl.sum(apart, 3), 0) / K + eps)
    nothing = gl.reshape(gl.zeros((WARPS, 32), gl.float32, lanes), (K_WARPS, TILE_WARPS, 8, 4))
    return gl.convert_layout(gl.reshape(scale[None, :, :, None] + nothing, (WARPS, 32)), lanes)


@gluon.jit
def _normed(words, by, scale):
    """A block of x, normed."""
    return (
        _scaled(words[0], by[0], scale),
        _scaled(words[1], by[1], scale),
        _scaled(words[2], by[2], scale),
        _scaled(words[3], by[3], scale),
    )


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
    CLUSTER: gl.constexpr,
):
    """Grid (N / 16 / TILE_WARPS / TILES) of clusters of CLUSTER programs. x: [rows, GROUPS K] bfloat16 as int32 pairs,
    rows STRIDE pairs apart; weights: [N / 16, K / 32, 32, 4] int32; scales: [N / 32, K / 32] uint8; y: [rows, N]
    bfloat16. Outputs of group g read x's columns from g K on. PER_WARP CHUNKS K_WARPS CLUSTER blocks of 32 are K; a
    chunk's weights come in STAGES, and AHEAD blocks of x are asked for at once. EARLY: the next launch may start before
    this one has its input. LATE: only when all of x has been asked for, else behind the wait. NORM: rows are normed
    first, by norm [K] bfloat16 as int32 pairs, eps above the mean square; with one group, one chunk and no clusters
    alone."""
    WARPS: gl.constexpr = TILE_WARPS * K_WARPS
    BLOCKS: gl.constexpr = K // 32
    # Tiles that share scales.
    PAIR: gl.constexpr = 2 if TILES % 2 == 0 else 1
    # To Triton a cluster's programs are all alike.
    lanes: gl.constexpr = _spread([1, 1], [1, 32], [WARPS, 1], CLUSTER)
    vectors: gl.constexpr = _spread([1, 1, 4], [1, 32, 1], [WARPS, 1, 1], CLUSTER)
    shared: gl.constexpr = _shared(1, 1, 3, CLUSTER)
    gl.static_assert(CHUNKS == 1 or not NORM, "rows are normed before the first of their numbers is multiplied")
    if CLUSTER > 1:
        _cluster_arrive()
    if EARLY:
        _launch_next()
    # One allocation a block: copies into parts of one would be kept apart by barriers.
    slab = ()
    for _ in gl.static_range(TILES * PER_WARP):
        slab = slab + (gl.allocate_shared_memory(gl.int32, [WARPS, 32, 4], shared),)  # type: ignore[assignment]  # noqa: RUF005
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, vectors)))[:, None, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, vectors)))[None, :, None]
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, vectors)))[None, None, :]
    flat_warp = gl.arange(0, WARPS, gl.SliceLayout(1, lanes))[:, None]
    first = gl.program_id(0) * (TILE_WARPS * TILES)
    tile, flat_tile = first + warp % TILE_WARPS * TILES, first + flat_warp % TILE_WARPS * TILES
    start, flat_start = warp // TILE_WARPS * (PER_WARP * CHUNKS), flat_warp // TILE_WARPS * (PER_WARP * CHUNKS)
    if CLUSTER > 1:
        gl.static_assert(not NORM, "a cluster's programs know a part of the squares")
        rank = _cluster_rank()
        start += rank * (K_WARPS * PER_WARP * CHUNKS)
        flat_start += rank * (K_WARPS * PER_WARP * CHUNKS)
    own_weights = weights + ((tile * BLOCKS + start) * 32 + lane) * 4 + word
    own_scales = scales + flat_tile // 2 * BLOCKS + flat_start + gl.zeros((WARPS, 32), gl.int32, lanes)
    # A lane of a row that is not there reads the last one; nobody stores what becomes of it.
    row = gl.minimum(lane // 4, rows - 1)
    own_x = x + row * STRIDE + tile // (N // 16 // GROUPS) * (K // 2) + start * 16 + lane % 4 * 4 + word
    norms = ()
    if NORM:
        # Beside the weights: there it takes no registers.
        own_norm = norm + start * 16 + lane % 4 * 4 + word + gl.zeros((WARPS, 32, 4), gl.int32, vectors)
        for i in gl.static_range(PER_WARP):
            norms = norms + (gl.allocate_shared_memory(gl.int32, [WARPS, 32, 4], shared),)  # type: ignore[assignment]  # noqa: RUF005
            async_copy.async_copy_global_to_shared(norms[i], own_norm + i * 16)
    none = gl.zeros((WARPS, 32), gl.float32, lanes)
    sums = ()
    for _ in gl.static_range(TILES):
        sums = sums + ((none, none, none, none),)  # type: ignore[assignment]  # noqa: RUF005
    for chunk in gl.static_range(CHUNKS):
        for stage in gl.static_range(STAGES):
            for i in gl.static_range(PER_WARP * stage // STAGES, PER_WARP * (stage + 1) // STAGES):
                for j in gl.static_range(TILES):
                    at = own_weights + (j * BLOCKS + chunk * PER_WARP + i) * 128
                    async_copy.async_copy_global_to_shared(slab[i * TILES + j], at)
            async_copy.commit_group()
        factors = ()
        for i in gl.static_range(PER_WARP):
            for j in gl.static_range(TILES // PAIR):
                factors = factors + (gl.load(own_scales + j * BLOCKS + chunk * PER_WARP + i),)  # type: ignore[assignment]  # noqa: RUF005
        if chunk == 0:
            _wait()
            if not EARLY and not LATE:
                _launch_next()
        inputs = ()
        for i in gl.static_range(PER_WARP if NORM else AHEAD):
            inputs = inputs + (gl.load(own_x + (chunk * PER_WARP + i) * 16),)  # type: ignore[assignment]  # noqa: RUF005
        # Else the compiler asks for x only when the weights are there, or for one block of it after the other.
        _barrier()
        if LATE and chunk == CHUNKS - 1 and (NORM or AHEAD == PER_WARP):
            _launch_next()
        if NORM:
            scale = _scale(inputs, eps, K, TILE_WARPS, K_WARPS, lanes)
        for stage in gl.static_range(STAGES):
            async_copy.wait_group(STAGES - 1 - stage)
            for number in gl.static_range(PER_WARP * stage // STAGES * TILES, PER_WARP * (stage + 1) // STAGES * TILES):
                weight = slab[number].load(vectors)  # type: ignore[var-annotated]
                if not NORM and number % TILES == 0 and number // TILES + AHEAD < PER_WARP:
                    inputs = inputs + (gl.load(own_x + (chunk * PER_WARP + number // TILES + AHEAD) * 16),)  # noqa: RUF005
                    if LATE and chunk == CHUNKS - 1 and number // TILES + AHEAD == PER_WARP - 1:
                        _launch_next()
                factor = factors[number // TILES * (TILES // PAIR) + number % TILES // PAIR]
                if number % TILES == 0:
                    own = four_words(inputs[number // TILES], WARPS, lanes)
                    if NORM:
                        own = _normed(own, four_words(norms[number // TILES].load(vectors), WARPS, lanes), scale)
                # The tile that is due comes first.
                sums = sums[1:] + (_block(weight, own, factor, sums[0], WARPS, lanes),)  # noqa: RUF005
    store_sums(y, sums, first, rows, N, TILE_WARPS, TILES, K_WARPS, CLUSTER)


@gluon.jit
def _quad(c, WARPS: gl.constexpr, CLUSTER: gl.constexpr):
    """A lane's four numbers, [WARPS, 32] each -> [WARPS, 32, 4]; they stay with it. Triton 3.6 joins none in
    clusters."""
    vectors: gl.constexpr = _spread([1, 1, 4], [1, 32, 1], [WARPS, 1, 1], CLUSTER)
    words: gl.constexpr = gl.SliceLayout(2, vectors)
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, vectors)))[None, None, :]
    c0, c1 = gl.convert_layout(c[0], words)[:, :, None], gl.convert_layout(c[1], words)[:, :, None]
    c2, c3 = gl.convert_layout(c[2], words)[:, :, None], gl.convert_layout(c[3], words)[:, :, None]
    return gl.where(word < 2, gl.where(word == 0, c0, c1), gl.where(word == 2, c2, c3))


@gluon.jit
def store_sums(
    y, sums, first, rows, N: gl.constexpr,
    TILE_WARPS: gl.constexpr, TILES: gl.constexpr, K_WARPS: gl.constexpr, CLUSTER: gl.constexpr = 1,
):  # fmt: skip
    """Adds the sums of the warps that share a tile's columns, and of the programs of a cluster, each of which stores
    some of the tiles. A lane's four are outputs lane / 4 and 8 more, of rows 2 (lane mod 4) and the next."""
    WARPS: gl.constexpr = TILE_WARPS * K_WARPS
    WIDTH: gl.constexpr = TILE_WARPS * 128
    # Four lanes add up an output. The four rows that they read at once are swizzled into different banks.
    SHARE: gl.constexpr = min(K_WARPS, 4)
    shared: gl.constexpr = _shared(8, SHARE, 2, CLUSTER)
    quads: gl.constexpr = _spread([1, 4], [1, 32], [K_WARPS, TILE_WARPS], CLUSTER)
    across: gl.constexpr = _spread([1, 1], [SHARE, 32 // SHARE], [1, WARPS], CLUSTER)
    partial = gl.allocate_shared_memory(gl.float32, [TILES, K_WARPS, WIDTH], shared)
    for j in gl.static_range(TILES):
        four = gl.reshape(_quad(sums[j], WARPS, CLUSTER), (K_WARPS, WIDTH))
        partial.index(j).store(gl.convert_layout(four, quads, assert_trivial=True))
    place = gl.arange(0, WIDTH, gl.SliceLayout(0, across))
    row = place // 4 % 4 * 2 + place % 2
    output = (first + place // 128 * TILES) * 16 + place // 2 % 2 * 8 + place // 16 % 8
    if CLUSTER > 1:
        _store_shares(y, partial, first, rows, N, TILE_WARPS, TILES, K_WARPS, CLUSTER, across)
        return
    for j in gl.static_range(TILES):
        total = gl.sum(partial.index(j).load(across), 0)
        gl.store(y + row * N + output + j * 16, total.to(y.dtype.element_ty), row < rows)


@gluon.jit
def _store_shares(
    y, partial, first, rows, N: gl.constexpr,
    TILE_WARPS: gl.constexpr, TILES: gl.constexpr, K_WARPS: gl.constexpr, CLUSTER: gl.constexpr, across: gl.constexpr,
):  # fmt: skip
    """Sends each tile's sums to the program of the cluster that stores it, and adds up and stores this one's."""
    WIDTH: gl.constexpr = TILE_WARPS * 128
    # Numbers that a program gets from each other, and threads of a warp that hold different ones.
    SHARE: gl.constexpr = TILES * WIDTH // CLUSTER
    THREADS: gl.constexpr = 32 // min(K_WARPS, 4)
    rank, room = _cluster_rank(), _room()
    place = gl.arange(0, WIDTH, gl.SliceLayout(0, across))
    # By now all of the cluster run.
    _cluster_wait()
    for j in gl.static_range(TILES):
        number = j * WIDTH + place
        total = gl.sum(partial.index(j).load(across), 0)
        _send(room + (rank * SHARE + number % SHARE) * 4, number // SHARE, total, THREADS)
    _cluster_arrive()
    # Of a cluster's programs each has its own share of the numbers.
    WARPS: gl.constexpr = TILE_WARPS * K_WARPS
    apart: gl.constexpr = _spread([1, 1], [1, 32], [1, WARPS], CLUSTER, True)
    of = gl.arange(0, CLUSTER, gl.SliceLayout(1, apart))[:, None]
    number = gl.arange(0, SHARE, gl.SliceLayout(0, apart))[None, :]
    address = room + number * 4 + of * 0
    place = (of * SHARE + number) % WIDTH
    output = (first + place // 128 * TILES + (of * SHARE + number) // WIDTH) * 16
    output += place // 2 % 2 * 8 + place // 16 % 8
    row = place // 4 % 4 * 2 + place % 2
    _cluster_wait()
    total = _received(address)
    for i in gl.static_range(1, CLUSTER):
        total += _received(address + i * SHARE * 4)
    gl.store(y + row * N + output, total.to(y.dtype.element_ty), row < rows)
