"""The MoE kernels on a GPU: values against float64, selection against stock's, graph replays, memory."""

import math
from functools import cache

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from specialized_decode.boundary import UnfinalizedRows
from specialized_decode.moe import MoEStep, RoutedExpertGemms, build_routed_expert_gemms, reference, tuning
from specialized_decode.moe.fused import FusedMoE, Routing
from specialized_decode.moe.kernels.route import select
from tests.helpers.held_moe import (
    SCALING,
    TOPK,
    HeldMoE,
    assert_led,
    exact_logits,
    exact_rows,
    exact_shared,
    held_moe,
    inputs,
    prefer,
)
from tests.helpers.poisoned import poisoned
from tests.helpers.step_gates import Gates

HIDDEN, EXPERTS = 5120, 64
# Of a rank at TP 1, 2, 4 and 8.
WIDTHS = (2304, 1152, 576, 288)
DEVICE = "cuda"


@cache
def layer(width: int, wide: bool = False) -> HeldMoE:
    return held_moe(width, EXPERTS, HIDDEN, width, DEVICE, wide)


def run(ffn: HeldMoE, x: Tensor, ids: Tensor) -> tuple[Routing, UnfinalizedRows]:
    moe = FusedMoE(ffn)
    with poisoned():
        routing = moe.route(x, ids)
        out = moe.down(routing, moe.up(routing))
    return routing, out


def assert_rounded(what: str, found: Tensor, exact: Tensor) -> None:
    """bfloat16 of what float16 rounds in between: no error far above bfloat16's own."""
    best = exact.bfloat16().double()
    assert found.dtype == torch.bfloat16 and found.shape == exact.shape
    assert found.isfinite().all(), f"{what}: {int((~found.isfinite()).sum())} values are not finite"
    ours, least = (found.double() - exact).norm(), (best - exact).norm()
    assert ours <= 1.1 * least, f"{what}: found an error of {ours:g}, a rounding of the exact value has {least:g}"


def assert_selected(ffn: HeldMoE, x: Tensor, ids: Tensor, routing: Routing) -> None:
    """As the exact logits select, but for near-ties: biased scores closer than float32 sums of 5120 products are."""
    logits = exact_logits(ffn, x)
    chosen, _ = reference.select_experts(logits.float(), ffn.bias, ffn.image_bias, ids, TOPK, SCALING)
    bias = ffn.bias.expand(len(x), -1)
    if ffn.image_bias is not None:
        bias = torch.where(((ids >= 129264) & (ids < 129269))[:, None], ffn.image_bias, bias)
    biased = torch.nn.functional.softplus(logits).sqrt() + bias
    ours, theirs = biased.gather(1, routing.ids.long()), biased.gather(1, chosen)
    assert (ours - theirs).abs().max() < 1e-5, "found experts that are no near-ties"
    scores = torch.nn.functional.softplus(logits).sqrt().gather(1, routing.ids.long())
    expected = scores / scores.sum(1, keepdim=True) * SCALING
    torch.testing.assert_close(routing.weights.double(), expected, rtol=1e-4, atol=1e-5)


def check(ffn: HeldMoE, x: Tensor, ids: Tensor, logits: bool = True) -> tuple[Routing, UnfinalizedRows]:
    routing, out = run(ffn, x, ids)
    if logits:
        assert_selected(ffn, x, ids, routing)
    assert_rounded("routed", out.rows, exact_rows(ffn, x, routing.ids.long()))
    assert_rounded("shared", out.shared, exact_shared(ffn, x))
    return routing, out


@pytest.mark.parametrize("rows", range(1, 9))
@pytest.mark.parametrize("width", WIDTHS)
def test_values(width: int, rows: int) -> None:
    check(layer(width), *inputs(rows, rows, HIDDEN, DEVICE))


@pytest.mark.parametrize("width", WIDTHS)
def test_scales_far_apart(width: int) -> None:
    check(layer(width, wide=True), *inputs(3, 3, HIDDEN, DEVICE))


def test_all_experts_of_a_release() -> None:
    """384 experts, whose words pass 2**31 bytes."""
    ffn = held_moe(0, 384, HIDDEN, 576, DEVICE)
    for rows in (1, 8):
        check(ffn, *inputs(rows, rows, HIDDEN, DEVICE))
    x = prefer(ffn, [list(range(378, 384))] * 8)
    assert sorted(check(ffn, x, torch.arange(8, device=DEVICE))[0].ids[7].tolist()) == list(range(378, 384))


@pytest.mark.parametrize(
    "experts",
    [
        [[0, 1, 2, EXPERTS - 3, EXPERTS - 2, EXPERTS - 1]] * 8,
        [list(range(6 * row, 6 * row + 6)) for row in range(8)],
        [list(range(row, row + 6)) for row in range(8)],
    ],
    ids=["all on the same, both ends", "all distinct", "some shared"],
)
def test_who_chooses_what(experts: list[list[int]]) -> None:
    ffn = held_moe(10, EXPERTS, HIDDEN, 576, DEVICE)
    x = prefer(ffn, experts)
    routing, _ = check(ffn, x, torch.arange(8, device=DEVICE))
    assert [sorted(chosen) for chosen in routing.ids.tolist()] == experts
    assert_led(routing, experts)


@pytest.mark.parametrize("width", [576, 288])
def test_rows_that_are_no_numbers_stay_by_themselves(width: int) -> None:
    ffn, (x, ids) = layer(width), inputs(11, 8, HIDDEN, DEVICE)
    clean = run(ffn, x, ids)[1]
    x[1], x[3], x[5, 7], ids[5] = math.nan, 0, math.inf, -1
    routing, out = run(ffn, x, ids)
    assert routing.ids[1].tolist() == [0, 1, 2, 3, 4, 5] and out.weights[1].isnan().all()
    assert out.rows[1].isnan().all() and out.shared[1].isnan().all()
    assert not out.rows[3].any() and not out.shared[3].any()
    for row in (0, 2, 4, 6, 7):
        for found, expected in ((out.rows, clean.rows), (out.shared, clean.shared), (out.weights, clean.weights)):
            assert torch.equal(found[row], expected[row])


def test_clamp_active() -> None:
    ffn, (x, ids) = layer(576), inputs(12, 4, HIDDEN, DEVICE, size=300.0)
    # Logits this large leave selection to the last bits of sums.
    check(ffn, x, ids, logits=False)


@pytest.mark.parametrize("few, many", [(2, tuning.FEWEST_OF_MOST - 1), (tuning.FEWEST_OF_MOST, tuning.MAX_ROWS)])
def test_a_row_is_the_same_among_others(few: int, many: int) -> None:
    """A row's bits do not depend on who else is in the batch, between row counts that take the same launches."""
    ffn, (x, ids) = layer(576), inputs(13, many, HIDDEN, DEVICE)
    together = run(ffn, x, ids)[1]
    for first in range(many - few + 1):
        own = slice(first, first + few)
        alone = run(ffn, x[own], ids[own])[1]
        assert torch.equal(alone.rows, together.rows[own]) and torch.equal(alone.shared, together.shared[own])


def test_replays_read_what_is_there_then() -> None:
    """Layers behind one another in one graph, which overlap at their ends, with inputs that change."""
    layers = [FusedMoE(layer(width)) for width in (576, 288, 576)]
    x, ids = inputs(14, 6, HIDDEN, DEVICE)
    x = x.clone()

    def steps() -> list[UnfinalizedRows]:
        routings = []
        for moe in layers:
            routing = moe.route(x, ids)
            routings.append(moe.down(routing, moe.up(routing)))
        return routings

    steps()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = steps()
    for seed in range(20):
        fresh, fresh_ids = inputs(seed, 6, HIDDEN, DEVICE)
        x.copy_(fresh)
        ids.copy_(fresh_ids.roll(seed))
        graph.replay()
        torch.cuda.synchronize()
        for ours, expected in zip(found, steps(), strict=True):
            assert torch.equal(ours.rows, expected.rows) and torch.equal(ours.shared, expected.shared)
            assert torch.equal(ours.weights, expected.weights)


def test_a_step_takes_the_kernels_and_keeps_no_copy(caplog: pytest.LogCaptureFixture) -> None:
    ffn = held_moe(15, EXPERTS, HIDDEN, 576, DEVICE)
    ffn.stock = lambda x, ids: x
    x, ids = inputs(15, 9, HIDDEN, DEVICE)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with caplog.at_level("INFO"):
        (gemm,) = build_routed_expert_gemms([ffn])
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    assert "1 of 1 layers on the low-batch path" in caplog.text and "keep 0 bytes" in caplog.text
    assert isinstance(gemm, RoutedExpertGemms)
    step = MoEStep(ffn, gemm, 49)
    output = step.run(x[:8].contiguous(), ids[:8].contiguous(), Gates(8))
    assert isinstance(output, UnfinalizedRows)
    assert torch.equal(output.rows, run(ffn, x[:8].contiguous(), ids[:8].contiguous())[1].rows)
    assert step.run(x, ids, Gates(9)) is x


# --- selection -----------------------------------------------------------------------------------


@triton.jit
def select_kernel(logits, bias, ids, weights, EXPERTS: tl.constexpr, PADDED: tl.constexpr):
    """The routing kernel's selection of a row of logits."""
    row = tl.program_id(0)
    expert = tl.arange(0, PADDED)
    inside = expert < EXPERTS
    own = tl.load(logits + row * EXPERTS + expert, inside, other=0.0)
    chosen, found = select(own, tl.load(bias + expert, inside, other=0.0), expert, inside, 1.5, PADDED, 6, 8)
    slot = tl.arange(0, 8)
    tl.store(ids + row * 6 + slot, chosen, slot < 6)
    tl.store(weights + row * 6 + slot, found, slot < 6)


KINDS = ("random", "ties", "infinities", "NaN")


def logits_and_bias(kind: str) -> tuple[Tensor, Tensor]:
    """100,000 rows of logits of 384 experts, and a bias of each."""
    count, generator = 100_000, torch.Generator(DEVICE).manual_seed(0)
    logits = torch.randn(count, 384, generator=generator, device=DEVICE) * 3
    bias = torch.randn(384, generator=generator, device=DEVICE)
    if kind == "ties":
        logits, bias = logits.round(), bias.round()
    if kind == "infinities":
        logits[:, ::5], logits[:, 1::5] = math.inf, -math.inf
    if kind == "NaN":
        logits[torch.rand(count, 384, generator=generator, device=DEVICE) < 0.5] = math.nan
        logits[0] = math.nan
    return logits, bias


def selected(logits: Tensor, bias: Tensor, warps: int) -> tuple[Tensor, Tensor]:
    ids = torch.full((len(logits), TOPK), -1, dtype=torch.int32, device=DEVICE)
    weights = torch.full((len(logits), TOPK), torch.nan, device=DEVICE)
    select_kernel[(len(logits),)](logits, bias, ids, weights, EXPERTS=384, PADDED=512, num_warps=warps)
    return ids, weights


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("warps", [1, 4])
def test_selection(kind: str, warps: int) -> None:
    logits, bias = logits_and_bias(kind)
    assert_best(logits, bias, *selected(logits, bias, warps))


def assert_best(logits: Tensor, bias: Tensor, ids: Tensor, weights: Tensor) -> None:
    """By stock's rule, in float64: the best by score and bias, of equal ones the lower id first, NaN last, as -1e30."""
    exact, ids = logits.double(), ids.long()
    scores = torch.where(exact > 20, exact, exact.clamp_max(20).exp().log1p()).sqrt()
    biased = (scores + bias.double()).nan_to_num(nan=-1e30, posinf=torch.inf, neginf=-torch.inf)
    # Rounding 1 + exp to float32 moves its logarithm by 2**-24, whose root is the score.
    unsure = (1e-6 + 6e-8 / scores.clamp_min(2e-4)).nan_to_num(0.0)
    best, expected = (part[:, :TOPK] for part in biased.sort(dim=1, descending=True, stable=True))
    found = biased.gather(1, ids)
    close = (found - best).abs() <= unsure.gather(1, ids) + unsure.gather(1, expected)
    assert ((found == best) | close).all()
    experts = torch.arange(logits.shape[1], device=logits.device)
    for slot in range(TOPK):
        own = found[:, slot, None]
        lower = (biased == own) & (experts < ids[:, slot, None])
        assert torch.equal(lower.sum(1), (found[:, :slot] == own).sum(1)), "found a higher id ahead of a lower one"
    chosen = scores.gather(1, ids)
    total = chosen.sum(1, keepdim=True)
    expected_weights = chosen * (SCALING / torch.where(total > 0, total, 1.0))
    slack = SCALING * unsure.gather(1, ids) / total.clamp_min(1e-3)
    assert (weights - expected_weights).abs().nan_to_num(0.0).le(1e-5 + slack.nan_to_num(0.0)).all()
    assert torch.equal(weights.isnan(), expected_weights.isnan())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("warps", [1, 4])
def test_selection_is_stocks(kind: str, warps: int) -> None:
    module = pytest.importorskip("vllm.model_executor.layers.fused_moe.router.dsv4_topk")
    logits, bias = logits_and_bias(kind)
    expected, expected_ids = module.dsv4_topk(logits, bias, torch.int32, 1.5)
    ids, weights = selected(logits, bias, warps)
    assert torch.equal(ids, expected_ids)
    # A sum of eight numbers may run in another order.
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=0, equal_nan=True)
