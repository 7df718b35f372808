"""The MoE kernels, run on the CPU by tests.helpers.emulated_kernels, against float64."""

import math

import pytest
import torch
from torch import Tensor

from specialized_decode.boundary import UnfinalizedRows
from specialized_decode.boundary.kernels import fragments as shared
from specialized_decode.moe import MoEStep, RoutedExpertGemms, reference
from specialized_decode.moe import fused as launcher
from specialized_decode.moe.fused import FusedMoE, Routing
from specialized_decode.moe.kernels import experts, fragments, front, route
from specialized_decode.moe.select import unfit
from tests.helpers.emulated_kernels import Emulated, Value, emulate
from tests.helpers.held_moe import (
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
from tests.helpers.step_gates import Gates

EXPERTS = 32


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Emulated]:
    torch.set_num_threads(1)
    found = emulate(monkeypatch, launcher, (shared, fragments, front, route, experts))
    assert found.keys() == {"front_kernel", "route_kernel", "up_kernel", "down_kernel"}
    # Fresh tensors hold NaN.
    torch.use_deterministic_algorithms(True)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    return found


@pytest.fixture(autouse=True)
def deterministic_no_more() -> object:
    yield
    torch.use_deterministic_algorithms(False)


def run(ffn: HeldMoE, x: Tensor, ids: Tensor) -> tuple[Routing, UnfinalizedRows]:
    assert unfit(ffn) is None
    moe = FusedMoE(ffn)
    routing = moe.route(x, ids)
    return routing, moe.down(routing, moe.up(routing))


def assert_rounded(found: Tensor, exact: Tensor) -> None:
    """bfloat16 of what float16 rounds in between: no error far above bfloat16's own."""
    best = exact.bfloat16().double()
    assert found.dtype == torch.bfloat16 and found.shape == exact.shape
    ours, least = (found.double() - exact).norm(), (best - exact).norm()
    assert ours <= 1.1 * least, f"found an error of {ours:g}, a rounding of the exact value has {least:g}"


def check(ffn: HeldMoE, x: Tensor, ids: Tensor) -> tuple[Routing, UnfinalizedRows]:
    """Every output, from the experts that the logits in float64 choose."""
    routing, out = run(ffn, x, ids)
    chosen, weights = reference.select_experts(
        exact_logits(ffn, x).float(), ffn.bias, ffn.image_bias, ids, TOPK, ffn.scaling
    )
    assert torch.equal(routing.ids.long(), chosen)
    torch.testing.assert_close(out.weights, weights, rtol=1e-5, atol=1e-6)
    assert_rounded(out.rows, exact_rows(ffn, x, chosen))
    assert_rounded(out.shared, exact_shared(ffn, x))
    return routing, out


# Widths as TP 8's, which ends within a tile of 64 columns, a whole number of tiles, and more than one chunk of them;
# hidden sizes of one chunk, of several of a tile, and of several of four.
SIZES = [(256, 96, rows) for rows in (1, 2, 3, 5, 8)]
SIZES += [(256, 64, 8), (256, 640, 2), (1280, 64, 2), (2048, 32, 1)]


@pytest.mark.parametrize(("hidden", "width", "rows"), SIZES)
def test_values(hidden: int, width: int, rows: int) -> None:
    check(held_moe(width + rows, EXPERTS, hidden, width), *inputs(rows, rows, hidden))


def test_launches(kernels: dict[str, Emulated]) -> None:
    check(held_moe(0, EXPERTS, 256, 96), *inputs(0, 2, 256))
    # 2 tiles of experts and 2 rows; 12 routed and 6 shared tiles of rows; 4 of outputs, of 12 pairs and the shared one.
    assert {name: kernel.launches for name, kernel in kernels.items()} == {
        "front_kernel": [2 + 2],
        "route_kernel": [2],
        "up_kernel": [12 + 12 * 6],
        "down_kernel": [4 + 12 * 4],
    }


def test_scales_far_apart() -> None:
    check(held_moe(7, EXPERTS, 256, 96, wide=True), *inputs(7, 2, 256))


def test_a_text_model() -> None:
    check(held_moe(8, EXPERTS, 256, 32, image=False), *inputs(8, 3, 256))


@pytest.mark.parametrize("size", [300.0, 2.0**-90], ids=["clamp active", "tiny"])
def test_other_sizes(size: float) -> None:
    ffn = held_moe(9, EXPERTS, 256, 96)
    x, ids = inputs(9, 3, 256, size=size)
    if size < 1:
        routing, out = run(ffn, x, ids)
        # The product of gate and up is below what bfloat16 holds; the input's power of two is taken back exactly.
        assert not out.rows.any() and not out.shared.any()
        assert torch.equal(routing.plain.float() * routing.factors[:, None], x.float())
        return
    routing, out = run(ffn, x, ids)
    # Logits this large leave selection to the last bits of sums.
    assert_rounded(out.rows, exact_rows(ffn, x, routing.ids.long()))
    assert_rounded(out.shared, exact_shared(ffn, x))
    up = x.double() @ (ffn.shared_up.weight.double() / 256).T
    assert up.abs().max() > 10


@pytest.mark.parametrize(
    ("rows", "experts"),
    [
        (8, [[0, 1, 2, EXPERTS - 3, EXPERTS - 2, EXPERTS - 1]] * 8),
        (5, [list(range(6 * row, 6 * row + 6)) for row in range(5)]),
        (4, [list(range(row, row + 6)) for row in range(4)]),
    ],
    ids=["all on the same, both ends", "all distinct", "some shared"],
)
def test_who_chooses_what(rows: int, experts: list[list[int]]) -> None:
    ffn = held_moe(10, EXPERTS, 256, 64)
    x = prefer(ffn, experts)
    routing, _ = check(ffn, x, torch.arange(rows))
    assert [sorted(chosen) for chosen in routing.ids.tolist()] == experts
    assert_led(routing, experts)


def test_rows_that_are_no_numbers_stay_by_themselves() -> None:
    ffn = held_moe(11, EXPERTS, 256, 64)
    x, ids = inputs(11, 4, 256)
    clean = run(ffn, x, ids)[1]
    x[1], x[3] = math.nan, 0
    routing, out = run(ffn, x, ids)
    assert routing.ids[1].tolist() == [0, 1, 2, 3, 4, 5]
    assert out.rows[1].isnan().all() and out.shared[1].isnan().all() and out.weights[1].isnan().all()
    assert not out.rows[3].any() and not out.shared[3].any()
    for row in (0, 2):
        assert torch.equal(out.rows[row], clean.rows[row]) and torch.equal(out.shared[row], clean.shared[row])
        assert torch.equal(out.weights[row], clean.weights[row])


def test_an_infinite_input() -> None:
    """One infinity: where no other row is touched, and its own becomes NaN or infinite."""
    ffn = held_moe(12, EXPERTS, 256, 64)
    x, ids = inputs(12, 2, 256)
    clean = run(ffn, x, ids)[1]
    x[1, 7] = math.inf
    out = run(ffn, x, ids)[1]
    assert torch.equal(out.rows[0], clean.rows[0]) and torch.equal(out.shared[0], clean.shared[0])


# --- selection ---------------------------------------------------------------------------------------------------


def select(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The routing kernel's selection of every row of logits [T, E]."""
    found = []
    for row in logits:
        padded = torch.nn.functional.pad(row, (0, 64 - len(row)))
        expert = Value(torch.arange(64))
        inside = Value(expert.data < len(row))
        own = torch.nn.functional.pad(bias, (0, 64 - len(row)))
        found.append(route.select(Value(padded), Value(own), expert, inside, 1.5, 64, TOPK, 8))
    return torch.stack([one[0].data[:TOPK] for one in found]), torch.stack([one[1].data[:TOPK] for one in found])


@pytest.mark.parametrize("kind", ["random", "ties", "infinities", "NaN", "barred"])
def test_selection(kind: str) -> None:
    """Against the reference: ties go to the lower id, NaN loses."""
    generator = torch.Generator().manual_seed(0)
    logits, bias = torch.randn(64, 48, generator=generator) * 3, torch.randn(48, generator=generator)
    if kind == "ties":
        logits, bias = logits.round(), bias.round()
    if kind == "infinities":
        logits[:, ::5], logits[:, 1::5] = math.inf, -math.inf
    if kind == "NaN":
        logits[torch.rand(64, 48, generator=generator) < 0.5] = math.nan
        logits[0] = math.nan
    if kind == "barred":
        bias[3:] = -math.inf
    ids, weights = select(logits, bias)
    expected, expected_weights = reference.select_experts(logits, bias, None, torch.zeros(64), TOPK, 1.5)
    assert torch.equal(ids, expected)
    torch.testing.assert_close(weights, expected_weights, equal_nan=True)


# --- the instructions that the kernels use ------------------------------------------------------------------------


def test_every_code_at_every_scale() -> None:
    """A word's codes as float16: e2m1(code) 2**(scale - 13), signs where the layout keeps them."""
    word = torch.randint(-(2**31), 2**31, (4096,), generator=torch.Generator().manual_seed(0))
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]).double()
    for scale in range(1, 13):
        low = Value(torch.full((4096,), scale * fragments.STEP_LOW + fragments.TABLE_LOW))
        high = Value(torch.full((4096,), scale * fragments.STEP_HIGH + fragments.TABLE_HIGH))
        pairs = fragments.widen_fp4(Value(word), low, high)
        for half in range(2):
            for column in range(4):
                magnitude = values[(word >> 16 * half + 4 * column & 7)]
                sign = word >> 8 * column + 4 * half + 3 & 1
                expected = torch.where(sign == 1, -magnitude, magnitude) * 2.0 ** (scale - fragments.SCALE_BIAS)
                found = pairs[2 * half + column % 2].data >> 16 * (column // 2) & 0xFFFF
                assert torch.equal(found.to(torch.int16).view(torch.float16).double(), expected)


# --- the step ----------------------------------------------------------------------------------------------------


def test_step(kernels: dict[str, Emulated]) -> None:
    """Up to eight rows on the kernels, whose last launch follows the join; more rows and hooks on the stock path."""
    ffn = held_moe(13, EXPERTS, 256, 64)
    stock = torch.zeros(1)
    ffn.stock = lambda x, ids: stock
    joined: list[int] = []
    step = MoEStep(ffn, RoutedExpertGemms(ffn), 49, lambda: joined.append(len(kernels["down_kernel"].launches)))
    x, ids = inputs(13, 9, 256)
    output = step.run(x[:8], ids[:8], Gates(8))
    assert isinstance(output, UnfinalizedRows)
    assert joined == [0] and [len(kernel.launches) for kernel in kernels.values()] == [1, 1, 1, 1]
    expected = run(ffn, x[:8], ids[:8])[1]
    assert torch.equal(output.rows, expected.rows) and torch.equal(output.shared, expected.shared)
    assert step.run(x, ids, Gates(9)) is stock
    assert step.run(x[:8], ids[:8], Gates(8, low_batch=False)) is stock
    ffn.routing_hook = lambda chosen: None
    assert step.run(x[:8], ids[:8], Gates(8)) is stock


def test_inputs_of_other_shapes_are_refused() -> None:
    moe = FusedMoE(held_moe(14, EXPERTS, 256, 64))
    x, ids = inputs(14, 9, 256)
    with pytest.raises(ValueError, match=r"found torch.bfloat16 \[9, 256\], expected bfloat16 \[1 to 8, 256\]"):
        moe.route(x, ids)
    with pytest.raises(ValueError, match=r"input_ids: found shape \[3\], strides \[1\], expected 2 contiguous rows"):
        moe.route(x[:2], ids[:3])
    with pytest.raises(ValueError, match=r"x: found shape \[2, 256\], strides \[512, 1\]"):
        moe.route(x[:4:2], ids[:2])
