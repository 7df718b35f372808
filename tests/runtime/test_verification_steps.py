"""Verification steps, a token and five drafts a request, against the plain model; drafts roll back."""

from collections.abc import Callable

import pytest

from specialized_decode.backbone.cache import Request
from specialized_decode.backbone.engine import Captured
from tests.helpers.runtime_errors import LAYERS
from tests.helpers.runtime_model import Pair, assert_same
from tests.runtime.conftest import Folder

LENGTH = 6
# Contexts after the step: the first six tokens; a step across the window's and the pages' edges; past the top-k and
# the candidate restriction.
CONTEXTS = (6, 7, 34, 49, 51, 66, 97, 150)


@pytest.fixture(scope="module")
def pair(folder: Folder) -> Pair:
    pair = Pair(folder(LAYERS), max_rows=2 * len(CONTEXTS), max_context=192, max_tokens=256)
    pair.backbone.set_aux_layers((4, 3, 2))
    return pair


@pytest.fixture(scope="module")
def captures(pair: Pair) -> Callable[[int], Captured]:
    """Number of requests -> the captured verification step."""
    taken = {requests: pair.capture(requests, LENGTH) for requests in (1, 3, 8, 9)}
    return taken.__getitem__


@pytest.fixture
def requests(pair: Pair) -> list[Request]:
    pair.model.selection.topk_indices.fill_(-1)
    return pair.open(CONTEXTS, new=LENGTH, image_share=0.05)


@pytest.mark.parametrize(("live", "padding"), [(1, 0), (2, 1), (8, 0), (8, 1), (5, 4)])
def test_steps_with_drafts(
    pair: Pair, requests: list[Request], captures: Callable[[int], Captured], live: int, padding: int
) -> None:
    """One to six tokens accepted, step after step: the next one starts where the rejected drafts were written."""
    captured = captures(live + padding)
    chosen = requests[-live:]
    for accepted in (1, 3, 6):
        batch = pair.batch([*chosen, *[None] * padding], LENGTH)
        assert_same(*pair.both(captured, batch), rows=live * LENGTH)
        pair.advance(chosen, accepted, LENGTH)
    pair.close(requests)


def test_rejected_drafts_leave_nothing(
    pair: Pair, requests: list[Request], captures: Callable[[int], Captured]
) -> None:
    """The same positions computed again with other tokens: as if the first tokens had never been there."""
    captured = captures(8)
    before = pair.snapshot()
    drafted = [list(request.tokens) for request in requests]
    pair.advance(requests, 0, LENGTH)
    assert all(request.tokens != tokens for request, tokens in zip(requests, drafted, strict=True))
    fresh = pair.replayed(captured, pair.batch(requests, LENGTH))
    final = [request.tokens for request in requests]
    pair.restore(before)
    for request, tokens in zip(requests, drafted, strict=True):
        request.tokens = tokens
    rejected = pair.replayed(captured, pair.batch(requests, LENGTH))
    assert not (rejected.hidden == fresh.hidden).all()
    for request, tokens in zip(requests, final, strict=True):
        request.tokens = tokens
    assert_same(fresh, pair.replayed(captured, pair.batch(requests, LENGTH)), rows=8 * LENGTH)
    pair.close(requests)


def test_partly_accepted_drafts(pair: Pair, requests: list[Request], captures: Callable[[int], Captured]) -> None:
    """Two of six accepted: the next step's values are those of a request that never saw the other four."""
    captured = captures(8)
    accepted = 2
    before = pair.snapshot()
    pair.replayed(captured, pair.batch(requests, LENGTH))
    drafted = [list(request.tokens) for request in requests]
    pair.advance(requests, accepted, LENGTH)
    after_drafts = pair.replayed(captured, pair.batch(requests, LENGTH))
    final = [list(request.tokens) for request in requests]
    # Again, with other drafts behind the accepted tokens.
    pair.restore(before)
    for request, tokens in zip(requests, drafted, strict=True):
        request.computed -= accepted
        request.tokens = tokens[: request.computed + accepted] + pair.token_ids(LENGTH - accepted)
    pair.replayed(captured, pair.batch(requests, LENGTH))
    for request, tokens in zip(requests, final, strict=True):
        request.computed += accepted
        request.tokens = tokens
    assert_same(after_drafts, pair.replayed(captured, pair.batch(requests, LENGTH)), rows=8 * LENGTH)
    pair.close(requests)


def test_drafts_see_the_drafts_before_them(
    pair: Pair, requests: list[Request], captures: Callable[[int], Captured]
) -> None:
    """Another first draft changes every later row of its request, no earlier one and nobody else's."""
    captured = captures(8)
    before = pair.snapshot()
    first = pair.replayed(captured, pair.batch(requests, LENGTH)).hidden.unflatten(0, (8, LENGTH))
    pair.restore(before)
    changed = requests[5].tokens
    changed[requests[5].computed + 1] = 3 + changed[requests[5].computed + 1] % 100
    second = pair.replayed(captured, pair.batch(requests, LENGTH)).hidden.unflatten(0, (8, LENGTH))
    differs = (first != second).any(2)
    assert differs[5].tolist() == [False] + [True] * 5
    differs[5] = False
    assert not differs.any()
    pair.close(requests)
