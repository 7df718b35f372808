"""MoEStep: the low-batch path against the plain layer and in float64, and what keeps a step on the stock path."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from specialized_decode.backbone.graphs import EmulatedDevice, capture
from specialized_decode.backbone.moe import MoE
from specialized_decode.boundary import UnfinalizedRows
from specialized_decode.boundary import reference as boundary_reference
from specialized_decode.moe import MoEStep, RoutedExpertGemms
from specialized_decode.moe import gemm as module
from tests.helpers.step_gates import Gates
from tests.helpers.step_mhc import numbers, random_bf16, same_bits
from tests.helpers.step_moe import HIDDEN, TOPK, random_moe

ROWS = [*range(1, 17), 47, 48, 49]
MAX_ROWS = 49


def _step(ffn: MoE, max_rows: int = MAX_ROWS) -> MoEStep:
    return MoEStep(ffn, RoutedExpertGemms(ffn), max_rows)


def _inputs(rows: int, size: float = 1.0) -> tuple[Tensor, Tensor]:
    """Rows of text and, every third, of an image."""
    ids = torch.where(torch.arange(rows) % 3 == 1, 129264 + torch.arange(rows) % 5, torch.arange(rows))
    return random_bf16(0, rows, HIDDEN, size=size), ids


def _finalized(output: UnfinalizedRows | Tensor) -> Tensor:
    """Term by term in float32, rounded once."""
    assert isinstance(output, UnfinalizedRows)
    total = torch.zeros(output.shared.shape)
    for k in range(output.weights.shape[1]):
        total = total + output.rows[:, k].float() * output.weights[:, k, None]
    return (total + output.shared.float()).to(torch.bfloat16)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("image_bias", [True, False])
def test_low_batch_gives_the_bits_of_the_plain_layer(rows: int, image_bias: bool) -> None:
    ffn = random_moe(image_bias=image_bias)
    x, ids = _inputs(rows)
    output = _step(ffn).run(x, ids, Gates(rows))
    assert isinstance(output, UnfinalizedRows)
    assert output.rows.shape == (rows, TOPK, HIDDEN) and output.weights.shape == (rows, TOPK)
    assert same_bits(boundary_reference.finalize(output), ffn(x, ids))
    assert same_bits(_finalized(output), ffn(x, ids))


@pytest.mark.parametrize("size", [20.0, 1e-20], ids=["clamp active", "tiny"])
def test_low_batch_at_other_sizes(size: float) -> None:
    ffn = random_moe()
    x, ids = _inputs(8, size)
    assert same_bits(_finalized(_step(ffn).run(x, ids, Gates(8))), ffn(x, ids))


def test_low_batch_with_experts_unpacked_as_used(monkeypatch: pytest.MonkeyPatch) -> None:
    ffn = random_moe()
    x, ids = _inputs(16)
    monkeypatch.setattr(module, "_KEPT_BYTES", {"cpu": 0})
    monkeypatch.setattr(module, "_CHUNK_BYTES", 1 << 17)
    step = _step(ffn)
    assert step.gemm is not None and 1 < step.gemm.chunk < 16
    assert same_bits(_finalized(step.run(x, ids, Gates(16))), ffn(x, ids))


@pytest.mark.parametrize("rows", [1, 8])
def test_low_batch_in_float64(rows: int) -> None:
    """The routed and the shared part, each from the weights; experts as the step chose them."""
    ffn = random_moe()
    x, ids = _inputs(rows)
    output = _step(ffn).run(x, ids, Gates(rows))
    assert isinstance(output, UnfinalizedRows)
    logits = numbers(x) @ numbers(ffn.gate.weight).T
    scores = np.sqrt(np.log1p(np.exp(logits)))
    assert ffn.image_bias is not None
    for row in range(rows):
        image = 129264 <= int(ids[row]) < 129269
        ranked = scores[row] + numbers(ffn.image_bias if image else ffn.bias)
        chosen = np.argsort(-ranked)[:TOPK]
        found = sorted(output.weights[row].tolist())
        weights = sorted((scores[row][chosen] / scores[row][chosen].sum() * 1.5).tolist())
        assert found == pytest.approx(weights, rel=1e-5)
    up_scale, down_scale = (
        2.0 ** (linear.scale.numpy().astype(float) - 127).repeat(32, 0).repeat(32, 1)
        for linear in (ffn.shared_up, ffn.shared_down)
        if linear.scale is not None
    )
    gate, up = np.split(numbers(x) @ (numbers(ffn.shared_up.weight) * up_scale).T, 2, axis=1)
    gate = np.minimum(gate, 10.0)
    hidden = gate / (1 + np.exp(-gate)) * np.clip(up, -10.0, 10.0)
    down = numbers(ffn.shared_down.weight) * down_scale
    np.testing.assert_array_less(
        np.abs(numbers(output.shared) - hidden @ down.T), 4 * 2**-8 * (np.abs(hidden) @ np.abs(down).T)
    )


def test_padded_rows_stay_by_themselves() -> None:
    ffn = random_moe()
    x, ids = _inputs(8)
    clean = _finalized(_step(ffn).run(x, ids, Gates(8)))
    x[[1, 7]], ids[[1, 7]] = math.nan, -1
    found = _finalized(_step(ffn).run(x, ids, Gates(8)))
    rows = [0, 2, 3, 4, 5, 6]
    assert same_bits(found[rows], clean[rows]) and found[[1, 7]].isnan().all()


class _Counted(MoE):
    """Counts how often its stock path runs."""

    calls = 0

    def __call__(self, x: Tensor, input_ids: Tensor) -> Tensor:
        self.calls += 1
        return super().__call__(x, input_ids)


def _counted() -> _Counted:
    ffn = random_moe()
    ffn.__class__ = _Counted
    assert isinstance(ffn, _Counted)
    return ffn


@pytest.mark.parametrize(
    ("why", "stock"),
    [
        ("nothing", False),
        ("the gate is shut", True),
        ("a row above max_rows", True),
        ("max_rows", False),
        ("no GEMM", True),
        ("a routing hook", True),
    ],
)
def test_what_keeps_a_step_on_the_stock_path(why: str, stock: bool) -> None:
    ffn = _counted()
    rows = 5 if why == "a row above max_rows" else 4
    step = MoEStep(ffn, None if why == "no GEMM" else RoutedExpertGemms(ffn), 4)
    seen: list[Tensor] = []
    if why == "a routing hook":
        ffn.routing_hook = seen.append
    gates = Gates(rows, low_batch=why != "the gate is shut")
    x, ids = _inputs(rows)
    assert step.takes_low_batch(gates) != stock
    output = step.run(x, ids, gates)
    assert ffn.calls == stock and isinstance(output, Tensor) == stock
    assert len(seen) == (why == "a routing hook")
    result = output if isinstance(output, Tensor) else _finalized(output)
    assert same_bits(result, random_moe()(x, ids))


def test_a_hook_set_later_sends_the_next_step_to_the_stock_path() -> None:
    ffn = _counted()
    step, (x, ids), seen = _step(ffn), _inputs(4), list[Tensor]()
    step.run(x, ids, Gates(4))
    ffn.routing_hook = seen.append
    step.run(x, ids, Gates(4))
    ffn.routing_hook = None
    step.run(x, ids, Gates(4))
    assert ffn.calls == 1
    assert seen[0].shape == (4, TOPK) and len(seen) == 1


@pytest.mark.parametrize("chunked", [False, True])
def test_a_replay_routes_its_own_inputs(monkeypatch: pytest.MonkeyPatch, chunked: bool) -> None:
    if chunked:
        monkeypatch.setattr(module, "_KEPT_BYTES", {"cpu": 0})
        monkeypatch.setattr(module, "_CHUNK_BYTES", 1 << 17)
    ffn = random_moe()
    step, device = _step(ffn), EmulatedDevice()
    x, ids = torch.zeros(6, HIDDEN, dtype=torch.bfloat16), torch.zeros(6, dtype=torch.int64)
    outputs: list[UnfinalizedRows | Tensor] = []
    graph = capture(device, lambda: outputs.append(step.run(x, ids, Gates(6))))
    for seed in (1, 2):
        x.copy_(random_bf16(seed, 6, HIDDEN))
        ids.copy_(torch.randint(129262, 129272, (6,), generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        assert same_bits(_finalized(outputs[0]), ffn(x, ids))
