"""An error inside any part of a captured step: the caller sees that error, and the next step is right."""

import pytest

from specialized_decode.backbone.cache import Request
from tests.helpers.runtime_errors import LAYERS, PLACES, Injected, Place, inject
from tests.helpers.runtime_model import Pair, assert_same, named_streams, unjoined
from tests.runtime.conftest import Folder

ROWS = 3


@pytest.fixture(scope="module")
def pair(folder: Folder) -> Pair:
    pair = Pair(folder(LAYERS), max_rows=ROWS, max_context=96, max_tokens=64)
    pair.backbone.set_aux_layers((1, 2, 4))
    return pair


@pytest.fixture(scope="module")
def requests(pair: Pair) -> list[Request]:
    return pair.open((1, 33, 80))


def assert_clean(pair: Pair) -> None:
    """No stream has forked work, no capture is open, and nothing of the step is kept."""
    assert unjoined(pair) == []
    assert pair.host.emulated is not None
    assert [stream.name for stream in pair.host.emulated.streams if stream.pending] == []
    assert pair.host.emulated.current == pair.host.emulated.MAIN
    assert not pair.host.capturing()
    assert not pair.host.forward_context_available()


def test_the_streams_have_the_places_names(pair: Pair) -> None:
    assert set(named_streams(pair).values()) == set(pair.executor.side_streams())
    assert set(named_streams(pair)) == {"engram 1", "engram 3", "compressor", "indexer", "candidates", "mhc"}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_error(pair: Pair, requests: list[Request], monkeypatch: pytest.MonkeyPatch, place: Place) -> None:
    error = Injected()
    with monkeypatch.context() as patch:
        pending = inject(patch, pair, place, error)
        with pytest.raises(Injected) as caught:
            pair.capture(ROWS)
    assert caught.value is error
    assert error.__context__ is None, "the step's clean-up raised nothing of its own"
    # The place is where it says: work was under way on a side stream.
    assert place.pending is None or set(place.pending) & set(pending[0]), pending
    assert_clean(pair)
    assert_same(*pair.both(pair.capture(ROWS), pair.batch(requests)), rows=ROWS)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), RuntimeError("CUDA error"), MemoryError()])
def test_every_kind_of_error(
    pair: Pair, requests: list[Request], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    with monkeypatch.context() as patch:
        inject(patch, pair, PLACES["candidate join"], error)
        with pytest.raises(type(error)) as caught:
            pair.capture(ROWS)
    assert caught.value is error
    assert_clean(pair)


def test_an_older_graph_replays_after_an_error(
    pair: Pair, requests: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs captured before an error share the executor's state with the broken capture, and stay right."""
    older = pair.capture(ROWS)
    for place in ("between publish_target and mark_published", "candidate expansion", "Engram started"):
        with monkeypatch.context() as patch:
            inject(patch, pair, PLACES[place], Injected())
            with pytest.raises(Injected):
                pair.capture(ROWS)
    assert_same(*pair.both(older, pair.batch(requests)), rows=ROWS)


def test_error_after_error(pair: Pair, requests: list[Request], monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken captures in a row, none of which cleaned up by a good one."""
    for place in ("output projection, published", "Engram started", "slot handed out, not published", "selection"):
        with monkeypatch.context() as patch:
            error = Injected()
            inject(patch, pair, PLACES[place], error)
            with pytest.raises(Injected) as caught:
                pair.capture(ROWS)
        assert caught.value is error
        assert_clean(pair)
    assert_same(*pair.both(pair.capture(ROWS), pair.batch(requests)), rows=ROWS)


@pytest.mark.parametrize("place", ["indexer's queries", "Engram, after", "MoE"])
def test_error_past_the_low_batch_gate(folder: Folder, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """The same on the stock projections and experts, which more rows take."""
    pair = Pair(folder(LAYERS), max_rows=9, max_context=64, max_tokens=64)
    requests = pair.open([4 + i for i in range(9)])
    with monkeypatch.context() as patch:
        error = Injected()
        inject(patch, pair, PLACES[place], error)
        with pytest.raises(Injected) as caught:
            pair.capture(9)
    assert caught.value is error
    assert_clean(pair)
    assert_same(*pair.both(pair.capture(9), pair.batch(requests)), rows=9)
