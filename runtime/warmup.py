"""Warm-up: everything a step can need runs once before the first capture."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specialized_decode.attention import AttentionStep
from specialized_decode.boundary import Pending, UnfinalizedRows
from specialized_decode.runtime.decode_step import step_gates
from specialized_decode.runtime.tuning import FUSED_MHC_MAX_ROWS

if TYPE_CHECKING:
    from specialized_decode.runtime.executor import SpecializedDecode

logger = logging.getLogger(__name__)


@torch.no_grad()
def warm_up(executor: SpecializedDecode) -> None:
    """Readies libraries and kernels, so that no capture compiles, tunes or allocates a workspace.

    Collective over the TP group where boundaries are. On a CPU there is nothing to ready.
    """
    if executor.device.type != "cuda":
        return
    _initialize_libraries(executor)
    if executor.all_reduce.fused is not None:
        for rows in range(1, FUSED_MHC_MAX_ROWS + 1):
            _run_boundaries(executor, rows)
    if executor.sparse_mla is not None:
        executor.sparse_mla.warm(executor.layers[0].layer.attn)
    most = executor.gates.low_batch
    for plan in executor.layers:
        if isinstance(plan.attention, AttentionStep):
            for projection in plan.attention.projections or ():
                projection.warm(most)
            if plan.attention.index is not None:
                plan.attention.index.warm(plan.layer.attn, most)
    torch.cuda.synchronize(executor.device)
    kernels = "no kernels" if executor.all_reduce.fused is None else f"boundaries of 1 to {FUSED_MHC_MAX_ROWS} rows"
    logger.info("Warmed up %d side streams and %s", len(executor.side_streams()), kernels)


def _initialize_libraries(executor: SpecializedDecode) -> None:
    """A GEMM library allocates a workspace on its first use on a stream: here, and not in a capture."""
    square = torch.ones(16, 16, dtype=torch.bfloat16, device=executor.device)
    for stream in executor.side_streams():
        with stream.fork():
            torch.mm(square, square)
            torch.mm(square, square, out_dtype=torch.float32)
            torch.mm(square.float(), square.float())
        stream.join()


def _run_boundaries(executor: SpecializedDecode, rows: int) -> None:
    """Every kind of boundary at one row count. Kernels are compiled by row count, and loaded when first launched."""
    boundaries, layer, step = executor.boundaries, executor.target.layers[0], step_gates(rows, executor)
    x = torch.zeros(rows, executor.target.config.hidden_size, dtype=torch.bfloat16, device=executor.device)
    executor.all_reduce.reset()
    _, state = boundaries.first(layer, x, step)
    boundaries.join()
    for kind in _pending_kinds(executor, rows):
        for ffn in (True, False):
            state.pending = _pending(executor, kind, x)
            boundaries.sublayer(layer, ffn, state, step, capture_aux=not ffn)
            boundaries.join()
        state.pending = _pending(executor, kind, x)
        residual = boundaries.post_only(state)
        boundaries.pre(layer, residual, state, step)
        boundaries.join()
        boundaries.mean(residual)
    executor.all_reduce.end_step()


def _pending_kinds(executor: SpecializedDecode, rows: int) -> list[str]:
    """How a step of `rows` rows hands its sublayers' outputs over."""
    kinds = ["tensor"]
    if rows <= executor.gates.low_batch:
        steps = [plan.attention for plan in executor.layers]
        if any(isinstance(step, AttentionStep) and step.publisher is not None for step in steps):
            kinds.append("published")
        if any(plan.moe.gemm is not None for plan in executor.layers):
            kinds.append("unfinalized")
    return kinds


def _pending(executor: SpecializedDecode, kind: str, x: Tensor) -> Pending:
    rows, hidden = x.shape
    if kind == "published":
        slot = executor.all_reduce.publish_target(rows)
        slot.copy_(x)
        executor.all_reduce.mark_published(slot)
        return slot
    if kind == "unfinalized":
        topk = executor.target.layers[0].ffn.topk
        return UnfinalizedRows(x.new_zeros(rows, topk, hidden), torch.zeros(rows, topk, device=x.device), x)
    return x
