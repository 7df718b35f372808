"""A contribution into every rank's mailbox, ahead of the boundary that reduces it; and the end of a step."""

import triton
import triton.language as tl

from specialized_decode.boundary.kernels.fused import GENERATIONS, mailbox, to_bits


@triton.jit(do_not_specialize=["index", "rank"])
def publish_kernel(
    pending,
    mailboxes,
    generations,
    index,
    rank,
    H: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
):
    """pending: [rows, H] bfloat16 -> the slot of boundary `index` in all ranks' mailboxes, this one's included."""
    row = tl.program_id(0).to(tl.int64)
    first, second = tl.arange(0, MAIN), MAIN + tl.arange(0, REST)
    inside = second < H
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    slot = (tl.load(generations) + index) % GENERATIONS
    main = to_bits(tl.load(pending + row * H + first).to(tl.float32))
    rest = to_bits(tl.load(pending + row * H + second, inside, other=0.0).to(tl.float32))
    for peer in tl.static_range(RANKS):
        place = mailbox(mailboxes, peer, slot, rank, row, H, ROWS, RANKS)
        tl.store(place + first, main)
        tl.store(place + second, rest, inside)


@triton.jit(do_not_specialize=["count"])
def advance_kernel(generations, count):
    """generations: [1] int64, raised by the boundaries of a step."""
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    tl.store(generations, tl.load(generations) + count)
