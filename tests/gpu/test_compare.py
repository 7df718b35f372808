"""What counts as the same logits."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.gpu.compare import (
    Difference,
    combined,
    difference,
    failures_if_close,
    failures_if_identical,
    missing_kernels,
)


def logits(*rows: list[float]) -> Tensor:
    return torch.tensor(rows)


def test_equal_logits() -> None:
    values = torch.randn(5, 7)
    assert difference(values, values.clone()) == Difference(steps=5)
    assert failures_if_identical(difference(values, values.clone())) == []


def test_differences_are_counted_and_measured() -> None:
    expected = logits([4.0, 1.0, 0.0], [3.0, 2.5, 0.0], [1.0, 0.0, 0.0])
    found = logits([4.0, 1.0, 0.0], [3.0, 3.25, 0.0], [1.0, 0.0, -0.5])
    one = difference(expected, found)
    assert (one.steps, one.differing, one.largest, one.argmax_differs, one.gap) == (3, 2, 0.75, 1, 0.5)
    assert one.rms == pytest.approx(((0.75**2 + 0.5**2) / 9) ** 0.5)
    (failure,) = failures_if_identical(one)
    assert failure == (
        "logits differ in 2 of 3 steps, by up to 0.75, expected none; first: step 1: logit of id 1 found 3.25, "
        "expected 2.5; largest found at id 1 (3.25), expected at id 0 (3)"
    )
    assert combined([difference(expected, expected), one]).first == one.first


def test_a_tie_decided_otherwise_is_no_other_argmax() -> None:
    expected = logits([2.0, 2.0, 0.0])
    assert difference(expected, logits([2.0, 2.5, 0.0])).argmax_differs == 0
    assert difference(expected, logits([2.0, 1.0, 2.5])).argmax_differs == 1


def test_broken_steps_do_not_pass() -> None:
    expected, found = torch.zeros(4, 3), torch.zeros(4, 3)
    found[1, 2], expected[3, 0] = float("nan"), float("inf")
    one = difference(expected, found)
    assert (one.steps, one.broken, one.differing) == (4, 2, 0)
    for failures in (failures_if_identical(one), failures_if_close(one, Difference(steps=4, rms=1.0))):
        assert failures == [
            "logits are not finite in 2 of 4 steps; first: step 1: logit of id 2 found nan, expected 0; largest found "
            "at id 2 (nan), expected at id 0 (0)"
        ]
    assert difference(torch.full((2, 3), float("nan")), torch.zeros(2, 3)) == Difference(steps=2, broken=2)


@pytest.mark.parametrize("shape", [(2, 4), (3, 3), (6,)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"found shape .+, expected \(2, 3\)"):
        difference(torch.zeros(2, 3), torch.zeros(shape))


def test_no_steps_are_no_difference() -> None:
    assert difference(torch.zeros(0, 3), torch.zeros(0, 3)) == Difference() == combined([])


def test_combined() -> None:
    torch.manual_seed(0)
    expected, found = torch.randn(9, 5), torch.randn(9, 5)
    whole = difference(expected, found)
    parts = [difference(expected[a:b], found[a:b]) for a, b in ((0, 2), (2, 3), (3, 9))]
    together = combined(parts)
    assert together.rms == pytest.approx(whole.rms)
    assert {**together.record(), "rms": 0.0} == {**whole.record(), "rms": 0.0}


def test_close_is_measured_by_stocks_own_noise() -> None:
    noise = Difference(steps=10, differing=10, largest=0.4, rms=0.1)
    near = Difference(steps=10, differing=10, largest=0.5, rms=0.14, argmax_differs=1, gap=0.3)
    assert failures_if_close(near, noise) == []
    far = Difference(steps=10, differing=10, largest=0.5, rms=0.16)
    assert failures_if_close(far, noise) == [
        "logits differ by 0.16 (rms), expected at most 1.5 times stock's own noise, 0.1"
    ]
    clear = Difference(steps=10, differing=10, largest=0.5, rms=0.1, argmax_differs=2, gap=0.8)
    assert failures_if_close(clear, noise) == [
        "another token is largest in 2 steps, once over a gap of 0.8, expected gaps below the largest difference, 0.5"
    ]
    # Stock's own batches choose otherwise over larger gaps.
    noise = replace(noise, argmax_differs=3, gap=0.9)
    assert failures_if_close(clear, noise) == []
    assert failures_if_close(replace(clear, gap=0.9), noise) == [
        "another token is largest in 2 steps, once over a gap of 0.9, expected gaps below stock's own, 0.9"
    ]


def test_kernels() -> None:
    stock = {"gemm": 8, "norm": 4, "copy": 1}
    assert missing_kernels(stock, dict(stock)) == []
    assert missing_kernels(stock, {"gemm": 8, "norm": 5, "fill": 2}) == [
        "copy: found 0, expected 1",
        "fill: found 2, expected 0",
        "norm: found 5, expected 4",
    ]
