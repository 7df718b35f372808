"""Every MoE op against scalar formulas and the formats' bits."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from specialized_decode.moe import reference
from tests.helpers import exact_formats as exact
from tests.helpers.exact_formats import bf16
from tests.helpers.step_mhc import assert_rounded, assert_within, numbers, random_bf16, same_bits
from tests.helpers.step_moe import packed

EXPERTS, TOPK, SCALING = 16, 3, 1.5
ROWS = [*range(1, 17), 47, 48, 49]
INF, NAN = math.inf, math.nan
TEXT = 17


def _score(logit: float) -> float:
    """sqrt(log(1 + exp(logit))), without overflow."""
    return math.sqrt(max(logit, 0.0) + math.log1p(math.exp(-abs(logit))))


def _silu(x: float) -> float:
    return x / (1 + math.exp(-x)) if x > -700 else -0.0


# --- router -----------------------------------------------------------------------------------------------------


def test_router_scores() -> None:
    """Around softplus's threshold of 20 and float32's limits of exp too."""
    logits = [*np.linspace(-30, 30, 121), 19.999, 20.0, 20.001, 88.7, 89.0, 1e4, 3e38, -60.0, -87.0]
    found = reference.router_scores(torch.tensor(logits, dtype=torch.float32))
    assert found.dtype == torch.float32
    expected = np.array([_score(float(np.float32(logit))) for logit in logits])
    assert_within(numbers(found), expected, 2e-6 * expected)


def test_router_scores_of_special_values() -> None:
    found = reference.router_scores(torch.tensor([INF, -INF, -1000.0, NAN])).tolist()
    assert found[:3] == [INF, 0.0, 0.0] and math.isnan(found[3])


def _assert_selection(logits: Tensor, bias: Tensor, found: tuple[Tensor, Tensor]) -> None:
    """bias: [T, E], what each row's experts are ranked with. Ties are not told apart."""
    ids, weights = found
    assert ids.dtype == torch.int64 and weights.dtype == torch.float32 and ids.shape == weights.shape
    for row in range(logits.shape[0]):
        scores = [_score(float(logit)) for logit in logits[row]]
        ranked = [score + float(b) for score, b in zip(scores, bias[row], strict=True)]
        chosen = ids[row].tolist()
        assert len(set(chosen)) == len(chosen)
        left = [value for expert, value in enumerate(ranked) if expert not in chosen]
        assert not left or min(ranked[e] for e in chosen) >= max(left) - 1e-5
        total = sum(scores[e] for e in chosen)
        for expert, weight in zip(chosen, weights[row].tolist(), strict=True):
            assert weight == pytest.approx(scores[expert] / total * SCALING if total else 0.0, rel=1e-5)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("size", [1.0, 30.0])
def test_select_experts(rows: int, size: float) -> None:
    generator = torch.Generator().manual_seed(rows)
    logits, bias = torch.randn(rows, EXPERTS, generator=generator) * size, torch.randn(EXPERTS, generator=generator)
    found = reference.select_experts(logits, bias, None, torch.full((rows,), TEXT), TOPK, SCALING)
    _assert_selection(logits, bias.expand(rows, -1), found)


@pytest.mark.parametrize("topk", [1, EXPERTS])
def test_select_one_or_all_experts(topk: int) -> None:
    logits = torch.randn(3, EXPERTS, generator=torch.Generator().manual_seed(0))
    ids, weights = reference.select_experts(logits, torch.zeros(EXPERTS), None, torch.zeros(3), topk, SCALING)
    assert weights.sum(1).tolist() == pytest.approx([SCALING] * 3)
    _assert_selection(logits, torch.zeros(3, EXPERTS), (ids, weights))


def test_the_bias_ranks_and_does_not_weigh() -> None:
    logits, bias = torch.linspace(-2, 2, EXPERTS).unsqueeze(0), torch.zeros(EXPERTS)
    bias[:TOPK] = 100.0
    ids, weights = reference.select_experts(logits, bias, None, torch.tensor([TEXT]), TOPK, SCALING)
    assert sorted(ids[0].tolist()) == [0, 1, 2]
    scores = [_score(float(logits[0, e])) for e in ids[0].tolist()]
    assert weights[0].tolist() == pytest.approx([SCALING * s / sum(scores) for s in scores], rel=1e-5)


@pytest.mark.parametrize("input_id", [-1, 0, 129263, 129264, 129266, 129268, 129269, 200000])
def test_five_ids_are_image_tokens(input_id: int) -> None:
    text, image = torch.zeros(EXPERTS), torch.zeros(EXPERTS)
    text[:TOPK], image[-TOPK:] = 10.0, 10.0
    logits, ids = torch.zeros(1, EXPERTS), torch.tensor([input_id])
    chosen = reference.select_experts(logits, text, image, ids, TOPK, SCALING)[0][0].tolist()
    assert sorted(chosen) == ([13, 14, 15] if 129264 <= input_id <= 129268 else [0, 1, 2])
    assert sorted(reference.select_experts(logits, text, None, ids, TOPK, SCALING)[0][0].tolist()) == [0, 1, 2]


def test_text_and_image_rows_in_one_batch() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5, EXPERTS, generator=generator)
    text, image = torch.randn(EXPERTS, generator=generator), torch.randn(EXPERTS, generator=generator)
    ids = torch.tensor([TEXT, 129264, 129269, 129268, 0])
    bias = torch.stack([text, image, text, image, text])
    _assert_selection(logits, bias, reference.select_experts(logits, text, image, ids, TOPK, SCALING))


def test_no_score_at_all_gives_zero_weights() -> None:
    logits, bias = torch.full((1, EXPERTS), -1000.0), torch.arange(EXPERTS) / 10
    ids, weights = reference.select_experts(logits, bias, None, torch.tensor([TEXT]), TOPK, SCALING)
    assert sorted(ids[0].tolist()) == [13, 14, 15] and weights[0].tolist() == [0.0] * TOPK


@pytest.mark.parametrize("experts", [16, 384])
def test_of_equal_experts_the_lower_ids_are_chosen(experts: int) -> None:
    logits = torch.zeros(2, experts)
    logits[1, experts - 5 :] = 1.0
    ids, weights = reference.select_experts(logits, torch.zeros(experts), None, torch.zeros(2), TOPK, SCALING)
    assert ids.tolist() == [[0, 1, 2], [experts - 5, experts - 4, experts - 3]]
    assert weights.tolist() == [pytest.approx([SCALING / TOPK] * TOPK, rel=1e-6)] * 2


def test_an_expert_of_nan_loses_to_all() -> None:
    logits = torch.linspace(-2, 2, EXPERTS).repeat(2, 1)
    logits[0, 15], logits[1, 1:] = NAN, NAN
    ids, _ = reference.select_experts(logits, torch.zeros(EXPERTS), None, torch.zeros(2), TOPK, SCALING)
    assert ids.tolist() == [[14, 13, 12], [0, 1, 2]]


def test_padded_rows_stay_by_themselves() -> None:
    """NaN in a row's logits: its ids stay those of experts, since they will be used as an index."""
    logits, bias = torch.randn(6, EXPERTS, generator=torch.Generator().manual_seed(2)), torch.zeros(EXPERTS)
    clean = reference.select_experts(logits, bias, bias, torch.zeros(6), TOPK, SCALING)
    logits[[1, 5]] = NAN
    ids, weights = reference.select_experts(logits, bias, bias, torch.zeros(6), TOPK, SCALING)
    rows = [0, 2, 3, 4]
    assert torch.equal(ids[rows], clean[0][rows]) and same_bits(weights[rows], clean[1][rows])
    assert ((ids >= 0) & (ids < EXPERTS)).all()


# --- SwiGLU -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [10.0, 0.5, 1e9], ids=["10", "clamp active", "no clamp"])
def test_swiglu(limit: float) -> None:
    gate_up = random_bf16(3, 8, 64, size=12)
    found = reference.swiglu(gate_up, limit)
    assert found.shape == (8, 32)
    x = numbers(gate_up)
    expected = np.array(
        [[_silu(min(row[i], limit)) * max(-limit, min(row[32 + i], limit)) for i in range(32)] for row in x]
    )
    assert_rounded(found, expected, 1e-6 * np.abs(expected))


def test_swiglu_bounds_the_gate_above_and_up_on_both_sides() -> None:
    gate_up = torch.tensor([[50.0, -50.0, 50.0, 1.0, 3.0, 3.0, -300.0, 300.0]], dtype=torch.bfloat16)
    found = reference.swiglu(gate_up, 10.0)[0].tolist()
    ten, one = _silu(10.0), _silu(1.0)
    assert found == pytest.approx([3 * ten, 0.0, -10 * ten, 10 * one], rel=2**-8, abs=1e-18)


def test_swiglu_of_special_values() -> None:
    """Infinities are clamped; NaN of either half stays NaN; zero keeps its sign; subnormals pass."""
    gate = [INF, 1.0, 1.0, NAN, 1.0, -0.0, 0.0, 2.0**-133, 1.0]
    up = [1.0, INF, -INF, 1.0, NAN, 1.0, -1.0, 1.0, -0.0]
    found = reference.swiglu(torch.tensor([gate + up], dtype=torch.bfloat16), 10.0)[0].tolist()
    assert found[:3] == pytest.approx([_silu(10.0), 10 * _silu(1.0), -10 * _silu(1.0)], rel=2**-8)
    assert math.isnan(found[3]) and math.isnan(found[4])
    assert [math.copysign(1, value) for value in found[5:7]] == [-1, -1] and found[5:7] == [0.0, 0.0]
    # Half of the smallest subnormal rounds to even.
    assert found[7] == 0.0 and math.copysign(1, found[8]) == -1


# --- FP4 --------------------------------------------------------------------------------------------------------


def _unpacked(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Value by value: [..., N, K/2] and [..., N, K/32] -> [..., N, K]."""
    result = np.empty((*codes.shape[:-1], 2 * codes.shape[-1]))
    for at in np.ndindex(*result.shape):
        byte = int(codes[(*at[:-1], at[-1] // 2)])
        code = byte & 15 if at[-1] % 2 == 0 else byte >> 4
        result[at] = exact.fp4_value(code) * exact.ue8m0_value(int(scales[(*at[:-1], at[-1] // 32)]))
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("byte_type", [torch.uint8, torch.int8])
def test_unpack_fp4(dtype: torch.dtype, byte_type: torch.dtype) -> None:
    """Exact in both types, every code and every scale but NaN's; negative zero keeps its sign."""
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8).repeat(16).view(1, 8, 512)
    scales = (torch.arange(256) % 252 + 1).to(torch.uint8).view(1, 8, 32)
    found = reference.unpack_fp4(codes.view(byte_type), scales, dtype)
    assert found.dtype == dtype
    expected = _unpacked(codes.numpy(), scales.numpy())
    # Half of 2**-126 is a subnormal in both types; 6 times 2**125 is infinite in neither.
    np.testing.assert_array_equal(numbers(found), expected)
    np.testing.assert_array_equal(np.signbit(numbers(found)), np.signbit(expected))


def test_unpack_fp4_reads_the_low_nibble_first() -> None:
    codes = torch.zeros(1, 16, dtype=torch.uint8)
    codes[0, 0] = 0xA3
    found = reference.unpack_fp4(codes, torch.tensor([[128]], dtype=torch.uint8), torch.float32)
    assert found[0, :3].tolist() == [3.0, -2.0, 0.0]


# --- experts ----------------------------------------------------------------------------------------------------


def _expert(x: np.ndarray, w13: np.ndarray, w2: np.ndarray, limit: float) -> tuple[np.ndarray, np.ndarray]:
    """One row through one expert, rounded where the op rounds, and what its second sum adds up."""
    gate_up = bf16((w13 @ x).astype(np.float32))
    half = len(gate_up) // 2
    hidden = bf16(
        [_silu(min(g, limit)) * max(-limit, min(u, limit)) for g, u in zip(gate_up[:half], gate_up[half:], strict=True)]
    )
    return w2 @ hidden, np.abs(w2) @ np.abs(hidden)


@pytest.mark.parametrize("rows", [1, 2, 8, 16, 49])
@pytest.mark.parametrize("limit", [10.0, 0.5], ids=["clamp idle", "clamp active"])
def test_expert_outputs(rows: int, limit: float) -> None:
    experts, hidden, width = 4, 64, 32
    w13 = reference.unpack_fp4(*packed(5, experts, 2 * width, hidden), torch.float32)
    w2 = reference.unpack_fp4(*packed(6, experts, hidden, width), torch.float32)
    x = random_bf16(7, rows, hidden)
    found = reference.expert_outputs(x, w13, w2, limit)
    assert found.shape == (experts, rows, hidden)
    for expert in range(experts):
        for row in range(rows):
            values, sizes = _expert(numbers(x[row]), numbers(w13[expert]), numbers(w2[expert]), limit)
            # A hidden value may fall on the other side of a rounding edge: two roundings of its terms' sum.
            assert_rounded(found[expert, row], values, 2**-9 * sizes)


def test_expert_outputs_of_padded_rows_stay_by_themselves() -> None:
    w13 = reference.unpack_fp4(*packed(5, 4, 64, 64), torch.float32)
    w2 = reference.unpack_fp4(*packed(6, 4, 64, 32), torch.float32)
    x = random_bf16(7, 8, 64)
    clean = reference.expert_outputs(x, w13, w2, 10.0)
    x[1::2] = NAN
    found = reference.expert_outputs(x, w13, w2, 10.0)
    assert same_bits(found[:, ::2], clean[:, ::2]) and found[:, 1::2].isnan().all()
