"""The low-batch head: its shard in float64, and the ranks' shards side by side."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from specialized_decode.backbone.host import SingleRank
from specialized_decode.logits import LowBatchHead, gather_logits, reference
from tests.helpers.step_gates import FixedGroup
from tests.helpers.step_mhc import assert_within, numbers, random_bf16, same_bits

HIDDEN, VOCAB = 96, 50
ROWS = [*range(1, 17), 47, 48, 49]


def _assert_logits(found: Tensor, hidden: Tensor, weight: Tensor) -> None:
    """float32, not rounded to bfloat16 on the way: within the sum's own error."""
    assert found.dtype == torch.float32
    sizes = np.abs(numbers(hidden)) @ np.abs(numbers(weight)).T
    assert_within(numbers(found), numbers(hidden) @ numbers(weight).T, HIDDEN * 2.0**-24 * sizes)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_head(rows: int, dtype: torch.dtype) -> None:
    hidden, weight = random_bf16(0, rows, HIDDEN), random_bf16(1, VOCAB, HIDDEN).to(dtype)
    found = LowBatchHead(weight, SingleRank(), VOCAB)(hidden)
    assert found.shape == (rows, VOCAB)
    _assert_logits(found, hidden, weight)


def test_logits_that_bfloat16_cannot_tell_apart() -> None:
    """1 + 2**-12 against 1: the argmax needs float32's sums."""
    hidden = torch.zeros(1, HIDDEN, dtype=torch.bfloat16)
    hidden[0, 0], hidden[0, 1] = 1.0, 2.0**-12
    weight = torch.zeros(3, HIDDEN, dtype=torch.bfloat16)
    weight[:, 0], weight[1, 1] = 1.0, 1.0
    assert LowBatchHead(weight, SingleRank(), 3)(hidden).tolist() == [[1.0, 1.0 + 2.0**-12, 1.0]]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("padding", [0, 1, 13])
@pytest.mark.parametrize("rows", [1, 5, 48])
def test_two_ranks_hold_a_half_each(rank: int, padding: int, rows: int) -> None:
    """The last rank's rows past the vocabulary are NaN here, and cut."""
    hidden, weight = random_bf16(2, rows, HIDDEN), random_bf16(3, VOCAB + padding + (VOCAB + padding) % 2, HIDDEN)
    weight[VOCAB:] = math.nan
    halves = weight.chunk(2)
    assert halves[0].shape == halves[1].shape
    other = reference.head(hidden, halves[1 - rank])
    found = LowBatchHead(halves[rank], FixedGroup(rank, [other]), VOCAB)(hidden)
    assert found.shape == (rows, VOCAB)
    _assert_logits(found, hidden, weight[:VOCAB])


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("cut", [0, 3])
def test_gather_puts_shards_side_by_side(ranks: int, cut: int) -> None:
    """Every value tells its rank, row and column; signs of zero and NaN travel too."""
    rows, width = 3, 5
    shards = [torch.arange(15.0).view(rows, width) + 100 * rank for rank in range(ranks)]
    shards[0][0, :2] = torch.tensor([-0.0, math.inf])
    found = gather_logits(shards[-1], FixedGroup(ranks - 1, shards[:-1]), ranks * width - cut)
    assert found.shape == (rows, ranks * width - cut)
    for row in range(rows):
        for column in range(ranks * width - cut):
            expected = shards[column // width][row, column % width]
            assert same_bits(found[row, column : column + 1], expected.view(1))


def test_a_padded_vocabulary_may_cut_a_whole_rank() -> None:
    shards = [torch.full((2, 4), float(rank)) for rank in range(3)]
    found = gather_logits(shards[0], FixedGroup(0, shards[1:]), 7)
    assert found.tolist() == [[0.0] * 4 + [1.0] * 3] * 2


def test_padded_rows_stay_by_themselves() -> None:
    hidden, head = random_bf16(4, 8, HIDDEN), LowBatchHead(random_bf16(5, VOCAB, HIDDEN), SingleRank(), VOCAB)
    clean = head(hidden)
    hidden[1::2] = math.nan
    found = head(hidden)
    assert same_bits(found[::2], clean[::2]) and found[1::2].isnan().all()
