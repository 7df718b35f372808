"""CandidateOverlap: forked or expanded in place, the same flags; and its order in an emulated capture."""

import pytest
import torch
from torch import Tensor

from specialized_decode.attention import CandidateOverlap, reference
from specialized_decode.backbone.graphs import CaptureError, EmulatedDevice, EmulatedStream, capture
from tests.helpers.step_gates import ForgetfulStream, Gates

SIZE, COUNT, WIDTH = 8, 5, 101
ROWS = [*range(1, 17), 47, 48, 49]


def _blocks(rows: int, seed: int = 0) -> Tensor:
    """Blocks of 8 positions, 12 whole ones and a part; -1 among them, and a row of nothing but."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(-1, 13, (rows, COUNT), generator=generator, dtype=torch.int32)
    blocks[-1] = -1
    blocks[0, 0] = 12
    return blocks


def _flags(blocks: Tensor) -> list[list[bool]]:
    return [[column // SIZE in row for column in range(WIDTH)] for row in blocks.tolist()]


def _overlap(stream_type: type[EmulatedStream] = EmulatedStream) -> tuple[EmulatedDevice, CandidateOverlap]:
    device = EmulatedDevice()
    stream = stream_type("candidates", device)
    device.streams.append(stream)
    return device, CandidateOverlap(stream, SIZE)


@pytest.mark.parametrize("rows", ROWS)
def test_forked_and_expanded_in_place_are_the_flags(rows: int) -> None:
    blocks = _blocks(rows)
    for warm in (True, False):
        _, overlap = _overlap()
        if warm:
            overlap.warm(rows)
        overlap.fork(blocks, WIDTH, Gates(rows))
        assert overlap.stream.pending == warm
        assert overlap.join(blocks, WIDTH).tolist() == _flags(blocks)
        assert not overlap.stream.pending


@pytest.mark.parametrize(
    ("warmed", "gate", "forks"),
    [({4}, True, True), ({3, 5}, True, False), (set(), True, False), ({4}, False, False)],
    ids=["warmed", "another row count", "nothing warmed", "gate shut"],
)
def test_what_forks(warmed: set[int], gate: bool, forks: bool) -> None:
    _, overlap = _overlap()
    for rows in warmed:
        overlap.warm(rows)
    assert overlap.warmed == warmed
    overlap.fork(_blocks(4), WIDTH, Gates(4, overlap_candidates=gate))
    assert overlap.stream.pending == forks


@pytest.mark.parametrize("forked", [True, False])
def test_the_expansion_is_made_once_a_step(forked: bool) -> None:
    """All consumers get one tensor; a step's reset forgets it."""
    _, overlap = _overlap()
    overlap.warm(4)
    blocks = _blocks(4)
    if forked:
        overlap.fork(blocks, WIDTH, Gates(4))
    first = overlap.join(blocks, WIDTH)
    assert overlap.join(blocks, WIDTH) is first
    overlap.reset()
    blocks.copy_(_blocks(4, seed=1))
    if forked:
        overlap.fork(blocks, WIDTH, Gates(4))
    found = overlap.join(blocks, WIDTH)
    assert found is not first and found.tolist() == _flags(blocks) != first.tolist()


def test_a_step_of_other_rows_after_an_aborted_one() -> None:
    """Flags of a step that never reached its consumer are not handed to the next."""
    _, overlap = _overlap()
    overlap.warm(9)
    overlap.fork(_blocks(9), WIDTH, Gates(9))
    overlap.stream.join()
    overlap.reset()
    blocks = _blocks(4, seed=2)
    assert overlap.join(blocks, WIDTH).tolist() == _flags(blocks)


def test_a_reset_keeps_what_is_warmed() -> None:
    _, overlap = _overlap()
    overlap.warm(4)
    overlap.reset()
    overlap.fork(_blocks(4), WIDTH, Gates(4))
    assert overlap.stream.pending


# --- in a capture -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("warm", [True, False])
def test_a_replay_expands_its_own_blocks(warm: bool) -> None:
    device, overlap = _overlap()
    if warm:
        overlap.warm(4)
    blocks, found = _blocks(4), []

    def run() -> None:
        overlap.reset()
        overlap.fork(blocks, WIDTH, Gates(4))
        found.append(overlap.join(blocks, WIDTH))

    graph = capture(device, run)
    for seed in (1, 2):
        blocks.copy_(_blocks(4, seed))
        graph.replay()
        assert found[0].tolist() == _flags(blocks)


def test_a_consumer_that_does_not_wait_is_caught() -> None:
    device, overlap = _overlap(ForgetfulStream)
    overlap.warm(4)
    blocks, scores = _blocks(4), torch.zeros(4, WIDTH)

    def run() -> None:
        overlap.fork(blocks, WIDTH, Gates(4))
        scores.masked_fill(~overlap.join(blocks, WIDTH), -torch.inf)

    with pytest.raises(CaptureError, match="on main reads what candidates wrote, without a join between them"):
        capture(device, run)


def test_a_fork_that_no_consumer_joins_ends_no_capture() -> None:
    device, overlap = _overlap()
    overlap.warm(4)
    with pytest.raises(CaptureError, match="unjoined work on candidates"):
        capture(device, lambda: overlap.fork(_blocks(4), WIDTH, Gates(4)))


def test_flags_of_the_sources_own_launch() -> None:
    """All consumers of the step get them, and nothing is forked or joined."""
    _, overlap = _overlap()
    overlap.warm(4)
    blocks = _blocks(4)
    made = reference.candidate_flags(blocks, SIZE, WIDTH)
    overlap.keep(made)
    assert not overlap.stream.pending
    assert overlap.join(blocks, WIDTH) is made and overlap.join(blocks, WIDTH) is made
    overlap.reset()
    assert overlap.join(blocks, WIDTH) is not made
