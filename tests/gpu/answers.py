"""Whether an answer given among others is what the engine gives alone, by the tokens' log-probabilities.

Another batch rounds differently, so greedy texts part where two tokens are nearly as likely. There the engine is asked
alone again, along the answer given, so that both sides see the same prefix at every step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """One output token of greedy decoding, its log-probability, and those of the most likely tokens."""

    token: int
    logprob: float
    top: dict[int, float]


@dataclass(frozen=True)
class Verdict:
    """error: the largest difference of a log-probability on the same prefix; gaps: of the tokens alone, wherever the
    answer took another one, infinite where it is not among the most likely."""

    error: float
    gaps: tuple[float, ...]

    def failures(self, most: float) -> list[str]:
        """What is wrong. most: the error that another batch brings on stock, in nats."""
        wrong = [f"log-probabilities differ by {self.error:.4g}, expected at most {most:.4g}"] * (self.error > most)
        # Each of two tokens may be off by the error.
        return wrong + [
            f"another token over a gap of {gap:.4g}, expected at most {2 * self.error:.4g}"
            for gap in self.gaps
            if gap > 2 * self.error
        ]


def judge(answer: Sequence[Step], alone: Callable[[Sequence[int]], Sequence[Step]]) -> Verdict:
    """Holds an answer against the engine alone. alone: its steps after the answer's first tokens, as many as remain.

    Raises ValueError where it gives fewer.
    """
    tokens, position, error = [step.token for step in answer], 0, 0.0
    gaps: list[float] = []
    while position < len(answer):
        found = alone(tokens[:position])
        if len(found) < len(answer) - position:
            raise ValueError(f"alone: found {len(found)} steps, expected {len(answer) - position}")
        for given, own in zip(answer[position:], found, strict=False):
            position += 1
            likely, answered = own.top | {own.token: own.logprob}, given.top | {given.token: given.logprob}
            # Of both sides' choices, where both sides tell: were one left out, its error would pass for a gap.
            for token in {given.token, own.token} & likely.keys() & answered.keys():
                error = max(error, abs(answered[token] - likely[token]))
            if given.token != own.token:
                gaps.append(own.logprob - likely.get(given.token, float("-inf")))
                break
    return Verdict(error, tuple(gaps))
