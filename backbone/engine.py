"""The local engine: ragged prompts in, greedy tokens out, with graphs for decode batches."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specialized_decode.backbone.cache import Batch, Caches, Request
from specialized_decode.backbone.errors import PromptError
from specialized_decode.backbone.graphs import Graph
from specialized_decode.backbone.model import NO_EXECUTOR, DeepseekV41, ModelOutput

# Why a step ran the plain layers although an executor was there.
PREFILL = "prefill"
NO_GRAPH = "more rows than the largest graph"


@dataclass
class Captured:
    """A decode step recorded for `batch.num_tokens` rows: replaying reads `batch` and leaves `output`.

    refusal: why it holds the plain layers; None when it holds an executor's step.
    """

    batch: Batch
    graph: Graph
    output: ModelOutput
    refusal: str | None


@dataclass
class Generation:
    """Greedy tokens of every prompt, in order, and how the steps ran."""

    tokens: list[list[int]]
    executor_steps: int = 0
    plain_steps: Counter[str] = field(default_factory=Counter)
    decode_seconds: list[float] = field(default_factory=list)


class LocalEngine:
    """Runs a model on this machine for up to `max_rows` requests at a time of up to `max_context` tokens.

    Decode batches are padded to the next captured size and replayed; others run eagerly.
    """

    def __init__(self, model: DeepseekV41, max_rows: int, max_context: int, max_tokens: int) -> None:
        self.model, self.max_rows, self.max_context, self.max_tokens = model, max_rows, max_context, max_tokens
        room = model.selection.topk_indices.shape[0]
        if max(max_tokens, max_rows) > room:
            raise ValueError(
                f"engine: found batches of {max(max_tokens, max_rows)} tokens, expected at most {room}, the model's"
            )
        self.host = model.model.host
        self.caches = Caches(model.config, max_rows, max_context, max_tokens, model.device)
        model.bind_caches(self.caches)
        self.graphs: dict[int, Captured] = {}

    def forward(self, batch: Batch, use_engram: bool = True) -> ModelOutput:
        """Runs one batch eagerly."""
        with torch.no_grad(), self.host.running(batch.metadata):
            return self.model.forward(batch, use_engram)

    def capture(self, sizes: Sequence[int], progress: Callable[[int], None] = lambda size: None) -> None:
        """Captures a decode step for each row count in `sizes`, largest first, as vLLM does."""
        for size in sorted(sizes, reverse=True):
            progress(size)
            self.graphs[size] = self.capture_step(self.caches.batch([None] * size, [1] * size, static=True))

    def capture_step(self, batch: Batch) -> Captured:
        """Captures `batch`, whose tensors become the graph's inputs. The run before the capture is eager."""
        self.forward(batch)
        output: list[ModelOutput] = []
        with torch.no_grad(), self.host.running(batch.metadata):
            graph = self.host.capture(lambda: output.append(self.model.forward(batch)))
        return Captured(batch, graph, output[0], self.model.refusal)

    def prefill(self, requests: list[Request], progress: Callable[[int], None] = lambda tokens: None) -> Tensor:
        """Computes every request's tokens in chunks of at most `max_tokens`; returns logits [R, vocab] of the last."""
        last: list[Tensor | None] = [None] * len(requests)
        while any(r.computed < len(r.tokens) for r in requests):
            rows, counts, room = [], [], self.max_tokens
            for index, request in enumerate(requests):
                count = min(len(request.tokens) - request.computed, room)
                if count > 0:
                    rows.append(index)
                    counts.append(count)
                    room -= count
            hidden = _hidden(self.forward(self.caches.batch([requests[i] for i in rows], counts)))
            ends = torch.tensor(counts).cumsum(0) - 1
            for index, count, end in zip(rows, counts, ends.tolist(), strict=True):
                requests[index].computed += count
                last[index] = hidden[end]
            progress(sum(counts))
        return self.model.logits(torch.stack([row for row in last if row is not None]))

    def decode(self, requests: list[Request], generation: Generation) -> Tensor:
        """One step: the last token of every request -> logits [R, vocab]."""
        rows = len(requests)
        size = min((s for s in self.graphs if s >= rows), default=None)
        if size is None:
            generation.plain_steps[NO_GRAPH if self.graphs else NO_EXECUTOR] += 1
            hidden = _hidden(self.forward(self.caches.batch(list(requests), [1] * rows)))
        else:
            padded = [*requests, *[None] * (size - rows)]
            hidden = self.replay(self.graphs[size], self.caches.batch(padded, [1] * size, static=True), generation)
        for request in requests:
            request.computed += 1
        by_executor = size is not None and self.graphs[size].refusal is None
        executor = self.model.executor if by_executor else None
        return self.model.logits(hidden[:rows]) if executor is None else executor.compute_logits(hidden[:rows])

    def replay(self, captured: Captured, batch: Batch, generation: Generation | None = None) -> Tensor:
        """Replays a captured step on `batch`; returns its hidden states [T, hidden]."""
        captured.batch.load(batch)
        captured.graph.replay()
        if generation is not None:
            if captured.refusal is None:
                generation.executor_steps += 1
            else:
                generation.plain_steps[captured.refusal] += 1
        return _hidden(captured.output)

    def generate(
        self, prompts: Sequence[Sequence[int]], tokens: int, progress: Callable[[int], None] = lambda step: None
    ) -> Generation:
        """Greedy generation of `tokens` tokens for each prompt. Raises PromptError for one that does not fit."""
        self._check(prompts, tokens)
        generation = Generation([])
        requests: list[Request] = []
        try:
            requests.extend(self.caches.open(list(prompt)) for prompt in prompts)
            logits = self.prefill(requests, lambda count: generation.plain_steps.update([PREFILL]))
            for step in range(tokens):
                for request, token in zip(requests, logits.argmax(-1).tolist(), strict=True):
                    request.tokens.append(token)
                progress(step + 1)
                if step + 1 < tokens:
                    start = time.perf_counter()
                    logits = self.decode(requests, generation)
                    if self.model.device.type == "cuda":
                        torch.cuda.synchronize()
                    generation.decode_seconds.append(time.perf_counter() - start)
        finally:
            for request in requests:
                self.caches.close(request)
        generation.tokens = [r.tokens[len(p) :] for r, p in zip(requests, prompts, strict=True)]
        return generation

    def _check(self, prompts: Sequence[Sequence[int]], tokens: int) -> None:
        if not 0 < len(prompts) <= self.max_rows:
            raise PromptError(f"prompts: found {len(prompts)}, expected 1 to {self.max_rows}, the engine's rows")
        if tokens < 1:
            raise PromptError(f"tokens: found {tokens}, expected at least 1")
        vocab = self.model.config.vocab_size
        for index, prompt in enumerate(prompts):
            if not prompt:
                raise PromptError(f"prompt {index}: found no tokens, expected at least 1")
            bad = [token for token in prompt if not 0 <= token < vocab]
            if bad:
                raise PromptError(f"prompt {index}: found token {bad[0]}, expected 0 to {vocab - 1}")
            if len(prompt) + tokens > self.max_context:
                raise PromptError(
                    f"prompt {index}: found {len(prompt)} tokens and {tokens} to generate, "
                    f"expected at most {self.max_context} together, the context"
                )


def _hidden(output: ModelOutput) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]
