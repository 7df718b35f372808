"""An indexer's scores, and in the same launch what its layer adds to the caches.

Scores of positions of earlier steps need no key of this one. So the compressor's programs run beside theirs, and score
the keys that they make themselves, for all rows of the key's request that may select it.
"""

import triton
import triton.language as tl

from specialized_decode.attention.kernels.index_inputs import (
    insert_key,
    key_ahead,
    made_key,
    normed_row,
    row_ahead,
    store_row,
)
from specialized_decode.attention.kernels.index_scores import (
    BINS,
    TAIL,
    count_score,
    length,
    loaded_queries,
    score_tiles,
    turn_of,
    turned_queries,
)


@triton.jit
def _score_key(turned, codes, factor, score, bins, SPREAD: tl.constexpr):
    """Scores one key for a row's turned queries."""
    queries, weight = turned
    dots = tl.sum(queries.to(tl.float32) * codes.to(tl.float32)[None, :], 1)
    found = tl.sum(tl.maximum(dots, 0.0) * weight, 0) * factor
    tl.store(score, found)
    count_score(bins, found, found == found, SPREAD)


@triton.jit(do_not_specialize=["rows", "at", "states", "log2", "index_log2", "table_stride", "width"])
def compress_scores_kernel(
    partial,
    rows,
    norm,
    eps,
    positions,
    cos_sin,
    token_to_req,
    ring,
    starts,
    rings,
    ring_stride,
    states,
    slots,
    cache,
    stride,
    log2,
    wk,
    k_norm,
    k_eps,
    index_slots,
    index_cache,
    index_stride,
    index_log2,
    q,
    at,
    owner,
    block_table,
    table_stride,
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
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
    KEYS: tl.constexpr,
    HELD: tl.constexpr,
    FULL: tl.constexpr,
    SPREAD: tl.constexpr,
):
    """Grid (1 + programs, rows). Of a row, the first program does what `compress_kernel`'s second does, and scores the
    key; the rest score keys of earlier steps, as `index_scores_kernel`'s, and the last of them, which may have fewer
    than the others, then does what `compress_kernel`'s first does. Arguments are theirs; one table of requests serves
    both, and `partial` holds the heads' weights too."""
    row = tl.program_id(1).to(tl.int64)
    closed = length(positions, owner, row, width, RATIO)
    if tl.program_id(0) == 0:
        ahead = row_ahead(row, norm, positions, cos_sin, token_to_req, ring, starts, rings, ring_stride, states, RATIO)
        slot, early = tl.load(index_slots + row), key_ahead(wk, k_norm, ahead[2], PARTS, EARLY)
        column, turn = ahead[0] // RATIO, turn_of(cos_sin + ahead[0] * TAIL)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
        loaded = loaded_queries(q, partial, at, rows, row, HEADS, PADDED, N, SPLITS)
        latent = normed_row(partial, row, rows, ahead, eps, rings, ring_stride, states, N, SPLITS, RATIO, False)
        if slot >= 0:
            turned = turned_queries(loaded, turn, scale, PADDED)
            codes, factor = made_key(latent, wk, early, k_eps, PARTS, EARLY)
            insert_key(codes, factor, slot, index_cache, index_stride, index_log2)
            if column < closed:
                _score_key(turned, codes, factor, scores + row * scores_stride + column, bins + row * BINS, SPREAD)
            # Later rows of the request.
            for other in range(row + 1, ahead[5].to(tl.int64)):
                if column < length(positions, owner, other, width, RATIO):
                    turn = turn_of(cos_sin + tl.load(positions + other) * TAIL)
                    loaded = loaded_queries(q, partial, at, rows, other, HEADS, PADDED, N, SPLITS)
                    turned = turned_queries(loaded, turn, scale, PADDED)
                    score = scores + other * scores_stride + column
                    _score_key(turned, codes, factor, score, bins + other * BINS, SPREAD)
    else:
        request = tl.load(token_to_req + row).to(tl.int64)
        # Groups that were closed before the request's first row of this step.
        settled = tl.minimum(tl.load(positions + tl.load(starts + request)) // RATIO, closed).to(tl.int32)
        score_tiles(
            q, partial, rows, row, at, cos_sin + tl.load(positions + row) * TAIL, block_table + request * table_stride,
            index_cache, index_stride, index_log2, bins, scores + row * scores_stride, width, bins + row * BINS, scale,
            closed, settled, tl.program_id(0) - 1, tl.num_programs(0) - 1,
            HEADS, PADDED, N, SPLITS, KEYS, HELD, False, FULL, SPREAD,
        )  # fmt: skip
        if tl.program_id(0) == tl.num_programs(0) - 1:
            store_row(
                row, rows, partial, norm, eps, positions, cos_sin, token_to_req, ring, starts, rings, ring_stride,
                states, slots, cache, stride, log2, N, SPLITS, RATIO,
            )  # fmt: skip
