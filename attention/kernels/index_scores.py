"""An indexer's scores of the positions that a request holds, and how many lie where in the numbers' order.

A row's positions are spread over programs, which walk through tiles of them up to the row's own length. Keys are the
multiplications' wider side; FP8 numbers are multiplied as float16, which holds them all, so that products are exact.
"""

import triton
import triton.language as tl

WIDTH, TAIL, HALF = tl.constexpr(128), tl.constexpr(64), tl.constexpr(32)
LARGEST = tl.constexpr(448.0)
# How many bins there are; bits of an ordered number that its bin does not tell, and what 2**-20 is without them.
BINS, STEP_BITS, FIRST_STEP = tl.constexpr(4096), tl.constexpr(17), tl.constexpr((127 - 20) << 6)
LOWEST = tl.constexpr(-3.4028234663852886e38)
# No fewer than the rows of a step.
NEWEST = tl.constexpr(16)


@triton.jit
def ordered(score):
    """float32 as int32 in the same order; both zeros are one."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def bin_of(key):
    """An ordered number's bin; the largest are in bin 0. They are 64 to an octave: 32 octaves of either sign; what is
    closer to zero is in their innermost, what is farther in their outermost."""
    step = key >> STEP_BITS
    step = tl.where(key >= 0, tl.maximum(step - FIRST_STEP, 0), tl.minimum(step + FIRST_STEP, -1))
    return BINS // 2 - 1 - tl.minimum(tl.maximum(step, -BINS // 2), BINS // 2 - 1)


@triton.jit
def lowest_of(bin):
    """The lowest number of a bin; none of one that is not there, above all."""
    step = BINS // 2 - 1 - bin
    key = (step + tl.where(step > 0, FIRST_STEP, tl.where(step < 0, -FIRST_STEP, 0))) << STEP_BITS
    lowest = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    lowest = tl.where(step <= -BINS // 2, LOWEST, lowest)
    return tl.where(step >= BINS // 2, float("nan"), lowest)


@triton.jit
def length(positions, owner, row, width, RATIO: tl.constexpr):
    """Closed groups of a row's request, no more than the scores' columns; none of a padding row."""
    closed = (tl.load(positions + row) + 1) // RATIO
    return tl.where(tl.load(owner + row) >= 0, tl.minimum(closed, width), 0).to(tl.int32)


@triton.jit
def _page(cache, stride, table, log2, column, inside):
    """The pages that columns lie in."""
    return tl.multiple_of(cache + tl.load(table + (column >> log2), inside, other=0).to(tl.int64) * stride, 16)


@triton.jit
def _keys(page, log2, column, inside):
    """A tile's keys [n, 128] uint8 and their scales [n] float32, zeros where they are not wanted."""
    state = column & ((1 << log2) - 1)
    place = (page + state * WIDTH)[:, None] + tl.arange(0, WIDTH)[None, :]
    factor = (page + (WIDTH << log2) + state * 4).to(tl.pointer_type(tl.float32))
    # Past the first-level cache: read ahead of a wait, a line may hold scales that are not there yet.
    codes = tl.load(place, inside[:, None], other=0, cache_modifier=".cg")
    return codes, tl.load(factor, inside, other=0.0, cache_modifier=".cg")


@triton.jit
def turn_of(turn):
    """Cosines and sines of a query's or a key's 64 pairs, of which the last half turns."""
    pair = tl.arange(0, WIDTH // 2)
    last = pair >= (WIDTH - TAIL) // 2
    return tl.load(turn + pair - HALF, last, other=1.0), tl.load(turn + pair, last, other=0.0)


@triton.jit
def loaded_queries(q, weights, at, rows, row, HEADS: tl.constexpr, PADDED: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr):  # fmt: skip  # noqa: E501
    """The row's queries [heads, 128] bfloat16 as projected, and the heads' weights."""
    head, d = tl.arange(0, PADDED), tl.arange(0, WIDTH)
    inside = head < HEADS
    x = tl.load(q + (row * HEADS + head)[:, None] * WIDTH + d[None, :], inside[:, None], other=0.0)
    weight = tl.load(weights + row * N + at + head, inside, other=0.0)
    for split in tl.static_range(1, SPLITS):
        weight += tl.load(weights + (split * rows + row) * N + at + head, inside, other=0.0)
    return x, weight


@triton.jit
def turned_queries(loaded, turn, scale, PADDED: tl.constexpr):
    """Loaded queries, turned and quantized, as float16, and the heads' weights with their scales."""
    x, weight = loaded
    cos, sin = turn
    real, imaginary = tl.split(tl.reshape(x.to(tl.float32), (PADDED, WIDTH // 2, 2)))
    cos, sin = cos[None, :], sin[None, :]
    turned = tl.join(real * cos - imaginary * sin, imaginary * cos + real * sin)
    x = tl.reshape(turned, (PADDED, WIDTH)).to(tl.bfloat16).to(tl.float32)
    # A ceiling of a logarithm, taken from the bits.
    bits = (tl.maximum(tl.max(tl.abs(x), 1), 1e-4) * (1.0 / LARGEST)).to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 127 + ((bits & 0x7FFFFF) > 0).to(tl.int32)
    unit = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    codes = tl.clamp(x * unit[:, None], -LARGEST, LARGEST).to(tl.float8e4nv).to(tl.float16)
    factor = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    return codes, weight.to(tl.bfloat16).to(tl.float32) * factor * scale


@triton.jit
def count_score(bins, score, counted, SPREAD: tl.constexpr):
    """Adds to a row's bins, of which number b lies at b mod SPREAD of as many stretches. No number is never chosen."""
    counted = counted & (score == score) & (score > float("-inf"))
    bin = bin_of(ordered(score))
    place = bin % SPREAD * (BINS // SPREAD) + bin // SPREAD
    tl.atomic_add(bins + place, 1, counted, sem="relaxed")


@triton.jit
def _multipliable(codes):
    """Keys as float16."""
    return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)


@triton.jit
def _scored(keys, queries, weight):
    """Scores of a tile's keys and their scales."""
    dots = tl.dot(keys[0], tl.trans(queries))
    return tl.sum(tl.maximum(dots, 0.0) * weight[None, :], 1) * keys[1]


@triton.jit
def _leave(score, column, flags, scores, bins, known, FLAGS: tl.constexpr, SPREAD: tl.constexpr):
    """Stores and counts the scores of columns below `known`."""
    inside = column < known
    if FLAGS:
        flagged = inside & (tl.load(flags + column, inside, other=0) != 0)
        tl.store(scores + column, tl.where(flagged, score, float("-inf")), inside)
        count_score(bins, score, flagged, SPREAD)
    else:
        tl.store(scores + column, score, inside)
        count_score(bins, score, inside, SPREAD)


@triton.jit
def score_tiles(
    q, weights, rows, row, at, turn, table, cache, stride, log2, flags, scores, bins, scale, closed, settled,
    program, programs, HEADS: tl.constexpr, PADDED: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr,
    KEYS: tl.constexpr, HELD: tl.constexpr, FLAGS: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """What one of a row's `programs` does, waits included, with columns below `settled`, whose keys are there before
    the wait: those of its first HELD tiles, one or two, are not only asked for but also widened ahead of it, and in
    their place for the multiplication. What lies behind `settled` there, up to `closed`, is read and not used, so that
    no load waits to know."""
    tile, step = tl.arange(0, KEYS), programs * KEYS
    start = program * KEYS
    pages, asked, held = (), (), ()
    # Each for all tiles, before the first tile's is there.
    for i in tl.static_range(HELD):
        own = start + i * step + tile
        pages = pages + (_page(cache, stride, table, log2, own, own < closed),)  # type: ignore[assignment]  # noqa: RUF005
    for i in tl.static_range(HELD):
        own = start + i * step + tile
        asked = asked + (_keys(pages[i], log2, own, own < closed),)  # type: ignore[assignment]  # noqa: RUF005
    for i in tl.static_range(HELD):
        held = held + ((_multipliable(asked[i][0]), asked[i][1]),)  # type: ignore[assignment]  # noqa: RUF005
    turned = turn_of(turn)
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    if start < settled:
        loaded = loaded_queries(q, weights, at, rows, row, HEADS, PADDED, N, SPLITS)
        queries, weight = turned_queries(loaded, turned, scale, PADDED)
        score, column = _scored(held[0], queries, weight), start + tile  # type: ignore[misc]
        if HELD == 2:
            score = tl.join(score, _scored(held[1], queries, weight))  # type: ignore[misc]
            column = tl.join(column, column + step)
        _leave(score, column, flags, scores, bins, settled, FLAGS, SPREAD)
        start += HELD * step
        if start < settled:
            page = _page(cache, stride, table, log2, start + tile, start + tile < settled)
            codes, key_scale = _keys(page, log2, start + tile, start + tile < settled)
            for first in range(start, settled, step):
                keys = _multipliable(codes), key_scale
                # The next tile's are on their way meanwhile.
                ahead = first + step + tile
                page = _page(cache, stride, table, log2, ahead, ahead < settled)
                codes, key_scale = _keys(page, log2, ahead, ahead < settled)
                found = _scored(keys, queries, weight)
                _leave(found, first + tile, flags, scores, bins, settled, FLAGS, SPREAD)


@triton.jit
def _score_newest(
    q, weights, rows, row, at, turn, table, cache, stride, log2, flags, scores, bins, scale, closed, settled,
    HEADS: tl.constexpr, PADDED: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr, FLAGS: tl.constexpr,
    SPREAD: tl.constexpr,
):  # fmt: skip
    """Likewise, waits included, with the columns from `settled` on, up to 16, whose keys this step may have made."""
    column, turned = settled + tl.arange(0, NEWEST), turn_of(turn)
    page = _page(cache, stride, table, log2, column, column < closed)
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    if settled < closed:
        loaded = loaded_queries(q, weights, at, rows, row, HEADS, PADDED, N, SPLITS)
        codes, key_scale = _keys(page, log2, column, column < closed)
        queries, weight = turned_queries(loaded, turned, scale, PADDED)
        score = _scored((_multipliable(codes), key_scale), queries, weight)
        _leave(score, column, flags, scores, bins, closed, FLAGS, SPREAD)


@triton.jit(do_not_specialize=["rows", "table_stride", "log2", "flags_stride", "width", "at"])
def index_scores_kernel(
    q,
    weights,
    rows,
    at,
    positions,
    cos_sin,
    owner,
    token_to_req,
    block_table,
    table_stride,
    cache,
    stride,
    log2,
    flags,
    flags_stride,
    scores,
    scores_stride,
    width,
    bins,
    scale,
    HEADS: tl.constexpr,
    PADDED: tl.constexpr,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    RATIO: tl.constexpr,
    KEYS: tl.constexpr,
    HELD: tl.constexpr,
    FLAGS: tl.constexpr,
    SPREAD: tl.constexpr,
):
    """Grid (1 + programs, rows), of which a row's first has the newest keys. q: [rows, HEADS, 128] bfloat16, not
    rotated; weights: [SPLITS, rows, N] float32, the heads' from column `at` on; positions: [rows] int64; cos_sin:
    [positions, 64] float32; owner: [rows] int64, negative for padding; token_to_req: [rows] int32; block_table:
    [requests, n] int32; cache: uint8 pages of 2**log2 index keys (see `attention.reference`), `stride` bytes apart;
    flags: FLAGS alone: [rows, width] uint8, of which 0 scores -inf; scores: [rows, width] float32, up to the row's
    length; bins: [rows, 4096] int32, to which the numbers found are added, see `count_score`. Rows of flags and scores
    lie their strides apart. PADDED: a power of two of heads; HELD: see `score_tiles`."""
    row = tl.program_id(1).to(tl.int64)
    # Inputs of the step.
    closed = length(positions, owner, row, width, RATIO)
    table = block_table + tl.load(token_to_req + row).to(tl.int64) * table_stride
    turn = cos_sin + tl.load(positions + row) * TAIL
    # A request's keys of this step are no more than it has rows.
    settled = tl.maximum(closed - rows, 0)
    if tl.program_id(0) == 0:
        _score_newest(
            q, weights, rows, row, at, turn, table, cache, stride, log2, flags + row * flags_stride,
            scores + row * scores_stride, bins + row * BINS, scale, closed, settled,
            HEADS, PADDED, N, SPLITS, FLAGS, SPREAD,
        )  # fmt: skip
    else:
        score_tiles(
            q, weights, rows, row, at, turn, table, cache, stride, log2, flags + row * flags_stride,
            scores + row * scores_stride, bins + row * BINS, scale, closed, settled, tl.program_id(0) - 1,
            tl.num_programs(0) - 1, HEADS, PADDED, N, SPLITS, KEYS, HELD, FLAGS, SPREAD,
        )  # fmt: skip
