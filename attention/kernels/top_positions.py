"""The best positions of each row, exactly: of equal scores the earlier wins; and where they lie in a paged cache.

The scores' launch has counted them by the first 12 bits of their order. What lies above the bin that the last of the
best is in is chosen at once; the bin's own are listed, and settled by their other 20 bits, five at a time.
"""

import triton
import triton.language as tl

from specialized_decode.attention.kernels.index_scores import BINS, bin_of, length, ordered

DIGIT = tl.constexpr(5)
DIGITS = tl.constexpr(32)
LOW, LOW_MASK = tl.constexpr(20), tl.constexpr(0xFFFFF)


@triton.jit
def _digits(low, shift, known, inside):
    """How many of the listed numbers that begin with `known` go on with each digit, [32]."""
    matches = inside & ((low >> (shift + DIGIT)) == known)
    return tl.histogram((low >> shift) & (DIGITS - 1), DIGITS, mask=matches)


@triton.jit
def _scores(scores, column, closed):
    return tl.load(scores + column, column < closed, other=float("-inf"), cache_modifier=".cg")


@triton.jit(do_not_specialize=["width", "out_stride", "table_stride", "log2"])
def top_positions_kernel(
    scores,
    scores_stride,
    width,
    positions,
    owner,
    bins,
    listed,
    token_to_req,
    block_table,
    table_stride,
    log2,
    out,
    out_stride,
    slots,
    RATIO: tl.constexpr,
    TOPK: tl.constexpr,
    TOPK_PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    LIST: tl.constexpr,
):
    """Grid (rows). scores: [rows, width] float32, `scores_stride` apart, up to a row's length; positions: [rows] int64;
    owner: [rows] int64, negative for padding; bins: [rows, 4096] int32, zero again afterwards; listed: [rows, 2,
    scores_stride] int32, scratch; token_to_req: [rows] int32; block_table: [requests, n] int32; a page holds 2**log2
    states. out: [rows, TOPK] int32 positions, `out_stride` apart, and slots: [rows, TOPK] int64, block * states +
    state, both -1 padded. CHUNK: scores taken at a time, LIST: of the list; powers of two."""
    row = tl.program_id(0).to(tl.int64)
    closed = length(positions, owner, row, width, RATIO)
    table = block_table + tl.load(token_to_req + row).to(tl.int64) * table_stride
    scores, out, slots = scores + row * scores_stride, out + row * out_stride, slots + row * TOPK
    numbers, columns = listed + row * 2 * scores_stride, listed + (row * 2 + 1) * scores_stride
    bin = tl.arange(0, BINS)
    bins += row * BINS + bin
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    held = tl.load(bins, cache_modifier=".cg")
    ahead = _scores(scores, tl.arange(0, CHUNK), closed)
    tl.store(bins, tl.zeros_like(held))
    behind = tl.cumsum(held, 0, reverse=True)
    # The bin of the last of the best; below all where there are not as many.
    last = tl.max(tl.where(behind >= TOPK, bin, -1), 0)
    wanted = TOPK - tl.sum(tl.where(bin > last, held, 0), 0)
    taken, found = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    for start in range(0, closed, CHUNK):
        column = start + tl.arange(0, CHUNK)
        score = ahead
        # The next chunk's are on their way meanwhile.
        ahead = _scores(scores, column + CHUNK, closed)
        key = ordered(score)
        real = (score == score) & (score > float("-inf"))
        place = bin_of(key)
        above, among = real & (place > last), real & (place == last)
        # Both counts in one scan: a chunk has fewer than 2**15.
        ones = above.to(tl.int32) + (among.to(tl.int32) << 16)
        before = tl.cumsum(ones, 0) - ones
        at = taken + (before & 0xFFFF)
        tl.store(out + at, column, above & (at < TOPK))
        tl.store(numbers + found + (before >> 16), key & (LOW_MASK), among)
        tl.store(columns + found + (before >> 16), column, among)
        total = tl.sum(ones, 0)
        taken += total & 0xFFFF
        found += total >> 16
    if found > 0:
        # What the program's other threads have stored.
        tl.debug_barrier()
        taken = _settle(numbers, columns, found, wanted, out, taken, TOPK, LIST)
    # Of scores that nobody has counted there may be more, which have no place.
    taken = tl.minimum(taken, TOPK)
    tl.debug_barrier()
    place = tl.arange(0, TOPK_PADDED)
    chosen = tl.load(out + place, place < taken, other=-1, cache_modifier=".cg")
    block = tl.load(table + (chosen >> log2), chosen >= 0, other=0).to(tl.int64)
    slot = (block << log2) + (chosen & ((1 << log2) - 1))
    tl.store(out + place, chosen, (place >= taken) & (place < TOPK))
    tl.store(slots + place, tl.where(chosen >= 0, slot, -1), place < TOPK)


@triton.jit
def _settle(numbers, columns, found, wanted, out, taken, TOPK: tl.constexpr, LIST: tl.constexpr):
    """Appends the `wanted` best of the list; returns how many there are then."""
    item = tl.arange(0, LIST)
    head = tl.load(numbers + item, item < found, other=0, cache_modifier=".cg")
    known = tl.full((), 0, tl.int32)
    digit = tl.arange(0, DIGITS)
    for i in tl.static_range(LOW // DIGIT):
        shift = LOW - DIGIT * (i + 1)
        counts = _digits(head, shift, known, item < found)
        for start in range(LIST, found, LIST):
            at = start + item
            low = tl.load(numbers + at, at < found, other=0, cache_modifier=".cg")
            counts += _digits(low, shift, known, at < found)
        behind = tl.cumsum(counts, 0, reverse=True)
        best = tl.max(tl.where(behind >= wanted, digit, 0), 0)
        wanted -= tl.sum(tl.where(digit > best, counts, 0), 0)
        known = (known << DIGIT) | best
    for start in range(0, found, LIST):
        at = start + item
        inside = at < found
        low = tl.load(numbers + at, inside, other=0, cache_modifier=".cg")
        column = tl.load(columns + at, inside, other=0, cache_modifier=".cg")
        equal = (inside & (low == known)).to(tl.int32)
        chosen = inside & ((low > known) | ((equal > 0) & (tl.cumsum(equal, 0) <= wanted)))
        ones = chosen.to(tl.int32)
        place = taken + tl.cumsum(ones, 0) - ones
        tl.store(out + place, column, chosen & (place < TOPK))
        taken += tl.sum(ones, 0)
        wanted -= tl.minimum(wanted, tl.sum(equal, 0))
    return taken
