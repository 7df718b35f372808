"""Warm-up of selecting layers compiles what their steps launch: compile-time arguments, compared without a GPU."""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specialized_decode.attention import index_tuning as tuning
from specialized_decode.attention.fused import FusedLinear
from specialized_decode.attention.fused_index import FusedIndexer, fused_bins
from tests.attention.sanitized import recorded
from tests.helpers.index_case import IndexCase, Shape
from tests.helpers.step_linear import fp8_linear

CPU = torch.device("cpu")
SHAPES = {"ratio 1": Shape(blocks=2048), "ratio 2": Shape(ratio=2, states=32), "consumer": Shape(compressor=False)}
Launches = set[tuple[str, frozenset[tuple[str, Any]]]]


def layer(case: IndexCase, together: bool) -> FusedIndexer:
    """together: whether projections of the input are one launch, and queries another."""
    shape = case.shape
    own: Any = SimpleNamespace(
        fused_wqa_wkv=FusedLinear(fp8_linear(1, 64, shape.hidden, 1.0, CPU)),
        wq_b=FusedLinear(fp8_linear(2, 64, shape.q_rank, 1.0, CPU)),
    )
    return FusedIndexer(case.attn, fused_bins(CPU), own if together else None)


def step(kernels: FusedIndexer, case: IndexCase) -> None:
    """As `AttentionStep` has its launches."""
    found = kernels.project_all(case.x)
    inputs = kernels.project(case.x) if found is None else found[1]
    if case.shape.compressor:
        kernels.compress(case.attn, inputs, case.positions, case.caches)
    if kernels.joined is None:
        q = kernels.wq_b(case.qr)
    else:
        q, _ = kernels.queries(case.qr, settled=case.shape.compressor)
    flags = torch.ones(case.rows, case.columns // case.shape.ratio, dtype=torch.bool)
    for given in (flags, None):
        scores = kernels.scores(case.attn, q, inputs, case.positions, case.caches, given)
        kernels.top(case.attn, scores, case.positions, case.caches)
    if case.shape.blocks:
        blocks = case.attn.selection.candidate_blocks[: case.rows]
        kernels.choose(case.attn, scores, case.positions, case.caches, blocks)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_no_step_launches_what_is_not_compiled(shape: Shape, together: bool) -> None:
    launches: Launches = set()

    def launch(kernel: Any, *_: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        launches.add((kernel.fn.__name__, frozenset(constants.items())))

    with recorded(launch):
        kernels = layer(IndexCase(shape, (700,), 1, CPU), together)
        kernels.warm(IndexCase(shape, (700,), 1, CPU).attn)
        warmed = launches.copy()
        for rows, longest in product(range(1, tuning.MAX_ROWS + 1), (0, 20000)):
            case = IndexCase(replace(shape, longest=longest), (700,) * rows, rows, CPU)
            launches.clear()
            step(kernels, case)
            assert {name for name, _ in launches} >= {
                "index_scores_kernel",
                "top_positions_kernel",
                "projection_kernel",
            }
            counts = {dict(values)["COUNT"] for name, values in launches if name == "top_positions_kernel"}
            assert counts == ({0, 2048} if shape.blocks else {0})
            assert launches <= warmed, f"{rows} rows: {launches - warmed}"
