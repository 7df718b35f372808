"""The injection against scalar formulas in float64."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from specialized_decode.engram import reference
from tests.helpers.step_mhc import assert_rounded, numbers, random_bf16, same_bits

HIDDEN, STREAMS = 64, 4
ROWS = [*range(1, 17), 47, 48, 49]
INF, NAN = math.inf, math.nan


def _inputs(rows: int, streams: int = STREAMS, size: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """residual, kv, q_weight, k_weight, keep."""
    keep = torch.arange(rows) % 3 != 1
    return (
        random_bf16(1, rows, streams, HIDDEN),
        random_bf16(2, rows, (streams + 1) * HIDDEN, size=size),
        random_bf16(3, streams, HIDDEN),
        random_bf16(4, streams, HIDDEN),
        keep,
    )


def _gate(residual: np.ndarray, key: np.ndarray, weight: np.ndarray, eps: float) -> float:
    """One stream's gate: the keys come normalized, and so does the stream; 1e-6 is the root's floor."""
    rms = math.sqrt((residual**2).mean() + eps) * math.sqrt((key**2).mean() + eps)
    dot = float((residual * weight * key).sum()) / rms / math.sqrt(len(residual))
    root = math.sqrt(max(abs(dot), 1e-6))
    return 1 / (1 + math.exp(root if dot < 0 else -root))


def _assert_injected(
    found: Tensor, inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], eps: float, slack: float = 1e-6
) -> None:
    residual, kv, q, k, keep = inputs
    rows, streams, hidden = residual.shape
    assert found.shape == residual.shape
    for row in range(rows):
        parts = numbers(kv[row]).reshape(streams + 1, hidden)
        for stream in range(streams):
            old = numbers(residual[row, stream])
            gate = _gate(old, parts[stream], numbers(q[stream]) * numbers(k[stream]), eps) if keep[row] else 0.0
            error = slack * (np.abs(old) + np.abs(parts[-1]))
            assert_rounded(found[row, stream], old + gate * parts[-1], error)


@pytest.mark.parametrize("rows", ROWS)
def test_inject(rows: int) -> None:
    inputs = _inputs(rows)
    _assert_injected(reference.inject(*inputs, 1e-20), inputs, 1e-20, slack=5e-6)


@pytest.mark.parametrize("streams", [1, 2])
def test_inject_into_other_numbers_of_streams(streams: int) -> None:
    inputs = _inputs(3, streams)
    _assert_injected(reference.inject(*inputs, 1e-20), inputs, 1e-20, slack=5e-6)


@pytest.mark.parametrize("size", [1e-15, 1e15])
def test_the_gate_ignores_the_size_of_the_keys(size: float) -> None:
    inputs = _inputs(3, size=size)
    _assert_injected(reference.inject(*inputs, 1e-20 * 1e-20), inputs, 1e-40, slack=5e-6)


@pytest.mark.parametrize("eps", [0.5, 1e-20])
def test_the_epsilon_is_under_both_roots(eps: float) -> None:
    residual, kv, q, k, _ = _inputs(3)
    inputs = (residual * 0.25, kv, q, k, torch.ones(3, dtype=torch.bool))
    _assert_injected(reference.inject(*inputs, eps), inputs, eps, slack=5e-6)


def _aligned(dot: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Streams of -1/2, keys of ones, weights that make the dot product `dot`, a value of ones."""
    streams = torch.full((1, STREAMS, HIDDEN), -0.5, dtype=torch.bfloat16)
    weight = torch.full((STREAMS, HIDDEN), -dot * HIDDEN**-0.5, dtype=torch.float32)
    kv, keep = torch.ones(1, (STREAMS + 1) * HIDDEN, dtype=torch.bfloat16), torch.ones(1, dtype=torch.bool)
    return streams, kv, weight, torch.ones(STREAMS, HIDDEN), keep


@pytest.mark.parametrize("dot", [0.0, -0.0, 1e-7, -1e-7, 1e-6, 4.0, -4.0, 1e4, -1e4])
def test_the_gate_by_its_dot_product(dot: float) -> None:
    """Floored at 1e-6 under the root, with the sign outside of it; zero counts as positive.

    Half of the value is taken away, so that a rounding hides nothing of a gate near one half.
    """
    found = reference.inject(*_aligned(dot), 1e-20)[0, 0, 0]
    root = math.sqrt(max(abs(dot), 1e-6))
    gate = 1 / (1 + math.exp(-math.copysign(root, dot))) if dot else 1 / (1 + math.exp(-root))
    assert_rounded(found, np.array(gate - 0.5), 1e-6)


def test_dropped_rows_keep_their_bits() -> None:
    """A shut gate adds zero: negative zeros become positive, all else is as it was, whatever the keys are."""
    residual, kv, q, k, _ = _inputs(4)
    kv *= 1e30
    found = reference.inject(residual, kv, q, k, torch.zeros(4, dtype=torch.bool), 1e-20)
    assert torch.equal(found, residual)


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("part", ["residual", "kv"])
def test_padded_rows_stay_by_themselves(poison: float, part: str) -> None:
    residual, kv, q, k, _ = _inputs(8)
    keep = torch.ones(8, dtype=torch.bool)
    clean = reference.inject(residual, kv, q, k, keep, 1e-20)
    (residual if part == "residual" else kv)[1::2] = poison
    found = reference.inject(residual, kv, q, k, keep, 1e-20)
    assert same_bits(found[::2], clean[::2])
    assert not found[1::2].isfinite().any()


def test_silent_streams_and_keys() -> None:
    """Nothing to normalize: the dot product is zero, and the gate what its floor leaves."""
    residual, kv, q, k, _ = _inputs(2)
    inputs = (torch.zeros_like(residual), kv, q, k, torch.ones(2, dtype=torch.bool))
    kv[1, : STREAMS * HIDDEN] = 0.0
    _assert_injected(reference.inject(*inputs, 1e-20), inputs, 1e-20)


def test_values_and_subnormals() -> None:
    """A value of subnormals is added to silent streams."""
    streams, kv, q, k, keep = _aligned(1e4)
    kv[0, -HIDDEN:] = 2.0**-133
    found = reference.inject(torch.zeros_like(streams), kv, q, k, keep, 1e-20)
    # A silent stream's gate is a little over one half: so little that half of a smallest subnormal rounds to it.
    assert found.eq(2.0**-133).all()
