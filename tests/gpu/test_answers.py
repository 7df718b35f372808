"""Answers that part at a near tie pass; other tokens, other probabilities and short ones are found."""

from collections.abc import Sequence

import pytest

from tests.gpu.answers import Step, judge


def engine(prefix: Sequence[int]) -> list[Step]:
    """Greedy: token 5 at every step, with 6 nearly as likely and 7 unlikely."""
    return [Step(5, -1.0, {5: -1.0, 6: -1.01, 7: -4.0})] * (4 - len(prefix))


def answer(*tokens: int, off: float = 0.0) -> list[Step]:
    logprobs = {5: -1.0, 6: -1.01, 7: -4.0, 9: -9.0}
    return [Step(token, logprobs[token] + off, {}) for token in tokens]


def test_the_same_answer() -> None:
    assert judge(answer(5, 5, 5, 5), engine).failures(0.0) == []


def test_a_near_tie_is_followed() -> None:
    verdict = judge(answer(5, 6, 5, 6, off=0.02), engine)
    assert [round(gap, 6) for gap in verdict.gaps] == [0.01, 0.01]
    assert verdict.failures(0.05) == []
    assert len(verdict.failures(0.01)) == 1


@pytest.mark.parametrize("token", [7, 9])
def test_another_token_is_found(token: int) -> None:
    (failure,) = judge(answer(5, token, 5, 5, off=0.02), engine).failures(0.05)
    assert failure.startswith("another token over a gap of")


def test_too_few_steps_alone() -> None:
    with pytest.raises(ValueError, match="found 1 steps, expected 4"):
        judge(answer(5, 5, 5, 5), lambda prefix: engine(prefix)[:1])
