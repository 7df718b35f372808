"""Where positions lie in a paged cache: the tables of `SparseIndexTables`."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["source_stride", "table_stride", "log2"])
def slots_kernel(
    source,
    source_stride,
    owner,
    token_to_req,
    block_table,
    table_stride,
    log2,
    out,
    N: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (N / BLOCK, rows). source: [rows, N] int32 positions of a request, negative for none; WINDOW: [rows] int64,
    a row's own position, which the N are up to. owner: [rows] int64, negative for padding; token_to_req: [rows] int32;
    block_table: [requests, n] int32; out: [rows, N] int64 slots, block * states + state, -1 for none. A page holds
    2**log2 states."""
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    # Inputs of the step, but for a selection.
    request, real = tl.load(token_to_req + row).to(tl.int64), tl.load(owner + row) >= 0
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    if WINDOW:
        state = tl.load(source + row) - N + 1 + column
    else:
        state = tl.load(source + row * source_stride + column, inside, other=-1).to(tl.int64)
    valid = inside & real & (state >= 0)
    block = tl.load(block_table + request * table_stride + (state >> log2), valid, other=0).to(tl.int64)
    slot = (block << log2) + (state & ((1 << log2) - 1))
    tl.store(out + row * N + column, tl.where(valid, slot, -1), inside)
