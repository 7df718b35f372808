"""The executor on kernels, the boundary's or all, against reference ops, teacher-forced, on a GPU."""

from pathlib import Path

import pytest

from specialized_decode.attention import AttentionStep
from specialized_decode.backbone.engine import Captured
from specialized_decode.runtime import KERNELS, DecodeConfig, SpecializedDecode
from tests.helpers.runtime_model import Pair, assert_close

CONTEXTS = (1, 2, 17, 33, 48, 49, 64, 97, 180)
STEPS = 4


class TwoExecutors:
    """A pair whose captures are taken by both executors, and replayed from one state."""

    def __init__(self, folder: Path, families: frozenset[str]) -> None:
        self.pair = Pair(folder, device="cuda", max_rows=72, max_context=256, max_tokens=512, kernels=families)
        self.pair.backbone.set_aux_layers((1,))
        self.kernels = self.pair.executor
        self.reference = SpecializedDecode.for_target(self.pair.backbone, DecodeConfig(), self.pair.model.lm_head)
        self.captures: dict[tuple[int, int], tuple[Captured, Captured]] = {}

    def captured(self, requests: int, count: int) -> tuple[Captured, Captured]:
        if (requests, count) not in self.captures:
            pair, taken = self.pair, []
            for executor in (self.reference, self.kernels):
                pair.executor = executor
                taken.append(pair.capture(requests, count))
            self.captures[requests, count] = taken[0], taken[1]
        return self.captures[requests, count]


@pytest.fixture(scope="module", params=[frozenset({"boundary"}), KERNELS], ids=["boundary", "all"])
def two(tiny_folder: Path, request: pytest.FixtureRequest) -> TwoExecutors:
    return TwoExecutors(tiny_folder, request.param)


def test_kernels_are_used(two: TwoExecutors) -> None:
    assert two.reference.all_reduce.fused is None
    assert two.kernels.all_reduce.fused is not None
    steps = [plan.attention for plan in two.kernels.layers]
    for step in steps:
        assert isinstance(step, AttentionStep)
        asked = "attention" in two.kernels.config.kernels
        assert (step.fused is not None, step.projections is not None) == (asked, asked)
    on_kernels = [plan.moe.gemm is not None and plan.moe.gemm.fused is not None for plan in two.kernels.layers]
    assert on_kernels == ["moe" in two.kernels.config.kernels] * len(on_kernels)


@pytest.mark.parametrize(("live", "padding", "count"), [(1, 0, 1), (7, 1, 1), (9, 0, 1), (60, 4, 1), (8, 1, 6)])
def test_teacher_forced(two: TwoExecutors, live: int, padding: int, count: int) -> None:
    """Both sides see the same prefix and caches at every step."""
    pair = two.pair
    by_reference, by_kernels = two.captured(live + padding, count)
    requests = pair.open([CONTEXTS[i % len(CONTEXTS)] + count - 1 for i in range(live)], count)
    try:
        for _ in range(STEPS):
            batch = pair.batch([*requests, *[None] * padding], count)
            before = pair.snapshot()
            found = pair.replayed(by_kernels, batch)
            pair.restore(before)
            assert_close(pair.replayed(by_reference, batch), found, live * count)
            pair.advance(requests, count, count)
    finally:
        pair.close(requests)
