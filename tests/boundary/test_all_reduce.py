"""BoundaryAllReduce: its values over fake ranks, and the publishing protocol."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from specialized_decode.boundary import BoundaryAllReduce, UnfinalizedRows
from tests.helpers import step_mhc as mhc
from tests.helpers.exact_formats import fp8_values
from tests.helpers.step_gates import FixedGroup
from tests.helpers.step_mhc import assert_rounded, numbers, random_bf16, same_bits

HIDDEN, MAX_ROWS = 64, 49
SUM = 512 * 2.0**-24
CPU = torch.device("cpu")


def _all_reduce(rank: int = 0, peers: list[Tensor] | None = None) -> BoundaryAllReduce:
    return BoundaryAllReduce(HIDDEN, MAX_ROWS, FixedGroup(rank, peers or []), CPU)


def _published(all_reduce: BoundaryAllReduce, contribution: Tensor) -> Tensor:
    """The contribution as a producer publishes it, out of a slot full of NaN."""
    target = all_reduce.publish_target(contribution.shape[0])
    target.fill_(math.nan)
    target.copy_(contribution)
    all_reduce.mark_published(target)
    return target


def _mixes(rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """residual, post, comb, pre."""
    generator = torch.Generator().manual_seed(rows)
    post, comb, pre = (torch.rand(rows, *shape, generator=generator) for shape in ((4,), (4, 4), (4,)))
    return random_bf16(1, rows, 4, HIDDEN), post, comb, pre


def _unfinalized(rows: int) -> UnfinalizedRows:
    weights = torch.rand(rows, 3, generator=torch.Generator().manual_seed(2))
    return UnfinalizedRows(random_bf16(3, rows, 3, HIDDEN), weights, random_bf16(4, rows, HIDDEN))


def _finalized(output: UnfinalizedRows) -> Tensor:
    """The weighted sum term by term in float32, rounded once."""
    total = torch.zeros(output.shared.shape)
    for k in range(output.weights.shape[1]):
        total = total + output.rows[:, k].float() * output.weights[:, k, None]
    return (total + output.shared.float()).to(torch.bfloat16)


# --- values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [*range(1, 17), 47, 48, 49])
@pytest.mark.parametrize("ranks", [1, 3])
def test_full_against_scalar_formulas(rows: int, ranks: int) -> None:
    """Reduce, post-mix, collapse, norm, quantize: each from what the one before it rounded to."""
    contributions = [random_bf16(10 + rank, rows, HIDDEN) for rank in range(ranks)]
    residual, post, comb, pre = _mixes(rows)
    norm = random_bf16(5, HIDDEN)
    all_reduce = _all_reduce(ranks - 1, contributions[:-1])
    streams, x, quant = all_reduce.full(contributions[-1], residual, post, comb, pre, norm, 1e-20, True)
    total = np.stack([numbers(part) for part in contributions]).sum(0)
    magnitude = np.abs(np.stack([numbers(part) for part in contributions])).sum(0)
    for row in range(rows):
        values, sizes = mhc.mixed(total[row], numbers(residual[row]), numbers(post[row]), numbers(comb[row]))
        sizes = sizes + numbers(post[row])[:, None] * magnitude[row]
        assert_rounded(streams[row], values, SUM * sizes)
        flat, sizes = mhc.collapsed(numbers(streams[row]), numbers(pre[row]))
        # The norm reads the collapsed row as rounded: one rounding of it, relative to itself, and the norm's own.
        expected = mhc.normed(flat, numbers(norm), 1e-20)
        scale = np.abs(numbers(norm)) / np.sqrt((flat**2).mean())
        assert_rounded(x[row], expected, mhc.HALF_ULP * np.abs(expected) * 2 + SUM * sizes * scale)
    assert quant is not None
    steps = np.exp2(quant.scales.numpy().astype(np.float64) - 127).repeat(32, 1)
    back = fp8_values(quant.values.view(torch.uint8).numpy()) * steps
    # e4m3 keeps 4 significant bits of a normal number, and 2**-9 of the block's scale below.
    np.testing.assert_array_less(
        np.abs(back - numbers(x)), np.maximum(np.abs(numbers(x)) * 2**-4, steps * 2**-10) * 1.001
    )


def test_full_quantizes_only_where_asked() -> None:
    residual, post, comb, pre = _mixes(3)
    arguments = (random_bf16(6, 3, HIDDEN), residual, post, comb, pre, random_bf16(5, HIDDEN), 1e-20)
    without, with_ = _all_reduce().full(*arguments, False), _all_reduce().full(*arguments, True)
    assert without[2] is None and with_[2] is not None
    assert same_bits(without[0], with_[0]) and same_bits(without[1], with_[1])


def test_residual_only_gives_the_streams_of_full() -> None:
    residual, post, comb, pre = _mixes(16)
    pending = random_bf16(6, 16, HIDDEN)
    streams, _, _ = _all_reduce().full(pending, residual, post, comb, pre, random_bf16(5, HIDDEN), 1e-20, False)
    assert same_bits(_all_reduce().residual_only(pending, residual, post, comb), streams)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_every_rank_gets_the_same_bits(rank: int) -> None:
    """Contributions of very different sizes, so that another order of the sum shows."""
    contributions = [random_bf16(20 + r, 9, HIDDEN, size=size) for r, size in enumerate((1.0, 3e4, 1e-2))]
    total = contributions[0].float().numpy()
    for other in contributions[1:]:
        total = total + other.float().numpy()
    peers = contributions[:rank] + contributions[rank + 1 :]
    assert same_bits(_all_reduce(rank, peers).reduce(contributions[rank]), torch.from_numpy(total))
    back = contributions[2].float() + contributions[1].float() + contributions[0].float()
    assert not same_bits(back, torch.from_numpy(total)), "the inputs do not tell orders apart"


@pytest.mark.parametrize("rows", [1, 8, 48, 49])
def test_unfinalized_rows_reduce_as_their_finalized_tensor(rows: int) -> None:
    output = _unfinalized(rows)
    peers = [random_bf16(7, rows, HIDDEN)]
    assert same_bits(_all_reduce(1, peers).reduce(output), _all_reduce(1, peers).reduce(_finalized(output)))


@pytest.mark.parametrize("rows", [1, 6, 49])
def test_published_reduces_as_unpublished(rows: int) -> None:
    contribution, peers = random_bf16(8, rows, HIDDEN), [random_bf16(9, rows, HIDDEN)]
    publishing = _all_reduce(0, peers)
    residual, post, comb, pre = _mixes(rows)
    norm = random_bf16(5, HIDDEN)
    found = publishing.full(_published(publishing, contribution), residual, post, comb, pre, norm, 1e-20, True)
    expected = _all_reduce(0, peers).full(contribution, residual, post, comb, pre, norm, 1e-20, True)
    assert same_bits(found[0], expected[0]) and same_bits(found[1], expected[1])
    assert found[2] is not None and expected[2] is not None
    assert same_bits(found[2].values, expected[2].values) and same_bits(found[2].scales, expected[2].scales)


def test_a_silent_output_over_an_identity_leaves_the_streams() -> None:
    residual, post, _, _ = _mixes(3)
    streams = _all_reduce().residual_only(
        torch.zeros(3, HIDDEN, dtype=torch.bfloat16), residual, post, torch.eye(4).expand(3, 4, 4)
    )
    assert same_bits(streams, residual)


def test_boundaries_follow_each_other() -> None:
    """Publish, reduce, publish again with other rows and values, and a plain output between them."""
    all_reduce = _all_reduce()
    for seed, rows, publish in ((0, 5, True), (1, 49, True), (2, 3, False), (3, 1, True)):
        contribution = random_bf16(seed, rows, HIDDEN)
        pending = _published(all_reduce, contribution) if publish else contribution
        assert same_bits(all_reduce.reduce(pending), contribution.float())


def test_a_reduced_output_outlives_the_slot() -> None:
    all_reduce = _all_reduce()
    first = random_bf16(0, 4, HIDDEN)
    reduced = all_reduce.reduce(_published(all_reduce, first))
    all_reduce.reduce(_published(all_reduce, random_bf16(1, 4, HIDDEN)))
    assert same_bits(reduced, first.float())


@pytest.mark.parametrize("published", [True, False])
def test_nan_in_padded_rows_stays_there(published: bool) -> None:
    contribution = random_bf16(8, 8, HIDDEN)
    residual, post, comb, pre = _mixes(8)
    arguments = (residual, post, comb, pre, random_bf16(5, HIDDEN), 1e-20, True)
    clean = _all_reduce().full(contribution, *arguments)
    contribution[5:], residual[5:], post[5:], comb[5:], pre[5:] = (math.nan,) * 5
    all_reduce = _all_reduce()
    pending = _published(all_reduce, contribution) if published else contribution
    found = all_reduce.full(pending, *arguments)
    assert same_bits(found[0][:5], clean[0][:5]) and same_bits(found[1][:5], clean[1][:5])
    assert found[2] is not None and clean[2] is not None
    assert same_bits(found[2].values[:5], clean[2].values[:5]) and same_bits(found[2].scales[:5], clean[2].scales[:5])


# --- the protocol -----------------------------------------------------------------------------------------------


def test_publish_target_is_the_rows_asked_for() -> None:
    target = _all_reduce().publish_target(7)
    assert target.shape == (7, HIDDEN) and target.dtype == torch.bfloat16 and target.is_contiguous()


@pytest.mark.parametrize("rows", [0, -1, MAX_ROWS + 1])
def test_publish_target_of_rows_out_of_range(rows: int) -> None:
    with pytest.raises(ValueError, match=rf"publish_target: found {rows} rows, expected 1 to {MAX_ROWS}"):
        _all_reduce().publish_target(rows)


@pytest.mark.parametrize("marked", [True, False])
def test_publish_target_twice(marked: bool) -> None:
    all_reduce = _all_reduce()
    if marked:
        _published(all_reduce, random_bf16(0, 4, HIDDEN))
    else:
        all_reduce.publish_target(4)
    with pytest.raises(RuntimeError, match="publish_target: found a slot handed out and not reduced"):
        all_reduce.publish_target(4)


def test_mark_published_twice() -> None:
    all_reduce = _all_reduce()
    target = _published(all_reduce, random_bf16(0, 4, HIDDEN))
    with pytest.raises(RuntimeError, match="mark_published: found the slot published already"):
        all_reduce.mark_published(target)


@pytest.mark.parametrize(
    "other",
    [
        lambda target: target.clone(),
        lambda target: target[:3],
        lambda target: target[1:],
        lambda target: target[:, : HIDDEN // 2],
    ],
    ids=["copy", "fewer rows", "later rows", "narrower"],
)
def test_mark_published_of_another_tensor(other: Callable[[Tensor], Tensor]) -> None:
    all_reduce = _all_reduce()
    target = all_reduce.publish_target(4)
    with pytest.raises(RuntimeError, match="mark_published: found another tensor"):
        all_reduce.mark_published(other(target))


@pytest.mark.parametrize("before", ["nothing", "a reduce"])
def test_mark_published_without_a_slot(before: str) -> None:
    all_reduce = _all_reduce()
    target = random_bf16(0, 4, HIDDEN)
    if before == "a reduce":
        target = _published(all_reduce, target)
        all_reduce.reduce(target)
    with pytest.raises(RuntimeError, match="mark_published: found another tensor"):
        all_reduce.mark_published(target)


def test_reduce_before_mark_published() -> None:
    all_reduce = _all_reduce()
    target = all_reduce.publish_target(4)
    with pytest.raises(RuntimeError, match="reduce: found a slot handed out and not published"):
        all_reduce.reduce(target)


@pytest.mark.parametrize(
    "other",
    [
        lambda target: target.clone(),
        lambda target: target[1:],
        lambda target: target[:3],
        lambda target: _unfinalized(4),
    ],
    ids=["copy", "later rows", "fewer rows", "unfinalized"],
)
def test_reduce_of_another_tensor_than_the_published(other: Callable[[Tensor], Tensor | UnfinalizedRows]) -> None:
    all_reduce = _all_reduce()
    target = _published(all_reduce, random_bf16(0, 4, HIDDEN))
    with pytest.raises(RuntimeError, match="reduce: found another tensor, expected the published one"):
        all_reduce.reduce(other(target))


@pytest.mark.parametrize("shape", [(MAX_ROWS + 1, HIDDEN), (4, HIDDEN // 2), (4, HIDDEN + 1), (1, 2 * HIDDEN)])
def test_reduce_of_a_wrong_shape(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"reduce: found a tensor of \(.*\), expected at most \[49, 64\]") as error:
        _all_reduce().reduce(torch.zeros(shape, dtype=torch.bfloat16))
    assert str(shape) in str(error.value)


def test_reduce_of_unfinalized_rows_of_a_wrong_width() -> None:
    narrow = UnfinalizedRows(random_bf16(0, 4, 2, 32), torch.ones(4, 2), random_bf16(1, 4, 32))
    with pytest.raises(ValueError, match=r"found a tensor of \(4, 32\)"):
        _all_reduce().reduce(narrow)


@pytest.mark.parametrize("marked", [True, False])
def test_reset_forgets_an_aborted_publish(marked: bool) -> None:
    """The step after it may reduce anything, publish anew, and gets its own values."""
    all_reduce = _all_reduce()
    aborted = all_reduce.publish_target(6)
    aborted.fill_(math.nan)
    if marked:
        all_reduce.mark_published(aborted)
    all_reduce.reset()
    plain, next_one = random_bf16(1, 6, HIDDEN), random_bf16(2, 9, HIDDEN)
    assert same_bits(all_reduce.reduce(plain), plain.float())
    assert same_bits(all_reduce.reduce(_published(all_reduce, next_one)), next_one.float())
    all_reduce.reset()
    with pytest.raises(RuntimeError, match="mark_published"):
        all_reduce.mark_published(aborted)


@pytest.mark.parametrize("misuse", ["reduce another", "mark another", "publish twice"])
def test_after_a_refused_call_and_a_reset_the_next_step_is_right(misuse: str) -> None:
    all_reduce = _all_reduce()
    target = _published(all_reduce, random_bf16(0, 4, HIDDEN))
    with pytest.raises(RuntimeError):
        if misuse == "reduce another":
            all_reduce.reduce(target.clone())
        elif misuse == "mark another":
            all_reduce.mark_published(target.clone())
        else:
            all_reduce.publish_target(4)
    all_reduce.reset()
    contribution = random_bf16(1, 4, HIDDEN)
    assert same_bits(all_reduce.reduce(_published(all_reduce, contribution)), contribution.float())
