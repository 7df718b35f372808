"""The executor on a GPU: real captured graphs against the plain model, bit for bit.

Both sides run the same torch kernels on the same shapes, on other streams at most: nothing may round differently, and
what takes an order of its own (float atomics) is used by neither.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from specialized_decode.backbone.cache import Request
from specialized_decode.backbone.engine import Captured
from specialized_decode.backbone.writer import write_checkpoint
from tests.helpers.runtime_errors import LAYERS, PLACES, Injected, Place, inject
from tests.helpers.runtime_model import FEW_LAYERS, Pair, assert_same, named_streams, small_checkpoint, unjoined

MAX_ROWS = 384
CONTEXTS = (1, 2, 16, 17, 25, 32, 33, 47, 48, 49, 63, 64, 65, 96, 97, 129, 180)
AUX_LAYERS = (10, 1, 5, 6, 2)
Captures = Callable[..., Captured]


@pytest.fixture(scope="module")
def pair(tiny_folder: Path) -> Pair:
    """The tiny preset: every kind of layer."""
    pair = Pair(tiny_folder, device="cuda", max_rows=MAX_ROWS + 8, max_context=256, max_tokens=512)
    pair.backbone.set_aux_layers(AUX_LAYERS)
    return pair


@pytest.fixture(scope="module")
def captures(pair: Pair) -> Captures:
    taken: dict[tuple[int, int, bool], Captured] = {}

    def capture(requests: int, count: int = 1, use_engram: bool = True) -> Captured:
        key = requests, count, use_engram
        if key not in taken:
            taken[key] = pair.capture(*key)
        return taken[key]

    return capture


@pytest.fixture(scope="module")
def requests(pair: Pair) -> list[Request]:
    """As many requests as the largest step has rows: the contexts in turn, prefilled once and copied."""
    opened = pair.open(CONTEXTS, image_share=0.05)
    while len(opened) < MAX_ROWS:
        twin = pair.copy(opened[len(opened) % len(CONTEXTS)])
        twin.tokens += pair.token_ids(1, 0.05)
        opened.append(twin)
    return opened


def padded(requests: list[Request], rows: int, padding: int) -> list[Request | None]:
    start = rows % len(CONTEXTS) if rows < len(requests) - len(CONTEXTS) else 0
    return [*requests[start : start + rows - padding], *[None] * padding]


@pytest.mark.parametrize("use_engram", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 48, 49, 384])
def test_agreement(pair: Pair, requests: list[Request], captures: Captures, rows: int, use_engram: bool) -> None:
    """Three replays of a graph: all rows live, a third padding, other blocks; tokens and contexts change each time."""
    captured = captures(rows, 1, use_engram)
    for step, padding in enumerate((0, rows // 3, 0)):
        if step == 2:
            pair.shuffle(requests)
        chosen = padded(requests, rows, padding)
        live = [request for request in chosen if request is not None]
        assert_same(*pair.both(captured, pair.batch(chosen), use_engram), rows=len(live))
        pair.advance(live, image_share=0.05)


@pytest.mark.parametrize(("live", "padding"), [(1, 0), (8, 1), (60, 4)])
def test_verification_steps(pair: Pair, requests: list[Request], captures: Captures, live: int, padding: int) -> None:
    """Six rows a request; one to six tokens accepted, the others rolled back."""
    captured = captures(live + padding, 6)
    chosen = requests[-live:]
    pair.advance(chosen, 0, 6)
    for accepted in (1, 4, 6):
        batch = pair.batch([*chosen, *[None] * padding], 6)
        assert_same(*pair.both(captured, batch), rows=live * 6)
        pair.advance(chosen, accepted, 6)
    pair.advance(chosen, 0, 1)


def test_null_blocks_disturb_nobody(pair: Pair, requests: list[Request], captures: Captures) -> None:
    batch = pair.batch(padded(requests, 8, 4))
    before = pair.snapshot()
    clean = pair.replayed(captures(8), batch)
    pair.restore(before)
    for group in (pair.caches.window, pair.caches.compressed):
        group.buffer.view(group.blocks, -1)[0] = 0xFF
    for ring in pair.caches.rings.values():
        ring[0] = float("nan")
    assert_same(clean, pair.replayed(captures(8), batch), rows=4)
    pair.restore(before)


def test_replays_of_many_graphs(pair: Pair, requests: list[Request], captures: Captures) -> None:
    """Graphs that share the executor's mailbox, streams and memory pool's neighbours, replayed in turn."""
    for rows in (48, 1, 9, 3, 48, 8, 1, 49):
        chosen = padded(requests, rows, rows // 4)
        live = [request for request in chosen if request is not None]
        assert_same(*pair.both(captures(rows), pair.batch(chosen)), rows=len(live))
        pair.advance(live, image_share=0.05)


def test_replays_back_to_back(pair: Pair, requests: list[Request], captures: Captures) -> None:
    """Two replays with nothing but the input copy between them: the second must not overtake the first."""
    first, second = pair.batch(requests[:8]), pair.batch(requests[8:16])
    before = pair.snapshot()
    plain = [pair.plain(first), pair.plain(second)]
    pair.restore(before)
    captured = captures(8)
    for _ in range(10):
        pair.engine.replay(captured, first)
        hidden = pair.engine.replay(captured, second).clone()
    assert torch.equal(hidden, plain[1].hidden)


def test_greedy_tokens(pair: Pair) -> None:
    """Generation through graphs with the executor and without it."""
    prompts = [pair.token_ids(length) for length in (1, 30, 64, 150, 9)]
    found = []
    try:
        for executor in (None, pair.executor):
            pair.engine.graphs.clear()
            pair.model.executor = executor
            pair.engine.capture([8])
            found.append(pair.engine.generate(prompts, 12))
    finally:
        pair.engine.graphs.clear()
        pair.model.executor = None
    assert found[1].executor_steps == 11
    assert found[0].executor_steps == 0
    assert found[1].tokens == found[0].tokens


@pytest.fixture(scope="module")
def small_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Fewer layers, for tests that capture often."""
    folder = write_checkpoint(small_checkpoint(LAYERS), tmp_path_factory.mktemp("gpu") / "small")
    pair = Pair(folder, device="cuda", max_rows=4, max_context=96, max_tokens=96)
    pair.backbone.set_aux_layers((1, 2, 4))
    yield pair
    torch.cuda.synchronize()


@pytest.fixture(scope="module")
def small_requests(small_pair: Pair) -> list[Request]:
    return small_pair.open((1, 33, 80))


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_error_in_a_capture(
    small_pair: Pair, small_requests: list[Request], monkeypatch: pytest.MonkeyPatch, place: Place
) -> None:
    """The caller sees the error itself, not the driver's complaint about unjoined work, and can capture again."""
    pair, error = small_pair, Injected()
    with monkeypatch.context() as patch:
        pending = inject(patch, pair, place, error)
        with pytest.raises(Injected) as caught:
            pair.capture(3)
    assert caught.value is error
    assert place.pending is None or set(place.pending) & set(pending[0]), pending
    assert unjoined(pair) == []
    assert not torch.cuda.is_current_stream_capturing()
    for stream in named_streams(pair).values():
        with stream.fork():
            assert not torch.cuda.is_current_stream_capturing()
        stream.join()
    assert_same(*pair.both(pair.capture(3), pair.batch(small_requests)), rows=3)


def test_warm_up_leaves_nothing_pending(small_pair: Pair) -> None:
    executor = type(small_pair.executor).for_target(
        small_pair.backbone, small_pair.executor.config, small_pair.model.lm_head
    )
    assert not any(stream.pending for stream in executor.side_streams())


def test_nothing_is_allocated_by_a_replay(small_pair: Pair, small_requests: list[Request]) -> None:
    """A replay runs in the memory that its capture took."""
    captured = small_pair.capture(3)
    small_pair.engine.replay(captured, small_pair.batch(small_requests))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_stats()["allocation.all.allocated"]
    captured.graph.replay()
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_stats()["allocation.all.allocated"]) == before


def test_other_widths(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Another plan at other widths."""
    folder = write_checkpoint(
        small_checkpoint(FEW_LAYERS, hidden_size=96, sliding_window=24, index_topk=8),
        tmp_path_factory.mktemp("gpu") / "widths",
    )
    pair = Pair(folder, device="cuda", max_rows=64, max_context=96, max_tokens=96)
    requests = pair.open([1 + i for i in range(64)])
    for rows in (64, 5):
        assert_same(*pair.both(pair.capture(rows), pair.batch(requests[:rows])), rows=rows)
        pair.advance(requests[:rows])
