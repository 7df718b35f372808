"""Steps of 383 and 384 rows, the most that a step may have, against the plain model."""

from collections.abc import Iterator

import pytest

from specialized_decode.backbone.cache import Request
from specialized_decode.runtime import FUSED_MHC_MAX_ROWS
from tests.helpers.runtime_model import FEW_LAYERS, Pair, assert_same
from tests.runtime.conftest import Folder

# Selections of 8, candidates of 12 and a window of 24 positions: short contexts get past all three.
NARROW = {"index_topk": 8, "candidate_topk_blocks": 3, "sliding_window": 24}


@pytest.fixture(scope="module")
def pair(folder: Folder) -> Pair:
    return Pair(folder(FEW_LAYERS, **NARROW), max_rows=FUSED_MHC_MAX_ROWS, max_context=96, max_tokens=384)


@pytest.fixture(scope="module")
def requests(pair: Pair) -> Iterator[list[Request]]:
    """384 requests: 12 texts of 1 to 90 tokens, prefilled together in chunks, and copies of them."""
    texts = [pair.caches.open(pair.token_ids(length, 0.05)) for length in (0, 1, 7, 8, 9, 23, 24, 31, 32, 33, 63, 89)]
    pair.engine.prefill(texts[1:])
    requests = [*texts, *(pair.copy(texts[i % len(texts)]) for i in range(len(texts), FUSED_MHC_MAX_ROWS))]
    for request in requests:
        request.tokens += pair.token_ids(1, 0.05)
    yield requests
    pair.close(requests)


@pytest.mark.parametrize(("rows", "padding"), [(384, 0), (383, 0), (384, 100)])
def test_largest_steps(pair: Pair, requests: list[Request], rows: int, padding: int) -> None:
    pair.backbone.set_aux_layers((4, 1))
    captured = pair.capture(rows)
    live = requests[: rows - padding]
    assert_same(*pair.both(captured, pair.batch([*live, *[None] * padding])), rows=len(live))
    pair.advance(live)
    # Other requests in other rows: the same graph, other inputs.
    live = live[::-1]
    assert_same(*pair.both(captured, pair.batch([*live, *[None] * padding])), rows=len(live))
    pair.advance(live)
