"""The executor and the plain model on the same padded batch from the same state: bit for bit the same."""

from collections.abc import Callable, Iterator

import pytest
import torch

from specialized_decode.attention import reference as attention_reference
from specialized_decode.backbone.cache import Request
from specialized_decode.backbone.engine import Captured
from specialized_decode.engram import reference as engram_reference
from tests.helpers.runtime_model import IMAGE_IDS, Layers, Pair, assert_same
from tests.runtime.conftest import Folder

MAX_ROWS = 49
# The first token; both compression ratios' groups; the top-k of 16 (32 tokens at ratio 2); window pages of 32 and
# compressed pages of 64; the window of 48; the candidate restriction of 24 positions, well behind from 65 on.
CONTEXTS = (1, 2, 3, 15, 16, 17, 24, 25, 31, 32, 33, 34, 47, 48, 49, 63, 64, 65, 95, 96, 97, 128, 129, 200)
# Every kind of layer in fewer than the tiny preset has: two sources of ratio 2, one that publishes candidates.
LAYERS = Layers((0, 0, 2, 2, 2, 1, 1, 1), (2, 4, 5), (2, 4, 5, 7), 5, (1, 4))
AUX_LAYERS = (8, 1, 4, 5, 2)


@pytest.fixture(scope="module")
def pair(folder: Folder) -> Pair:
    return Pair(folder(LAYERS), max_rows=MAX_ROWS, max_tokens=256)


Captures = Callable[..., Captured]


@pytest.fixture(scope="module")
def captures(pair: Pair) -> Captures:
    """Captured steps, each captured once for its arguments and the aux layers of the moment."""
    taken: dict[object, Captured] = {}

    def capture(rows: int, use_engram: bool = True) -> Captured:
        key = rows, use_engram, pair.backbone.aux_layers
        if key not in taken:
            taken[key] = pair.capture(rows, use_engram=use_engram)
        return taken[key]

    return capture


@pytest.fixture(scope="module")
def requests(pair: Pair) -> list[Request]:
    """As many requests as the largest step has rows, with contexts from CONTEXTS in turn."""
    return pair.open([CONTEXTS[i % len(CONTEXTS)] for i in range(MAX_ROWS)], image_share=0.05)


@pytest.fixture(autouse=True)
def aux_layers(pair: Pair) -> Iterator[None]:
    pair.backbone.set_aux_layers(AUX_LAYERS)
    yield
    pair.backbone.set_aux_layers(())


def padded(requests: list[Request], rows: int, padding: int) -> list[Request | None]:
    """`rows` rows, of which the last `padding` belong to no request; which requests, depends on the row count."""
    start = rows % len(requests)
    return [*(requests + requests)[start : start + rows - padding], *[None] * padding]


def test_every_context(pair: Pair, requests: list[Request], captures: Captures) -> None:
    """Each context's first step and the one after it, four requests at a time around a padding request."""
    for i in range(0, len(CONTEXTS), 4):
        for _ in range(2):
            chosen = requests[i : i + 4]
            assert_same(*pair.both(captures(5), pair.batch([*chosen[:2], None, *chosen[2:]])), rows=4)
            pair.advance(chosen)


@pytest.mark.parametrize("rows", [*range(1, 17), 47, 48, 49])
def test_every_row_count(pair: Pair, requests: list[Request], captures: Captures, rows: int) -> None:
    captured = captures(rows)
    # Small steps with padding at every other row count, the larger ones both ways.
    for padding in (0, rows // 3) if rows > 16 else (rows // 3 * (rows % 2),):
        chosen = padded(requests, rows, padding)
        live = [request for request in chosen if request is not None]
        assert_same(*pair.both(captured, pair.batch(chosen)), rows=len(live))
        pair.advance(live, image_share=0.05)


@pytest.mark.parametrize(
    ("aux", "use_engram", "rows"),
    [
        ((), True, 3),
        ((), False, 9),
        ((8,), True, 9),
        ((8,), False, 3),
        ((1,), True, 3),
        ((1,), False, 9),
        ((7, 5, 3), True, 9),
        (tuple(range(8, 0, -1)), True, 3),
        (tuple(range(8, 0, -1)), False, 9),
    ],
)
def test_aux_layers_and_engram(
    pair: Pair, requests: list[Request], captures: Captures, aux: tuple[int, ...], use_engram: bool, rows: int
) -> None:
    pair.backbone.set_aux_layers(aux)
    captured = captures(rows, use_engram=use_engram)
    plain, executed = pair.both(captured, pair.batch(padded(requests, rows, 1)), use_engram)
    assert len(executed.aux) == len(aux)
    assert_same(plain, executed, rows=rows - 1)
    pair.advance(requests)


def test_without_hashes_is_another_model(pair: Pair, requests: list[Request]) -> None:
    """What the test above compares differs with and without Engram."""
    batch = pair.batch(requests[:3])
    before = pair.snapshot()
    first = pair.plain(batch, use_engram=True)
    pair.restore(before)
    assert not torch.equal(first.hidden, pair.plain(batch, use_engram=False).hidden)


@pytest.mark.parametrize("use_engram", [True, False])
def test_image_tokens(pair: Pair, requests: list[Request], captures: Captures, use_engram: bool) -> None:
    """Every image id as the step's own token, beside text, after prompts that hold some."""
    captured = captures(8, use_engram=use_engram)
    chosen = requests[:8]
    for request, token in zip(chosen, (*IMAGE_IDS, IMAGE_IDS[0] - 1, 5, 129279), strict=True):
        request.tokens[-1] = token
    assert_same(*pair.both(captured, pair.batch(chosen), use_engram), rows=8)
    pair.advance(requests)


def test_image_tokens_route_by_their_own_bias(pair: Pair, requests: list[Request], captures: Captures) -> None:
    """A step's image token takes other experts than a text token with the same embedding would."""
    requests[0].tokens[-1] = IMAGE_IDS[1]
    captured = captures(1)
    batch = pair.batch(requests[:1])
    plain, executed = pair.both(captured, batch)
    assert_same(plain, executed)
    biases = [layer.ffn.image_bias for layer in pair.backbone.layers]
    for layer in pair.backbone.layers:
        layer.ffn.image_bias = None
    try:
        without = pair.plain(batch)
    finally:
        for layer, bias in zip(pair.backbone.layers, biases, strict=True):
            layer.ffn.image_bias = bias
    assert not torch.equal(without.hidden, executed.hidden)


@pytest.mark.parametrize("rows", [4, 12])
def test_padding_and_null_blocks_disturb_nobody(
    pair: Pair, requests: list[Request], captures: Captures, rows: int
) -> None:
    """Null blocks full of NaN change no row of a request, nor does the number of padding rows' content."""
    captured = captures(rows)
    batch = pair.batch(padded(requests, rows, rows // 2))
    before = pair.snapshot()
    clean = pair.replayed(captured, batch)
    pair.restore(before)
    for group in (pair.caches.window, pair.caches.compressed):
        group.buffer.view(group.blocks, -1)[0] = 0xFF
    for ring in pair.caches.rings.values():
        ring[0] = float("nan")
    try:
        assert_same(clean, pair.replayed(captured, batch), rows=rows - rows // 2)
    finally:
        pair.restore(before)


def test_padding_alone(pair: Pair, requests: list[Request], captures: Captures) -> None:
    """A step of nothing but padding writes no block of a request."""
    plain, executed = pair.both(captures(4), pair.batch([None] * 4))
    assert executed.hidden.shape[0] == 0
    for name, content in plain.caches.items():
        assert torch.equal(content, executed.caches[name]), name


def test_rows_do_not_see_each_other(pair: Pair, requests: list[Request], captures: Captures) -> None:
    """A request's row is the same with other neighbours in the batch."""
    captured = captures(6)
    before = pair.snapshot()
    first = pair.replayed(captured, pair.batch([requests[20], *requests[:5]]))
    pair.restore(before)
    second = pair.replayed(captured, pair.batch([requests[20], *requests[5:9], None]))
    assert torch.equal(first.hidden[0], second.hidden[0])
    pair.restore(before)


def _everywhere(blocks: torch.Tensor, size: int, width: int) -> torch.Tensor:
    return torch.ones(blocks.shape[0], width, dtype=torch.bool)


@pytest.mark.parametrize(
    ("module", "name", "wrong"),
    [
        (attention_reference, "candidate_flags", _everywhere),
        (attention_reference, "top_positions", lambda scores, count: torch.full((len(scores), count), -1).int()),
        (engram_reference, "inject", lambda residual, *rest: residual),
    ],
    ids=["no candidate restriction", "no selection", "no Engram"],
)
def test_comparison_notices(
    pair: Pair,
    requests: list[Request],
    captures: Captures,
    monkeypatch: pytest.MonkeyPatch,
    module: object,
    name: str,
    wrong: object,
) -> None:
    """The comparison above fails where an op is wrong: its inputs reach what they are meant to reach."""
    longest = sorted(requests, key=lambda request: request.computed)[-3:]
    with monkeypatch.context() as patch:
        patch.setattr(module, name, wrong)
        captured = pair.capture(3)
    with pytest.raises(AssertionError, match="differ"):
        assert_same(*pair.both(captured, pair.batch(longest)), rows=3)
