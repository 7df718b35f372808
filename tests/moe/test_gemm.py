"""Routed-expert GEMMs: which experts' rows come back, kept or unpacked as used, and which layers are refused."""

import logging
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specialized_decode.moe import RoutedExpertGemms, build_routed_expert_gemms
from specialized_decode.moe import gemm as module
from tests.helpers.exact_formats import fp4_value, ue8m0_value
from tests.helpers.step_mhc import numbers, random_bf16, same_bits
from tests.helpers.step_moe import EXPERTS, HIDDEN, TOPK, WIDTH, random_moe

ROWS = [*range(1, 17), 47, 48, 49]
# Bytes of one expert of `random_moe`, dequantized.
EXPERT_BYTES = 4 * (2 * WIDTH * HIDDEN + HIDDEN * WIDTH)


def _ids(rows: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOPK] for _ in range(rows)])


def _dequantized(codes: Tensor, scales: Tensor) -> np.ndarray:
    table = np.array([fp4_value(code) for code in range(16)])
    values = np.stack((table[codes.numpy() & 15], table[codes.numpy() >> 4]), -1).reshape(*codes.shape[:-1], -1)
    factors = np.array([ue8m0_value(code) for code in range(256)])[scales.numpy()]
    return values * factors.repeat(32, -1)


def _expected(ffn: Any, x: Tensor, ids: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Expert by expert in float64 with no rounding between, and the size that errors are relative to."""
    w13, w2 = (
        _dequantized(*pair)
        for pair in ((ffn.experts.w13, ffn.experts.w13_scale), (ffn.experts.w2, ffn.experts.w2_scale))
    )
    values = np.empty((*ids.shape, HIDDEN))
    sizes = np.empty_like(values)
    for row, chosen in enumerate(ids.tolist()):
        for slot, expert in enumerate(chosen):
            gate, up = np.split(w13[expert] @ numbers(x[row]), 2)
            gate = np.minimum(gate, ffn.limit)
            hidden = gate / (1 + np.exp(-gate)) * np.clip(up, -ffn.limit, ffn.limit)
            values[row, slot], sizes[row, slot] = w2[expert] @ hidden, np.abs(w2[expert]) @ np.abs(hidden)
    return values, sizes


@pytest.mark.parametrize("rows", ROWS)
def test_rows_of_the_chosen_experts(rows: int) -> None:
    ffn, x, ids = random_moe(), random_bf16(0, rows, HIDDEN), _ids(rows)
    found = RoutedExpertGemms(ffn)(x, ids)
    assert found.shape == (rows, TOPK, HIDDEN) and found.dtype == torch.bfloat16
    values, sizes = _expected(ffn, x, ids)
    # Four roundings to bfloat16 lie behind every term: gate, up, their product, the sum.
    np.testing.assert_array_less(np.abs(numbers(found) - values), 4 * 2**-8 * sizes + 1e-30)


@pytest.mark.parametrize("size", [40.0], ids=["clamp active"])
def test_the_clamp_is_the_layers(size: float) -> None:
    ffn, x, ids = random_moe(), random_bf16(0, 4, HIDDEN, size=size), _ids(4)
    values, sizes = _expected(ffn, x, ids)
    np.testing.assert_array_less(np.abs(numbers(RoutedExpertGemms(ffn)(x, ids)) - values), 4 * 2**-8 * sizes + 1e-30)
    ffn.limit = 1e9
    assert np.abs(_expected(ffn, x, ids)[0] - values).max() > sizes.max(), "nothing was clamped"


@pytest.mark.parametrize("chunk", [1, 3, 5, EXPERTS - 1, EXPERTS])
@pytest.mark.parametrize("rows", [1, 8, 49])
def test_unpacked_as_used_gives_the_bits_of_kept(monkeypatch: pytest.MonkeyPatch, chunk: int, rows: int) -> None:
    ffn, x, ids = random_moe(), random_bf16(0, rows, HIDDEN), _ids(rows)
    kept = RoutedExpertGemms(ffn)
    monkeypatch.setattr(module, "_KEPT_BYTES", {"cpu": 0})
    monkeypatch.setattr(module, "_CHUNK_BYTES", chunk * EXPERT_BYTES)
    chunked = RoutedExpertGemms(ffn)
    assert (kept.chunk, chunked.chunk) == (EXPERTS, chunk)
    assert same_bits(chunked(x, ids), kept(x, ids))


def test_a_chunk_smaller_than_an_expert_is_one_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KEPT_BYTES", {"cpu": 0})
    monkeypatch.setattr(module, "_CHUNK_BYTES", 1)
    ffn, x, ids = random_moe(), random_bf16(0, 2, HIDDEN), _ids(2)
    gemms = RoutedExpertGemms(ffn)
    assert gemms.chunk == 1
    values, sizes = _expected(ffn, x, ids)
    np.testing.assert_array_less(np.abs(numbers(gemms(x, ids)) - values), 4 * 2**-8 * sizes + 1e-30)


@pytest.mark.parametrize("spare", [0, -1], ids=["fits", "a byte short"])
def test_experts_are_kept_up_to_the_limit(monkeypatch: pytest.MonkeyPatch, spare: int) -> None:
    """Experts that are unpacked as used follow the packed tensors; kept ones are a copy."""
    monkeypatch.setattr(module, "_KEPT_BYTES", {"cpu": EXPERTS * EXPERT_BYTES + spare})
    ffn, x, ids = random_moe(), random_bf16(0, 2, HIDDEN), _ids(2)
    gemms = RoutedExpertGemms(ffn)
    assert gemms(x, ids).any()
    ffn.experts.w2.zero_()
    assert bool(gemms(x, ids).any()) == (spare == 0)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("expert", [0, EXPERTS - 1])
def test_all_rows_on_one_expert(monkeypatch: pytest.MonkeyPatch, expert: int, chunked: bool) -> None:
    if chunked:
        monkeypatch.setattr(module, "_KEPT_BYTES", {"cpu": 0})
        monkeypatch.setattr(module, "_CHUNK_BYTES", 5 * EXPERT_BYTES)
    ffn, x = random_moe(), random_bf16(0, 16, HIDDEN)
    ids = torch.full((16, TOPK), expert)
    found = RoutedExpertGemms(ffn)(x, ids)
    values, sizes = _expected(ffn, x, ids)
    np.testing.assert_array_less(np.abs(numbers(found) - values), 4 * 2**-8 * sizes + 1e-30)
    assert same_bits(found[:, 0], found[:, 1]) and same_bits(found[:, 0], found[:, 2])


@pytest.mark.parametrize("chunked", [False, True])
def test_padded_rows_stay_by_themselves(monkeypatch: pytest.MonkeyPatch, chunked: bool) -> None:
    if chunked:
        monkeypatch.setattr(module, "_KEPT_BYTES", {"cpu": 0})
        monkeypatch.setattr(module, "_CHUNK_BYTES", 5 * EXPERT_BYTES)
    gemms, x, ids = RoutedExpertGemms(random_moe()), random_bf16(0, 8, HIDDEN), _ids(8)
    clean = gemms(x, ids)
    x[1::2] = math.nan
    found = gemms(x, ids)
    assert same_bits(found[::2], clean[::2]) and found[1::2].isnan().all()


@pytest.mark.parametrize("chunk", [1, 5])
def test_an_overflowing_expert_stays_by_itself(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Infinite outputs of experts that a row did not choose do not reach it, whatever chunk they are in."""
    monkeypatch.setattr(module, "_KEPT_BYTES", {"cpu": 0})
    monkeypatch.setattr(module, "_CHUNK_BYTES", chunk * EXPERT_BYTES)
    ffn, x = random_moe(), random_bf16(0, 3, HIDDEN)
    # Expert 0 and the last one of every chunk are what ids outside a chunk are clamped to.
    ids = torch.tensor([[1, 2, 3], [6, 7, 8], [11, 12, 13]])
    clean = RoutedExpertGemms(ffn)(x, ids)
    for expert in (0, 4, 5, 9, 10, 14, 15):
        ffn.experts.w2_scale[expert] = 254
    assert same_bits(RoutedExpertGemms(ffn)(x, ids), clean)


# --- what is built ----------------------------------------------------------------------------------------------


def _view(**changes: Tensor | str) -> Any:
    """A layer whose experts differ from a right one's by `changes`."""
    right = random_moe()
    tensors = {name: getattr(right.experts, name) for name in ("w13", "w13_scale", "w2", "w2_scale")}
    experts = {"count": EXPERTS, "layout": right.experts.layout, **tensors, **changes}
    return SimpleNamespace(limit=right.limit, experts=SimpleNamespace(**experts))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"w13": torch.zeros(EXPERTS, 2 * WIDTH, HIDDEN // 2, dtype=torch.int8)}, None),
        (
            {"w13": torch.zeros(EXPERTS, 2 * WIDTH, HIDDEN // 2, dtype=torch.bfloat16)},
            "w13 is torch.bfloat16, expected packed FP4 bytes",
        ),
        (
            {"w2": torch.zeros(EXPERTS, HIDDEN, WIDTH // 2, dtype=torch.int32)},
            "w2 is torch.int32, expected packed FP4 bytes",
        ),
        (
            {"w13_scale": torch.zeros(EXPERTS, 2 * WIDTH, 1, dtype=torch.uint8)},
            "w13's scales are (16, 64, 1), expected one per 32 along K",
        ),
        (
            {"w2_scale": torch.zeros(EXPERTS, HIDDEN, 2, dtype=torch.uint8)},
            "w2's scales are (16, 64, 2), expected one per 32 along K",
        ),
        (
            {"w2_scale": torch.zeros(EXPERTS - 1, HIDDEN, 1, dtype=torch.uint8)},
            "w2's scales are (15, 64, 1), expected one per 32 along K",
        ),
        # The same shapes may be another order of the bytes.
        ({"layout": "MARLIN"}, "experts are in the form of MARLIN, expected the checkpoint's"),
    ],
    ids=[
        *("as stored", "signed bytes", "w13 unpacked", "w2 words", "w13 too few", "w2 too many", "an expert short"),
        "rewritten",
    ],
)
def test_refusal(changes: dict[str, Tensor | str], reason: str | None) -> None:
    assert RoutedExpertGemms.refusal(_view(**changes)) == reason


def test_built_for_the_layers_that_can(caplog: pytest.LogCaptureFixture) -> None:
    """One a layer in order; two reasons, of which one twice."""
    unpacked = torch.zeros(EXPERTS, 2 * WIDTH, HIDDEN // 2, dtype=torch.bfloat16)
    scales = torch.zeros(EXPERTS, HIDDEN, 2, dtype=torch.uint8)
    layers = [_view(w13=unpacked), _view(), _view(w2_scale=scales), _view(), _view(w13=unpacked)]
    with caplog.at_level(logging.INFO, logger=module.logger.name):
        gemms = build_routed_expert_gemms(layers)
    assert [gemm is not None for gemm in gemms] == [False, True, False, True, False]
    for gemm, layer in zip(gemms, layers, strict=True):
        assert gemm is None or gemm.experts is layer.experts
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("INFO", "Routed experts: 2 of 5 layers on the low-batch path"),
        (
            "WARNING",
            "Routed experts: layers on the stock path: 2: w13 is torch.bfloat16, expected packed FP4 bytes",
        ),
        (
            "WARNING",
            "Routed experts: layers on the stock path: 1: w2's scales are (16, 64, 2), expected one per 32 along K",
        ),
    ]


@pytest.mark.parametrize("count", [0, 3])
def test_built_for_all_without_a_warning(caplog: pytest.LogCaptureFixture, count: int) -> None:
    with caplog.at_level(logging.INFO, logger=module.logger.name):
        gemms = build_routed_expert_gemms([_view() for _ in range(count)])
    assert len(gemms) == count and None not in gemms
    (record,) = caplog.records
    assert record.message == f"Routed experts: {count} of {count} layers on the low-batch path"
