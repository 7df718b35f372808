"""The soak's client: OpenAI's own, against a real server that answers in vLLM's response classes."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from openai import AsyncOpenAI, OpenAI
from prometheus_client import CollectorRegistry, Counter, generate_latest
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.openai.completion.protocol import (
    CompletionLogProbs,
    CompletionRequest,
    CompletionResponse,
    CompletionResponseChoice,
    CompletionResponseStreamChoice,
    CompletionStreamResponse,
)
from vllm.entrypoints.serve.engine.protocol import UsageInfo

from tests.gpu.http_phases import serve_command
from tests.gpu.http_traffic import MODEL, Alone, Asked, Given, answer_failures, ask, soak
from tests.gpu.server import Metrics
from tests.gpu.worker_plugin import FORCED, take_forced_tokens

GONE: list[int] = []


def logprobs(first: int, count: int) -> CompletionLogProbs:
    """Token i of an answer has id 100 + i."""
    ids = [f"token_id:{100 + i}" for i in range(first, first + count)]
    return CompletionLogProbs(
        text_offset=[0] * count,
        token_logprobs=[-0.5] * count,
        tokens=list(ids),
        top_logprobs=[{one: -0.5, "token_id:7": -0.75} for one in ids],
    )


app = FastAPI()


@app.post("/v1/completions")
async def completions(raw: Request) -> Any:
    request = CompletionRequest(**await raw.json())
    params = request.to_sampling_params(request.max_tokens or 0, {})
    forced = params.trace_decode_token_ids
    assert params.logprobs == 20 and params.ignore_eos and forced == (request.vllm_xargs or {}).get(FORCED)
    assert request.model == MODEL and request.ignore_eos and request.return_tokens_as_token_ids
    assert request.temperature == 0 and request.logprobs == 20 and isinstance(request.prompt, list)
    count = request.max_tokens or 0
    usage = UsageInfo(prompt_tokens=len(request.prompt), completion_tokens=count, total_tokens=0)
    if not request.stream:
        given = logprobs(0, count)
        given.tokens = [f"token_id:{token}" for token in forced or ()]
        choice = CompletionResponseChoice(index=0, text="x", logprobs=given, finish_reason="length")
        return JSONResponse(CompletionResponse(model=MODEL, choices=[choice], usage=usage).model_dump())

    async def chunks() -> AsyncIterator[str]:
        sent = 0
        try:
            # As vLLM does where steps are faster than the connection: one token, then several at once.
            for size in [1, *[3] * ((count - 1) // 3), *[1] * ((count - 1) % 3)]:
                reason = "length" if sent + size == count else None
                choice = CompletionResponseStreamChoice(
                    index=0, text="x", logprobs=logprobs(sent, size), finish_reason=reason
                )
                sent += size
                yield f"data: {CompletionStreamResponse(model=MODEL, choices=[choice]).model_dump_json()}\n\n"
                await asyncio.sleep(0.002)
            assert request.stream_options is not None and request.stream_options.include_usage
            yield f"data: {CompletionStreamResponse(model=MODEL, choices=[], usage=usage).model_dump_json()}\n\n"
            yield "data: [DONE]\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            GONE.append(sent)
            raise

    return StreamingResponse(chunks(), media_type="text/event-stream")


@pytest.fixture(autouse=True)
def plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the server: requests may name the tokens that they get."""
    monkeypatch.setattr(SamplingParams, "from_optional", SamplingParams.from_optional)
    take_forced_tokens()


@contextmanager
def serving() -> Iterator[str]:
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join()


async def asked(url: str, *requests: Asked) -> list[Given]:
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        return [await ask(client, request) for request in requests]


def test_answers_come_whole_and_cancelled() -> None:
    GONE.clear()
    with serving() as url:
        whole, some, none = asyncio.run(asked(url, Asked(2, 12), Asked(0, 300, cancel_after=2), Asked(0, 300, 0)))
        until = time.monotonic() + 5
        while not GONE and time.monotonic() < until:
            time.sleep(0.01)
    assert [step.token for step in whole.steps] == list(range(100, 112))
    assert whole.steps[0].top == {100: -0.5, 7: -0.75} and whole.reason == "length" and not whole.error
    assert [step.token for step in some.steps] == [100, 101, 102, 103] and some.reason is None
    assert none.steps == [] and none.reason is None and not none.error
    # The server has seen a client go away.
    assert GONE and max(GONE) < 300


def test_several_clients_and_the_engine_alone() -> None:
    with serving() as url:

        async def run() -> list[Given]:
            async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
                return await soak(client, 1.0)

        answers = asyncio.run(run())
        assert len(answers) > 10 and answer_failures(answers) == []
        with OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            engine = Alone(client)
            assert all(engine.difference(given).differing == 0 for given in answers)
            wrong = Given(Asked(0, 3), [replace(answers[0].steps[0], logprob=-0.75, top={})] * 2)
            assert engine.difference(wrong).largest == 0.25


def test_a_server_that_is_gone() -> None:
    with serving() as url:
        pass
    (given,) = asyncio.run(asked(url, Asked(0, 3)))
    assert given.error.startswith("APIConnectionError")


def test_metrics_of_prometheus() -> None:
    registry = CollectorRegistry()
    counter = Counter("a:b", "Text.", ["by", "reason"], registry=registry)
    counter.labels("x", 'a "quoted", one').inc(3)
    counter.labels("y", "").inc(1e7)
    found = Metrics.parse(generate_latest(registry).decode())
    assert found.total("a:b_total") == 1e7 + 3
    assert found.total("a:b_total", by="x") == 3


@pytest.mark.parametrize("executor", [None, {"decode_backend": "latency_specialized"}])
def test_vllm_takes_the_command(tmp_path: Path, executor: dict[str, Any] | None) -> None:
    from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    command = serve_command(SimpleNamespace(folder=tmp_path, ranks=2), executor, 8123)  # type: ignore[arg-type]
    assert command[:2] == ["vllm.entrypoints.cli.main", "serve"]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(command[2:])
    validate_parsed_serve_args(args)
    # As `vllm serve` does.
    args.model = args.model_tag
    engine = AsyncEngineArgs.from_cli_args(args)
    assert engine.tensor_parallel_size == 2 and engine.enable_prefix_caching is False and engine.enable_trace_replay
    assert engine.kv_cache_memory_bytes == 8 << 30 and engine.gpu_memory_utilization == 0.25
    assert engine.compilation_config.cudagraph_capture_sizes == [1, 2, 4, 8]
    assert (engine.additional_config or {}) == (executor or {})


def test_forced_tokens_become_a_replay() -> None:
    request = CompletionRequest(model=MODEL, prompt=[1], vllm_xargs={FORCED: [7, 129264, 9]}, max_tokens=3)
    params = request.to_sampling_params(3, {})
    assert params.trace_decode_token_ids == [7, 129264, 9] and params.max_tokens == 3
    assert CompletionRequest(model=MODEL, prompt=[1]).to_sampling_params(3, {}).trace_decode_token_ids is None
