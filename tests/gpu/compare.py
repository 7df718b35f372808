"""How logits of two runs over the same tokens are compared, and what counts as the same."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

# An executor on kernels of its own may round differently from stock, but not be further from it than another batch
# size takes stock from itself, with some room for chance.
NOISE_ROOM = 1.5


@dataclass(frozen=True)
class Difference:
    """Two runs' logits over the same tokens.

    steps: rows times steps compared; differing: of those, with any logit that differs; largest, rms: of the logits'
    differences; argmax_differs: steps whose largest logit is another token's; gap: the largest gap between the expected
    run's two largest logits among these; broken: steps with a logit that is not finite on either side; first: where
    they differ first, and by what.
    """

    steps: int = 0
    differing: int = 0
    largest: float = 0.0
    rms: float = 0.0
    argmax_differs: int = 0
    gap: float = 0.0
    broken: int = 0
    first: str = field(default="", compare=False)

    def record(self) -> dict[str, Any]:
        """As a dictionary, for a result file."""
        return asdict(self)


def difference(expected: Tensor, found: Tensor) -> Difference:
    """Compares logits [steps, ids] of two runs over the same tokens. Raises ValueError for other shapes."""
    if expected.shape != found.shape or expected.dim() != 2:
        raise ValueError(
            f"logits: found shape {tuple(found.shape)}, expected {tuple(expected.shape)} of two dimensions"
        )
    if expected.shape[0] == 0:
        return Difference()
    expected, found = expected.float(), found.float()
    first = first_difference(expected, found)
    broken = ~(expected.isfinite().all(1) & found.isfinite().all(1))
    expected, found = expected[~broken], found[~broken]
    if expected.shape[0] == 0:
        return Difference(steps=len(broken), broken=int(broken.sum()), first=first)
    apart = (expected - found).abs()
    top = expected.topk(2, dim=1)
    moved = top.indices[:, 0] != found.argmax(1)
    # A tie is no difference: where the found run's choice has the expected run's largest logit, the order is chance.
    moved &= expected.gather(1, found.argmax(1, keepdim=True))[:, 0] != top.values[:, 0]
    gaps = (top.values[:, 0] - top.values[:, 1])[moved]
    return Difference(
        steps=len(broken),
        differing=int((apart.amax(1) > 0).sum()),
        largest=float(apart.max()),
        rms=float(apart.double().square().mean().sqrt()),
        argmax_differs=int(moved.sum()),
        gap=float(gaps.max()) if len(gaps) else 0.0,
        broken=int(broken.sum()),
        first=first,
    )


def first_difference(expected: Tensor, found: Tensor) -> str:
    """The first step of logits [steps, ids] that differs in any value: its largest difference, and both sides' choices;
    "" where none does."""
    differs = (expected != found).any(1) | ~expected.isfinite().all(1)
    if not differs.any():
        return ""
    step = int(differs.nonzero()[0])
    one, other = expected[step], found[step]
    place = int((one - other).abs().nan_to_num(nan=float("inf")).argmax())
    top, its = int(one.argmax()), int(other.argmax())
    return (
        f"step {step}: logit of id {place} found {float(other[place]):.5g}, expected {float(one[place]):.5g}; largest "
        f"found at id {its} ({float(other[its]):.5g}), expected at id {top} ({float(one[top]):.5g})"
    )


def combined(differences: Iterable[Difference]) -> Difference:
    """Several comparisons as one; `rms` weighs each by its steps."""
    parts = list(differences)
    steps = sum(part.steps for part in parts)
    return Difference(
        steps=steps,
        differing=sum(part.differing for part in parts),
        largest=max((part.largest for part in parts), default=0.0),
        rms=(sum(part.rms**2 * part.steps for part in parts) / max(1, steps)) ** 0.5,
        argmax_differs=sum(part.argmax_differs for part in parts),
        gap=max((part.gap for part in parts), default=0.0),
        broken=sum(part.broken for part in parts),
        first=next((part.first for part in parts if part.first), ""),
    )


def failures_if_identical(found: Difference) -> list[str]:
    """What is wrong with a run that used the same kernels: any difference."""
    wrong = _broken(found)
    if found.differing:
        wrong.append(
            f"logits differ in {found.differing} of {found.steps} steps, by up to {found.largest:.4g}, expected none"
        )
    return _at(wrong, found)


def failures_if_unsound(found: Difference) -> list[str]:
    """What is wrong with a run on other kernels, whatever their rounding: logits that are not finite, or another
    choice over a gap that no logit's difference explains."""
    return _at(_broken(found) + _moved(found, found.largest), found)


def failures_if_close(found: Difference, noise: Difference) -> list[str]:
    """What is wrong with a run on other kernels, given how far another batch takes stock from itself: in its logits,
    and by the gaps over which it chooses otherwise, which may be larger than any logit's difference: two logits make
    a gap, and not all of them need be known."""
    wrong = _broken(found)
    if found.rms > NOISE_ROOM * noise.rms:
        limit = f"at most {NOISE_ROOM} times stock's own noise, {noise.rms:.4g}"
        wrong.append(f"logits differ by {found.rms:.4g} (rms), expected {limit}")
    return _at(wrong + _moved(found, max(found.largest, noise.gap)), found)


def _moved(found: Difference, limit: float) -> list[str]:
    if not found.argmax_differs or found.gap < limit:
        return []
    of = "the largest difference" if limit == found.largest else "stock's own"
    return [
        f"another token is largest in {found.argmax_differs} steps, once over a gap of {found.gap:.4g}, "
        f"expected gaps below {of}, {limit:.4g}"
    ]


def _at(wrong: list[str], found: Difference) -> list[str]:
    """The last failure tells where the runs differ first."""
    return [*wrong[:-1], f"{wrong[-1]}; first: {found.first}"] if wrong and found.first else wrong


def _broken(found: Difference) -> list[str]:
    return [f"logits are not finite in {found.broken} of {found.steps} steps"] if found.broken else []


def missing_kernels(expected: dict[str, int], found: dict[str, int]) -> list[str]:
    """How two profiles differ, as lines `name: found N, expected M`; none when they are equal."""
    return [
        f"{name[:100]}: found {found.get(name, 0)}, expected {expected.get(name, 0)}"
        for name in sorted({*expected, *found})
        if found.get(name, 0) != expected.get(name, 0)
    ]
