"""The best positions of each row, exactly: of equal scores the earlier wins; and where they lie in a paged cache.

The scores' launch has counted them by their bins. What lies above the bin that the last of the best is in is chosen at
once; the bin's own are listed. Each of a short list counts those ahead of it, which is its place; a long list is
settled by their bits, five at a time. A program has a row, so that what it does for each score counts: two comparisons,
and one store of those few that are chosen or listed. Pages are looked up for those alone. Meanwhile a second program
of each row of a candidate source chooses blocks.
"""

import triton
import triton.language as tl

from specialized_decode.attention.kernels.candidates import choose_row
from specialized_decode.attention.kernels.index_scores import BINS, length, lowest_of, ordered

DIGIT = tl.constexpr(5)
DIGITS = tl.constexpr(32)
# A number for a score and its column: the columns' bits, and the digits of all.
COLUMN_BITS, COLUMN_MASK = tl.constexpr(25), tl.constexpr(0x1FFFFFF)
PLACES = tl.constexpr(12)
MOST = tl.constexpr(2048)
LEAST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _scores(scores, stripe, start, closed):
    return tl.load(scores + stripe + start, stripe < closed - start, other=float("-inf"), cache_modifier=".cg")


@triton.jit
def _limit(held, GROUPS: tl.constexpr, SPREAD: tl.constexpr, TOPK: tl.constexpr):
    """The bin of the last of the best, and how many of it are wanted, none where there are fewer than TOPK, which are
    up to MOST. held: those of bin SPREAD g + s are the s-th's g-th. A thread has neighbouring bins, and one reduction
    finds both."""
    group = held[0]
    for i in tl.static_range(1, SPREAD):
        group += held[i]
    behind = tl.cumsum(group, 0)
    ahead = behind - group
    # How many lie ahead of a bin, and its place in the group, in one number.
    mark = ahead * SPREAD
    code = mark
    for i in tl.static_range(SPREAD - 1):
        mark += held[i] * SPREAD + 1
        code = tl.where(mark < TOPK * SPREAD, mark, code)
    code = tl.where((ahead < TOPK) & (behind >= TOPK), tl.arange(0, GROUPS) * (MOST * SPREAD) + code, -1)
    code = tl.max(code, 0)
    last = code // (MOST * SPREAD) * SPREAD + code % SPREAD
    return last, tl.where(code >= 0, TOPK - code % (MOST * SPREAD) // SPREAD, 0)


@triton.jit
def _entry(score, column):
    """Both in one number, not negative as its column is none."""
    return (score.to(tl.uint32, bitcast=True).to(tl.uint64) << 32 | column.to(tl.uint32)).to(tl.int64, bitcast=True)


@triton.jit
def _number(entry):
    """An entry's score."""
    return (entry >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _rank(entry):
    """One number for a score and its column: of scores that are alike the earlier's is the larger; -1 for no entry."""
    column = entry.to(tl.int32)
    rank = ((ordered(_number(entry)).to(tl.int64) + (1 << 31)) << COLUMN_BITS) | (COLUMN_MASK - column)
    return tl.where(column >= 0, rank, -1)


@triton.jit
def _listed(end, at, found):
    """The list's entries, -1 behind it."""
    return tl.load(end - 1 - at, at < found, other=-1)


@triton.jit
def _keep(out, slots, place, table, column, log2, chosen):
    """Stores chosen columns at their places, and their slots."""
    page = tl.load(table + (column >> log2), chosen, other=0)
    tl.store(out + place, column, chosen)
    tl.store(slots + place, (page.to(tl.int64) << log2) + (column & ((1 << log2) - 1)), chosen)


@triton.jit
def _select_row(
    scores, room, closed, bins, entries, table, log2, out, slots, page,
    TOPK: tl.constexpr, TOPK_PADDED: tl.constexpr, STRIPE: tl.constexpr, STRIPES: tl.constexpr, PART: tl.constexpr,
    FEW: tl.constexpr, SHORT: tl.constexpr, TILE: tl.constexpr, RIVALS: tl.constexpr, LONG: tl.constexpr,
    SPREAD: tl.constexpr,
):  # fmt: skip
    """What a row's program does behind its wait. entries: [room] int64, of which what is chosen at once lies in front,
    the list backwards from the end, with room between; page: pages [TOPK_PADDED] that have been asked for."""
    GROUPS: tl.constexpr = BINS // SPREAD
    group, few, rival = tl.arange(0, GROUPS), tl.arange(0, FEW), tl.arange(0, RIVALS)
    stripe, item = tl.arange(0, STRIPE), tl.arange(0, TOPK_PADDED)
    bins += group
    end = entries + room
    held = ()
    for i in tl.static_range(SPREAD):
        held = held + (tl.load(bins + i * GROUPS, cache_modifier=".cg"),)  # type: ignore[assignment]  # noqa: RUF005
    score = ()
    for i in tl.static_range(STRIPES):
        score = score + (_scores(scores, stripe, i * STRIPE, closed),)  # type: ignore[assignment]  # noqa: RUF005
    # Whatever nobody stores to. No page is less than -1; so they have been read.
    tl.store(out + item, tl.minimum(page, -1), item < TOPK)
    tl.store(slots + item, tl.full((TOPK_PADDED,), -1, tl.int64), item < TOPK)
    tl.store(entries + item, tl.full((TOPK_PADDED,), -1, tl.int64))
    tl.store(end - 1 - few, tl.full((FEW,), -1, tl.int64))
    tl.store(end - 1 - FEW, -1)
    last, wanted = _limit(held, GROUPS, SPREAD, TOPK)
    # Their comparisons with what is no number are false, as they should be.
    above = tl.where(wanted > 0, lowest_of(last - 1), LEAST)
    among = tl.where(wanted > 0, lowest_of(last), LEAST)
    final = room - 1
    taken, found, count = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32), tl.zeros((STRIPE,), tl.int32)
    for start in range(0, closed, STRIPES * STRIPE):
        # Both counts in one: there are fewer than 2**15.
        count, parts = tl.zeros((STRIPE,), tl.int32), ()
        for part in tl.static_range(STRIPES // PART):
            parts = parts + (count,)  # type: ignore[assignment]  # noqa: RUF005
            if start + part * PART * STRIPE < closed:
                for i in tl.static_range(part * PART, part * PART + PART):
                    count += tl.where(score[i] >= above, 1, tl.where(score[i] >= among, 1 << 16, 0))
        place = tl.cumsum(count, 0) - count
        for part in tl.static_range(STRIPES // PART):
            if start + part * PART * STRIPE < closed:
                own = place + parts[part]
                first, at = taken + (own & 0xFFFF), final - found - (own >> 16)
                for i in tl.static_range(part * PART, part * PART + PART):
                    column, chosen, member = start + i * STRIPE + stripe, score[i] >= above, score[i] >= among
                    tl.store(entries + tl.where(chosen, first, at), _entry(score[i], column), member)
                    first += chosen.to(tl.int32)
                    at -= tl.where(chosen, 0, member.to(tl.int32))
        if start + STRIPES * STRIPE < closed:
            sums = tl.sum(count, 0)
            taken += sums & 0xFFFF
            found += sums >> 16
            score = ()
            for i in tl.static_range(STRIPES):
                ahead = start + (STRIPES + i) * STRIPE
                score = score + (_scores(scores, stripe, ahead, closed),)  # type: ignore[assignment]  # noqa: RUF005
    # What the program's other threads have stored.
    tl.debug_barrier()
    # As counted; of scores that nobody has counted, or others were, there may be more or fewer.
    upto = TOPK - wanted
    chosen = tl.load(entries + item, item < upto, other=-1).to(tl.int32)
    mine, others = tl.load(end - 1 - few), ()
    many = tl.load(end - 1 - FEW).to(tl.int32) >= 0
    for i in tl.static_range(FEW // RIVALS):
        others = others + (tl.load(end - 1 - i * RIVALS - rival),)  # type: ignore[assignment]  # noqa: RUF005
    _keep(out, slots, item, table, chosen, log2, chosen >= 0)
    column, number = mine.to(tl.int32), _number(mine)
    ahead = tl.zeros((FEW, RIVALS), tl.int32)
    for i in tl.static_range(FEW // RIVALS):
        # What is no entry is no number either.
        its = _number(others[i])[None, :]
        earlier = (its == number[:, None]) & (others[i].to(tl.int32)[None, :] < column[:, None])
        ahead += ((its > number[:, None]) | earlier).to(tl.int32)
    ahead = tl.sum(ahead, 1)
    _keep(out, slots, upto + ahead, table, column, log2, (column >= 0) & (ahead < wanted) & (many == 0))
    for i in tl.static_range(SPREAD):
        tl.store(bins + i * GROUPS, tl.zeros((GROUPS,), tl.int32))
    if many:
        found += tl.sum(count, 0) >> 16
        wanted = tl.minimum(wanted, found)
        if found <= SHORT:
            _place(end, found, wanted, out, slots, table, log2, upto, TILE, RIVALS)
        else:
            _settle(end, found, wanted, out, slots, table, log2, upto, LONG)


@triton.jit
def _place(end, found, wanted, out, slots, table, log2, taken, TILE: tl.constexpr, RIVALS: tl.constexpr):
    """The `wanted` best of a list, stored from place `taken` on, best first."""
    item, rival = tl.arange(0, TILE), tl.arange(0, RIVALS)
    for first in range(0, found, TILE):
        entry = _listed(end, first + item, found)
        own = _rank(entry)
        ahead = tl.zeros((TILE, RIVALS), tl.int32)
        for start in range(0, found, TILE):
            others = ()
            for i in tl.static_range(TILE // RIVALS):
                others = others + (_rank(_listed(end, start + i * RIVALS + rival, found)),)  # type: ignore[assignment]  # noqa: RUF005
            for i in tl.static_range(TILE // RIVALS):
                ahead += (others[i][None, :] > own[:, None]).to(tl.int32)
        place = tl.sum(ahead, 1)
        _keep(out, slots, taken + place, table, entry.to(tl.int32), log2, (own >= 0) & (place < wanted))


@triton.jit
def _settle(end, found, wanted, out, slots, table, log2, taken, LONG: tl.constexpr):
    """As `_place`, of a list of any length; in the list's order."""
    item, digit = tl.arange(0, LONG), tl.arange(0, DIGITS)
    known, left = tl.full((), 0, tl.int64), wanted
    for i in tl.range(0, PLACES):
        shift = DIGIT * (PLACES - 1 - i)
        counts = tl.zeros((DIGITS,), tl.int32)
        for start in range(0, found, LONG):
            rank = _rank(_listed(end, start + item, found))
            matches = (rank >> (shift + DIGIT)) == known
            counts += tl.histogram(((rank >> shift) & (DIGITS - 1)).to(tl.int32), DIGITS, mask=matches)
        behind = tl.cumsum(counts, 0, reverse=True)
        best = tl.max(tl.where(behind >= left, digit, 0), 0)
        left -= tl.sum(tl.where(digit > best, counts, 0), 0)
        known = (known << DIGIT) | best
    for start in range(0, found, LONG):
        entry = _listed(end, start + item, found)
        chosen = _rank(entry) >= known
        ones = chosen.to(tl.int32)
        _keep(out, slots, taken + tl.cumsum(ones, 0) - ones, table, entry.to(tl.int32), log2, chosen)
        taken += tl.sum(ones, 0)


@triton.jit(do_not_specialize=["width", "out_stride", "table_stride", "log2", "keys_stride", "blocks_stride"])
def top_positions_kernel(
    scores,
    scores_stride,
    width,
    positions,
    owner,
    bins,
    entries,
    token_to_req,
    block_table,
    table_stride,
    log2,
    out,
    out_stride,
    slots,
    keys,
    keys_stride,
    blocks,
    blocks_stride,
    flags,
    flags_stride,
    RATIO: tl.constexpr,
    TOPK: tl.constexpr,
    TOPK_PADDED: tl.constexpr,
    STRIPE: tl.constexpr,
    STRIPES: tl.constexpr,
    PART: tl.constexpr,
    ROOM: tl.constexpr,
    FEW: tl.constexpr,
    SHORT: tl.constexpr,
    TILE: tl.constexpr,
    RIVALS: tl.constexpr,
    LONG: tl.constexpr,
    SPREAD: tl.constexpr,
    SIZE: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Grid (rows), or (rows, 2) where COUNT blocks of SIZE positions are chosen too. scores: [rows, width] float32,
    `scores_stride` apart, up to a row's length; positions: [rows] int64; owner: [rows] int64, negative for padding;
    bins: [rows, 4096] int32, see `index_scores.count_score`, zero again afterwards; entries: [rows, scores_stride +
    ROOM] int64, scratch, ROOM TOPK_PADDED or more and more than FEW; token_to_req: [rows] int32; block_table:
    [requests, n] int32; a page holds 2**log2 states. out: [rows, TOPK] int32 positions, `out_stride` apart, and slots:
    [rows, TOPK] int64, block * states + state, both -1 padded. keys, blocks, flags: see `candidates.choose_row`, rows
    their strides apart. STRIPES of STRIPE scores are taken at a time, counted and stored PART by PART; a list of up to
    FEW is compared with itself at once, one of up to SHORT TILE by TILE, RIVALS of them at a time, a longer one taken
    LONG at a time, and BLOCKS blocks; powers of two."""
    row = tl.program_id(0).to(tl.int64)
    closed = length(positions, owner, row, width, RATIO)
    scores += row * scores_stride
    if COUNT > 0 and tl.program_id(1) > 0:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
        its = keys + row * keys_stride, blocks + row * blocks_stride, flags + row * flags_stride
        choose_row(scores, closed, its[0], its[1], its[2], SIZE, COUNT, BLOCKS)
    else:
        table = block_table + tl.load(token_to_req + row).to(tl.int64) * table_stride
        item = tl.arange(0, TOPK_PADDED)
        # An input of the step, which is near thereafter.
        page = tl.load(table + item, (item << log2) < closed, other=0)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
        _select_row(
            scores, scores_stride + ROOM, closed, bins + row * BINS, entries + row * (scores_stride + ROOM), table,
            log2, out + row * out_stride, slots + row * TOPK, page,
            TOPK, TOPK_PADDED, STRIPE, STRIPES, PART, FEW, SHORT, TILE, RIVALS, LONG, SPREAD,
        )  # fmt: skip
