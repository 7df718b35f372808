"""Batches and traffic that stock vLLM and the executor are given alike. Pure data; imports neither."""

from collections.abc import Sequence
from dataclasses import dataclass

from specialized_decode.backbone.config import IMAGE_TOKEN_ID

VOCAB_SIZE = 129280
# Steps of each batch that must be replays of the full graph of its rows; more run beside prefills of the same batch.
DECODE_STEPS = 128
OUTPUT_TOKENS = 1 + DECODE_STEPS + 28
GRAPH_SIZES = (1, 2, 4, 8)
MAX_ROWS = 16
# Small enough that the longer prompts are prefilled in chunks, between other requests' decode steps.
PREFILL_CHUNK = 2048
# Prompt tokens of each row: 1, 2, 4 and 8 rows, contexts of one token, at the window's edges, past the top-k, and past
# the candidate restriction of 16,384 positions.
BATCHES: tuple[tuple[int, ...], ...] = (
    (1,),
    (127,),
    (513,),
    (4096,),
    (8192,),
    (20000,),
    (1, 8192),
    (128, 129),
    (1, 127, 1024, 4096),
    (1, 2, 127, 128, 129, 513, 2049, 8192),
    (300,) * 8,
)
# Rows and context of the batches whose GPU operations are listed.
PROFILED = ((1, 300), (8, 300), (1, 8000))
# Rows of the batch before the last that also run alone: what a different batch changes is stock's own noise.
ALONE = (0, 3, 5, 7)
ALONE_BATCH = 9


def prompt(length: int, seed: int) -> list[int]:
    """`length` token ids over the whole vocabulary, the image tokens' left out; another seed gives others."""
    state = seed * 2654435761 + 12345
    ids: list[int] = []
    while len(ids) < length:
        # A linear congruential generator: the same ids on every host and library version.
        state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        token = 3 + (state >> 33) % (IMAGE_TOKEN_ID - 3)
        ids.append(token)
    return ids


@dataclass(frozen=True)
class Request:
    """One request of a script: arrives before engine step `step`, and is aborted before step `abort`, if given."""

    name: str
    step: int
    prompt_tokens: int
    output_tokens: int
    abort: int | None = None


# Batch sizes that change from step to step; one-token prompts; prefills, chunked ones too, between decode steps; more
# rows than the largest graph has, and fewer than a graph's; aborts in decode, in prefill and right after arrival.
TRAFFIC: tuple[Request, ...] = (
    Request("first", 0, 40, 150),
    Request("one-token", 6, 1, 30),
    Request("chunked", 10, 5000, 60),
    Request("group-0", 25, 300, 50),
    Request("group-1", 25, 301, 50, abort=48),
    Request("group-2", 25, 127, 50),
    *(Request(f"crowd-{i}", 34 + i // 4, 16 + 37 * i, 20 + 3 * i) for i in range(9)),
    Request("aborted-in-prefill", 60, 9000, 20, abort=63),
    Request("aborted-at-once", 66, 64, 20, abort=66),
    Request("late", 70, 129, 70),
    Request("aborted-in-decode", 75, 20, 90, abort=110),
    Request("last", 120, 2000, 40),
)


def largest_batch(requests: Sequence[Request]) -> int:
    """An upper bound of the requests that run at once, each taken to run a step a token from its arrival on."""
    ends = [(r.step, r.abort if r.abort is not None else r.step + r.output_tokens) for r in requests]
    return max(sum(start <= step < end for start, end in ends) for step, _ in ends)
