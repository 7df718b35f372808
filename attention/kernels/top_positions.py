"""The best positions of each row, exactly: of equal scores the earlier wins; and where they lie in a paged cache.

The scores' launch has counted them by the first 12 bits of their order. What lies above the bin that the last of the
best is in is chosen at once; the bin's own are listed. Each of a short list counts those ahead of it, which is its
place; a long list is settled by their other bits, five at a time. A program has a row, so that what it does for each
score counts: two comparisons, and a store of those few that are chosen or listed.
"""

import triton
import triton.language as tl

from specialized_decode.attention.kernels.index_scores import BINS, length, lowest_of, ordered

DIGIT = tl.constexpr(5)
DIGITS = tl.constexpr(32)
# Bits of an ordered number that its bin does not tell, and of a column behind them.
LOW_MASK, COLUMN_BITS, COLUMN_MASK = tl.constexpr(0xFFFFF), tl.constexpr(25), tl.constexpr(0x1FFFFFF)
PLACES = tl.constexpr(9)
MOST = tl.constexpr(2048)
LEAST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _scores(scores, column, closed):
    return tl.load(scores + column, column < closed, other=float("-inf"), cache_modifier=".cg")


@triton.jit
def _pages(table, column, log2, closed):
    """The pages that columns lie in."""
    return tl.load(table + (column >> log2), column < closed, other=0)


@triton.jit
def _limit(held, bin, TOPK: tl.constexpr):
    """The bin of the last of the best, and how many of it are wanted, none where there are fewer than TOPK, which are
    up to MOST. One reduction finds both."""
    upto = tl.cumsum(held, 0)
    ahead = upto - held
    crossed = (ahead < TOPK) & (upto >= TOPK)
    code = tl.max(tl.where(crossed, bin * MOST + (TOPK - 1 - ahead), -1), 0)
    return code // MOST, tl.where(code >= 0, code % MOST + 1, 0)


@triton.jit
def _counted(score, above, among):
    """1 for one that is chosen at once, 2**16 for one that is listed."""
    return tl.where(score >= above, 1, tl.where(score >= among, 1 << 16, 0))


@triton.jit
def _keep(out, slots, place, page, column, log2, chosen):
    """Stores chosen columns at their places, and their slots."""
    tl.store(out + place, column, chosen)
    tl.store(slots + place, (page.to(tl.int64) << log2) + (column & ((1 << log2) - 1)), chosen)


@triton.jit
def _listed(columns, numbers, at, found):
    """The list's columns, and one number for each score and its column: of scores that are alike the earlier's is the
    larger; -1 behind the list."""
    inside = at < found
    column = tl.load(columns + at, inside, other=0)
    number = tl.load(numbers + at, inside, other=0).to(tl.float32, bitcast=True)
    rank = ((ordered(number) & LOW_MASK).to(tl.int64) << COLUMN_BITS) | (COLUMN_MASK - column)
    return column, tl.where(inside, rank, -1)


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
    STRIPE: tl.constexpr,
    STRIPES: tl.constexpr,
    SHORT: tl.constexpr,
    TILE: tl.constexpr,
    RIVALS: tl.constexpr,
    LONG: tl.constexpr,
    SPREAD: tl.constexpr,
):
    """Grid (rows). scores: [rows, width] float32, `scores_stride` apart, up to a row's length; positions: [rows] int64;
    owner: [rows] int64, negative for padding; bins: [rows, 4096] int32, see `index_scores.count_score`,
    zero again afterwards;
    listed: [rows, 2, scores_stride] int32, scratch; token_to_req: [rows] int32; block_table: [requests, n] int32; a
    page holds 2**log2 states. out: [rows, TOPK] int32 positions, `out_stride` apart, and slots: [rows, TOPK] int64,
    block * states + state, both -1 padded. STRIPES of STRIPE scores are taken at a time; a list of up to SHORT is
    compared with itself, TILE by TILE, RIVALS of them at a time, a longer one taken LONG at a time; powers of two."""
    row = tl.program_id(0).to(tl.int64)
    closed = length(positions, owner, row, width, RATIO)
    table = block_table + tl.load(token_to_req + row).to(tl.int64) * table_stride
    scores, out, slots = scores + row * scores_stride, out + row * out_stride, slots + row * TOPK
    columns = listed + row * 2 * scores_stride
    numbers = columns + scores_stride
    bin = tl.arange(0, BINS)
    stretch = tl.arange(0, SPREAD)[:, None] * (BINS // SPREAD) + tl.arange(0, BINS // SPREAD)[None, :]
    bins += row * BINS + stretch
    stripe = tl.arange(0, STRIPE)
    # An input of the step.
    page = ()
    for i in tl.static_range(STRIPES):
        page = page + (_pages(table, i * STRIPE + stripe, log2, closed),)  # type: ignore[assignment]  # noqa: RUF005
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    held = tl.reshape(tl.trans(tl.load(bins, cache_modifier=".cg")), (BINS,))
    score = ()
    for i in tl.static_range(STRIPES):
        score = score + (_scores(scores, i * STRIPE + stripe, closed),)  # type: ignore[assignment]  # noqa: RUF005
    last, wanted = _limit(held, bin, TOPK)
    # Their comparisons with what is no number are false, as they should be.
    above = tl.where(wanted > 0, lowest_of(last - 1), LEAST)
    among = tl.where(wanted > 0, lowest_of(last), LEAST)
    taken, found = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    for start in range(0, closed, STRIPES * STRIPE):
        # Both counts in one: there are fewer than 2**15.
        count = tl.zeros((STRIPE,), tl.int32)
        for i in tl.static_range(STRIPES):
            count += _counted(score[i], above, among)
        place = tl.cumsum(count, 0) - count
        for i in tl.static_range(STRIPES):
            column, ones = start + i * STRIPE + stripe, _counted(score[i], above, among)
            first = taken + (place & 0xFFFF)
            # As counted; of scores that nobody has counted, or others were, there may be more or fewer.
            _keep(out, slots, first, page[i], column, log2, (ones == 1) & (first < TOPK))
            at = found + (place >> 16)
            tl.store(columns + at, column, ones > 1)
            tl.store(numbers + at, score[i].to(tl.int32, bitcast=True), ones > 1)
            place += ones
        sums = tl.sum(count, 0)
        taken += sums & 0xFFFF
        found += sums >> 16
        if start + STRIPES * STRIPE < closed:
            score, page = (), ()
            for i in tl.static_range(STRIPES):
                column = start + (STRIPES + i) * STRIPE + stripe
                score = score + (_scores(scores, column, closed),)  # type: ignore[assignment]  # noqa: RUF005
                page = page + (_pages(table, column, log2, closed),)  # type: ignore[assignment]  # noqa: RUF005
    # What the program's other threads have stored.
    tl.debug_barrier()
    tl.store(bins, tl.zeros((SPREAD, BINS // SPREAD), tl.int32))
    taken = tl.minimum(taken, TOPK)
    wanted = tl.minimum(wanted, tl.minimum(found, TOPK - taken))
    total = taken + wanted
    if wanted > 0:
        if found <= SHORT:
            _place(columns, numbers, found, wanted, out, slots, table, log2, taken, TILE, RIVALS)
        else:
            _settle(columns, numbers, found, wanted, out, slots, table, log2, taken, LONG)
    if total < TOPK:
        item = tl.arange(0, TOPK_PADDED)
        none = (item >= total) & (item < TOPK)
        tl.store(out + item, tl.full((TOPK_PADDED,), -1, tl.int32), none)
        tl.store(slots + item, tl.full((TOPK_PADDED,), -1, tl.int64), none)


@triton.jit
def _place(columns, numbers, found, wanted, out, slots, table, log2, taken, TILE: tl.constexpr, RIVALS: tl.constexpr):
    """The `wanted` best of a list, stored from place `taken` on, best first."""
    item, rival = tl.arange(0, TILE), tl.arange(0, RIVALS)
    for first in range(0, found, TILE):
        column, own = _listed(columns, numbers, first + item, found)
        ahead = tl.zeros((TILE, RIVALS), tl.int32)
        for start in range(0, found, TILE):
            others = ()
            for i in tl.static_range(TILE // RIVALS):
                others = others + (_listed(columns, numbers, start + i * RIVALS + rival, found)[1],)  # type: ignore[assignment]  # noqa: RUF005
            for i in tl.static_range(TILE // RIVALS):
                ahead += (others[i][None, :] > own[:, None]).to(tl.int32)
        place = tl.sum(ahead, 1)
        chosen = (own >= 0) & (place < wanted)
        _keep(out, slots, taken + place, tl.load(table + (column >> log2), chosen, other=0), column, log2, chosen)


@triton.jit
def _settle(columns, numbers, found, wanted, out, slots, table, log2, taken, LONG: tl.constexpr):
    """As `_place`, of a list of any length; in the list's order."""
    item, digit = tl.arange(0, LONG), tl.arange(0, DIGITS)
    known, left = tl.full((), 0, tl.int64), wanted
    for i in tl.range(0, PLACES):
        shift = DIGIT * (PLACES - 1 - i)
        counts = tl.zeros((DIGITS,), tl.int32)
        for start in range(0, found, LONG):
            rank = _listed(columns, numbers, start + item, found)[1]
            matches = (rank >> (shift + DIGIT)) == known
            counts += tl.histogram(((rank >> shift) & (DIGITS - 1)).to(tl.int32), DIGITS, mask=matches)
        behind = tl.cumsum(counts, 0, reverse=True)
        best = tl.max(tl.where(behind >= left, digit, 0), 0)
        left -= tl.sum(tl.where(digit > best, counts, 0), 0)
        known = (known << DIGIT) | best
    for start in range(0, found, LONG):
        column, rank = _listed(columns, numbers, start + item, found)
        chosen = rank >= known
        ones = chosen.to(tl.int32)
        page = tl.load(table + (column >> log2), chosen, other=0)
        _keep(out, slots, taken + tl.cumsum(ones, 0) - ones, page, column, log2, chosen)
        taken += tl.sum(ones, 0)
