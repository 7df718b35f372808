"""The candidate source's blocks of positions: those whose best score is among the largest, and a flag a position.

A row of no more blocks than are chosen takes them all, in one pass. Of a longer one the last block's number is found by
its bits, eight at a time; of blocks that are alike the earlier are chosen.
"""

import triton
import triton.language as tl

from specialized_decode.attention.kernels.index_scores import ordered

DIGIT, DIGITS, PASSES = tl.constexpr(8), tl.constexpr(256), tl.constexpr(4)
# Of a block without a score, below all others, and of a row's newest, which is infinity's.
NONE, NEWEST = tl.constexpr(-(1 << 31)), tl.constexpr(0x7F800000)


@triton.jit
def _best(scores, block, held, closed, SIZE: tl.constexpr):
    """The blocks' best scores as ordered numbers; of one with a score that is no number NONE."""
    column = block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    score = tl.load(scores + column, column < closed, other=float("-inf"), cache_modifier=".cg")
    whole = tl.max((score != score).to(tl.int32), 1) == 0
    best = tl.max(score, 1)
    key = tl.where(whole & (best > float("-inf")), ordered(best), NONE)
    return tl.where(block == held - 1, NEWEST, key)


@triton.jit
def _digit(key, shift):
    """Bits of a number, those of the largest number largest, and what lies above them."""
    rank = key.to(tl.uint32, bitcast=True) ^ 0x80000000
    return ((rank >> shift) & (DIGITS - 1)).to(tl.int32), (rank.to(tl.uint64) >> (shift + DIGIT)).to(tl.int64)


@triton.jit
def _last(keys, held, block, COUNT: tl.constexpr, TILE: tl.constexpr):
    """The COUNT-th largest of `held` numbers, and how many that are like it are among the COUNT."""
    digit = tl.arange(0, DIGITS)
    known, wanted = tl.full((), 0, tl.int64), tl.full((), COUNT, tl.int32)
    for i in tl.range(0, PASSES):
        shift = DIGIT * (PASSES - 1 - i)
        counts = tl.zeros((DIGITS,), tl.int32)
        for start in range(0, held, TILE):
            inside = start + block < held
            its, above = _digit(tl.load(keys + start + block, inside, other=NONE, cache_modifier=".cg"), shift)
            counts += tl.histogram(its, DIGITS, mask=inside & (above == known))
        behind = tl.cumsum(counts, 0, reverse=True)
        found = tl.max(tl.where(behind >= wanted, digit, 0), 0)
        wanted -= tl.sum(tl.where(digit > found, counts, 0), 0)
        known = (known << DIGIT) | found
    return (known - (1 << 31)).to(tl.int32), wanted


@triton.jit
def _keep(blocks, flags, block, chosen, held, taken, SIZE: tl.constexpr):
    """Stores a tile's chosen blocks behind those `taken`, and the flags of all -> how many are taken then."""
    ones = chosen.to(tl.int32)
    tl.store(blocks + taken + tl.cumsum(ones, 0) - ones, block, chosen)
    column = block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    flag = tl.broadcast_to(ones.to(tl.uint8)[:, None], column.shape)
    tl.store(flags + column, flag, (block < held)[:, None])
    return taken + tl.sum(ones, 0)


@triton.jit
def choose_row(
    scores, closed, keys, blocks, flags, SIZE: tl.constexpr, COUNT: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """What a row's program does behind its wait. scores: [closed] float32; keys: [blocks of the row] int32, scratch,
    of a row of more than COUNT blocks alone. blocks: [COUNT] int32, the chosen in order, -1 padded; flags: uint8, 1 for
    a chosen block's columns and 0 for others, up to the last block that has one of `closed`. SIZE: columns of a block,
    TILE: blocks taken at a time; powers of two."""
    held = tl.cdiv(closed, SIZE)
    tile, taken = tl.arange(0, TILE), tl.full((), 0, tl.int32)
    if held <= COUNT:
        for start in range(0, held, TILE):
            chosen = _best(scores, start + tile, held, closed, SIZE) > NONE
            taken = _keep(blocks, flags, start + tile, chosen, held, taken, SIZE)
    else:
        for start in range(0, held, TILE):
            block = start + tile
            tl.store(keys + block, _best(scores, block, held, closed, SIZE), block < held)
        # What the program's other threads have stored.
        tl.debug_barrier()
        last, wanted = _last(keys, held, tile, COUNT, TILE)
        alike = tl.full((), 0, tl.int32)
        for start in range(0, held, TILE):
            block = start + tile
            key = tl.load(keys + block, block < held, other=NONE, cache_modifier=".cg")
            same = (key == last) & (key > NONE)
            ones = same.to(tl.int32)
            chosen = (key > last) | (same & (alike + tl.cumsum(ones, 0) - ones < wanted))
            taken = _keep(blocks, flags, block, chosen, held, taken, SIZE)
            alike += tl.sum(ones, 0)
    for start in range(taken // TILE * TILE, COUNT, TILE):
        place = start + tile
        tl.store(blocks + place, tl.full((TILE,), -1, tl.int32), (place >= taken) & (place < COUNT))
