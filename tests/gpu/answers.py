"""Whether an answer given among others is what the engine gives alone, by the tokens' log-probabilities.

Another batch rounds differently, so greedy texts part where two tokens are nearly as likely. So the engine is made to
give the same tokens alone, and both sides tell at every step, on the same prefix, how likely they find the likely ones.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tests.gpu.compare import Difference, combined, failures_if_close

# An answer by itself, of so many tokens at least, may be so many times as far off as stock's farthest.
LONG, ANSWER_ROOM = 16, 2.0


@dataclass(frozen=True)
class Step:
    """One output token, its log-probability, and those of the most likely tokens, both in nats."""

    token: int
    logprob: float
    top: dict[int, float]

    def known(self) -> dict[int, float]:
        return self.top | {self.token: self.logprob}


def difference(answer: Sequence[Step], alone: Sequence[Step]) -> Difference:
    """Holds a greedy answer against the engine alone along the same tokens, by the log-probabilities both sides tell.

    Its gaps are the engine's own, between the token that it finds most likely and the answer's; `first` is where the
    largest difference is. Raises ValueError where the tokens are others.
    """
    tokens, found = [step.token for step in answer], [step.token for step in alone]
    if tokens != found:
        shorter = min(len(tokens), len(found))
        place = next((at for at in range(shorter) if tokens[at] != found[at]), shorter)
        raise ValueError(f"alone: found tokens {found[place:][:3]} at {place}, expected {tokens[place:][:3]}")
    parts = []
    for place, (given, own) in enumerate(zip(answer, alone, strict=True)):
        one, other = given.known(), own.known()
        shared = sorted(one.keys() & other.keys())
        if not all(map(math.isfinite, [*one.values(), *other.values()])):
            parts.append(Difference(steps=1, broken=1, first=f"token {place}: log-probabilities are not finite"))
            continue
        apart = {token: abs(one[token] - other[token]) for token in shared}
        worst, gap = max(apart, key=lambda token: apart[token]), max(other.values()) - own.logprob
        said = f"token {place}: of id {worst} found {one[worst]:.5g}, alone {other[worst]:.5g}"
        rms = math.sqrt(sum(value**2 for value in apart.values()) / len(apart))
        parts.append(Difference(1, int(rms > 0), apart[worst], rms, int(gap > 0), max(gap, 0.0), first=said))
    total = combined(parts)
    farthest = max(parts, key=lambda part: (part.broken, part.largest), default=Difference())
    return Difference(**total.record() | {"first": farthest.first})


@dataclass(frozen=True)
class Noise:
    """What another batch does to stock's answers: of all, and the largest root mean square of a long one."""

    total: Difference
    farthest: float

    @classmethod
    def of(cls, found: Sequence[Difference]) -> "Noise":
        return cls(combined(found), max((one.rms for one in found if one.steps >= LONG), default=0.0))


def judge(found: Sequence[Difference], names: Sequence[str], noise: Noise) -> list[str]:
    """What is wrong with answers, by their differences from the engine alone."""
    failures = failures_if_close(combined(found), noise.total)
    most = ANSWER_ROOM * noise.farthest
    return failures + [
        f"{name}: log-probabilities differ by {one.rms:.4g} (rms), expected at most {most:.4g}; {one.first}"
        for name, one in zip(names, found, strict=True)
        if one.steps >= LONG and one.rms > most
    ]
