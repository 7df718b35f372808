"""Graphs of several sizes in one process, replayed many times with everything changed that may change."""

import random
from collections.abc import Iterator

import pytest
import torch

from specialized_decode.backbone.cache import Request
from specialized_decode.backbone.engine import Captured
from tests.helpers.runtime_errors import LAYERS
from tests.helpers.runtime_model import Pair, assert_same
from tests.runtime.conftest import Folder

SIZES = (12, 8, 4, 1)


@pytest.fixture(scope="module")
def pair(folder: Folder) -> Pair:
    pair = Pair(folder(LAYERS), max_rows=16, max_context=128, max_tokens=128)
    pair.backbone.set_aux_layers((2, 4))
    return pair


@pytest.fixture(scope="module")
def graphs(pair: Pair) -> dict[int, Captured]:
    """All captured before any is replayed, largest first."""
    return {size: pair.capture(size) for size in SIZES}


@pytest.fixture
def requests(pair: Pair) -> Iterator[list[Request]]:
    requests = pair.open((1, 2, 8, 31, 32, 33, 47, 48, 64, 65, 80, 100), image_share=0.05)
    yield requests
    pair.close(requests)


def padded(requests: list[Request], size: int) -> list[Request | None]:
    return [*requests, *[None] * (size - len(requests))]


def test_many_replays(pair: Pair, graphs: dict[int, Captured], requests: list[Request]) -> None:
    """Sizes in any order, other requests in other rows, other tokens, longer contexts, blocks moved in between."""
    order = random.Random(3)
    for step in range(24):
        size = order.choice(SIZES)
        chosen = order.sample(requests, order.randint(1, size))
        if step % 3 == 0:
            pair.shuffle(requests)
        assert_same(*pair.both(graphs[size], pair.batch(padded(chosen, size))), rows=len(chosen))
        pair.advance(chosen, image_share=0.05)


def test_requests_come_and_go(pair: Pair, graphs: dict[int, Captured], requests: list[Request]) -> None:
    """A new request in the blocks and ring that another one left behind."""
    for context in (1, 2, 33, 60):
        pair.close([requests.pop(0)])
        requests += pair.open([context])
        assert_same(*pair.both(graphs[12], pair.batch(requests)), rows=12)
        pair.advance(requests)


def test_moved_blocks_change_nothing(pair: Pair, graphs: dict[int, Captured], requests: list[Request]) -> None:
    """The same step from the same content in other physical blocks."""
    first = pair.replayed(graphs[12], pair.batch(requests))
    before = [(list(r.window_blocks), list(r.compressed_blocks)) for r in requests]
    pair.shuffle(requests)
    assert before != [(r.window_blocks, r.compressed_blocks) for r in requests]
    second = pair.replayed(graphs[12], pair.batch(requests))
    assert torch.equal(first.hidden, second.hidden)
    assert torch.equal(first.mtp, second.mtp)


def test_same_replay_twice(pair: Pair, graphs: dict[int, Captured], requests: list[Request]) -> None:
    """A step computed again writes the same and returns the same: nothing adds up over replays."""
    batch = pair.batch(padded(requests[:7], 8))
    assert_same(pair.replayed(graphs[8], batch), pair.replayed(graphs[8], batch), rows=7)


def test_a_later_capture_leaves_older_graphs_alone(
    pair: Pair, graphs: dict[int, Captured], requests: list[Request]
) -> None:
    """Another size, another layout and the steps without Engram, captured between two replays of one graph."""
    batch = pair.batch(requests[:4])
    before = pair.snapshot()
    first = pair.replayed(graphs[4], batch)
    pair.capture(7)
    pair.capture(2, 6)
    pair.capture(4, use_engram=False)
    pair.restore(before)
    assert_same(first, pair.replayed(graphs[4], batch), rows=4)


def test_two_captures_of_one_size(pair: Pair, graphs: dict[int, Captured], requests: list[Request]) -> None:
    """Replayed in turn, each reads its own inputs."""
    twin = pair.capture(4)
    before = pair.snapshot()
    plain, other_plain = (pair.plain(pair.batch(requests[i : i + 4])) for i in (0, 4))
    pair.restore(before)
    first = pair.replayed(graphs[4], pair.batch(requests[:4]))
    second = pair.replayed(twin, pair.batch(requests[4:8]))
    assert torch.equal(first.hidden, plain.hidden)
    assert_same(other_plain, second, rows=4)


def test_two_executors_on_one_model(pair: Pair, graphs: dict[int, Captured], requests: list[Request]) -> None:
    """An executor built later shares the weights and caches, not the mailbox, streams or tables."""
    other = Pair.__new__(Pair)
    other.__dict__ |= pair.__dict__
    other.executor = type(pair.executor).for_target(pair.backbone, pair.executor.config, pair.model.lm_head)
    captured = other.capture(4)
    assert_same(*other.both(captured, pair.batch(requests[:4])), rows=4)
    pair.advance(requests[:4])
    assert_same(*pair.both(graphs[4], pair.batch(requests[:4])), rows=4)
