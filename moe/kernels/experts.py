"""The experts' GEMMs of a few rows at memory speed: routed ones in Humming's form (see `moe.expert_layout`), the shared
one in FP8.

A program has one expert's rows, for all tokens that chose the expert: a weight is read once. It stands for a pair
(token TOPK + slot); one of the pairs of an expert leads, the others' programs end at once. A lane's 16 loaded bytes are
its operands of the tensor cores' multiplication; nothing of a weight goes through shared memory. Sums are float32.

leaders: [pairs] int32, the expert of a pair that leads, -1 for others. members: [E] int64, an expert's tokens, a byte
each from the lowest on: 1 + the slot with which it chose the expert, 0 if it did not. One token's experts are distinct,
so that `leaders` are its ids, and members are not read.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from specialized_decode.moe.kernels.fragments import SCALE_BIAS, add_fp4, add_fp8, quad_column, wait


@gluon.jit
def _members(members, leader, expert, RECORDED: gl.constexpr):
    """An expert's tokens, or the one token's pair. Past the first-level cache, which may hold an earlier step's."""
    own = leader
    if RECORDED:
        own = gl.load(members + expert, cache_modifier=".cg")
    return own


@gluon.jit
def _pair(own, token, TOPK: gl.constexpr, RECORDED: gl.constexpr):
    """The pair with which a token chose an expert, or -1. own: see `_members`."""
    if RECORDED:
        slot = ((own >> (8 * token)) & 0xFF).to(gl.int32) - 1
        pair = gl.where(slot >= 0, token * TOPK + slot, -1)
    else:
        pair = gl.where(token == 0, own, -1)
    return pair


@gluon.jit
def _pair_or(own, token, leader, TOPK: gl.constexpr, RECORDED: gl.constexpr):
    """The same, or the leader: nobody stores what becomes of a token that did not choose the expert."""
    pair = _pair(own, token, TOPK, RECORDED)
    return gl.where(pair >= 0, pair, leader)


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


# --- up: gate and up projections, and the clamped SwiGLU ---------------------------------------------------------


@gluon.jit(do_not_specialize=["rows"])
def up_kernel(
    leaders,
    members,
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
    SHARED_CHUNK: gl.constexpr,
    RECORDED: gl.constexpr,
):
    """Grid (I / 8 + pairs I / 16), the shared expert's programs first. leaders, members: see above; quads, plain:
    [rows, K] float16 as int32 pairs; factors: [rows] float32; weight: [E, K / 64, 8 N_HELD] int32; scale: [E, K / 32,
    N_HELD] bytes as uint16 pairs; scale_2: [E] float32; shared: [2 I, K] e4m3 as int32; shared_scale: [2 I / 32,
    K / 32] uint8; hidden: [rows TOPK, I_HELD] float16, quads together, and shared_hidden: [rows, I] float16: SCALE
    times the outputs."""
    program = gl.program_id(0)
    if program < I // 8:
        _shared_up(
            plain, factors, shared, shared_scale, shared_hidden, rows, limit, program, K, I, SCALE, WARPS,
            SHARED_CHUNK,
        )  # fmt: skip
    else:
        program -= I // 8
        wait()
        leader = program // (I // 16)
        expert = gl.load(leaders + leader, cache_modifier=".cg")
        if expert >= 0:
            _routed_up(
                members, quads, factors, weight, scale, scale_2, hidden, limit, leader, expert, program % (I // 16),
                TOPK, K, I_HELD, N_HELD, FIRST_UP, SCALE, WARPS, CHUNK, RECORDED,
            )  # fmt: skip


@gluon.jit
def _routed_up(
    members, quads, factors, weight, scale, scale_2, hidden, limit, leader, expert, tile, TOPK: gl.constexpr,
    K: gl.constexpr, I_HELD: gl.constexpr, N_HELD: gl.constexpr, FIRST_UP: gl.constexpr, SCALE: gl.constexpr,
    WARPS: gl.constexpr, CHUNK: gl.constexpr, RECORDED: gl.constexpr,
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
    g, u, s, t = _up_chunk(at, gate_scale, up_scale, 0, COLUMN, N_HELD, UP, CHUNK)
    own = _members(members, leader, expert, RECORDED)
    pair = _pair_or(own, lane // 4, leader, TOPK, RECORDED)
    inputs = quads + pair // TOPK * (K // 2) + warp * TILES * 32 + lane % 4 * 8 + word
    out: gl.constexpr = gl.BlockedLayout([1, 1, 1], [32, 1, 1], [1, min(WARPS, 2), max(WARPS // 2, 1)], [2, 1, 0])
    # [lane, row of 2, token of 2]
    lane = gl.arange(0, 32, gl.SliceLayout(1, gl.SliceLayout(2, out)))[:, None, None]
    place = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, out)))[None, :, None]
    parity = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, out)))[None, None, :]
    token = lane % 4 * 2 + parity
    # Asked for ahead where there are registers for it: a lane of fewer warps stores more.
    AHEAD: gl.constexpr = WARPS >= 4 and not RECORDED
    if AHEAD:
        pair, factor = _pair_and_factor(own, factors, scale_2 + expert, token, TOPK, RECORDED)
    zero = gl.zeros((WARPS, 32), gl.float32, lanes)
    sums = (zero, zero, zero, zero, zero, zero, zero, zero)
    for start in range(CHUNK, TILES, CHUNK):
        next_g, next_u, next_s, next_t = _up_chunk(at, gate_scale, up_scale, start, COLUMN, N_HELD, UP, CHUNK)
        sums = _add_up_chunk(g, u, s, t, inputs + (start - CHUNK) * 32, sums, CHUNK, WARPS, lanes)
        g, u, s, t = next_g, next_u, next_s, next_t
    sums = _add_up_chunk(g, u, s, t, inputs + (TILES - CHUNK) * 32, sums, CHUNK, WARPS, lanes)
    a0, a1, a2, a3, b0, b1, b2, b3 = sums
    if not AHEAD:
        pair, factor = _pair_and_factor(own, factors, scale_2 + expert, token, TOPK, RECORDED)
    gates = gl.join(gl.join(a0, a2), gl.join(a1, a3))
    ups = gl.join(gl.join(b0, b2), gl.join(b1, b3))
    gate, up = gl.split(gl.sum(gl.join(gates, ups), 0))
    gate, up = gl.convert_layout(gate, out), gl.convert_layout(up, out)
    column = quad_column(tile * 16 + place * 8 + lane // 4)
    result = _swiglu(gate * factor, up * factor, limit) * SCALE
    gl.store(hidden + pair * I_HELD + column, result.to(gl.float16), pair >= 0)


@gluon.jit
def _pair_and_factor(own, factors, scale_2, token, TOPK: gl.constexpr, RECORDED: gl.constexpr):
    """A token's pair, or -1, and what its sums are multiplied by."""
    pair = _pair(own, token, TOPK, RECORDED)
    return pair, gl.load(scale_2) * 2.0**SCALE_BIAS * gl.load(factors + token, pair >= 0, other=0.0)


@gluon.jit
def _up_chunk(
    at, gate_scale, up_scale, start, COLUMN: gl.constexpr, N_HELD: gl.constexpr, UP: gl.constexpr,
    CHUNK: gl.constexpr,
):  # fmt: skip
    """Asks for the weights and scales of CHUNK tiles of columns."""
    g, u, s, t = (), (), (), ()
    for i in gl.static_range(CHUNK):
        column = at + (start + i) * COLUMN
        g = g + (gl.load(column),)  # type: ignore[assignment]  # noqa: RUF005
        u = u + (gl.load(column + UP * 128),)  # type: ignore[assignment]  # noqa: RUF005
    for i in gl.static_range(2 * CHUNK):
        row = (2 * start + i) * (N_HELD // 2)
        s = s + (gl.load(gate_scale + row).to(gl.int32),)  # type: ignore[assignment]  # noqa: RUF005
        t = t + (gl.load(up_scale + row).to(gl.int32),)  # type: ignore[assignment]  # noqa: RUF005
    return g, u, s, t


@gluon.jit
def _add_up_chunk(
    g, u, s, t, inputs, sums, CHUNK: gl.constexpr, WARPS: gl.constexpr, lanes: gl.constexpr
):  # fmt: skip
    """Adds CHUNK tiles of gate and up rows; inputs: where the first tile's begin."""
    a0, a1, a2, a3, b0, b1, b2, b3 = sums
    for i in gl.static_range(CHUNK):
        x, y = gl.load(inputs + i * 32), gl.load(inputs + i * 32 + 4)
        a0, a1, a2, a3 = add_fp4(g[i], s[2 * i], s[2 * i + 1], x, y, a0, a1, a2, a3, True, WARPS, lanes)
        b0, b1, b2, b3 = add_fp4(u[i], t[2 * i], t[2 * i + 1], x, y, b0, b1, b2, b3, True, WARPS, lanes)
    return a0, a1, a2, a3, b0, b1, b2, b3


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
    g, u, s, t = _shared_up_chunk(gate, gate_scale, 0, K, I, CHUNK)
    wait()
    warp, lane, word = _indices(vectors, WARPS, 4)
    inputs = plain + gl.minimum(lane // 4, rows - 1) * (K // 2) + warp * BLOCKS * 16 + lane % 4 * 4 + word
    c0 = gl.zeros((WARPS, 32), gl.float32, lanes)
    c1, c2, c3 = c0, c0, c0
    for start in range(CHUNK, BLOCKS, CHUNK):
        next_g, next_u, next_s, next_t = _shared_up_chunk(gate, gate_scale, start, K, I, CHUNK)
        for i in gl.static_range(CHUNK):
            x = gl.load(inputs + (start - CHUNK + i) * 16)
            c0, c1, c2, c3 = add_fp8(g[i], u[i], x, s[i], t[i], c0, c1, c2, c3, WARPS, lanes)
        g, u, s, t = next_g, next_u, next_s, next_t
    for i in gl.static_range(CHUNK):
        x = gl.load(inputs + (BLOCKS - CHUNK + i) * 16)
        c0, c1, c2, c3 = add_fp8(g[i], u[i], x, s[i], t[i], c0, c1, c2, c3, WARPS, lanes)
    out: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [min(WARPS, 2), max(WARPS // 2, 1)], [1, 0])
    gate_sum, up_sum = gl.split(gl.sum(gl.join(gl.join(c0, c1), gl.join(c2, c3)), 0))
    gate_sum, up_sum = gl.convert_layout(gate_sum, out), gl.convert_layout(up_sum, out)
    lane = gl.arange(0, 32, gl.SliceLayout(1, out))[:, None]
    parity = gl.arange(0, 2, gl.SliceLayout(0, out))[None, :]
    token = lane % 4 * 2 + parity
    factor = gl.load(factors + gl.minimum(token, rows - 1))
    result = _swiglu(gate_sum * factor, up_sum * factor, limit) * SCALE
    gl.store(hidden + token * I + tile * 8 + lane // 4, result.to(gl.float16), token < rows)


@gluon.jit
def _shared_up_chunk(gate, gate_scale, start, K: gl.constexpr, I: gl.constexpr, CHUNK: gl.constexpr):
    """Asks for the weights and scales of CHUNK blocks of 32 columns."""
    g, u, s, t = (), (), (), ()
    for i in gl.static_range(CHUNK):
        block = gate + (start + i) * 8
        g = g + (gl.load(block),)  # type: ignore[assignment]  # noqa: RUF005
        u = u + (gl.load(block + I * (K // 4)),)  # type: ignore[assignment]  # noqa: RUF005
    for i in gl.static_range(CHUNK):
        own = gate_scale + start + i
        s = s + (gl.load(own),)  # type: ignore[assignment]  # noqa: RUF005
        t = t + (gl.load(own + I // 32 * (K // 32)),)  # type: ignore[assignment]  # noqa: RUF005
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
    leaders,
    members,
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
    TOPK: gl.constexpr,
    H: gl.constexpr,
    I: gl.constexpr,
    I_HELD: gl.constexpr,
    N_HELD: gl.constexpr,
    K_HELD: gl.constexpr,
    SCALE: gl.constexpr,
    WARPS: gl.constexpr,
    CHUNK: gl.constexpr,
    SHARED_CHUNK: gl.constexpr,
    REPEAT: gl.constexpr,
    RECORDED: gl.constexpr,
):
    """Grid (H / 16 / WARPS (1 + pairs / REPEAT)), the shared expert's programs first; a warp has 16 outputs, and of a
    routed expert REPEAT times 16, one behind the other. leaders, members: see above; hidden, shared_hidden: as the up
    kernel leaves them, as int32 pairs; weight: [E, K_HELD / 64, 8 N_HELD] int32; scale: [E, K_HELD / 32, N_HELD] bytes
    as uint16 pairs; scale_2: [E] float32; shared: [H, I] e4m3 as int32; shared_scale: [H / 32, I / 32] uint8;
    routed_out: [pairs, H], shared_out: [rows, H] bfloat16."""
    program = gl.program_id(0)
    SHARED: gl.constexpr = H // 16 // WARPS
    PROGRAMS: gl.constexpr = SHARED // REPEAT
    if program < SHARED:
        _shared_down(
            shared_hidden, shared, shared_scale, shared_out, rows, program * WARPS, H, I, SCALE, WARPS, SHARED_CHUNK,
        )  # fmt: skip
    else:
        program -= SHARED
        leader = program // PROGRAMS
        # The routing was there before the launch ahead of this one let it start.
        expert = gl.load(leaders + leader, cache_modifier=".cg")
        if expert >= 0:
            _routed_down(
                members, hidden, weight, scale, scale_2, routed_out, leader, expert,
                program % PROGRAMS * (WARPS * REPEAT), TOPK, H, I, I_HELD, N_HELD, K_HELD, SCALE, WARPS, CHUNK, REPEAT,
                RECORDED,
            )  # fmt: skip


@gluon.jit
def _store_rows(first, second, c0, c1, c2, c3, has_first, has_second):
    """A lane's outputs g and g + 8, of two tokens."""
    gl.store(first, c0.to(gl.bfloat16), has_first)
    gl.store(second, c1.to(gl.bfloat16), has_second)
    gl.store(first + 8, c2.to(gl.bfloat16), has_first)
    gl.store(second + 8, c3.to(gl.bfloat16), has_second)


@gluon.jit
def _routed_down(
    members, hidden, weight, scale, scale_2, out, leader, expert, first_tile, TOPK: gl.constexpr, H: gl.constexpr,
    I: gl.constexpr, I_HELD: gl.constexpr, N_HELD: gl.constexpr, K_HELD: gl.constexpr, SCALE: gl.constexpr,
    WARPS: gl.constexpr, CHUNK: gl.constexpr, REPEAT: gl.constexpr, RECORDED: gl.constexpr,
):  # fmt: skip
    """16 rows a warp, all columns, in chunks of CHUNK tiles, the next one's weights on their way while one is
    multiplied; then the next rows. The first weights do not wait."""
    lanes: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    vectors: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32, 1], [WARPS, 1, 1], [2, 1, 0])
    COLUMN: gl.constexpr = 8 * N_HELD
    base = expert.to(gl.int64) * (K_HELD // 64)
    weight += base * COLUMN
    scale += base * N_HELD
    at, groups = _down_rows(weight, scale, first_tile, WARPS)
    w, s = _down_chunk(at, groups, 0, COLUMN, N_HELD, CHUNK)
    own = _members(members, leader, expert, RECORDED)
    warp, lane, word = _indices(vectors, WARPS, 4)
    pair = _pair_or(own, lane // 4, leader, TOPK, RECORDED)
    inputs = hidden + pair * (I_HELD // 2) + warp * 0 + lane % 4 * 8 + word
    warp, lane = _flat_indices(lanes, WARPS)
    first, second = _pair(own, lane % 4 * 2, TOPK, RECORDED), _pair(own, lane % 4 * 2 + 1, TOPK, RECORDED)
    has_first, has_second = first >= 0, second >= 0
    row = (first_tile + warp) * 16 + lane // 4
    first, second = out + first * H + row, out + second * H + row
    factor = gl.load(scale_2 + expert) * (2.0**SCALE_BIAS / SCALE)
    wait()
    for j in range(REPEAT - 1):
        next_at, next_groups = _down_rows(weight, scale, first_tile + (j + 1) * WARPS, WARPS)
        w, s, c0, c1, c2, c3 = _down_tile(
            w, s, at, groups, next_at, next_groups, inputs, I, N_HELD, CHUNK, False, WARPS, lanes
        )
        offset = j * (16 * WARPS)
        _store_rows(
            first + offset, second + offset, c0 * factor, c1 * factor, c2 * factor, c3 * factor, has_first, has_second
        )
        at, groups = next_at, next_groups
    w, s, c0, c1, c2, c3 = _down_tile(w, s, at, groups, at, groups, inputs, I, N_HELD, CHUNK, True, WARPS, lanes)
    offset = (REPEAT - 1) * (16 * WARPS)
    _store_rows(
        first + offset, second + offset, c0 * factor, c1 * factor, c2 * factor, c3 * factor, has_first, has_second
    )


@gluon.jit
def _down_rows(weight, scale, first_tile, WARPS: gl.constexpr):
    """Where a lane's weights and scales of a warp's 16 rows begin."""
    lanes: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    vectors: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32, 1], [WARPS, 1, 1], [2, 1, 0])
    warp, lane, word = _indices(vectors, WARPS, 4)
    at = weight + (first_tile + warp) * 128 + lane * 4 + word
    warp, lane = _flat_indices(lanes, WARPS)
    tile = first_tile + warp
    return at, scale + tile // 4 * 32 + lane // 4 * 4 + tile % 4


@gluon.jit
def _down_tile(
    w, s, at, groups, next_at, next_groups, inputs, I: gl.constexpr, N_HELD: gl.constexpr, CHUNK: gl.constexpr,
    LAST: gl.constexpr, WARPS: gl.constexpr, lanes: gl.constexpr,
):  # fmt: skip
    """Sums over all columns of 16 rows, whose first chunk is w and s; the next rows' first chunk, unless LAST."""
    TILES: gl.constexpr = (I + 63) // 64
    COLUMN: gl.constexpr = 8 * N_HELD
    c0 = gl.zeros((WARPS, 32), gl.float32, lanes)
    c1, c2, c3 = c0, c0, c0
    for start in range(CHUNK, TILES, CHUNK):
        next_w, next_s = _down_chunk(at, groups, start, COLUMN, N_HELD, CHUNK)
        for i in gl.static_range(CHUNK):
            x = gl.load(inputs + (start - CHUNK + i) * 32)
            y = gl.load(inputs + (start - CHUNK + i) * 32 + 4)
            c0, c1, c2, c3 = add_fp4(w[i], s[2 * i], s[2 * i + 1], x, y, c0, c1, c2, c3, True, WARPS, lanes)
        w, s = next_w, next_s
    next_w, next_s = w, s
    if not LAST:
        next_w, next_s = _down_chunk(next_at, next_groups, 0, COLUMN, N_HELD, CHUNK)
    for i in gl.static_range(CHUNK):
        c0, c1, c2, c3 = _last_tile(
            w[i], s[2 * i], s[2 * i + 1], inputs + (TILES - CHUNK + i) * 32, c0, c1, c2, c3,
            (TILES - CHUNK + i) * 64 + 32 < I, WARPS, lanes,
        )  # fmt: skip
    return next_w, next_s, c0, c1, c2, c3


@gluon.jit
def _last_tile(
    w, s, more_s, inputs, c0, c1, c2, c3, WHOLE: gl.constexpr, WARPS: gl.constexpr,
    lanes: gl.constexpr,
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
    hidden, shared, shared_scale, out, rows, first_tile, H: gl.constexpr, I: gl.constexpr, SCALE: gl.constexpr,
    WARPS: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
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
    for start in range(CHUNK, BLOCKS, CHUNK):
        next_first, next_second, next_s = _shared_down_chunk(at, factors, start, I, CHUNK)
        for i in gl.static_range(CHUNK):
            x = gl.load(inputs + (start - CHUNK + i) * 16)
            c0, c1, c2, c3 = add_fp8(first[i], second[i], x, s[i], s[i], c0, c1, c2, c3, WARPS, lanes)
        first, second, s = next_first, next_second, next_s
    for i in gl.static_range(CHUNK):
        x = gl.load(inputs + (BLOCKS - CHUNK + i) * 16)
        c0, c1, c2, c3 = add_fp8(first[i], second[i], x, s[i], s[i], c0, c1, c2, c3, WARPS, lanes)
    member = flat_lane % 4 * 2
    at = out + member * H + (first_tile + flat_warp) * 16 + flat_lane // 4
    _store_rows(at, at + H, c0 / SCALE, c1 / SCALE, c2 / SCALE, c3 / SCALE, member < rows, member + 1 < rows)


@gluon.jit
def _shared_down_chunk(at, factors, start, I: gl.constexpr, CHUNK: gl.constexpr):
    """Asks for the weights and scales of CHUNK blocks of 32 columns."""
    first, second, s = (), (), ()
    for i in gl.static_range(CHUNK):
        block = at + (start + i) * 8
        first = first + (gl.load(block),)  # type: ignore[assignment]  # noqa: RUF005
        second = second + (gl.load(block + 2 * I),)  # type: ignore[assignment]  # noqa: RUF005
    for i in gl.static_range(CHUNK):
        s = s + (gl.load(factors + start + i),)  # type: ignore[assignment]  # noqa: RUF005
    return first, second, s
