"""The boundary in one launch: contribution, all-reduce over peer memory, mHC post-mix, collapse, RMSNorm, MXFP8.

One program a row: a thread holds neighbouring columns of every stream, so a row stays in registers from the first
load to the last store. Ranks exchange contributions through mailboxes in peer memory (see `boundary.mailbox`). An
element that holds EMPTY has not arrived; every contribution is kept clear of that pattern, so data and flag are one
word, and no fence is needed.
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


@triton.jit
def from_bits(bits):
    """bfloat16 bits as float32."""
    return bits.to(tl.bfloat16, bitcast=True).to(tl.float32)


@triton.jit
def to_bits(x):
    """float32 as the bits of a contribution: bfloat16, never EMPTY."""
    bits = x.to(tl.bfloat16).to(tl.int16, bitcast=True)
    return tl.where(x == x, bits, tl.full(x.shape, QUIET_NAN, tl.int16))


@triton.jit
def mailbox(mailboxes, owner, slot, sender, row, H: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr):
    """Where `owner` receives a row from `sender` in one slot."""
    base = tl.multiple_of(tl.load(mailboxes + owner).to(tl.pointer_type(tl.int16)), 16)
    return base + ((slot * RANKS + sender) * ROWS + row) * H


@triton.jit
def send(x, mailboxes, slot, row, column, inside, rank, H: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr):
    """Stores a contribution into every other rank's mailbox."""
    bits = to_bits(x)
    for peer in tl.static_range(RANKS):
        if peer != rank:
            tl.store(mailbox(mailboxes, peer, slot, rank, row, H, ROWS, RANKS) + column, bits, inside)


@triton.jit
def _now():
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def _give_up(report, generation, sender: tl.constexpr, row):
    """Records in host memory who is missing, and ends the kernel with an error."""
    host = report.to(tl.pointer_type(tl.int64))
    tl.store(host + 1, generation)
    tl.store(host + 2, tl.full((), sender, tl.int64))
    tl.store(host + 3, row)
    tl.store(host, tl.full((), 1, tl.int64))
    tl.inline_asm_elementwise("fence.sc.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    # No thread ends the kernel before the one that stores the report has done so, and the host has seen it: after
    # the trap other watchers of the GPU may end the process first.
    tl.debug_barrier()
    start = _now()
    while _now() - start < GRACE_NS:
        pass
    tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def receive(place, inside, report, generation, sender: tl.constexpr, row, deadline_ns):
    """Waits for a contribution at `place`, takes it and empties the place; float32.

    The place is used again three boundaries later; its sender cannot be that far before this rank has gone on.
    """
    bits = tl.load(place, inside, other=0, volatile=True)
    missing = tl.max(tl.where(inside & (bits == EMPTY), 1, 0), 0)
    start = _now()
    while missing != 0:
        bits = tl.load(place, inside, other=0, volatile=True)
        # Decided by all threads together: their clocks differ.
        state = tl.where(_now() - start > deadline_ns, 2, 1)
        missing = tl.max(tl.where(inside & (bits == EMPTY), state, 0), 0)
        if missing == 2:
            _give_up(report, generation, sender, row)
    tl.store(place, tl.full(bits.shape, EMPTY, tl.int16), inside)
    return from_bits(bits)


@triton.jit
def _contribution(pending, rows, weights, shared, row, column, inside, H: tl.constexpr, TOPK: tl.constexpr):
    """This rank's contribution, rounded to bfloat16, as float32. TOPK > 0: finalizes a MoE output."""
    if TOPK == 0:
        return tl.load(pending + row * H + column, inside, other=0.0).to(tl.float32)
    total = tl.zeros(column.shape, tl.float32)
    for k in tl.static_range(TOPK):
        part = tl.load(rows + (row * TOPK + k) * H + column, inside, other=0.0).to(tl.float32)
        total += tl.load(weights + row * TOPK + k) * part
    total += tl.load(shared + row * H + column, inside, other=0.0).to(tl.float32)
    return total.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _quantize(y, values, scales, row, H: tl.constexpr, WIDTH: tl.constexpr):
    """OCP MX v1.0: FP8 e4m3 values with one power-of-two scale per 32."""
    column, block = tl.arange(0, WIDTH), tl.arange(0, WIDTH // 32)
    blocks = tl.reshape(y, (WIDTH // 32, 32))
    bits = tl.maximum(tl.max(tl.abs(blocks), 1), 2.0**-126).to(tl.int32, bitcast=True)
    # 448 is 1.75 * 2**8: the exponent eight below amax's, one more where its mantissa is above 1.75.
    exponent = tl.maximum((bits >> 23) - 135 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32), -127)
    scaled = blocks * tl.exp2(-exponent.to(tl.float32))[:, None]
    scaled = tl.clamp(scaled, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(values + row * H + column, tl.reshape(scaled, (WIDTH,)).to(tl.float8e4nv), column < H)
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
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    TOPK: tl.constexpr,
    PUBLISHED: tl.constexpr,
    FULL: tl.constexpr,
    QUANTIZE: tl.constexpr,
):
    """See BoundaryAllReduce.full; four streams. index: this boundary's number in its step; generations: [1] int64,
    the boundaries before the step. PUBLISHED: the contribution is in every rank's mailbox already."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < H
    if FULL:
        # A weight depends on nothing, so it is on its way before the grid dependency resolves.
        scale = tl.load(norm + column, inside, other=0.0)
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    generation = tl.zeros((), tl.int64)
    if RANKS > 1:
        generation = tl.load(generations) + index
    slot = generation % GENERATIONS
    if PUBLISHED:
        x = from_bits(tl.load(mailbox(mailboxes, rank, slot, rank, row, H, ROWS, RANKS) + column, inside, other=0))
    else:
        x = _contribution(pending, rows, weights, shared, row, column, inside, H, TOPK)
        if RANKS > 1:
            send(x, mailboxes, slot, row, column, inside, rank, H, ROWS, RANKS)
            # What the others receive.
            x = from_bits(to_bits(x))
    # Kept as bfloat16, half the registers, while contributions are on their way.
    stream = residual + row * 4 * H + column
    r0 = tl.load(stream, inside, other=0.0)
    r1 = tl.load(stream + H, inside, other=0.0)
    r2 = tl.load(stream + 2 * H, inside, other=0.0)
    r3 = tl.load(stream + 3 * H, inside, other=0.0)
    total = x
    if RANKS > 1:
        # In rank order, so that every rank gets the same bits.
        for sender in tl.static_range(RANKS):
            part = x
            if sender != rank:
                place = mailbox(mailboxes, rank, slot, sender, row, H, ROWS, RANKS) + column
                part = receive(place, inside, report, generation, sender, row, deadline_ns)
            if sender == 0:
                total = part
            else:
                total += part
    collapsed = tl.zeros(column.shape, tl.float32)
    for j in tl.static_range(4):
        mixed = tl.load(comb + row * 16 + j) * r0.to(tl.float32)
        mixed += tl.load(comb + row * 16 + 4 + j) * r1.to(tl.float32)
        mixed += tl.load(comb + row * 16 + 8 + j) * r2.to(tl.float32)
        mixed += tl.load(comb + row * 16 + 12 + j) * r3.to(tl.float32)
        new = (mixed + tl.load(post + row * 4 + j) * total).to(tl.bfloat16)
        tl.store(streams_out + (row * 4 + j) * H + column, new, inside)
        if FULL:
            collapsed += tl.load(pre + row * 4 + j) * new.to(tl.float32)
    if FULL:
        rounded = tl.where(inside, collapsed.to(tl.bfloat16).to(tl.float32), 0.0)
        y = (rounded * tl.rsqrt(tl.sum(rounded * rounded, 0) / H + eps) * scale.to(tl.float32)).to(tl.bfloat16)
        tl.store(x_out + row * H + column, y, inside)
        if QUANTIZE:
            _quantize(y.to(tl.float32), values_out, scales_out, row, H, WIDTH)
