"""Boundaries over two and four real processes, which contribute different outputs."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from specialized_decode.boundary import BoundaryAllReduce, UnfinalizedRows
from tests.helpers.step_gates import FixedGroup
from tests.helpers.step_mhc import assert_rounded, numbers, same_bits
from tests.helpers.step_ranks import HIDDEN, INNER, ROWS, contribution, projection, rank_work, run_rank

Found = list[dict[str, Tensor]]


@pytest.fixture(scope="module", params=[2, 4], ids=["tp2", "tp4"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What every rank of a group found."""
    folder, size = tmp_path_factory.mktemp("ranks"), request.param
    torch.multiprocessing.spawn(run_rank, (size, str(folder)), nprocs=size)
    return [torch.load(Path(folder, f"{rank}.pt")) for rank in range(size)]


def _in_rank_order(parts: list[Tensor]) -> Tensor:
    total = parts[0].float().numpy()
    for part in parts[1:]:
        total = total + part.float().numpy()
    return torch.from_numpy(total)


def _finalized(rank: int) -> Tensor:
    output = contribution(rank, "unfinalized")
    assert isinstance(output, UnfinalizedRows)
    total = torch.zeros(ROWS, HIDDEN)
    for k in range(output.weights.shape[1]):
        total = total + output.rows[:, k].float() * output.weights[:, k, None]
    return (total + output.shared.float()).to(torch.bfloat16)


def test_all_ranks_get_the_same_bits(ranks: Found) -> None:
    for rank, found in enumerate(ranks):
        for name, tensor in ranks[0].items():
            assert same_bits(found[name], tensor), f"{name} of rank {rank}"


@pytest.mark.parametrize("kind", ["plain", "unfinalized"])
def test_the_sum_is_float32_in_rank_order(ranks: Found, kind: str) -> None:
    parts = []
    for rank in range(len(ranks)):
        part = contribution(rank, kind)
        parts.append(part if isinstance(part, Tensor) else _finalized(rank))
    assert same_bits(ranks[-1][kind], _in_rank_order(parts))
    if len(parts) > 2:
        assert not same_bits(_in_rank_order(parts[::-1]), ranks[-1][kind]), "the inputs do not tell orders apart"


def test_published_projections_add_up(ranks: Found) -> None:
    values, sizes = np.zeros((ROWS, HIDDEN)), np.zeros((ROWS, HIDDEN))
    parts = []
    for rank in range(len(ranks)):
        x, weight = projection(rank)
        parts.append((x.float() @ weight.T).to(torch.bfloat16))
        assert_rounded(
            parts[-1],
            numbers(x) @ numbers(weight).T,
            INNER * 2.0**-24 * (np.abs(numbers(x)) @ np.abs(numbers(weight)).T),
        )
        values, sizes = values + numbers(parts[-1]), sizes + np.abs(numbers(parts[-1]))
    np.testing.assert_array_less(np.abs(numbers(ranks[0]["published"]) - values), 4 * 2.0**-24 * sizes + 1e-30)
    assert same_bits(ranks[0]["published"], _in_rank_order(parts))


def test_the_chain_needs_every_rank(ranks: Found) -> None:
    """A rank alone, or one whose peers are silent, comes to other streams."""
    silent = [torch.zeros(ROWS, HIDDEN, dtype=torch.bfloat16)] * (len(ranks) - 1)
    alone = rank_work(BoundaryAllReduce(HIDDEN, ROWS, FixedGroup(0, silent), torch.device("cpu")), 0)
    assert not same_bits(alone["streams"], ranks[0]["streams"])
    assert ranks[0]["streams"].isfinite().all() and ranks[0]["streams"].any()


def test_min_is_agreed_on(ranks: Found) -> None:
    assert [int(found["min"]) for found in ranks] == [11 - len(ranks)] * len(ranks)
