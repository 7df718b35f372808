"""The scripts hold what they are meant to."""

from specialized_decode.backbone.config import IMAGE_TOKEN_ID
from tests.gpu import scenarios
from tests.gpu.scenarios import BATCHES, GRAPH_SIZES, MAX_ROWS, PREFILL_CHUNK, TRAFFIC, Request, prompt


def test_prompts_are_valid_and_differ() -> None:
    ids = prompt(20000, 5)
    assert len(ids) == 20000
    assert min(ids) >= 3
    assert max(ids) < IMAGE_TOKEN_ID
    assert len(set(ids)) > 10000
    assert prompt(20000, 5) == ids
    assert prompt(100, 5) == ids[:100]
    assert prompt(100, 6) != ids[:100]


def test_batches_cover_rows_and_contexts() -> None:
    assert {len(batch) for batch in BATCHES} == set(GRAPH_SIZES)
    lengths = {length for batch in BATCHES for length in batch}
    assert {1, 8192, 20000} <= lengths
    assert all(length <= 8192 for batch in BATCHES for length in batch if len(batch) > 1)
    assert len(BATCHES[scenarios.ALONE_BATCH]) == max(GRAPH_SIZES)
    assert all(row < max(GRAPH_SIZES) for row in scenarios.ALONE)


def test_steps_beside_prefills_leave_enough_decode_steps() -> None:
    """A row comes when the one before it has its first token, which is told a step later."""
    spare = scenarios.OUTPUT_TOKENS - 1 - scenarios.DECODE_STEPS
    for batch in BATCHES:
        assert sum(-(-length // PREFILL_CHUNK) + 1 for length in batch[1:]) <= spare, batch


def test_traffic_covers_the_cases() -> None:
    names = [request.name for request in TRAFFIC]
    assert len(set(names)) == len(names)
    assert max(GRAPH_SIZES) < scenarios.largest_batch(TRAFFIC) <= MAX_ROWS
    assert any(request.prompt_tokens == 1 for request in TRAFFIC)
    chunked = [request for request in TRAFFIC if request.prompt_tokens > PREFILL_CHUNK]
    assert any(request.abort is None for request in chunked)
    # Aborted before its prompt's chunks can all have run, in decode, and as it arrives.
    aborted = {request.name: request for request in TRAFFIC if request.abort is not None}
    prefill = aborted["aborted-in-prefill"]
    assert prefill.abort is not None
    assert prefill.abort - prefill.step < prefill.prompt_tokens // PREFILL_CHUNK
    assert aborted["aborted-at-once"].abort == aborted["aborted-at-once"].step
    assert all(
        request.abort is None or request.abort - request.step < request.output_tokens for request in aborted.values()
    )


def test_largest_batch() -> None:
    requests = [
        Request("a", 0, 1, 10),
        Request("b", 5, 1, 10),
        Request("c", 9, 1, 10, abort=10),
        Request("d", 10, 1, 1),
    ]
    assert scenarios.largest_batch(requests) == 3
    assert scenarios.largest_batch(requests[:1]) == 1
