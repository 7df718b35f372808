"""Answers within what other batches do pass; other tokens, other probabilities and answers to something else do not."""

import pytest

from tests.gpu.answers import Noise, Step, difference, judge
from tests.gpu.compare import Difference

LIKELY = {5: -1.0, 6: -1.01, 7: -4.0}


def answer(*tokens: int, off: float = 0.0) -> list[Step]:
    """Steps at which 5 and 6 are nearly as likely and 7 is not; the values are all `off` by as much."""
    values = {token: value + off for token, value in (LIKELY | {9: -9.0}).items()}
    return [Step(token, values[token], {one: values[one] for one in LIKELY}) for token in tokens]


def test_the_same_answer() -> None:
    found = difference(answer(5, 5, 5), answer(5, 5, 5))
    assert found == Difference(steps=3)
    assert judge([found], ["a"], Noise.of([found])) == []


def test_a_near_tie_within_the_error() -> None:
    found = difference(answer(5, 6, 5, off=0.02), answer(5, 6, 5))
    assert (found.steps, found.differing, found.argmax_differs) == (3, 3, 1)
    assert (found.largest, found.rms, found.gap) == pytest.approx((0.02, 0.02, 0.01))
    assert found.first == "token 0: of id 5 found -0.98, alone -1"
    assert judge([found], ["a"], Noise.of([found])) == []
    (failure,) = judge([found], ["a"], Noise.of([difference(answer(5, off=0.01), answer(5))]))
    assert failure.startswith("logits differ by 0.02 (rms)")


@pytest.mark.parametrize("token", [7, 9])
def test_a_token_that_is_not_likely_is_found(token: int) -> None:
    found = difference(answer(5, token, off=0.02), answer(5, token))
    (failure,) = judge([found], ["a"], Noise.of([found]))
    assert failure.startswith("another token is largest in 1 steps, once over a gap of")


def test_one_answer_to_something_else_is_found() -> None:
    """Among many, whose total hides it."""
    right = [difference(answer(*[5] * 20, off=0.1), answer(*[5] * 20))] * 99
    wrong = difference(answer(*[5] * 20, off=0.3), answer(*[5] * 20))
    noise = Noise.of(right)
    assert judge(right, ["a"] * 99, noise) == []
    (failure,) = judge([*right, wrong], [*["a"] * 99, "b"], noise)
    assert failure.startswith("b: log-probabilities differ by 0.3 (rms), expected at most 0.2; token ")


def test_only_what_both_sides_tell_is_compared() -> None:
    one, other = Step(5, -1.0, {5: -1.0, 6: -2.0}), Step(5, -1.5, {7: -0.5})
    found = difference([one], [other])
    assert (found.largest, found.rms, found.gap) == (0.5, 0.5, 1.0)


def test_values_that_are_not_finite_do_not_pass() -> None:
    found = difference(answer(5, 5), [*answer(5), Step(5, float("nan"), {})])
    (failure,) = judge([found], ["a"], Noise.of([found]))
    assert failure.startswith("logits are not finite in 1 of 2 steps; first: token 1")


def test_other_tokens_alone() -> None:
    with pytest.raises(ValueError, match=r"found tokens \[6\] at 1, expected \[5, 7\]"):
        difference(answer(5, 5, 7), answer(5, 6))
    with pytest.raises(ValueError, match=r"found tokens \[\] at 1, expected \[5\]"):
        difference(answer(5, 5), answer(5))
