"""Routing: top-k experts of every row out of the gate's partial sums, and who else chose them."""

import triton
import triton.language as tl

# What NaN counts as in a selection, and the least that a score and bias can be.
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
    leaders,
    members,
    rows,
    scaling,
    FIRST_IMAGE: tl.constexpr,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
    TOPK: tl.constexpr,
    TOPK_PADDED: tl.constexpr,
    RECORDED: tl.constexpr,
):
    """Grid (rows). partial: [SPLITS, rows, EXPERTS] float32, logits summed over the splits; bias, image_bias: [EXPERTS]
    float32, the second for five ids from FIRST_IMAGE on, unless that is 0; input_ids: [rows] int64; ids: [rows, TOPK]
    int32 and weights: [rows, TOPK] float32. leaders and members, with RECORDED: see `experts`; members are zero at
    first."""
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
    if RECORDED:
        own = (slot + 1).to(tl.int64) << (8 * row)
        earlier = tl.atomic_add(members + chosen, own, slot < TOPK, sem="relaxed")
        tl.store(leaders + row * TOPK + slot, tl.where(earlier == 0, chosen, -1), slot < TOPK)


@triton.jit
def select(logits, bias, expert, inside, scaling, PADDED: tl.constexpr, TOPK: tl.constexpr, TOPK_PADDED: tl.constexpr):
    """The TOPK best by score + bias, of equal ones the lower id first, NaN last; weights are scores, renormalized.

    The score is written as stock's kernel computes it, so that equal logits give equal bits: log(1 + exp), not log1p.
    """
    scores = tl.sqrt(tl.where(logits > 20.0, logits, tl.log(1.0 + tl.exp(logits))))
    left = scores + bias
    # Above what is taken or not there, so that experts are distinct whatever their biases are.
    left = tl.where(inside, tl.where(left >= LOWEST, left, LOWEST), -float("inf"))
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
