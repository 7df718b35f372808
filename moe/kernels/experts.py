"""The experts' GEMMs of a few rows at memory speed: routed ones in Humming's form (see `moe.expert_layout`), the shared
one in FP8.

A program has one expert's rows, for all tokens that chose the expert: a weight is read once. A lane's 16 loaded bytes
are its operands of the tensor cores' multiplication; nothing of a weight goes through shared memory. Sums are float32.

record: [pairs, 16] int32, a row for every expert that some token chose, in turn its id, how many chose it, and from 8
on the pairs (token topk + slot) of those that did; -1 for an id where there is no more.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from specialized_decode.moe.kernels.fragments import SCALE_BIAS, add_fp4, add_fp8, wait

RECORD = gl.constexpr(16)
PAIRS = gl.constexpr(8)


@gluon.jit
def _indices(layout: gl.constexpr, WARPS: gl.constexpr, WORDS: gl.constexpr):
    """Warp, lane and word of [WARPS, 32, WORDS]."""
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    word = gl.arange(0, WORDS, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    return warp, lane, word


@gluon.jit
def _flat_indices(layout: gl.constexpr, WARPS: gl.constexpr):
    """Warp and lane of [WARPS, 32]."""
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, layout))[:, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, layout))[None, :]
    return warp, lane


@gluon.jit
def _quad_column(column):
    """Where a column lies in a row of float16 whose quads of a packed tile are neighbours."""
    within = column % 64
    return column // 64 * 64 + within % 16 // 4 * 16 + within // 16 * 4 + within % 4


# --- up: gate and up projections, and the clamped SwiGLU ---------------------------------------------------------


@gluon.jit(do_not_specialize=["rows"])
def up_kernel(
    record,
    quads,
    plain,
    factors,
    weight,
    scale,
    scale_2,
    shared,
    shared_scale,
    hidden,
    shared_hidden,
    rows,
    limit,
    TOPK: gl.constexpr,
    K: gl.constexpr,
    I: gl.constexpr,
    I_HELD: gl.constexpr,
    N_HELD: gl.constexpr,
    FIRST_UP: gl.constexpr,
    SCALE: gl.constexpr,
    WARPS: gl.constexpr,
    CHUNK: gl.constexpr,
):
    """Grid (I / 8 + pairs I / 16), the shared expert's programs first. quads, plain: [rows, K] float16 as int32 pairs;
    factors: [rows] float32; weight: [E, K / 64, 8 N_HELD] int32; scale: [E, K / 32, N_HELD] bytes as uint16 pairs;
    scale_2: [E] float32; shared: [2 I, K] e4m3 as int32; shared_scale: [2 I / 32, K / 32] uint8; hidden: [rows TOPK,
    I_HELD] float16, quads together, and shared_hidden: [rows, I] float16: SCALE times the outputs."""
    program = gl.program_id(0)
    if program < I // 8:
        _shared_up(
            plain, factors, shared, shared_scale, shared_hidden, rows, limit, program, K, I, SCALE, WARPS, 2 * CHUNK
        )
    else:
        program -= I // 8
        wait()
        expert = gl.load(record + program // (I // 16) * RECORD)
        if expert >= 0:
            _routed_up(
                record + program // (I // 16) * RECORD, quads, factors, weight, scale, scale_2, hidden, limit, expert,
                program % (I // 16), TOPK, K, I_HELD, N_HELD, FIRST_UP, SCALE, WARPS, CHUNK,
            )  # fmt: skip


@gluon.jit
def _routed_up(
    own, quads, factors, weight, scale, scale_2, hidden, limit, expert, tile, TOPK: gl.constexpr, K: gl.constexpr,
    I_HELD: gl.constexpr, N_HELD: gl.constexpr, FIRST_UP: gl.constexpr, SCALE: gl.constexpr, WARPS: gl.constexpr,
    CHUNK: gl.constexpr,
):  # fmt: skip
    """16 gate and 16 up rows of one expert; a warp has a part of the columns, in chunks of CHUNK tiles, the next one's
    weights on their way while one is multiplied."""
    lanes: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    vectors: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32, 1], [WARPS, 1, 1], [2, 1, 0])
    TILES: gl.constexpr = K // 64 // WARPS
    COLUMN: gl.constexpr = 8 * N_HELD
    warp, lane, word = _indices(vectors, WARPS, 4)
    flat_warp, flat_lane = _flat_indices(lanes, WARPS)
    UP: gl.constexpr = FIRST_UP // 16
    base = expert.to(gl.int64) * (K // 64)
    at = weight + (base + warp * TILES) * COLUMN + tile * 128 + lane * 4 + word
    groups = scale + (base + flat_warp * TILES) * N_HELD
    gate_scale = groups + tile // 4 * 32 + flat_lane // 4 * 4 + tile % 4
    up_scale = groups + (tile + UP) // 4 * 32 + flat_lane // 4 * 4 + (tile + UP) % 4
    g, u, s, t = _up_chunk(at, gate_scale, up_scale, 0, TILES, COLUMN, N_HELD, UP, CHUNK)
    count = gl.load(own + 1)
    pair = gl.load(own + PAIRS + gl.minimum(lane // 4, count - 1))
    inputs = quads + pair // TOPK * (K // 2) + warp * TILES * 32 + lane % 4 * 8 + word
    a0 = gl.zeros((WARPS, 32), gl.float32, lanes)
    a1, a2, a3, b0, b1, b2, b3 = a0, a0, a0, a0, a0, a0, a0
    for start in range(0, TILES, CHUNK):
        next_g, next_u, next_s, next_t = _up_chunk(
            at, gate_scale, up_scale, start + CHUNK, TILES, COLUMN, N_HELD, UP, CHUNK
        )
        for i in gl.static_range(CHUNK):
            x = gl.load(inputs + (start + i) * 32)
            more_x = gl.load(inputs + (start + i) * 32 + 4)
            a0, a1, a2, a3 = add_fp4(g[i], s[2 * i], s[2 * i + 1], x, more_x, a0, a1, a2, a3, True, WARPS, lanes)
            b0, b1, b2, b3 = add_fp4(u[i], t[2 * i], t[2 * i + 1], x, more_x, b0, b1, b2, b3, True, WARPS, lanes)
        g, u, s, t = next_g, next_u, next_s, next_t
    gates = gl.join(gl.join(a0, a2), gl.join(a1, a3))
    ups = gl.join(gl.join(b0, b2), gl.join(b1, b3))
    out: gl.constexpr = gl.BlockedLayout([1, 1, 1], [32, 1, 1], [1, 2, WARPS // 2], [2, 1, 0])
    gate, up = gl.split(gl.sum(gl.join(gates, ups), 0))
    gate, up = gl.convert_layout(gate, out), gl.convert_layout(up, out)
    # [lane, row of 2, token of 2]
    lane = gl.arange(0, 32, gl.SliceLayout(1, gl.SliceLayout(2, out)))[:, None, None]
    place = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, out)))[None, :, None]
    parity = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, out)))[None, None, :]
    member = lane % 4 * 2 + parity
    pair = gl.load(own + PAIRS + gl.minimum(member, count - 1))
    factor = gl.load(scale_2 + expert) * 2.0**SCALE_BIAS * gl.load(factors + pair // TOPK)
    column = _quad_column(tile * 16 + place * 8 + lane // 4)
    result = _swiglu(gate * factor, up * factor, limit) * SCALE
    gl.store(hidden + pair * I_HELD + column, result.to(gl.float16), member < count)


@gluon.jit
def _up_chunk(
    at, gate_scale, up_scale, start, TILES: gl.constexpr, COLUMN: gl.constexpr, N_HELD: gl.constexpr,
    UP: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """Asks for the weights and scales of CHUNK tiles of columns, where there are so many."""
    g, u, s, t = (), (), (), ()
    for i in gl.static_range(CHUNK):
        inside = start + i < TILES
        column = at + (start + i) * COLUMN
        g = g + (gl.load(column, inside, other=0),)  # type: ignore[assignment]  # noqa: RUF005
        u = u + (gl.load(column + UP * 128, inside, other=0),)  # type: ignore[assignment]  # noqa: RUF005
    for i in gl.static_range(2 * CHUNK):
        inside = start + i // 2 < TILES
        row = (2 * start + i) * (N_HELD // 2)
        s = s + (gl.load(gate_scale + row, inside, other=0).to(gl.int32),)  # type: ignore[assignment]  # noqa: RUF005
        t = t + (gl.load(up_scale + row, inside, other=0).to(gl.int32),)  # type: ignore[assignment]  # noqa: RUF005
    return g, u, s, t


@gluon.jit
def _shared_up(
    plain, factors, shared, shared_scale, hidden, rows, limit, tile, K: gl.constexpr, I: gl.constexpr,
    SCALE: gl.constexpr, WARPS: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """Eight gate rows and their up rows, as rows g and g + 8 of one tile. The first weights depend on nothing."""
    lanes: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    vectors: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32, 1], [WARPS, 1, 1], [2, 1, 0])
    doubles: gl.constexpr = gl.BlockedLayout([1, 1, 2], [1, 32, 1], [WARPS, 1, 1], [2, 1, 0])
    BLOCKS: gl.constexpr = K // 32 // WARPS
    warp, lane, word = _indices(doubles, WARPS, 2)
    flat_warp, flat_lane = _flat_indices(lanes, WARPS)
    gate = shared + (tile * 8 + lane // 4) * (K // 4) + warp * BLOCKS * 8 + lane % 4 * 2 + word
    gate_scale = shared_scale + tile // 4 * (K // 32) + flat_warp * BLOCKS + flat_lane * 0
    g, u, s, t = _shared_up_chunk(gate, gate_scale, 0, BLOCKS, K, I, CHUNK)
    wait()
    warp, lane, word = _indices(vectors, WARPS, 4)
    inputs = plain + gl.minimum(lane // 4, rows - 1) * (K // 2) + warp * BLOCKS * 16 + lane % 4 * 4 + word
    c0 = gl.zeros((WARPS, 32), gl.float32, lanes)
    c1, c2, c3 = c0, c0, c0
    for start in range(0, BLOCKS, CHUNK):
        next_g, next_u, next_s, next_t = _shared_up_chunk(gate, gate_scale, start + CHUNK, BLOCKS, K, I, CHUNK)
        for i in gl.static_range(CHUNK):
            x = gl.load(inputs + (start + i) * 16)
            c0, c1, c2, c3 = add_fp8(g[i], u[i], x, s[i], t[i], c0, c1, c2, c3, WARPS, lanes)
        g, u, s, t = next_g, next_u, next_s, next_t
    out: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [2, WARPS // 2], [1, 0])
    gate_sum, up_sum = gl.split(gl.sum(gl.join(gl.join(c0, c1), gl.join(c2, c3)), 0))
    gate_sum, up_sum = gl.convert_layout(gate_sum, out), gl.convert_layout(up_sum, out)
    lane = gl.arange(0, 32, gl.SliceLayout(1, out))[:, None]
    parity = gl.arange(0, 2, gl.SliceLayout(0, out))[None, :]
    token = lane % 4 * 2 + parity
    factor = gl.load(factors + gl.minimum(token, rows - 1))
    result = _swiglu(gate_sum * factor, up_sum * factor, limit) * SCALE
    gl.store(hidden + token * I + tile * 8 + lane // 4, result.to(gl.float16), token < rows)


@gluon.jit
def _shared_up_chunk(
    gate, gate_scale, start, BLOCKS: gl.constexpr, K: gl.constexpr, I: gl.constexpr, CHUNK: gl.constexpr
):
    """Asks for the weights and scales of CHUNK blocks of 32 columns, where there are so many."""
    g, u, s, t = (), (), (), ()
    for i in gl.static_range(CHUNK):
        inside = start + i < BLOCKS
        block = gate + (start + i) * 8
        g = g + (gl.load(block, inside, other=0),)  # type: ignore[assignment]  # noqa: RUF005
        u = u + (gl.load(block + I * (K // 4), inside, other=0),)  # type: ignore[assignment]  # noqa: RUF005
    for i in gl.static_range(CHUNK):
        inside = start + i < BLOCKS
        own = gate_scale + start + i
        s = s + (gl.load(own, inside, other=0),)  # type: ignore[assignment]  # noqa: RUF005
        t = t + (gl.load(own + I // 32 * (K // 32), inside, other=0),)  # type: ignore[assignment]  # noqa: RUF005
    return g, u, s, t


@gluon.jit
def _swiglu(gate, up, limit):
    """silu(min(gate, limit)) * clamp(up, +-limit); NaN stays NaN."""
    gate = gl.where(gate > limit, limit, gate)
    up = gl.where(up > limit, limit, gl.where(up < -limit, -limit, up))
    return gate / (1.0 + gl.exp(-gate)) * up


# --- down --------------------------------------------------------------------------------------------------------


@gluon.jit(do_not_specialize=["rows"])
def down_kernel(
    record,
    hidden,
    shared_hidden,
    weight,
    scale,
    scale_2,
    shared,
    shared_scale,
    routed_out,
    shared_out,
    rows,
    H: gl.constexpr,
    I: gl.constexpr,
    I_HELD: gl.constexpr,
    N_HELD: gl.constexpr,
    K_HELD: gl.constexpr,
    SCALE: gl.constexpr,
    WARPS: gl.constexpr,
    CHUNK: gl.constexpr,
    SHARED_CHUNK: gl.constexpr,
):
    """Grid ((1 + pairs) H / 16 / WARPS), the shared expert's programs first; a warp has 16 outputs. hidden,
    shared_hidden: as the up kernel leaves them, as int32 pairs; weight: [E, K_HELD / 64, 8 N_HELD] int32; scale: [E,
    K_HELD / 32, N_HELD] bytes as uint16 pairs; shared: [H, I] e4m3 as int32; shared_scale: [H / 32, I / 32] uint8;
    routed_out: [pairs, H], shared_out: [rows, H] bfloat16."""
    program = gl.program_id(0)
    PROGRAMS: gl.constexpr = H // 16 // WARPS
    lanes: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    warp, lane = _flat_indices(lanes, WARPS)
    tile = program % PROGRAMS * WARPS + warp
    row = tile * 16 + lane // 4
    member = lane % 4 * 2
    if program < PROGRAMS:
        c0, c1, c2, c3 = _shared_down(
            shared_hidden, shared, shared_scale, rows, program * WARPS, I, WARPS, SHARED_CHUNK
        )
        at = shared_out + member * H + row
        _store_rows(at, at + H, c0 / SCALE, c1 / SCALE, c2 / SCALE, c3 / SCALE, member, rows)
    else:
        # The routing was there before the launch ahead of this one let it start. Past the first-level cache, which may
        # hold an earlier step's.
        own = record + (program // PROGRAMS - 1) * RECORD
        expert = gl.load(own, cache_modifier=".cg")
        if expert >= 0:
            count = gl.load(own + 1, cache_modifier=".cg")
            c0, c1, c2, c3 = _routed_down(
                own, count, hidden, weight, scale, expert, program % PROGRAMS * WARPS, I, I_HELD, N_HELD, K_HELD, WARPS,
                CHUNK,
            )  # fmt: skip
            factor = gl.load(scale_2 + expert) * (2.0**SCALE_BIAS / SCALE)
            first = gl.load(own + PAIRS + gl.minimum(member, count - 1), cache_modifier=".cg")
            second = gl.load(own + PAIRS + gl.minimum(member + 1, count - 1), cache_modifier=".cg")
            _store_rows(
                routed_out + first * H + row, routed_out + second * H + row, c0 * factor, c1 * factor, c2 * factor,
                c3 * factor, member, count,
            )  # fmt: skip


@gluon.jit
def _store_rows(first, second, c0, c1, c2, c3, member, count):
    """A lane's outputs g and g + 8, of two tokens."""
    gl.store(first, c0.to(gl.bfloat16), member < count)
    gl.store(second, c1.to(gl.bfloat16), member + 1 < count)
    gl.store(first + 8, c2.to(gl.bfloat16), member < count)
    gl.store(second + 8, c3.to(gl.bfloat16), member + 1 < count)


@gluon.jit
def _routed_down(
    own, count, hidden, weight, scale, expert, first_tile, I: gl.constexpr, I_HELD: gl.constexpr,
    N_HELD: gl.constexpr, K_HELD: gl.constexpr, WARPS: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """16 rows a warp, all columns, in chunks of CHUNK tiles; the first one's weights do not wait."""
    lanes: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    vectors: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32, 1], [WARPS, 1, 1], [2, 1, 0])
    TILES: gl.constexpr = (I + 63) // 64
    COLUMN: gl.constexpr = 8 * N_HELD
    warp, lane, word = _indices(vectors, WARPS, 4)
    flat_warp, flat_lane = _flat_indices(lanes, WARPS)
    base = expert.to(gl.int64) * (K_HELD // 64)
    at = weight + base * COLUMN + (first_tile + warp) * 128 + lane * 4 + word
    tile = first_tile + flat_warp
    groups = scale + base * N_HELD + tile // 4 * 32 + flat_lane // 4 * 4 + tile % 4
    pair = gl.load(own + PAIRS + gl.minimum(lane // 4, count - 1), cache_modifier=".cg")
    inputs = hidden + pair * (I_HELD // 2) + warp * 0 + lane % 4 * 8 + word
    c0 = gl.zeros((WARPS, 32), gl.float32, lanes)
    c1, c2, c3 = c0, c0, c0
    w, s = _down_chunk(at, groups, 0, COLUMN, N_HELD, CHUNK)
    wait()
    for start in range(CHUNK, TILES, CHUNK):
        next_w, next_s = _down_chunk(at, groups, start, COLUMN, N_HELD, CHUNK)
        for i in gl.static_range(CHUNK):
            x = gl.load(inputs + (start - CHUNK + i) * 32)
            more_x = gl.load(inputs + (start - CHUNK + i) * 32 + 4)
            c0, c1, c2, c3 = add_fp4(w[i], s[2 * i], s[2 * i + 1], x, more_x, c0, c1, c2, c3, True, WARPS, lanes)
        w, s = next_w, next_s
    for i in gl.static_range(CHUNK):
        c0, c1, c2, c3 = _last_tile(
            w[i], s[2 * i], s[2 * i + 1], inputs + (TILES - CHUNK + i) * 32, c0, c1, c2, c3,
            (TILES - CHUNK + i) * 64 + 32 < I, WARPS, lanes,
        )  # fmt: skip
    return c0, c1, c2, c3


@gluon.jit
def _last_tile(
    w, s, more_s, inputs, c0, c1, c2, c3, WHOLE: gl.constexpr, WARPS: gl.constexpr, lanes: gl.constexpr
):  # fmt: skip
    """A tile that may end in the middle, where padding begins: nobody wrote inputs there."""
    x = gl.load(inputs)
    more_x = x
    if WHOLE:
        more_x = gl.load(inputs + 4)
    return add_fp4(w, s, more_s, x, more_x, c0, c1, c2, c3, WHOLE, WARPS, lanes)


@gluon.jit
def _down_chunk(at, groups, start, COLUMN: gl.constexpr, N_HELD: gl.constexpr, CHUNK: gl.constexpr):
    """Asks for the weights and scales of CHUNK tiles of columns."""
    w, s = (), ()
    for i in gl.static_range(CHUNK):
        w = w + (gl.load(at + (start + i) * COLUMN),)  # type: ignore[assignment]  # noqa: RUF005
    for i in gl.static_range(2 * CHUNK):
        s = s + (gl.load(groups + (2 * start + i) * (N_HELD // 2)).to(gl.int32),)  # type: ignore[assignment]  # noqa: RUF005
    return w, s


@gluon.jit
def _shared_down(
    hidden, shared, shared_scale, rows, first_tile, I: gl.constexpr, WARPS: gl.constexpr, CHUNK: gl.constexpr
):
    """16 rows a warp, all columns, in chunks of CHUNK blocks."""
    lanes: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    vectors: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32, 1], [WARPS, 1, 1], [2, 1, 0])
    doubles: gl.constexpr = gl.BlockedLayout([1, 1, 2], [1, 32, 1], [WARPS, 1, 1], [2, 1, 0])
    BLOCKS: gl.constexpr = I // 32
    warp, lane, word = _indices(doubles, WARPS, 2)
    flat_warp, flat_lane = _flat_indices(lanes, WARPS)
    at = shared + ((first_tile + warp) * 16 + lane // 4) * (I // 4) + lane % 4 * 2 + word
    factors = shared_scale + (first_tile + flat_warp) // 2 * BLOCKS + flat_lane * 0
    first, second, s = _shared_down_chunk(at, factors, 0, I, CHUNK)
    wait()
    warp, lane, word = _indices(vectors, WARPS, 4)
    inputs = hidden + gl.minimum(lane // 4, rows - 1) * (I // 2) + warp * 0 + lane % 4 * 4 + word
    c0 = gl.zeros((WARPS, 32), gl.float32, lanes)
    c1, c2, c3 = c0, c0, c0
    for start in range(0, BLOCKS, CHUNK):
        next_first, next_second, next_s = _shared_down_chunk(at, factors, start + CHUNK, I, CHUNK)
        for i in gl.static_range(CHUNK):
            x = gl.load(inputs + (start + i) * 16)
            c0, c1, c2, c3 = add_fp8(first[i], second[i], x, s[i], s[i], c0, c1, c2, c3, WARPS, lanes)
        first, second, s = next_first, next_second, next_s
    return c0, c1, c2, c3


@gluon.jit
def _shared_down_chunk(at, factors, start, I: gl.constexpr, CHUNK: gl.constexpr):
    """Asks for the weights and scales of CHUNK blocks of 32 columns."""
    first, second, s = (), (), ()
    for i in gl.static_range(CHUNK):
        inside = start + i < I // 32
        first = first + (gl.load(at + (start + i) * 8, inside, other=0),)  # type: ignore[assignment]  # noqa: RUF005
        second = second + (gl.load(at + 2 * I + (start + i) * 8, inside, other=0),)  # type: ignore[assignment]  # noqa: RUF005
    for i in gl.static_range(CHUNK):
        inside = start + i < I // 32
        s = s + (gl.load(factors + start + i, inside, other=0),)  # type: ignore[assignment]  # noqa: RUF005
    return first, second, s
