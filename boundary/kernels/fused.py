"""The boundary in one launch: contribution, all-reduce over peer memory, mHC post-mix, collapse, RMSNorm, MXFP8.

One program a row: a thread holds neighbouring columns of every stream, so a row stays in registers from the first
load to the last store. A row of H columns is two parts, MAIN and REST columns, powers of two both, since one power of
two would leave up to half of the registers empty. Ranks exchange contributions through mailboxes in peer memory (see
`boundary.mailbox`). An element that holds EMPTY has not arrived; every contribution is kept clear of that pattern, so
data and flag are one word, and no fence is needed.
"""

import triton
import triton.language as tl

# bfloat16 bits that no contribution has: a NaN with its sign set. Contributions send NaN as QUIET_NAN.
EMPTY = tl.constexpr(-1)
QUIET_NAN = tl.constexpr(0x7FFF)
# Slots of a mailbox, used in turn: a rank can be one boundary ahead of another, and no further.
GENERATIONS = tl.constexpr(3)
# Between a report and the trap, in ns.
GRACE_NS = tl.constexpr(1_000_000_000)


# Two values an instruction, in assembly, since the compiler converts one by one: half of the kernel's instructions were
# conversions.
@triton.jit
def widened(x):
    """bfloat16 as float32."""
    return tl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2
    )


@triton.jit
def rounded(x):
    """float32 to the nearest bfloat16: as such, and as float32."""
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $4, $3; shl.b32 $1, $0, 16; and.b32 $2, $0, 0xffff0000;",
        "=&r,=&r,=&r,r,r",
        [x],
        dtype=(tl.bfloat16, tl.float32),
        is_pure=True,
        pack=2,
    )


@triton.jit
def from_bits(bits):
    """bfloat16 bits as float32."""
    return widened(bits.to(tl.bfloat16, bitcast=True))


@triton.jit
def to_bits(x):
    """float32 as the bits of a contribution: bfloat16, never EMPTY."""
    bits = rounded(x)[0].to(tl.int16, bitcast=True)
    return tl.where(x == x, bits, tl.full(x.shape, QUIET_NAN, tl.int16))


@triton.jit
def row_sum(main, rest):
    """The sum over a row's two parts, in one reduction: neighbours of the main part first, within a thread."""
    folded = tl.reshape(main, (rest.shape[0], main.shape[0] // rest.shape[0]))
    return tl.sum(tl.sum(folded, 1) + rest, 0)


@triton.jit
def row_max(main, rest):
    """As `row_sum`, the maximum."""
    folded = tl.reshape(main, (rest.shape[0], main.shape[0] // rest.shape[0]))
    return tl.max(tl.maximum(tl.max(folded, 1), rest), 0)


@triton.jit
def mailbox(mailboxes, owner, slot, sender, row, H: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr):
    """Where `owner` receives a row from `sender` in one slot."""
    base = tl.multiple_of(tl.load(mailboxes + owner).to(tl.pointer_type(tl.int16)), 16)
    return base + ((slot * RANKS + sender) * ROWS + row) * H


@triton.jit
def send(main, rest, mailboxes, slot, row, rank, H: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr):
    """Stores a contribution into every other rank's mailbox."""
    main_bits, rest_bits = to_bits(main), to_bits(rest)
    first = tl.arange(0, main.shape[0])
    second = main.shape[0] + tl.arange(0, rest.shape[0])
    for peer in tl.static_range(RANKS):
        if peer != rank:
            place = mailbox(mailboxes, peer, slot, rank, row, H, ROWS, RANKS)
            tl.store(place + first, main_bits)
            tl.store(place + second, rest_bits, second < H)


@triton.jit
def now_ns():
    """The GPU's clock."""
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def _give_up(report, generation, sender, row):
    """Records in host memory who is missing, and ends the kernel with an error."""
    host = report.to(tl.pointer_type(tl.int64))
    tl.store(host + 1, generation)
    tl.store(host + 2, sender.to(tl.int64))
    tl.store(host + 3, row)
    tl.store(host, tl.full((), 1, tl.int64))
    tl.inline_asm_elementwise("fence.sc.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    # No thread ends the kernel before the one that stores the report has done so, and the host has seen it: after
    # the trap other watchers of the GPU may end the process first.
    tl.debug_barrier()
    start = now_ns()
    while now_ns() - start < GRACE_NS:
        pass
    tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def receive(
    place, report, generation, sender, row, deadline_ns, H: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr
):
    """Waits for a contribution at `place`, takes it and empties the place; float32, both parts.

    The place is used again three boundaries later; its sender cannot be that far before this rank has gone on.
    """
    first = place + tl.arange(0, MAIN)
    column = MAIN + tl.arange(0, REST)
    second, inside = place + column, column < H
    main = tl.load(first, volatile=True)
    rest = tl.load(second, inside, other=0, volatile=True)
    missing = row_max((main == EMPTY).to(tl.int32), (rest == EMPTY).to(tl.int32))
    start = now_ns()
    while missing != 0:
        main = tl.load(first, volatile=True)
        rest = tl.load(second, inside, other=0, volatile=True)
        # Decided by all threads together: their clocks differ.
        state = tl.where(now_ns() - start > deadline_ns, 2, 1)
        missing = row_max(tl.where(main == EMPTY, state, 0), tl.where(rest == EMPTY, state, 0))
        if missing == 2:
            _give_up(report, generation, sender, row)
    tl.store(first, tl.full((MAIN,), EMPTY, tl.int16))
    tl.store(second, tl.full((REST,), EMPTY, tl.int16), inside)
    return from_bits(main), from_bits(rest)


@triton.jit
def _part(
    main, rest, mailboxes, report, generation, slot, sender, rank, row, deadline_ns,
    H: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """A sender's contribution: received, or this rank's own as given."""
    if sender != rank:
        place = mailbox(mailboxes, rank, slot, sender, row, H, ROWS, RANKS)
        main, rest = receive(place, report, generation, sender, row, deadline_ns, H, main.shape[0], rest.shape[0])
    return main, rest


@triton.jit
def _contribution(pending, rows, weights, shared, row, column, inside, H: tl.constexpr, TOPK: tl.constexpr):
    """This rank's contribution, rounded to bfloat16, as float32. TOPK > 0: finalizes a MoE output."""
    if TOPK == 0:
        return widened(tl.load(pending + row * H + column, inside, other=0.0))
    total = tl.zeros(column.shape, tl.float32)
    for k in tl.static_range(TOPK):
        part = widened(tl.load(rows + (row * TOPK + k) * H + column, inside, other=0.0))
        total = tl.fma(tl.load(weights + row * TOPK + k), part, total)
    total += widened(tl.load(shared + row * H + column, inside, other=0.0))
    return rounded(total)[1]


@triton.jit
def _streams(residual, row, column, inside, H: tl.constexpr):
    """A part of the four streams; bfloat16, half the registers of float32. Nobody reads them after this, so the second
    level cache may drop them first."""
    at = residual + row * 4 * H + column
    return (
        tl.load(at, inside, other=0.0, eviction_policy="evict_first"),
        tl.load(at + H, inside, other=0.0, eviction_policy="evict_first"),
        tl.load(at + 2 * H, inside, other=0.0, eviction_policy="evict_first"),
        tl.load(at + 3 * H, inside, other=0.0, eviction_policy="evict_first"),
    )


@triton.jit
def _stream_mixes(post, comb, pre, row, j: tl.constexpr, FULL: tl.constexpr):
    """What stream j takes of the contribution and of the four streams, and what the next input takes of it."""
    collapse = 0.0
    if FULL:
        collapse = tl.load(pre + row * 4 + j)
    own = comb + row * 16 + j
    return tl.load(post + row * 4 + j), tl.load(own), tl.load(own + 4), tl.load(own + 8), tl.load(own + 12), collapse


@triton.jit
def _add(total, r0, r1, r2, r3, mixes, collapsed, out, inside, FULL: tl.constexpr):
    """One stream: mixes the four, adds the contribution, stores, and collapses it further."""
    mixed = mixes[1] * r0
    mixed = tl.fma(mixes[2], r1, mixed)
    mixed = tl.fma(mixes[3], r2, mixed)
    mixed = tl.fma(mixes[4], r3, mixed)
    new, number = rounded(tl.fma(mixes[0], total, mixed))
    tl.store(out, new, inside)
    if FULL:
        collapsed = tl.fma(mixes[5], number, collapsed)
    return collapsed


@triton.jit
def _update(total, r0, r1, r2, r3, m0, m1, m2, m3, out, inside, H: tl.constexpr, FULL: tl.constexpr):
    """All four streams of a part; returns the collapsed input, rounded, float32."""
    r0, r1, r2, r3 = widened(r0), widened(r1), widened(r2), widened(r3)
    collapsed = _add(total, r0, r1, r2, r3, m0, tl.zeros_like(total), out, inside, FULL)
    collapsed = _add(total, r0, r1, r2, r3, m1, collapsed, out + H, inside, FULL)
    collapsed = _add(total, r0, r1, r2, r3, m2, collapsed, out + 2 * H, inside, FULL)
    collapsed = _add(total, r0, r1, r2, r3, m3, collapsed, out + 3 * H, inside, FULL)
    return tl.where(inside, rounded(collapsed)[1], 0.0)


@triton.jit
def _quantize(y, values, scales, row, start, H: tl.constexpr):
    """OCP MX v1.0: FP8 e4m3 values with one power-of-two scale per 32."""
    count: tl.constexpr = y.shape[0] // 32
    column = start + tl.arange(0, y.shape[0])
    block = start // 32 + tl.arange(0, count)
    blocks = tl.reshape(y, (count, 32))
    bits = tl.maximum(tl.max(tl.abs(blocks), 1), 2.0**-126).to(tl.int32, bitcast=True)
    # 448 is 1.75 * 2**8: the exponent eight below amax's, one more where its mantissa is above 1.75.
    exponent = tl.maximum((bits >> 23) - 135 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32), -127)
    scaled = blocks * tl.exp2(-exponent.to(tl.float32))[:, None]
    scaled = tl.clamp(scaled, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(values + row * H + column, tl.reshape(scaled, (y.shape[0],)).to(tl.float8e4nv), column < H)
    tl.store(scales + row * (H // 32) + block, (exponent + 127).to(tl.uint8), block < H // 32)


# One kernel for every boundary of a step and every rank.
@triton.jit(do_not_specialize=["index", "rank"])
def boundary_kernel(
    pending,
    rows,
    weights,
    shared,
    residual,
    post,
    comb,
    pre,
    norm,
    streams_out,
    x_out,
    values_out,
    scales_out,
    mailboxes,
    generations,
    report,
    index,
    rank,
    eps,
    deadline_ns,
    H: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    TOPK: tl.constexpr,
    PUBLISHED: tl.constexpr,
    SETTLED: tl.constexpr,
    MANY: tl.constexpr,
    FULL: tl.constexpr,
    QUANTIZE: tl.constexpr,
):
    """See BoundaryAllReduce.full; four streams. index: this boundary's number in its step; generations: [1] int64,
    the boundaries before the step. PUBLISHED: the contribution is in every rank's mailbox already. SETTLED: the
    residual was written by launches before the preceding one. MANY: more rows than start at once where a program holds
    all that it can ahead; the next launch then starts after this one, and not beside it."""
    row = tl.program_id(0).to(tl.int64)
    first, second = tl.arange(0, MAIN), MAIN + tl.arange(0, REST)
    whole, inside = first < H, second < H
    # What depends on nothing that may still run is on its way before the grid dependency resolves. Not the mixes: in
    # a graph the edge of a stream joined just before is a programmatic one too.
    if FULL and not MANY:
        first_scale = tl.load(norm + first)
        second_scale = tl.load(norm + second, inside, other=0.0)
    if SETTLED:
        a0, a1, a2, a3 = _streams(residual, row, first, whole, H)
        b0, b1, b2, b3 = _streams(residual, row, second, inside, H)
    tl.extra.cuda.gdc_wait()
    if not MANY:
        tl.extra.cuda.gdc_launch_dependents()
    generation = tl.zeros((), tl.int64)
    if RANKS > 1:
        generation = tl.load(generations) + index
    slot = generation % GENERATIONS
    if PUBLISHED:
        own = mailbox(mailboxes, rank, slot, rank, row, H, ROWS, RANKS)
        a = from_bits(tl.load(own + first))
        b = from_bits(tl.load(own + second, inside, other=0))
    else:
        a = _contribution(pending, rows, weights, shared, row, first, whole, H, TOPK)
        b = _contribution(pending, rows, weights, shared, row, second, inside, H, TOPK)
        if RANKS > 1:
            send(a, b, mailboxes, slot, row, rank, H, ROWS, RANKS)
            # What the others receive.
            a, b = from_bits(to_bits(a)), from_bits(to_bits(b))
    if not SETTLED:
        # While contributions are on their way.
        a0, a1, a2, a3 = _streams(residual, row, first, whole, H)
        if not MANY:
            b0, b1, b2, b3 = _streams(residual, row, second, inside, H)
    # All at once, before the first store: the compiler moves no load ahead of one.
    m0 = _stream_mixes(post, comb, pre, row, 0, FULL)
    m1 = _stream_mixes(post, comb, pre, row, 1, FULL)
    m2 = _stream_mixes(post, comb, pre, row, 2, FULL)
    m3 = _stream_mixes(post, comb, pre, row, 3, FULL)
    if RANKS > 1:
        # In rank order, so that every rank gets the same bits. Not unrolled: all loads would be held at once.
        own_a, own_b = a, b
        first_sender = tl.zeros((), tl.int32)
        a, b = _part(
            own_a, own_b, mailboxes, report, generation, slot, first_sender, rank, row, deadline_ns, H, ROWS, RANKS
        )
        for sender in range(1, RANKS):
            part_a, part_b = _part(
                own_a, own_b, mailboxes, report, generation, slot, sender, rank, row, deadline_ns, H, ROWS, RANKS
            )
            a, b = a + part_a, b + part_b
    out = streams_out + row * 4 * H
    a = _update(a, a0, a1, a2, a3, m0, m1, m2, m3, out + first, whole, H, FULL)
    if MANY:
        # With the registers that this saves more programs fit on a multiprocessor, and hide the wait.
        b0, b1, b2, b3 = _streams(residual, row, second, inside, H)
    b = _update(b, b0, b1, b2, b3, m0, m1, m2, m3, out + second, inside, H, FULL)
    if FULL:
        inverse = tl.rsqrt(row_sum(a * a, b * b) / H + eps)
        if MANY:
            first_scale = tl.load(norm + first)
            second_scale = tl.load(norm + second, inside, other=0.0)
        y, y_number = rounded(a * inverse * widened(first_scale))
        z, z_number = rounded(b * inverse * widened(second_scale))
        tl.store(x_out + row * H + first, y)
        tl.store(x_out + row * H + second, z, inside)
        if QUANTIZE:
            _quantize(y_number, values_out, scales_out, row, 0, H)
            _quantize(z_number, values_out, scales_out, row, MAIN, H)
