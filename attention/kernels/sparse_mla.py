"""Sparse MLA of decode rows: RoPE, attention over the window and the selected positions, inverse RoPE, in one launch.

Keys are the multiplications' 64-wide side and heads the narrow one, so that few heads are not padded to 64. A row's
keys are split over programs, and the last one to arrive adds the splits up; or, where all of a launch runs at once,
each waits for the others and adds up a share. Slices of a row's 512 output columns are programs too: each computes all
scores of its keys again, and adds up its own columns alone; so the adding up is spread.
Records are 584 bytes (see `attention.reference`); one of 512 columns is eight blocks of 64, the last of them rotated.
"""

import triton
import triton.language as tl

from specialized_decode.attention.kernels.norm_insert import insert_record, latent_weight, normed_latent

BLOCK = tl.constexpr(64)
HALF = tl.constexpr(32)
DATA, SCALES = tl.constexpr(576), tl.constexpr(8)
WIDTH, QUANTIZED = tl.constexpr(512), tl.constexpr(448)
# Words of a record's quantized columns, and those taken at a time.
CODES, PART = tl.constexpr(112), tl.constexpr(32)
# What a launch adds to a counter in all, so that counters need not be set back: more than splits.
ROUND = tl.constexpr(4096)
# Finite, so that differences of peaks are numbers; no score is below it.
LOWEST = tl.constexpr(-3.0e38)
TINY = tl.constexpr(1.1754944e-38)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def dequantized(word, scale):
    """Four e4m3 codes times a power of two, bfloat16; exact. word, scale: int32, the second twice a bfloat16. A code's
    bits in place are the number times 2^-120, subnormals too; a code that is no number counts as 480."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 low, high, rest, unit;
        mov.b32 unit, 0x7b807b80;
        prmt.b32 low, $4, 0, 0x1404;
        prmt.b32 high, $4, 0, 0x3424;
        shr.u32 rest, low, 4;
        and.b32 rest, rest, 0x07f007f0;
        and.b32 low, low, 0x80008000;
        or.b32 low, low, rest;
        mul.rn.bf16x2 low, low, unit;
        mul.rn.bf16x2 low, low, $5;
        shr.u32 rest, high, 4;
        and.b32 rest, rest, 0x07f007f0;
        and.b32 high, high, 0x80008000;
        or.b32 high, high, rest;
        mul.rn.bf16x2 high, high, unit;
        mul.rn.bf16x2 high, high, $5;
        mov.b32 {$0, $1}, low;
        mov.b32 {$2, $3}, high;
        }""",
        "=h,=h,=h,=h,r,r",
        [word, scale],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _records(
    window_cache, window_stride, window_slots, cache, stride, selected_slots, row, tile, new,
    window_log2, log2, KEYS: tl.constexpr, WINDOW: tl.constexpr, TOPK: tl.constexpr,
):  # fmt: skip
    """A tile's keys: where each record and its eight scale bytes lie, whether there is one, and whether it is not or is
    among the window's `new` last ones. The cache is chosen by numbers, not by a branch, through which the compiler
    would forget how addresses are aligned."""
    WINDOW_TILES: tl.constexpr = (WINDOW + KEYS - 1) // KEYS
    base, table, count = window_cache.to(tl.int64), window_slots.to(tl.int64), WINDOW
    oldest = WINDOW - new
    if TOPK > 0:
        window = tile < WINDOW_TILES
        base, table = tl.where(window, base, cache.to(tl.int64)), tl.where(window, table, selected_slots.to(tl.int64))
        count, log2 = tl.where(window, count, TOPK), tl.where(window, window_log2, log2)
        stride, tile = tl.where(window, window_stride, stride), tl.where(window, tile, tile - WINDOW_TILES)
        oldest = tl.where(window, oldest, TOPK)
    else:
        stride, log2 = window_stride, window_log2
    column = tile * KEYS + tl.arange(0, KEYS)
    slots = tl.load(table.to(tl.pointer_type(tl.int64)) + row * count + column, column < count, other=-1)
    valid = slots >= 0
    # Pages hold a power of two of states.
    states = 1 << log2
    state = slots & (states - 1)
    page = tl.multiple_of(base.to(tl.pointer_type(tl.uint8)), 16) + (slots >> log2) * stride
    scales = (page + states * DATA + state * SCALES).to(tl.pointer_type(tl.int64))
    data = (page + state * DATA).to(tl.pointer_type(tl.int32))
    return data, scales, valid, valid & (column < oldest), valid & (column >= oldest)


@triton.jit
def _scales(place, valid):
    """The last byte is no scale."""
    return tl.load(place, valid, other=0) & 0xFFFFFFFFFFFFFF


@triton.jit
def _words(data, valid, first, N: tl.constexpr, END: tl.constexpr):
    """N words of a tile's records from `first` on, [KEYS, N] int32, 0 from END on."""
    word = tl.arange(0, N) + first
    return tl.load(data[:, None] + word[None, :], valid[:, None] & (word[None, :] < END), other=0)


@triton.jit
def _quantized(words, scales, first):
    """Words from `first` on of the quantized columns as numbers, [KEYS, 4 words] bfloat16."""
    block = (tl.arange(0, words.shape[1]) + first) // (BLOCK // 4)
    scale = ((scales[:, None] >> (block * 8)[None, :]) & 255).to(tl.int32)
    a, b, c, d = dequantized(words, scale << 7 | scale << 23)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (words.shape[0], 4 * words.shape[1]))


@triton.jit
def _rotated(words):
    """Words of the rotated columns as numbers, [KEYS, 2 words] bfloat16."""
    low, high = words.to(tl.int16), (words >> 16).to(tl.int16)
    return tl.reshape(tl.join(low, high), (words.shape[0], 2 * words.shape[1])).to(tl.bfloat16, bitcast=True)


@triton.jit
def _all_words(data, valid):
    """A tile's records, in four parts of 32 words (the last 16 are 0) and the 32 of the rotated columns."""
    return (
        _words(data, valid, 0, PART, CODES),
        _words(data, valid, PART, PART, CODES),
        _words(data, valid, 2 * PART, PART, CODES),
        _words(data, valid, 3 * PART, PART, CODES),
        _words(data, valid, CODES, PART, CODES + PART),
    )


@triton.jit
def _keys(words, scales, zero):
    """All columns of a tile's keys, in four parts of 128 (the last 64 are 0) and the 64 rotated ones. All of it is
    asked for before any of it is looked at: the first number needs the last load, as far as the compiler can tell."""
    held = (words[0] ^ words[1] ^ words[2] ^ words[3] ^ words[4]) & zero
    return (
        _quantized(words[0] | held, scales, 0),
        _quantized(words[1] | held, scales, PART),
        _quantized(words[2] | held, scales, 2 * PART),
        _quantized(words[3] | held, scales, 3 * PART),
        _rotated(words[4] | held),
    )


@triton.jit
def _over(words, data, fresh, first, N: tl.constexpr, END: tl.constexpr):
    """Those words of a tile with the fresh keys' read again."""
    word = tl.arange(0, N) + first
    return tl.load(data[:, None] + word[None, :], fresh[:, None] & (word[None, :] < END), other=words)


@triton.jit
def _all_over(words, data, fresh):
    """As `_all_words`."""
    return (
        _over(words[0], data, fresh, 0, PART, CODES),
        _over(words[1], data, fresh, PART, PART, CODES),
        _over(words[2], data, fresh, 2 * PART, PART, CODES),
        _over(words[3], data, fresh, 3 * PART, PART, CODES),
        _over(words[4], data, fresh, CODES, PART, CODES + PART),
    )


@triton.jit
def _new_rows(token_to_req, slot_mapping, row, ROWS: tl.constexpr):
    """The rows of this one's request up to it, whose records this step brings: this one and those just before it; 0 for
    a padding row."""
    other = tl.arange(0, ROWS)
    request = tl.load(token_to_req + other, other <= row, other=-1)
    live = tl.load(slot_mapping + other, other <= row, other=-1) >= 0
    same = live & (request == tl.load(token_to_req + row))
    return tl.where(tl.load(slot_mapping + row) >= 0, tl.sum(same.to(tl.int32), 0), 0)


@triton.jit
def _insert(
    latents, latent_stride, kv_norm, eps, positions, cos_sin, slot_mapping, cache, stride, log2, row, new
):  # fmt: skip
    """Stores the records of `row` and of the rows just before it, `new` in all, in the window's cache, where this
    program finds them afterwards. Programs that share a record store the same bytes."""
    for i in range(new):
        own = row - i
        slot = tl.load(slot_mapping + own)
        weight = latent_weight(kv_norm)
        turn = cos_sin + tl.load(positions + own) * BLOCK
        latent = normed_latent(latents + own * latent_stride, weight, eps)
        cos, sin = tl.load(turn + tl.arange(0, HALF)), tl.load(turn + HALF + tl.arange(0, HALF))
        insert_record(latent, cos, sin, cache + (slot >> log2) * stride, slot & ((1 << log2) - 1), log2)
    tl.debug_barrier()


@triton.jit
def _turned(x, cos, sin):
    """Pairs of x [heads, n] turned, float32; cos, sin: [n / 2]."""
    real, imaginary = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    turned = tl.join(
        real * cos[None, :] - imaginary * sin[None, :],
        imaginary * cos[None, :] + real * sin[None, :],
    )
    return tl.reshape(turned, x.shape)


@triton.jit
def _query(q, at, inside, part: tl.constexpr):
    """128 columns of the queries, [128, heads], 0 behind the quantized columns' counterparts."""
    column = tl.arange(0, 4 * PART) + part * 4 * PART
    wanted = inside[None, :] & (column[:, None] < QUANTIZED)
    return tl.load(q + at[None, :] + column[:, None], wanted, other=0.0)


@triton.jit
def _last_query(q, at, inside, cos, sin):
    """The queries' last columns, turned, [64, heads]."""
    column = tl.arange(0, BLOCK) + QUANTIZED
    last = tl.load(q + at[:, None] + column[None, :], inside[:, None], other=0.0)
    return tl.trans(_turned(last.to(tl.float32), cos, sin).to(tl.bfloat16))


@triton.jit
def _queries(q, at, inside, cos, sin):
    return (
        _query(q, at, inside, 0),
        _query(q, at, inside, 1),
        _query(q, at, inside, 2),
        _query(q, at, inside, 3),
        _last_query(q, at, inside, cos, sin),
    )


@triton.jit
def _scores(keys, queries):
    scores = tl.dot(keys[4], queries[4])
    scores = tl.dot(keys[0], queries[0], scores)
    scores = tl.dot(keys[1], queries[1], scores)
    scores = tl.dot(keys[2], queries[2], scores)
    return tl.dot(keys[3], queries[3], scores)


@triton.jit
def _weights(scores, valid, factor, peak, total):
    """A tile's weights in the running softmax (Milakov and Gimelshein, 2018), in powers of two, and what becomes of its
    peak, its total and the factor of what was added up before."""
    scores = tl.where(valid[:, None], scores * factor, float("-inf"))
    highest = tl.maximum(peak, tl.max(scores, 0))
    kept = tl.exp2(peak - highest)
    weights = tl.exp2(scores - highest[None, :])
    return weights.to(tl.bfloat16), highest, total * kept + tl.sum(weights, 0), kept


@triton.jit
def _add(sums, kept, keys, data, scales, valid, weights, part, SLICES: tl.constexpr):
    """Adds a tile to the sums [columns, heads] of the slice's columns, in parts of 128, and of the rotated ones."""
    added = ()
    if SLICES == 1:
        for i in tl.static_range(4):
            added = added + (tl.dot(tl.trans(keys[i]), weights, sums[i] * kept[None, :]),)  # type: ignore[assignment]  # noqa: RUF005
    else:
        COLUMNS: tl.constexpr = WIDTH // SLICES
        N: tl.constexpr = COLUMNS // 4 if COLUMNS < 4 * PART else PART
        for i in tl.static_range(COLUMNS // 4 // N):
            # In the first-level cache by now.
            first = part * (COLUMNS // 4) + i * N
            values = _quantized(_words(data, valid, first, N, CODES), scales, first)
            added = added + (tl.dot(tl.trans(values), weights, sums[i] * kept[None, :]),)  # type: ignore[assignment]  # noqa: RUF005
    return added + (tl.dot(tl.trans(keys[4]), weights, sums[len(added)] * kept[None, :]),)  # noqa: RUF005


@triton.jit
def _no_sums(GROUP: tl.constexpr, SLICES: tl.constexpr):
    COLUMNS: tl.constexpr = WIDTH // SLICES
    N: tl.constexpr = COLUMNS if COLUMNS < 4 * PART else 4 * PART
    sums = ()
    for _ in tl.static_range(COLUMNS // N):
        sums = sums + (tl.zeros((N, GROUP), tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    return sums + (tl.zeros((BLOCK, GROUP), tl.float32),)  # noqa: RUF005


@triton.jit
def _store(out, at, inside, result, column):
    """Head outputs [columns, heads] float32, but for the rotated ones."""
    wanted = inside[:, None] & (column < QUANTIZED)[None, :]
    tl.store(out + at[:, None] + column[None, :], tl.trans(result).to(tl.bfloat16), wanted)


@triton.jit
def _store_rotated(out, at, inside, result, cos, sin):
    """The last columns [64, heads] float32, turned back, of heads inside."""
    column = tl.arange(0, BLOCK) + QUANTIZED
    tl.store(out + at[:, None] + column[None, :], _turned(tl.trans(result), cos, -sin).to(tl.bfloat16), inside[:, None])


# One kernel for every layer of a step.
@triton.jit(do_not_specialize=["heads", "window_log2", "log2", "zero", "eps"])
def sparse_mla_kernel(
    q,
    positions,
    cos_sin,
    sinks,
    window_cache,
    window_stride,
    window_slots,
    cache,
    stride,
    selected_slots,
    partial,
    statistics,
    arrived,
    out,
    scale,
    heads,
    window_log2,
    log2,
    zero,
    latents,
    latent_stride,
    kv_norm,
    eps,
    token_to_req,
    slot_mapping,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    TOPK: tl.constexpr,
    KEYS: tl.constexpr,
    TILES: tl.constexpr,
    SPLITS: tl.constexpr,
    SLICES: tl.constexpr,
    SETTLED: tl.constexpr,
    EARLY: tl.constexpr,
    SPREAD: tl.constexpr,
    INSERT: tl.constexpr,
):
    """Grid (SPLITS, head groups x SLICES, rows). q, out: [rows, heads, 512] bfloat16, not rotated; positions: [rows]
    int64; cos_sin: [positions, 64] float32; sinks: [heads] float32; caches: uint8, block strides in bytes, the binary
    logarithm of a page's states; slots: [rows, WINDOW] and [rows, TOPK] int64, -1 for none, TOPK 0 without a compressed
    cache; zero: 0, which the compiler must not know; partial: [programs, 512 / SLICES, GROUP] float32 and
    statistics: [programs, GROUP] float32; arrived: int32 a row, group and slice, multiples of ROUND, zero at first.
    GROUP: a power of two of at least 16 heads. TILES: tiles of KEYS keys a split. SETTLED: what launches before the
    preceding one wrote, see `attention.mla.Settled`. EARLY: the next launch may start beside this one. SPREAD: splits
    wait for each other, so all of the launch must fit on the GPU at once. INSERT: none, or at least as many as there
    are rows: latents, whose rows begin latent_stride apart, [rows, 512] bfloat16, written by a launch before the
    preceding one too, are normed by kv_norm [512] bfloat16, turned, and stored in the
    window's cache at slot_mapping [rows] int64, -1 for none; token_to_req: [rows] int32."""
    COLUMNS: tl.constexpr = WIDTH // SLICES
    WINDOW_TILES: tl.constexpr = (WINDOW + KEYS - 1) // KEYS
    ALL_TILES: tl.constexpr = WINDOW_TILES + (TOPK + KEYS - 1) // KEYS
    split, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    part, group = tl.program_id(1) % SLICES, tl.program_id(1) // SLICES
    head = group * GROUP + tl.arange(0, GROUP)
    inside = head < heads
    at = (row * heads + head) * WIDTH
    first = split * TILES
    # What depends on nothing that may still run is on its way, and converted, before the grid dependency resolves.
    pair = tl.arange(0, HALF)
    turn = cos_sin + tl.load(positions + row) * BLOCK
    cos, sin = tl.load(turn + pair), tl.load(turn + HALF + pair)
    sink = tl.load(sinks + head, inside, other=0.0) * LOG2_E
    if SETTLED == 0:
        tl.extra.cuda.gdc_wait()
    if SETTLED == 2:
        queries = _queries(q, at, inside, cos, sin)
        if first >= WINDOW_TILES:
            tl.extra.cuda.gdc_wait()
    new = 0
    if INSERT > 0:
        new = _new_rows(token_to_req, slot_mapping, row, INSERT)
        ours = (first < WINDOW_TILES) & ((first + TILES) * KEYS > WINDOW - new)
        new = tl.where(ours, new, 0)
    data, place, valid, old, fresh = _records(
        window_cache, window_stride, window_slots, cache, stride, selected_slots, row, first, new,
        window_log2, log2, KEYS, WINDOW, TOPK,
    )  # fmt: skip
    if INSERT > 0:
        # Old records are on their way meanwhile.
        words = _all_words(data, old)
        _insert(
            latents, latent_stride, kv_norm, eps, positions, cos_sin, slot_mapping, window_cache, window_stride,
            window_log2, row, new,
        )  # fmt: skip
        words = _all_over(words, data, fresh)
        scales = _scales(place, valid)
    else:
        scales, words = _scales(place, valid), _all_words(data, valid)
    keys = _keys(words, scales, zero)
    if SETTLED > 0:
        tl.extra.cuda.gdc_wait()
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if SETTLED < 2:
        queries = _queries(q, at, inside, cos, sin)
    peak, total = tl.full((GROUP,), LOWEST, tl.float32), tl.zeros((GROUP,), tl.float32)
    weights, peak, total, kept = _weights(_scores(keys, queries), valid, scale * LOG2_E, peak, total)
    sums = _add(_no_sums(GROUP, SLICES), kept, keys, data, scales, valid, weights, part, SLICES)
    if TILES > 1:
        for tile in range(first + 1, tl.minimum(first + TILES, ALL_TILES)):
            data, place, valid, _, _ = _records(
                window_cache, window_stride, window_slots, cache, stride, selected_slots, row, tile, 0,
                window_log2, log2, KEYS, WINDOW, TOPK,
            )  # fmt: skip
            scales = _scales(place, valid)
            keys = _keys(_all_words(data, valid), scales, zero)
            weights, peak, total, kept = _weights(_scores(keys, queries), valid, scale * LOG2_E, peak, total)
            sums = _add(sums, kept, keys, data, scales, valid, weights, part, SLICES)
    N: tl.constexpr = COLUMNS if COLUMNS < 4 * PART else 4 * PART
    column = tl.arange(0, N) + part * COLUMNS
    if SPLITS == 1:
        highest = tl.maximum(peak, sink)
        kept = tl.exp2(peak - highest)
        kept = kept / tl.maximum(total * kept + tl.exp2(sink - highest), TINY)
        for i in tl.static_range(COLUMNS // N):
            _store(out, at, inside, sums[i] * kept[None, :], column + i * N)
        if part == SLICES - 1:
            _store_rotated(out, at, inside, sums[COLUMNS // N] * kept[None, :], cos, sin)
    else:
        own = (row * tl.num_programs(1) + tl.program_id(1)) * SPLITS
        local = tl.arange(0, GROUP)
        # Averages of the slice's columns, of which the rotated ones are the last slice's last.
        inverse = (1 / tl.maximum(total, TINY))[None, :]
        place = partial + (own + split) * (COLUMNS * GROUP) + local[None, :]
        for i in tl.static_range(COLUMNS // N):
            quantized = (column + i * N < QUANTIZED)[:, None]
            own_column = (tl.arange(0, N) + i * N)[:, None]
            tl.store(place + own_column * GROUP, sums[i] * inverse, quantized & (local >= 0)[None, :])
        if part == SLICES - 1:
            last = (tl.arange(0, BLOCK) + COLUMNS - BLOCK)[:, None]
            tl.store(place + last * GROUP, sums[COLUMNS // N] * inverse)
        size = tl.maximum(peak + tl.log2(total), LOWEST)
        tl.store(statistics + (own + split) * GROUP + local, size)
        # A row's first split brings what the others leave.
        share = tl.where(split == 0, ROUND - SPLITS + 1, 1)
        tl.debug_barrier()
        now = tl.atomic_add(arrived + own // SPLITS, share, sem="acq_rel") + share
        if SPREAD:
            _add_up_share(
                partial, statistics, arrived + own // SPLITS, now, own, split, part, sink, turn, out, at, inside,
                GROUP, SPLITS, COLUMNS,
            )  # fmt: skip
        elif now % ROUND == 0:
            rotates = part == SLICES - 1
            # All that one trip to the second-level cache can bring.
            sizes = _sizes(statistics + own * GROUP, GROUP, SPLITS)
            averages = _averages(partial, own, COLUMNS - BLOCK, BLOCK, GROUP, SPLITS, COLUMNS)
            shares = _shares(sizes, sink, SPLITS)
            mixed, chunk = _mixed(averages, shares, SPLITS), part * COLUMNS + tl.arange(0, BLOCK)
            # A turn by nothing, where there is none to make.
            turned = _turned(tl.trans(mixed), tl.where(rotates, cos, 1.0), tl.where(rotates, -sin, 0.0))
            tl.store(out + at[:, None] + (chunk + COLUMNS - BLOCK)[None, :], turned.to(tl.bfloat16), inside[:, None])
            for i in tl.static_range(COLUMNS // BLOCK - 1):
                mixed = _mixed(_averages(partial, own, i * BLOCK, BLOCK, GROUP, SPLITS, COLUMNS), shares, SPLITS)
                result = tl.trans(mixed).to(tl.bfloat16)
                tl.store(out + at[:, None] + (chunk + i * BLOCK)[None, :], result, inside[:, None])


# What other programs left is read past the first-level cache, which may hold what has been replaced since. A thread
# reads the sizes of the heads that it adds up: they are few, and it need not wait for another.
@triton.jit
def _sizes(place, GROUP: tl.constexpr, SPLITS: tl.constexpr):
    """The binary logarithms of the splits' totals, [heads] each."""
    sizes = ()
    for s in tl.static_range(SPLITS):
        size = tl.load(place + s * GROUP + tl.arange(0, GROUP), cache_modifier=".cg")
        sizes = sizes + (size,)  # type: ignore[assignment]  # noqa: RUF005
    return sizes


@triton.jit
def _shares(sizes, sink, SPLITS: tl.constexpr):
    """What each split's average counts for, [heads] each."""
    highest = sink
    for s in tl.static_range(SPLITS):
        highest = tl.maximum(highest, sizes[s])
    total, shares = tl.exp2(sink - highest), ()
    for s in tl.static_range(SPLITS):
        share = tl.exp2(sizes[s] - highest)
        # A split without keys counts for nothing, even where there is nothing else.
        share = tl.where(sizes[s] > LOWEST, share, 0.0)
        total += share
        shares = shares + (share,)  # type: ignore[assignment]  # noqa: RUF005
    inverse, parts = 1 / tl.maximum(total, TINY), ()
    for s in tl.static_range(SPLITS):
        parts = parts + (shares[s] * inverse,)  # type: ignore[assignment]  # noqa: RUF005
    return parts


@triton.jit
def _averages(partial, own, first, N: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr):
    """N of the slice's columns of all splits, [N, heads] each."""
    column, local = tl.arange(0, N)[:, None] + first, tl.arange(0, GROUP)[None, :]
    place = partial + own * (COLUMNS * GROUP) + column * GROUP + local
    averages = ()
    for s in tl.static_range(SPLITS):
        average = tl.load(place + s * (COLUMNS * GROUP), cache_modifier=".cg")
        averages = averages + (average,)  # type: ignore[assignment]  # noqa: RUF005
    return averages


@triton.jit
def _mixed(averages, shares, SPLITS: tl.constexpr):
    """The splits' averages by their shares, added up in their order whoever comes last; [columns, heads] float32."""
    result = averages[0] * shares[0][None, :]
    for s in tl.static_range(1, SPLITS):
        result += averages[s] * shares[s][None, :]
    return result


@triton.constexpr_function
def _sharers(splits):
    """Splits that add up a share."""
    return 8 if splits >= 8 else (4 if splits >= 4 else 2)


@triton.jit
def _all_arrived(counter, now):
    """Waits until a counter, `now` at this program's own arrival, is at its next multiple of ROUND; 0. After some
    seconds, 2^25 trips to the second-level cache, it ends the launch with an error."""
    return tl.inline_asm_elementwise(
        """{
        .reg .pred there, late;
        .reg .b32 seen, left, trips;
        mov.b32 seen, $2;
        mov.b32 trips, 0;
        await:
        and.b32 left, seen, 4095;
        setp.eq.u32 there, left, 0;
        @there bra arrived;
        ld.acquire.gpu.global.u32 seen, [$1];
        add.u32 trips, trips, 1;
        setp.gt.u32 late, trips, 33554432;
        @late trap;
        bra await;
        arrived:
        mov.b32 $0, 0;
        }""",
        "=r,l,r",
        [counter, now],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _add_up_share(
    partial, statistics, counter, now, own, split, part, sink, turn, out, at, inside,
    GROUP: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Adds up this split's share of the slice's columns, once all splits' averages are there. A share lies within the
    rotated columns or outside."""
    MOST: tl.constexpr = _sharers(SPLITS)
    SHARE: tl.constexpr = COLUMNS // MOST
    N: tl.constexpr = SHARE if SHARE < BLOCK else BLOCK
    if split < MOST:
        pair = tl.arange(0, N // 2)
        # As far as the compiler can tell, what is read lies where the wait says.
        moved = _all_arrived(counter, now)
        partial, statistics = partial + moved, statistics + moved
        sizes = _sizes(statistics + own * GROUP, GROUP, SPLITS)
        for i in tl.static_range(SHARE // N):
            begin = split * SHARE + i * N
            column = part * COLUMNS + begin
            averages = _averages(partial, own, begin, N, GROUP, SPLITS, COLUMNS)
            # A turn by nothing, where there is none to make.
            angle, rotates = turn + (column - QUANTIZED) // 2 + pair, column >= QUANTIZED
            cos, sin = tl.load(angle, rotates, other=1.0), tl.load(angle + HALF, rotates, other=0.0)
            mixed = _mixed(averages, _shares(sizes, sink, SPLITS), SPLITS)
            turned = _turned(tl.trans(mixed), cos, -sin).to(tl.bfloat16)
            tl.store(out + at[:, None] + (column + tl.arange(0, N))[None, :], turned, inside[:, None])
