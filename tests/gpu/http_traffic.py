"""Requests to a vLLM server by the OpenAI client: ragged ones, several at once, streamed, and some cancelled."""

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.gpu.answers import Step, Verdict, judge
from tests.gpu.scenarios import prompt

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


def parameters(tokens: Sequence[int], output_tokens: int) -> dict[str, Any]:
    """A greedy request of exactly `output_tokens` tokens with log-probabilities; tokens come as ids."""
    return {
        "model": MODEL,
        "prompt": list(tokens),
        "max_tokens": output_tokens,
        "temperature": 0,
        "logprobs": TOP,
        "extra_body": {"ignore_eos": True, "return_tokens_as_token_ids": True},
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
    """The engine with one request at a time, and what it answered. client: an openai.OpenAI; prompts and tokens already
    asked for are not asked for again."""

    client: Any
    known: dict[tuple[int, tuple[int, ...]], list[Step]] = field(default_factory=dict)

    def steps(self, kind: int, tokens: Sequence[int], count: int) -> list[Step]:
        """`count` steps after a prompt and its answer's first `tokens`."""
        key = kind, tuple(tokens)
        if len(self.known.get(key, ())) < count:
            ids = [*Asked(kind, count).prompt, *tokens]
            done = self.client.completions.create(**parameters(ids, count))
            self.known[key] = steps_of(done.choices[0].logprobs)
        return self.known[key][:count]

    def judge(self, given: Given) -> Verdict:
        """Holds an answer, a cancelled one as far as it came, against the engine alone."""
        kind, count = given.asked.kind, len(given.steps)
        return judge(given.steps, lambda tokens: self.steps(kind, tokens, count - len(tokens)))


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
