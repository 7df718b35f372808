"""Requests to a vLLM server by the OpenAI client: ragged ones, several at once, streamed, and some cancelled."""

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.gpu.answers import Step, difference
from tests.gpu.compare import Difference
from tests.gpu.scenarios import prompt
from tests.gpu.worker_plugin import FORCED

MODEL = "model"
# As many tokens as vLLM gives log-probabilities of by default.
TOP = 20
CLIENTS = 8
PROMPTS = (1, 127, 2, 300, 129, 40, 3000, 513, 128, 1024, 16, 2049, 65, 700, 5, 4096)
OUTPUTS = (150, 16, 400, 48, 96, 260, 32, 120, 1, 64, 200)


@dataclass(frozen=True)
class Asked:
    """One request. kind: of PROMPTS; two of one kind have the same prompt; cancel_after: the tokens after which the
    client goes away, None for never."""

    kind: int
    output_tokens: int
    cancel_after: int | None = None

    @property
    def prompt(self) -> list[int]:
        return prompt(PROMPTS[self.kind], 5000 + self.kind)


def asked(index: int) -> Asked:
    """The request of a soak by its index: every seventh is cancelled, some before their first token."""
    kind, output_tokens = index % len(PROMPTS), OUTPUTS[index % len(OUTPUTS)]
    return Asked(kind, output_tokens, index * 5 % output_tokens if index % 7 == 3 else None)


@dataclass
class Given:
    """What came for a request: tokens, why the server ended it, None where the client went away, and what went
    wrong."""

    asked: Asked
    steps: list[Step] = field(default_factory=list)
    reason: str | None = None
    error: str = ""


def parameters(tokens: Sequence[int], output_tokens: int, forced: Sequence[int] | None = None) -> dict[str, Any]:
    """A greedy request of exactly `output_tokens` tokens, or of the `forced` ones, with log-probabilities; tokens come
    as ids."""
    more: dict[str, Any] = {} if forced is None else {"vllm_xargs": {FORCED: list(forced)}}
    return {
        "model": MODEL,
        "prompt": list(tokens),
        "max_tokens": output_tokens,
        "temperature": 0,
        "logprobs": TOP,
        "extra_body": {"ignore_eos": True, "return_tokens_as_token_ids": True} | more,
    }


def token_id(text: str) -> int:
    """The id in `token_id:7`. Raises ValueError for other text."""
    name, _, number = text.partition(":")
    if name != "token_id":
        raise ValueError(f"token: found {text!r}, expected token_id:NUMBER")
    return int(number)


def steps_of(logprobs: Any) -> list[Step]:
    """The tokens of a completion's `logprobs`."""
    return [
        Step(token_id(token), value, {token_id(name): one for name, one in top.items()})
        for token, value, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True)
    ]


async def ask(client: Any, request: Asked) -> Given:
    """Streams one request. client: an openai.AsyncOpenAI; what it raises is in the answer."""
    given = Given(request)
    try:
        options = parameters(request.prompt, request.output_tokens) | {"stream_options": {"include_usage": True}}
        async with await client.completions.create(**options, stream=True) as stream:
            if request.cancel_after == 0:
                return given
            async for chunk in stream:
                if chunk.usage is not None and chunk.usage.completion_tokens != len(given.steps):
                    given.error = f"usage: found {chunk.usage.completion_tokens} tokens, {len(given.steps)} came"
                for choice in chunk.choices:
                    given.steps += steps_of(choice.logprobs) if choice.logprobs is not None else []
                    given.reason = choice.finish_reason or given.reason
                if request.cancel_after is not None and len(given.steps) >= request.cancel_after:
                    return given
    except Exception as error:
        given.error = f"{type(error).__name__}: {error}"
    return given


async def soak(client: Any, seconds: float, clients: int = CLIENTS) -> list[Given]:
    """Keeps `clients` requests running for so long; the last ones are waited for."""
    indices, until = itertools.count(), time.monotonic() + seconds
    answers: list[Given] = []

    async def one_after_another() -> None:
        while time.monotonic() < until:
            answers.append(await ask(client, asked(next(indices))))

    await asyncio.gather(*(one_after_another() for _ in range(clients)))
    return answers


@dataclass
class Alone:
    """The engine with one request at a time, made to give the tokens of answers. client: an openai.OpenAI; what was
    asked once is not asked again."""

    client: Any
    known: dict[tuple[int, tuple[int, ...]], list[Step]] = field(default_factory=dict)

    def steps(self, kind: int, tokens: Sequence[int]) -> list[Step]:
        """What the engine alone tells along `tokens` after the prompt of that kind."""
        key = kind, tuple(tokens)
        if key not in self.known:
            done = self.client.completions.create(**parameters(Asked(kind, 1).prompt, len(tokens), tokens))
            self.known[key] = steps_of(done.choices[0].logprobs)
        return self.known[key]

    def difference(self, given: Given) -> Difference:
        """Holds an answer, a cancelled one as far as it came, against the engine alone."""
        if not given.steps:
            return Difference()
        return difference(given.steps, self.steps(given.asked.kind, [step.token for step in given.steps]))


def spread(count: int) -> list[int]:
    """The numbers below `count` in an order whose every beginning is spread over all of them."""
    golden = (5**0.5 - 1) / 2
    return sorted(range(count), key=lambda index: index * golden % 1)


def answer_failures(answers: Sequence[Given]) -> list[str]:
    """What is wrong with the answers by themselves: errors, tokens missing, ended otherwise, none cancelled."""
    failures = [f"{given.asked}: {given.error}" for given in answers if given.error]
    for given in answers:
        whole = len(given.steps) == given.asked.output_tokens and given.reason == "length"
        if given.asked.cancel_after is None and not given.error and not whole:
            failures.append(f"{given.asked}: found {len(given.steps)} tokens ended by {given.reason}, expected length")
    if not any(given.asked.cancel_after is not None for given in answers):
        failures.append("no request was cancelled")
    return failures
