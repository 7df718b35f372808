"""A server in a process of its own that answers as vLLM's does, without an engine: the soak's script runs against it.

`python -m tests.integration.http_server PORT LEAK OFF`: it leaves LEAK files in shared memory behind, and is OFF nats
further off than it should be where a request names its tokens, after all prompts but the one of a single token.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from vllm.entrypoints.openai.completion.protocol import (
    CompletionLogProbs,
    CompletionRequest,
    CompletionResponse,
    CompletionResponseChoice,
    CompletionResponseStreamChoice,
    CompletionStreamResponse,
)
from vllm.entrypoints.serve.engine.protocol import UsageInfo

from tests.gpu.http_checks import STEPS
from tests.gpu.http_traffic import CLIENTS
from tests.gpu.worker_plugin import take_forced_tokens

registry = CollectorRegistry()
ENDED = Counter("vllm:request_success", "", ["finished_reason"], registry=registry)
GENERATED = Counter("vllm:generation_tokens", "", registry=registry)
PROMPTS = Counter("vllm:prompt_tokens", "", registry=registry)
RUNNING = Gauge("vllm:num_requests_running", "", registry=registry)
WAITING = Gauge("vllm:num_requests_waiting", "", registry=registry)
USED = Gauge("vllm:kv_cache_usage_perc", "", registry=registry)
COUNTS = Counter(STEPS.removesuffix("_total"), "", ["by", "reason"], registry=registry)
app = FastAPI()
off = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0


@app.get("/health")
def health() -> PlainTextResponse:
    return PlainTextResponse("")


@app.get("/metrics")
def metrics() -> PlainTextResponse:
    return PlainTextResponse(generate_latest(registry).decode())


def choices(tokens: list[int], error: float) -> CompletionLogProbs:
    """Each token at -0.5, another one a little less likely."""
    names = [f"token_id:{token}" for token in tokens]
    values = [-0.5 + error] * len(tokens)
    tops: Any = [{name: -0.5 + error, "token_id:7": -0.75} for name in names]
    return CompletionLogProbs(
        text_offset=[0] * len(tokens), token_logprobs=values, tokens=list(names), top_logprobs=tops
    )


@app.post("/v1/completions")
async def completions(raw: Request) -> Any:
    request = CompletionRequest(**await raw.json())
    params = request.to_sampling_params(request.max_tokens or 0, {})
    assert isinstance(request.prompt, list)
    count, length = request.max_tokens or 0, len(request.prompt)
    COUNTS.labels("stock", "prefill").inc(length / 4096)
    PROMPTS.inc(length)
    usage = UsageInfo(prompt_tokens=length, completion_tokens=count, total_tokens=0)
    if not request.stream:
        forced = params.trace_decode_token_ids
        tokens = list(range(100, 100 + count)) if forced is None else forced
        given = choices(tokens, 0.01 if length == 1 else 0.01 + off)
        choice = CompletionResponseChoice(index=0, text="", logprobs=given, finish_reason="length")
        return JSONResponse(CompletionResponse(model="model", choices=[choice], usage=usage).model_dump())

    async def chunks() -> AsyncIterator[str]:
        RUNNING.inc()
        reason = "abort"
        try:
            for place in range(count):
                reason = "length" if place == count - 1 else "abort"
                GENERATED.inc()
                COUNTS.labels("executor", "").inc(1 / CLIENTS)
                given = choices([100 + place], 0.0)
                ended = "length" if reason == "length" else None
                choice = CompletionResponseStreamChoice(index=0, text="", logprobs=given, finish_reason=ended)
                yield f"data: {CompletionStreamResponse(model='model', choices=[choice]).model_dump_json()}\n\n"
                await asyncio.sleep(0.001)
            yield f"data: {CompletionStreamResponse(model='model', choices=[], usage=usage).model_dump_json()}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            RUNNING.dec()
            ENDED.labels(reason).inc()

    return StreamingResponse(chunks(), media_type="text/event-stream")


if __name__ == "__main__":
    take_forced_tokens()
    held = [os.open(f"/dev/shm/tests-http-{sys.argv[1]}-{i}", os.O_CREAT | os.O_RDWR) for i in range(int(sys.argv[2]))]
    # uvicorn ends by the signal that ended it; vLLM's own servers do not.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
