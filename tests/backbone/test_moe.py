"""The mixture of experts against per-token loops in float64."""

import math
import weakref

import numpy as np
import pytest
import torch
from torch import Tensor

from specialized_decode.backbone import moe as module
from specialized_decode.backbone.linear import Linear
from specialized_decode.backbone.moe import Experts, MoE, swiglu
from tests.helpers.exact_formats import bf16, fp4_value, ue8m0_value
from tests.helpers.small_config import small_config

HIDDEN, WIDTH, EXPERTS, TOPK = 64, 32, 16, 3
TEXT, IMAGE = 17, 129264


def _packed(generator: torch.Generator, rows: int, columns: int, experts: int) -> tuple[Tensor, Tensor]:
    codes = torch.randint(256, (experts, rows, columns // 2), generator=generator).to(torch.uint8)
    scales = torch.randint(121, 126, (experts, rows, columns // 32), generator=generator).to(torch.uint8)
    return codes, scales


def _experts(seed: int = 0, experts: int = EXPERTS) -> Experts:
    generator = torch.Generator().manual_seed(seed)
    w13 = _packed(generator, 2 * WIDTH, HIDDEN, experts)
    w2 = _packed(generator, HIDDEN, WIDTH, experts)
    return Experts(*w13, *w2)


def _moe(experts: Experts, bias: Tensor, image_bias: Tensor | None = None, seed: int = 1) -> MoE:
    """A layer whose gate passes x's first values on as the logits."""
    generator = torch.Generator().manual_seed(seed)
    shared_up = torch.randn(2 * WIDTH, HIDDEN, generator=generator).to(torch.bfloat16) * 0.2
    shared_down = torch.randn(HIDDEN, WIDTH, generator=generator).to(torch.bfloat16) * 0.2
    gate = torch.eye(experts.count, HIDDEN, dtype=torch.bfloat16)
    config = small_config(n_routed_experts=experts.count, num_experts_per_tok=TOPK)
    return MoE(config, Linear(gate), bias, image_bias, experts, Linear(shared_up), Linear(shared_down))


def _x(tokens: int, seed: int = 2) -> Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def _bias(seed: int, count: int = EXPERTS) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 0.5


def _score(logit: float) -> float:
    """sqrt(log(1 + exp(logit))), without overflow."""
    return math.sqrt(max(logit, 0.0) + math.log1p(math.exp(-abs(logit))))


def _route(logits: list[float], bias: list[float]) -> tuple[list[int], list[float]]:
    scores = [_score(logit) for logit in logits]
    ids = sorted(range(len(scores)), key=lambda e: (-(scores[e] + bias[e]), e))[:TOPK]
    total = sum(scores[e] for e in ids)
    return ids, [scores[e] / total * 1.5 if total > 0 else 0.0 for e in ids]


def _check_route(layer: MoE, x: Tensor, input_ids: Tensor, bias: Tensor) -> None:
    ids, weights = layer.route(x, input_ids)
    assert ids.dtype == torch.int64 and weights.dtype == torch.float32
    for token in range(x.shape[0]):
        expected = _route(x[token, :EXPERTS].tolist(), bias[token].tolist())
        found = dict(zip(ids[token].tolist(), weights[token].tolist(), strict=True))
        assert sorted(found) == sorted(expected[0]), f"token {token}"
        for expert, weight in zip(*expected, strict=True):
            assert found[expert] == pytest.approx(weight, rel=1e-5, abs=1e-7)


def test_routing_against_a_loop() -> None:
    bias = _bias(3)
    layer = _moe(_experts(), bias)
    x = _x(60) * 3
    _check_route(layer, x, torch.full((60,), TEXT), bias.expand(60, -1))
    assert layer.route(x, torch.zeros(60, dtype=torch.int64))[1].sum(-1).tolist() == pytest.approx([1.5] * 60)


def test_routing_is_stable_at_extreme_logits() -> None:
    x = torch.zeros(5, HIDDEN)
    x[0, :EXPERTS] = torch.linspace(15.0, 25.0, EXPERTS)  # around the threshold past which softplus(x) is x
    x[1, :EXPERTS] = torch.linspace(80.0, 96.0, EXPERTS)  # around exp's overflow
    x[2, :EXPERTS] = torch.linspace(1e4, 3e38, EXPERTS)
    x[3, :EXPERTS] = torch.linspace(-25.0, -10.0, EXPERTS)
    x[4, 0], x[4, 1:EXPERTS] = 1e30, -1e30
    x = x.to(torch.bfloat16)
    bias = torch.linspace(0, 1e-3, EXPERTS)
    _check_route(_moe(_experts(), bias), x, torch.full((5,), TEXT), bias.expand(5, -1))


def test_the_bias_changes_the_selection_and_not_the_weights() -> None:
    x = torch.zeros(1, HIDDEN)
    x[0, :EXPERTS] = torch.linspace(-2.0, 2.0, EXPERTS)
    x = x.to(torch.bfloat16)
    bias = torch.zeros(EXPERTS)
    plain = _moe(_experts(), bias).route(x, torch.tensor([TEXT]))[0][0]
    assert sorted(plain.tolist()) == [13, 14, 15]
    bias[[0, 1, 2]] = 10.0
    ids, weights = _moe(_experts(), bias).route(x, torch.tensor([TEXT]))
    assert sorted(ids[0].tolist()) == [0, 1, 2]
    scores = [_score(float(x[0, e])) for e in ids[0].tolist()]
    assert weights[0].tolist() == pytest.approx([1.5 * s / sum(scores) for s in scores], rel=1e-5)


@pytest.mark.parametrize("input_id", [0, 129263, 129264, 129265, 129268, 129269, 129279])
def test_image_tokens_have_their_own_bias(input_id: int) -> None:
    text, image = torch.zeros(EXPERTS), torch.zeros(EXPERTS)
    text[:TOPK], image[-TOPK:] = 10.0, 10.0
    x = _x(1)
    is_image = input_id in range(129264, 129269)
    ids = _moe(_experts(), text, image).route(x, torch.tensor([input_id]))[0][0]
    assert sorted(ids.tolist()) == (list(range(13, 16)) if is_image else [0, 1, 2])
    ids = _moe(_experts(), text, None).route(x, torch.tensor([input_id]))[0][0]
    assert sorted(ids.tolist()) == [0, 1, 2]


def test_text_and_image_tokens_in_one_batch() -> None:
    text, image = _bias(4), _bias(5)
    input_ids = torch.tensor([TEXT, IMAGE, 129269, IMAGE + 4, 0])
    expected = torch.stack([image if IMAGE <= i < IMAGE + 5 else text for i in input_ids.tolist()])
    _check_route(_moe(_experts(), text, image), _x(5), input_ids, expected)


@pytest.mark.parametrize("experts", [16, 384])
def test_ties_go_to_the_lowest_experts(experts: int) -> None:
    """As in the serving engine's router; equal weights all the same."""
    x = torch.zeros(2, 384, dtype=torch.bfloat16)
    x[1, experts - 4 :] = 1.0
    layer = _moe(_experts(experts=experts), torch.zeros(experts))
    layer.gate = Linear(torch.eye(experts, 384, dtype=torch.bfloat16))
    ids, weights = layer.route(x, torch.full((2,), TEXT))
    assert weights.tolist() == [pytest.approx([0.5] * 3)] * 2
    assert sorted(ids[0].tolist()) == [0, 1, 2]
    assert sorted(ids[1].tolist()) == [experts - 4, experts - 3, experts - 2]


def test_no_score_at_all_gives_zero_weights() -> None:
    x = torch.full((1, HIDDEN), -1000.0, dtype=torch.bfloat16)
    bias = torch.arange(EXPERTS) / 10
    ids, weights = _moe(_experts(), bias).route(x, torch.tensor([TEXT]))
    assert sorted(ids[0].tolist()) == [13, 14, 15] and weights[0].tolist() == [0.0] * 3


def _silu(x: float) -> float:
    return x / (1 + math.exp(-x)) if x > -700 else 0.0


@pytest.mark.parametrize("limit", [10.0, 0.5, 1e9])
def test_swiglu(limit: float) -> None:
    gate_up = (torch.randn(8, 2 * WIDTH, generator=torch.Generator().manual_seed(6)) * 12).to(torch.bfloat16)
    found = swiglu(gate_up, limit)
    assert found.dtype == torch.bfloat16 and found.shape == (8, WIDTH)
    for row in range(8):
        for i in range(WIDTH):
            gate, up = float(gate_up[row, i]), float(gate_up[row, WIDTH + i])
            expected = _silu(min(gate, limit)) * max(-limit, min(up, limit))
            assert float(found[row, i]) == pytest.approx(expected, rel=2**-8, abs=1e-9)


def test_swiglu_bounds_one_side_of_the_gate_and_both_of_up() -> None:
    gate_up = torch.tensor([[50.0, -50.0, 50.0, 1.0, 3.0, 3.0, -300.0, 300.0]], dtype=torch.bfloat16)
    found = swiglu(gate_up, 10.0)[0].tolist()
    ten, one = _silu(10.0), _silu(1.0)
    assert found == pytest.approx([ten * 3, 0.0, ten * -10, one * 10], rel=2**-8)


def test_swiglu_bounds_infinities_and_keeps_nan() -> None:
    inf, nan = math.inf, math.nan
    gate_up = torch.tensor([[inf, 1.0, 1.0, nan, 1.0, nan, 1.0, inf, -inf, 1.0, nan, 0.0]], dtype=torch.bfloat16)
    found = swiglu(gate_up, 10.0)[0].tolist()
    assert found[:3] == pytest.approx([_silu(10.0), 10 * _silu(1.0), -10 * _silu(1.0)], rel=2**-8)
    assert all(math.isnan(value) for value in found[3:])


def _dequantized(codes: Tensor, scales: Tensor) -> np.ndarray:
    """Value by value: [E, N, K/2] and [E, N, K/32] -> [E, N, K]."""
    table, bytes_, factors = [fp4_value(c) for c in range(16)], codes.numpy(), scales.numpy()
    values = np.stack((np.take(table, bytes_ & 15), np.take(table, bytes_ >> 4)), -1)
    values = values.reshape(*bytes_.shape[:2], -1)
    for block in range(factors.shape[2]):
        values[..., 32 * block : 32 * block + 32] *= np.vectorize(lambda code: ue8m0_value(int(code)))(
            factors[..., block : block + 1]
        )
    return values


def _expert(x: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    """One token through one expert, rounded where the layer rounds."""
    gate_up = bf16(up @ x)
    width = len(gate_up) // 2
    hidden = [
        _silu(min(g, 10.0)) * max(-10.0, min(u, 10.0)) for g, u in zip(gate_up[:width], gate_up[width:], strict=True)
    ]
    return bf16(down @ bf16(hidden))


def _forward(layer: MoE, x: Tensor, bias: Tensor) -> np.ndarray:
    experts = layer.experts
    w13, w2 = _dequantized(experts.w13, experts.w13_scale), _dequantized(experts.w2, experts.w2_scale)
    shared = layer.shared_up.weight.double().numpy(), layer.shared_down.weight.double().numpy()
    rows = []
    for token in x:
        row = token.double().numpy()
        total = _expert(row, *shared)
        for expert, weight in zip(*_route(token[: experts.count].tolist(), bias.tolist()), strict=True):
            total = total + weight * _expert(row, w13[expert], w2[expert])
        rows.append(bf16(total))
    return np.stack(rows)


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("size", [0.25, 6.0])
def test_experts_against_a_loop(tokens: int, size: float) -> None:
    """At the larger size the clamp is active."""
    bias = _bias(7)
    layer, x = _moe(_experts(), bias), _x(tokens) * size
    found = layer(x, torch.full((tokens,), TEXT))
    assert found.dtype == torch.bfloat16
    expected = _forward(layer, x, bias)
    np.testing.assert_allclose(found.double().numpy(), expected, rtol=0.02, atol=0.02 * np.abs(expected).max())
    up = x.float() @ torch.from_numpy(_dequantized(layer.experts.w13, layer.experts.w13_scale)[0].T).float()
    assert (up.max() > 10) == (size > 1)


def test_experts_dequantized_as_used_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    bias, x, ids = _bias(8), _x(9), torch.full((9,), TEXT)
    kept = _moe(_experts(), bias)
    assert kept.experts.kept and kept.experts.chunk == EXPERTS
    expected = kept(x, ids)
    expert_bytes = 3 * WIDTH * HIDDEN * 4
    monkeypatch.setattr(module, "_KEEP_BYTES", {"cpu": 0})
    for chunk in (1, 3, 5, EXPERTS, 2 * EXPERTS):
        monkeypatch.setattr(module, "_CHUNK_BYTES", chunk * expert_bytes)
        used = _moe(_experts(), bias)
        assert not used.experts.kept and used.experts.chunk == min(chunk, EXPERTS)
        for start, stop in ((0, 2), (3, 4), (14, 16)):
            for found, whole in zip(
                used.experts.dequantized(start, stop), kept.experts.dequantized(0, 16), strict=True
            ):
                assert torch.equal(found, whole[start:stop])
        torch.testing.assert_close(used(x, ids), expected, rtol=2**-7, atol=1e-3)


class _Turned:
    """Experts of which the last comes first, each a tensor of its own: a form as good as another."""

    layout, w13_scale_2, w2_scale_2 = "turned", None, None

    def __init__(self, experts: Experts) -> None:
        self.w13, self.w13_scale = experts.w13.flip(0), experts.w13_scale.flip(0)
        self.w2, self.w2_scale = experts.w2.flip(0), experts.w2_scale.flip(0)
        self.asked: list[tuple[int, int]] = []

    def unpacked(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        self.asked.append((start, stop))
        part = slice(EXPERTS - stop, EXPERTS - start)
        tensors = [t[part].flip(0) for t in (self.w13, self.w13_scale, self.w2, self.w2_scale)]
        return tensors[0], tensors[1], tensors[2], tensors[3]


@pytest.mark.parametrize("kept", [True, False])
def test_experts_held_in_another_form(monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    """They are read through the form, once where they are kept dequantized, and what they were before is released."""
    if not kept:
        monkeypatch.setattr(module, "_KEEP_BYTES", {"cpu": 0})
        monkeypatch.setattr(module, "_CHUNK_BYTES", 5 * 3 * WIDTH * HIDDEN * 4)
    layer, x, ids = _moe(_experts(), _bias(8)), _x(9), torch.full((9,), TEXT)
    expected, form = layer(x, ids), _Turned(layer.experts)
    before = weakref.ref(layer.experts.w13)
    layer.experts.hold(form)
    assert before() is None
    assert layer.experts.layout == "turned" and layer.experts.w2_scale is form.w2_scale
    assert layer.experts.w13_scale_2 is None and layer.experts.count == EXPERTS
    for _ in range(2):
        assert torch.equal(layer(x, ids), expected)
    assert form.asked == ([(0, EXPERTS)] if kept else [(0, 5), (5, 10), (10, 15), (15, EXPERTS)] * 2)


def test_long_batches_give_what_their_rows_give(monkeypatch: pytest.MonkeyPatch) -> None:
    text, image = _bias(9), _bias(10)
    layer, x = _moe(_experts(), text, image), _x(11)
    ids = torch.tensor([TEXT, IMAGE] * 5 + [TEXT])
    expected = torch.cat([layer(x[row : row + 1], ids[row : row + 1]) for row in range(11)])
    torch.testing.assert_close(layer(x, ids), expected, rtol=2**-7, atol=1e-3)
    monkeypatch.setattr(module, "_CHUNK_TOKENS", 4)
    torch.testing.assert_close(layer(x, ids), expected, rtol=2**-7, atol=1e-3)


def test_a_row_of_nan_stays_in_its_row() -> None:
    layer, x = _moe(_experts(), _bias(11)), _x(3)
    ids = torch.full((3,), TEXT)
    expected = layer(x, ids)
    x[1] = math.nan
    found = layer(x, ids)
    assert found[1].isnan().all()
    torch.testing.assert_close(found[[0, 2]], expected[[0, 2]], rtol=2**-7, atol=1e-3)
