"""The index kernels on a GPU: values against the reference, in float64 where that says more; graph replays."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specialized_decode.attention import index_tuning as tuning
from specialized_decode.attention.fused import FusedLinear, JoinedLinear
from specialized_decode.attention.fused_index import FusedIndexer, fused_bins
from tests.helpers.index_case import (
    IndexCase,
    Shape,
    assert_chosen,
    assert_compressed,
    assert_in_place,
    assert_projected,
    assert_scored,
    assert_selected,
    bins_of,
    closed_groups,
    tied_scores,
)
from tests.helpers.poisoned import poisoned
from tests.helpers.step_linear import fp8_linear
from tests.helpers.step_mhc import same_bits

DEVICE = torch.device("cuda")
CONTEXTS = (1, 2, 127, 128, 129, 130, 511, 512, 513, 514, 1024, 8192, 24576)
RAGGED = (8192, 1, 0, 513, 24576, 2, 1023, 130, 129, 514, 0, 12000, 511, 3, 1024, 127)
RATIOS = {1: Shape(), 2: Shape(ratio=2, states=32)}


def check(case: IndexCase, flags: Tensor | None = None) -> None:
    """All launches of a step, one after the other."""
    fused = FusedIndexer(case.attn, fused_bins(DEVICE))
    with poisoned():
        inputs = fused.project(case.x)
        summed = assert_projected(case, inputs.partial)
        if case.shape.compressor:
            before = case.cache_bytes()
            fused.compress(case.attn, inputs, case.positions, case.caches)
            assert_compressed(case, before, summed[:, : inputs.heads])
        heads = summed[:, inputs.heads :]
        scores = fused.scores(case.attn, case.q, inputs, case.positions, case.caches, flags)
        masked = assert_scored(case, scores, heads, flags)
        blocks = case.attn.selection.candidate_blocks
        if blocks is None:
            slots = fused.top(case.attn, scores, case.positions, case.caches)
        else:
            slots, chosen = fused.choose(case.attn, scores, case.positions, case.caches, blocks[: case.rows])
            assert_chosen(case, masked, chosen)
        assert_selected(case, masked, slots)
        assert not fused.bins.any(), "bins are not zero again"


@pytest.mark.parametrize("at", range(len(tuning.CUTS)))
@pytest.mark.parametrize("ratio", RATIOS)
def test_cuts(ratio: int, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every one that tuning may choose."""
    for name in ("FEW", "SHORT_ROWS", "MANY"):
        monkeypatch.setattr(tuning, name, tuning.CUTS[at])
    monkeypatch.setattr(tuning, "TOP_WARPS", tuning.TOPS[at % len(tuning.TOPS)])
    monkeypatch.setattr(tuning, "SPREAD", tuning.SPREADS[at % len(tuning.SPREADS)])
    check(IndexCase(RATIOS[ratio], RAGGED[:1], 11, DEVICE))
    check(IndexCase(RATIOS[ratio], RAGGED[:8], 12, DEVICE))
    check(IndexCase(RATIOS[ratio], RAGGED, 13, DEVICE))


@pytest.mark.parametrize("rows", [1, 3, 8, 13])
@pytest.mark.parametrize(
    "shape", [*RATIOS.values(), Shape(compressor=False), Shape(heads=20), Shape(heads=64, hidden=4096)], ids=str
)
def test_projections(shape: Shape, rows: int) -> None:
    """Of the input and of queries, in a launch each and in one; the same bits again, whatever was in memory."""
    case = IndexCase(shape, (9, 0, 200, 1, 5, 4, 3, 2, 7, 0, 131, 6, 8)[:rows], rows, DEVICE)
    alone = FusedIndexer(case.attn, fused_bins(DEVICE))
    wqa_wkv = FusedLinear(fp8_linear(1, 1792, shape.hidden, shape.hidden**-0.5, DEVICE))
    wq_b = FusedLinear(fp8_linear(2, 8192, shape.q_rank, shape.q_rank**-0.5, DEVICE))
    own: Any = SimpleNamespace(fused_wqa_wkv=wqa_wkv, wq_b=wq_b)
    expected = wqa_wkv(case.x), alone.wq_b(case.qr), wq_b(case.qr)
    together = FusedIndexer(case.attn, fused_bins(DEVICE), own)
    first: list[Tensor] | None = None
    for _ in range(3):
        with poisoned():
            sums = [alone.project(case.x).partial]
            found = together.project_all(case.x)
            assert found is not None
            torch.cuda.synchronize()
            queries = together.queries(case.qr, settled=True), together.queries(case.qr)
        sums.append(found[1].partial)
        for partial in sums:
            assert_projected(case, partial)
        ours = [(found[0], expected[0]), *(pair for both in queries for pair in zip(both, expected[1:], strict=True))]
        assert all(same_bits(mine[case.live], theirs[case.live]) for mine, theirs in ours)
        live = [partial[:, case.live] for partial in sums]
        assert first is None or all(map(same_bits, first, live))
        first = live


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("context", CONTEXTS)
def test_one_row(context: int, ratio: int) -> None:
    check(IndexCase(RATIOS[ratio], (context,), context, DEVICE))


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("rows", range(1, tuning.MAX_ROWS + 1))
def test_rows(rows: int, ratio: int) -> None:
    """Ragged, padding among them."""
    check(IndexCase(RATIOS[ratio], RAGGED[:rows], rows, DEVICE))


@pytest.mark.parametrize("ratio", RATIOS)
def test_drafts(ratio: int) -> None:
    """Rows of one request, which read each other, and a ring whose request goes on."""
    shape = Shape(ratio=ratio, states=64 // ratio, count=6)
    for context in (6, 700, 701):
        check(IndexCase(shape, (context,), context, DEVICE))
    check(IndexCase(Shape(ratio=ratio, count=2, states=64 // ratio), (2049, 2, 0, 131), 3, DEVICE))


@pytest.mark.parametrize("rows", [1, 8, 16])
def test_consumer(rows: int) -> None:
    """No compressor, and candidates alone; one row of them has none."""
    case = IndexCase(Shape(compressor=False), RAGGED[8 - min(rows, 8) : max(rows, 8)], rows, DEVICE)
    flags = torch.rand(rows, case.columns, generator=case.generator).to(DEVICE) < 0.2
    flags[-1] = False
    check(case, flags)


@pytest.mark.parametrize("longest", [0, 200_000])
@pytest.mark.parametrize("contexts", [(8192,), (24576,), (16384, 16385, 16392, 16393, 20001, 0, 1, 24576)], ids=str)
def test_candidate_source(contexts: tuple[int, ...], longest: int) -> None:
    """At and beyond as many positions as the release's candidates hold; graphs are captured for longer ones."""
    check(IndexCase(Shape(blocks=2048, longest=longest), contexts, len(contexts), DEVICE))


def test_many_candidates() -> None:
    """A row of many tiles of blocks, next to short ones; and blocks of other sizes."""
    check(IndexCase(Shape(blocks=2048), (150_001, 16385, 3), 7, DEVICE))
    check(IndexCase(Shape(blocks=2048, size=1), (2049, 24576), 7, DEVICE))
    check(IndexCase(Shape(blocks=3, size=64, ratio=2, states=32), (24576, 1, 385), 7, DEVICE))


def test_wide_maximum() -> None:
    """Far beyond what the rows hold; launches are cut by it."""
    check(IndexCase(Shape(longest=200_000), (8192, 5, 0), 1, DEVICE))


def test_small_widths() -> None:
    shape = Shape(ratio=2, states=32, hidden=64, heads=4, q_rank=32, topk=16)
    check(IndexCase(shape, (1, 47, 48, 49, 0, 96), 4, DEVICE))


def test_ties() -> None:
    """Scores that repeat: of equal ones the earlier positions, and blocks, are chosen."""
    case = IndexCase(Shape(longest=26000, blocks=300), (24576, 8192, 512, 40, 5000, 1, 513, 1025), 5, DEVICE)
    fused, blocks = FusedIndexer(case.attn, fused_bins(DEVICE)), case.attn.selection.candidate_blocks[: case.rows]
    for scores in tied_scores(case).values():
        fused.bins.copy_(bins_of(scores, closed_groups(case), fused.bins))
        slots, flags = fused.choose(case.attn, scores, case.positions, case.caches, blocks)
        assert_selected(case, scores, slots)
        assert_chosen(case, scores, flags)
    for times in (0, 3):
        # Counts that are not the scores': nothing is read or written that is not theirs.
        scores = tied_scores(case)["few"]
        fused.bins.copy_(times * bins_of(scores, closed_groups(case), fused.bins))
        assert_in_place(case, fused.top(case.attn, scores, case.positions, case.caches))


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize(("requests", "count"), [(1, 1), (8, 1), (4, 2), (1, 6), (16, 1)])
@pytest.mark.parametrize("settled", [False, True])
def test_replays(settled: bool, requests: int, count: int, ratio: int) -> None:
    """A chain of all launches of three layers in one graph, replayed over other batches: as one launch after the other,
    and the same bits every time. Scores read ahead of their wait, but for the keys that the step's rows make."""
    contexts, layers, shape = RAGGED[:requests], range(3), replace(RATIOS[ratio], count=count)
    cases = [IndexCase(shape, contexts, seed, DEVICE) for seed in layers]
    others = [IndexCase(shape, contexts, 10 + seed, DEVICE) for seed in layers]
    bins = fused_bins(DEVICE)
    fused = [FusedIndexer(case.attn, bins) for case in cases]
    qr, first = [case.qr for case in cases], [FusedLinear(case.attn.indexer.wq_b, early=False) for case in cases]
    both = [
        JoinedLinear(kernels.wq_b, FusedLinear(case.attn.indexer.wq_b))
        for kernels, case in zip(fused, cases, strict=True)
    ]

    def step(pause: bool) -> list[list[Tensor]]:
        found = []

        def launched(launch: Callable[..., Any], *given: Any, **named: Any) -> Any:
            if pause:
                torch.cuda.synchronize()
            return launch(*given, **named)

        for kernels, case, low, ahead, joined in zip(fused, cases, qr, first, both, strict=True):
            given = case.positions, case.caches
            if settled:
                # As a step has them: what lies two launches back is read without a wait.
                launched(ahead, low)
                inputs = launched(kernels.project, case.x)
                launched(kernels.compress, case.attn, inputs, *given)
                q, _ = launched(joined, low, settled)
            else:
                inputs, q = launched(kernels.project, case.x), launched(kernels.wq_b, low)
                launched(kernels.compress, case.attn, inputs, *given)
            scores = launched(kernels.scores, case.attn, q, inputs, *given)
            found.append([launched(kernels.top, case.attn, scores, *given), case.selection])
        return found

    def left() -> list[Tensor]:
        return [tensor for case in cases for tensor in case.cache_bytes().values()]

    befores = [case.cache_bytes() for case in cases]
    step(True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(False)
    for batch in (None, others):
        if batch is not None:
            for case, other in zip(cases, batch, strict=True):
                case.load(other)
            befores = [case.cache_bytes() for case in cases]
        expected: list[Tensor] | None = None
        for eager in (True, False, False, False):
            for case, before in zip(cases, befores, strict=True):
                case.restore(before)
                case.selection[: case.rows] = 999
            if eager:
                outputs = step(True)
            else:
                graph.replay()
                outputs = captured
            torch.cuda.synchronize()
            found = [tensor.clone() for layer in outputs for tensor in layer] + left()
            assert expected is None or all(same_bits(ours, its) for ours, its in zip(found, expected, strict=True))
            expected = found


def test_warm_up_compiles_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launch of a step compiles after it."""
    import triton

    compiled: list[str] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda *_, **found: compiled.append(str(found)))
    for shape in (replace(RATIOS[1], blocks=2048), RATIOS[2], Shape(compressor=False)):
        kernels = None
        for rows, longest in product(range(1, tuning.MAX_ROWS + 1), (0, 20000)):
            case = IndexCase(replace(shape, longest=longest), (700,) * rows, rows, DEVICE)
            if kernels is None:
                own: Any = SimpleNamespace(
                    fused_wqa_wkv=FusedLinear(fp8_linear(1, 1792, shape.hidden, 1.0, DEVICE)),
                    wq_b=FusedLinear(fp8_linear(2, 8192, shape.q_rank, 1.0, DEVICE)),
                )
                kernels = FusedIndexer(case.attn, fused_bins(DEVICE), own)
                kernels.warm(case.attn)
                compiled.clear()
            together = kernels.project_all(case.x)
            assert together is not None
            inputs = together[1]
            if shape.compressor:
                kernels.compress(case.attn, inputs, case.positions, case.caches)
            kernels.queries(case.qr, settled=True)
            q, _ = kernels.queries(case.qr)
            scores = kernels.scores(case.attn, q, inputs, case.positions, case.caches)
            kernels.top(case.attn, scores, case.positions, case.caches)
            flags = torch.ones_like(scores, dtype=torch.bool)
            kernels.scores(case.attn, case.q, inputs, case.positions, case.caches, flags)
            if shape.blocks:
                blocks = case.attn.selection.candidate_blocks[:rows]
                kernels.choose(case.attn, scores, case.positions, case.caches, blocks)
            assert compiled == [], f"{rows} rows, ratio {shape.ratio}"


def test_other_inputs_are_refused() -> None:
    case = IndexCase(Shape(), (5, 7), 1, DEVICE)
    fused = FusedIndexer(case.attn, fused_bins(DEVICE))
    with pytest.raises(ValueError, match=r"indexer: found 17 rows, expected 1 to 16"):
        fused.project(case.x.new_zeros(17, 5120))
    with pytest.raises(ValueError, match=r"x: found torch.float32"):
        fused.project(case.x.float())
    inputs = fused.project(case.x)
    with pytest.raises(ValueError, match=r"candidates: found torch.uint8"):
        flags = torch.zeros(2, 7, dtype=torch.uint8, device=DEVICE)
        fused.scores(case.attn, case.q, inputs, case.positions, case.caches, flags)
    scores = fused.scores(case.attn, case.q, inputs, case.positions, case.caches)
    with pytest.raises(ValueError, match=r"candidate blocks: found torch.int64 \[2, 9\]"):
        blocks = torch.zeros(2, 9, dtype=torch.int64, device=DEVICE)
        fused.choose(case.attn, scores, case.positions, case.caches, blocks)
