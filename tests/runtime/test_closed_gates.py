"""Whatever gates are open, a step has the plain model's values; and a capture starts from nothing an older one left."""

import dataclasses
import itertools

import pytest
import torch

from specialized_decode.backbone.cache import Request
from specialized_decode.runtime import FUSED_MHC_MAX_ROWS, DecodeStep
from tests.helpers.runtime_errors import LAYERS
from tests.helpers.runtime_model import Pair, assert_same
from tests.runtime.conftest import Folder

ROWS = 4
GATES = ("mhc_overlap", "low_batch", "overlap", "engram_prefetch")


@pytest.fixture(scope="module")
def pair(folder: Folder) -> Pair:
    pair = Pair(folder(LAYERS), max_rows=ROWS, max_context=96, max_tokens=96)
    pair.backbone.set_aux_layers((1, 2, 4))
    return pair


@pytest.fixture(scope="module")
def requests(pair: Pair) -> list[Request]:
    return pair.open((1, 33, 64, 80))


def set_gates(pair: Pair, patch: pytest.MonkeyPatch, opened: tuple[bool, ...]) -> None:
    """Opens or closes GATES, and attention's aux streams with the last of `opened`, for every row count."""
    rows = {name: FUSED_MHC_MAX_ROWS if is_open else 0 for name, is_open in zip(GATES, opened[:-1], strict=True)}
    patch.setattr(pair.executor, "gates", dataclasses.replace(pair.executor.gates, **rows))
    patch.setattr(pair.host, "multi_stream_threshold", FUSED_MHC_MAX_ROWS if opened[-1] else 0)


@pytest.mark.parametrize("opened", [s for s in itertools.product((True, False), repeat=5) if sum(s) in (0, 1, 4, 5)])
def test_each_gate_alone(
    pair: Pair, requests: list[Request], monkeypatch: pytest.MonkeyPatch, opened: tuple[bool, ...]
) -> None:
    """All open, all closed, each closed alone and each open alone."""
    set_gates(pair, monkeypatch, opened)
    captured = pair.capture(ROWS)
    for request in requests:
        request.tokens[-1:] = pair.token_ids(1)
    assert_same(*pair.both(captured, pair.batch(requests)), rows=ROWS)


@pytest.mark.parametrize("is_open", [True, False])
def test_a_batch_captured_twice(
    pair: Pair, requests: list[Request], monkeypatch: pytest.MonkeyPatch, is_open: bool
) -> None:
    """The second graph, over the very same metadata, reads no table and no expansion that the first one made."""
    set_gates(pair, monkeypatch, (is_open,) * 5)
    first = pair.capture(ROWS)
    pair.model.executor = pair.executor
    try:
        second = pair.engine.capture_step(first.batch)
    finally:
        pair.model.executor = None
    assert second.refusal is None
    assert_same(*pair.both(second, pair.batch(requests)), rows=ROWS)
    pair.advance(requests)
    assert_same(*pair.both(second, pair.batch(requests[::-1])), rows=ROWS)
    assert_same(*pair.both(first, pair.batch(requests)), rows=ROWS)


def test_an_unwarmed_expansion_is_not_forked(
    pair: Pair, requests: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture without the run before it expands where the consumer reads, and is right twice in a row."""
    candidates = pair.executor.candidates
    assert candidates is not None
    monkeypatch.setattr(candidates, "warmed", set())
    monkeypatch.setattr(candidates, "warm", lambda rows: None)
    monkeypatch.setattr(candidates.stream, "fork", lambda: pytest.fail("forked an expansion that nothing warmed"))
    graphs = [pair.capture(ROWS) for _ in range(2)]
    for captured in graphs:
        assert_same(*pair.both(captured, pair.batch(requests)), rows=ROWS)
        pair.advance(requests)


def test_a_step_run_eagerly(pair: Pair, requests: list[Request]) -> None:
    """A granted step outside a capture runs the same schedule with the same values."""
    granted: list[DecodeStep | None] = []
    batch = pair.batch(requests)
    before = pair.snapshot()
    plain = pair.plain(batch)
    pair.restore(before)
    with torch.no_grad(), pair.host.running(batch.metadata):
        pair.host.capture(lambda: granted.append(pair.executor.plan(batch.positions, None)))
        hashes, mask = pair.model.engram_inputs(batch)
        x = pair.backbone.embedding[batch.input_ids]
        assert granted[0] is not None
        found, _ = granted[0].run(x, batch.positions, batch.input_ids, hashes, mask)
    assert torch.equal(found, plain.hidden)
