"""Routing: top-k experts of every row out of the gate's partial sums, and the record that the experts' GEMMs read."""

import triton
import triton.language as tl

# As in `moe.kernels.experts`: numbers of a record's row, and where its pairs begin.
RECORD = tl.constexpr(16)
FIRST_PAIR = tl.constexpr(8)
# What NaN counts as in a selection.
LOWEST = tl.constexpr(-1e30)
IMAGE_IDS = tl.constexpr(5)


@triton.jit(do_not_specialize=["rows"])
def route_kernel(
    partial,
    bias,
    image_bias,
    input_ids,
    ids,
    weights,
    record,
    arrived,
    rows,
    scaling,
    FIRST_IMAGE: tl.constexpr,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
    TOPK: tl.constexpr,
    TOPK_PADDED: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Grid (rows). partial: [SPLITS, rows, EXPERTS] float32, logits summed over the splits; bias, image_bias: [EXPERTS]
    float32, the second for five ids from FIRST_IMAGE on, unless that is 0; input_ids: [rows] int64; ids: [rows, TOPK]
    int32 and weights: [rows, TOPK] float32; record: see `experts`; arrived: [1] int32, zero, and zero again
    afterwards. PAIRS: rows TOPK, padded."""
    row = tl.program_id(0)
    expert = tl.arange(0, PADDED)
    inside = expert < EXPERTS
    own_bias = tl.load(bias + expert, inside, other=0.0)
    if FIRST_IMAGE > 0:
        # Ids and biases are older than the launch ahead of this one.
        token = tl.load(input_ids + row)
        image = (token >= FIRST_IMAGE) & (token < FIRST_IMAGE + IMAGE_IDS)
        own_bias = tl.where(image, tl.load(image_bias + expert, inside, other=0.0), own_bias)
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    logits = tl.zeros((PADDED,), tl.float32)
    for split in tl.static_range(SPLITS):
        logits += tl.load(partial + (split * rows + row) * EXPERTS + expert, inside, other=0.0)
    chosen, own_weights = select(logits, own_bias, expert, inside, scaling, PADDED, TOPK, TOPK_PADDED)
    slot = tl.arange(0, TOPK_PADDED)
    tl.store(ids + row * TOPK + slot, chosen, slot < TOPK)
    tl.store(weights + row * TOPK + slot, own_weights, slot < TOPK)
    tl.debug_barrier()
    if tl.atomic_add(arrived, 1, sem="acq_rel") == rows - 1:
        tl.store(arrived, 0)
        write_record(ids, record, rows * TOPK, PAIRS)


@triton.jit
def select(logits, bias, expert, inside, scaling, PADDED: tl.constexpr, TOPK: tl.constexpr, TOPK_PADDED: tl.constexpr):
    """The TOPK best by score + bias, of equal ones the lower id first, NaN last; weights are scores, renormalized.

    The score is written as stock's kernel computes it, so that equal logits give equal bits: log(1 + exp), not log1p.
    """
    scores = tl.sqrt(tl.where(logits > 20.0, logits, tl.log(1.0 + tl.exp(logits))))
    left = scores + bias
    left = tl.where(inside, tl.where(left == left, left, LOWEST), -float("inf"))
    slot = tl.arange(0, TOPK_PADDED)
    chosen = tl.zeros((TOPK_PADDED,), tl.int32)
    weights = tl.zeros((TOPK_PADDED,), tl.float32)
    for k in tl.static_range(TOPK):
        best = tl.min(tl.where(left == tl.max(left, 0), expert, PADDED), 0)
        chosen = tl.where(slot == k, best, chosen)
        weights = tl.where(slot == k, tl.sum(tl.where(expert == best, scores, 0.0), 0), weights)
        left = tl.where(expert == best, -float("inf"), left)
    total = tl.sum(weights, 0)
    return chosen, weights * (scaling / tl.where(total > 0.0, total, 1.0))


@triton.jit
def write_record(ids, record, count, PAIRS: tl.constexpr):
    """One program: groups the pairs by expert. Experts come in the order of their first pair."""
    pair, other = tl.arange(0, PAIRS)[:, None], tl.arange(0, PAIRS)[None, :]
    # Past the first-level cache: other programs wrote them.
    mine = tl.load(ids + pair, pair < count, other=-1, cache_modifier=".cg")
    theirs = tl.load(ids + other, other < count, other=-2, cache_modifier=".cg")
    same = mine == theirs
    first = tl.min(tl.where(same, other, PAIRS), 1)[:, None]
    # The matrix is symmetric: the same, along the other axis.
    leads = tl.min(tl.where(same, pair, PAIRS), 0)[None, :] == other
    place = tl.sum((leads & (other < first)).to(tl.int32), 1)[:, None]
    earlier = tl.sum((same & (other < pair)).to(tl.int32), 1)[:, None]
    members = tl.sum(same.to(tl.int32), 1)[:, None]
    real = pair < count
    tl.store(record + place * RECORD, mine, real & (first == pair))
    tl.store(record + place * RECORD + 1, members, real & (first == pair))
    tl.store(record + place * RECORD + FIRST_PAIR + earlier, pair, real)
    experts = tl.sum(leads.to(tl.int32), 1)[:, None]
    tl.store(record + pair * RECORD, -tl.full((PAIRS, 1), 1, tl.int32), real & (pair >= experts))
