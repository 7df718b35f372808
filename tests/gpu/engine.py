"""vLLM in this process: building it, running batches and scripted traffic, and looking at what it did."""

import gc
import itertools
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from tests.gpu.scenarios import Request, prompt

COPY = "Memcpy DtoD (Device -> Device)"
COUNTER = "specialized_decode:steps_total"
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
}
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)
# An engine of 8 layers takes at most a quarter of a GPU, its KV cache a fixed part of it. vLLM then measures no memory,
# which fails where another engine ends meanwhile: so several can run side by side.
SHARED_GPU = {"gpu_memory_utilization": 0.25, "kv_cache_memory_bytes": 8 << 30}


@dataclass
class Steps:
    """Model steps of this process: all, and those that replayed a full graph, by the graph's rows."""

    total: int = 0
    replays: Counter[int] = field(default_factory=Counter)

    def copy(self) -> "Steps":
        return Steps(self.total, Counter(self.replays))

    def since(self, before: "Steps") -> "Steps":
        """What came after `before`, a copy."""
        return Steps(self.total - before.total, self.replays - before.replays)


def watch_steps() -> Steps:
    """Counts model steps from here on, apart from the executor's own counters: at vLLM's runner and its replays."""
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    steps = Steps()
    execute, replay = GPUModelRunner.execute_model, CudaGraphManager.run_fullgraph

    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("dummy_run") and scheduler_output.total_num_scheduled_tokens:
            steps.total += 1
        return execute(self, scheduler_output, *args, **kwargs)

    def run_fullgraph(self: Any, desc: Any) -> Any:
        steps.replays[desc.num_tokens] += 1
        return replay(self, desc)

    GPUModelRunner.execute_model = execute_model
    CudaGraphManager.run_fullgraph = run_fullgraph
    return steps


def watch_captures() -> Counter[int]:
    """Counts the executor's runs from here on, by rows; each is part of a capture."""
    from specialized_decode.runtime.decode_step import DecodeStep

    rows: Counter[int] = Counter()
    original = DecodeStep.run

    def run(self: DecodeStep, *args: Any, **kwargs: Any) -> Any:
        rows[self.rows] += 1
        return original(self, *args, **kwargs)

    DecodeStep.run = run  # type: ignore[method-assign]
    return rows


def register_text_model() -> None:
    """Serves the folders as the text model alone; the vision wrapper adds nothing to a decode step."""
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.models.deepseek_v41.nvidia.model import DeepseekV41LLMForCausalLM

    ModelRegistry.register_model("DeepseekV41ForCausalLM", DeepseekV41LLMForCausalLM)


def engine_settings(graph_sizes: Sequence[int]) -> dict[str, Any]:
    """LLM's options that every engine here has. graph_sizes: tokens of a step, each with a graph of its own."""
    return {
        "kv_cache_dtype": "fp8",
        "enable_prefix_caching": False,
        "limit_mm_per_prompt": {},
        "disable_log_stats": False,
        "enable_trace_replay": True,
        "compilation_config": {
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": list(graph_sizes),
            "mode": 0,
        },
        "kernel_config": {"enable_jit_warmup": False, "enable_flashinfer_autotune": False},
    }


@dataclass
class Engine:
    """A built engine. seconds: what its construction took; before: bytes of GPU memory allocated until then."""

    llm: Any
    seconds: float
    before: int

    @classmethod
    def build(cls, folder: Path, graph_sizes: Sequence[int], **options: Any) -> Self:
        """Starts vLLM, on one GPU by default; `options` are LLM's, over the ones that every engine here has."""
        from vllm import LLM

        start, before = time.monotonic(), torch.cuda.memory_allocated()
        llm = LLM(model=str(folder), **engine_settings(graph_sizes) | options)
        return cls(llm, time.monotonic() - start, before)

    @property
    def runner(self) -> Any:
        """vLLM's GPUModelRunner."""
        return self.llm.collective_rpc(lambda worker: worker.model_runner)[0]

    @property
    def recorder(self) -> Any:
        """The engine's tests.gpu.recorder.Recorder."""
        (found,) = (p for p in self.runner.sampler.logits_processors if type(p).__name__ == "Recorder")
        return found

    def take(self) -> dict[str, Any]:
        """What the recorder has kept since the last call: a tests.gpu.recorder.Recording by request."""
        return dict(self.recorder.take())

    @property
    def kv_blocks(self) -> int:
        """Blocks of the KV cache."""
        return int(self.runner.kv_cache_config.num_blocks)

    @property
    def kv_bytes(self) -> int:
        """GPU memory of the KV cache: its size follows from what the rest leaves."""
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in _tensors(self.runner.kv_caches)}
        return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())

    def shut_down(self) -> tuple[int, int]:
        """Ends the engine; returns the bytes of GPU memory that this process still holds, and held before it."""
        self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        for _ in range(2):
            gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(), self.before


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a nest of lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def clear_failed_start() -> None:
    """Gives back what an engine took that did not start, so that another one can, in this process."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()


def parameters(name: str, prompt_tokens: int, output_tokens: int, forced: Sequence[int] | None, record: bool) -> Any:
    """Greedy sampling of `output_tokens` tokens, or of the `forced` ones; `record` keeps logits under `name`."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0,
        max_tokens=output_tokens,
        ignore_eos=True,
        detokenize=False,
        trace_decode_token_ids=list(forced) if forced else None,
        extra_args={"record": name, "prompt_tokens": prompt_tokens} if record else None,
    )


@dataclass(frozen=True)
class Outputs:
    """Output tokens and recorded logits [tokens, ids] by request."""

    tokens: dict[str, list[int]]
    logits: dict[str, Tensor]


def take_logits(engine: Engine, tokens: dict[str, list[int]]) -> dict[str, Tensor]:
    """The recorded logits of the tokens that each request returned, on the CPU.

    Raises RuntimeError where a step is missing, or where an id beyond the trained ones has a logit other than zero.
    """
    logits = {}
    for name, recording in engine.take().items():
        count = len(tokens[name])
        missing = sorted(set(range(count)) - recording.steps)
        if missing:
            raise RuntimeError(f"{name}: no logits of output tokens {missing[:5]}, expected those of all {count}")
        if float(recording.rest) != 0.0:
            raise RuntimeError(f"{name}: found a logit of {float(recording.rest)} at an untrained id, expected 0")
        logits[name] = recording.logits[:count].cpu()
    return logits


def run_in_turn(engine: Engine, requests: Sequence[tuple[str, Any, Any]]) -> dict[str, Any]:
    """Runs requests, each a name, a prompt and sampling parameters, as one batch; returns vLLM's CompletionOutputs.

    One comes when the one before has its first token. Of six and more prompts prefilled in one step some came out
    differently the next time, on stock too; one after the other they all repeat (H200, 2026-11-30).
    """
    llm_engine = engine.llm.llm_engine
    outputs: dict[str, Any] = {}

    def step() -> None:
        outputs.update((output.request_id, output.outputs[0]) for output in llm_engine.step())

    for name, ids, sampling in requests:
        llm_engine.add_request(name, ids, sampling)
        while name not in outputs or not outputs[name].token_ids:
            step()
    while llm_engine.has_unfinished_requests():
        step()
    return outputs


def tokens_of(outputs: dict[str, Any]) -> dict[str, list[int]]:
    """The tokens of CompletionOutputs, by request."""
    return {name: list(output.token_ids) for name, output in outputs.items()}


def run_batch(
    engine: Engine,
    lengths: Sequence[int],
    seeds: Sequence[int],
    output_tokens: int,
    forced: Sequence[Sequence[int]] | None = None,
    record: bool = True,
) -> Outputs:
    """Runs one batch, whose rows are named by their index and come in turn. seeds: of each row's prompt."""
    requests = []
    for row, (length, seed) in enumerate(zip(lengths, seeds, strict=True)):
        sampling = parameters(str(row), length, output_tokens, forced[row] if forced else None, record)
        requests.append((str(row), {"prompt_token_ids": prompt(length, seed)}, sampling))
    tokens = tokens_of(run_in_turn(engine, requests))
    return Outputs(tokens, take_logits(engine, tokens) if record else {})


def run_traffic(
    engine: Engine,
    requests: Sequence[Request],
    forced: dict[str, list[int]] | None = None,
    seeds: dict[str, int] | None = None,
) -> tuple[Outputs, int]:
    """Plays a script of requests, one engine step after another; returns the outputs and the steps called for.

    seeds: of the prompts, where they are not the requests' places in the script.
    """
    llm_engine = engine.llm.llm_engine
    tokens: dict[str, list[int]] = {request.name: [] for request in requests}
    step = 0
    last = max(max(request.step, request.abort or 0) for request in requests)
    while step <= last or llm_engine.has_unfinished_requests():
        for place, request in enumerate(requests):
            if request.step == step:
                given = forced[request.name] if forced else None
                sampling = parameters(request.name, request.prompt_tokens, request.output_tokens, given, record=True)
                seed = 1000 + (place if seeds is None else seeds[request.name])
                ids = {"prompt_token_ids": prompt(request.prompt_tokens, seed)}
                llm_engine.add_request(request.name, ids, sampling)
            if request.abort == step:
                llm_engine.abort_request([request.name])
        if llm_engine.has_unfinished_requests():
            for output in llm_engine.step():
                tokens[output.request_id] = list(output.outputs[0].token_ids)
        step += 1
    return Outputs(tokens, take_logits(engine, tokens)), step


def step_counters() -> dict[tuple[str, str], int]:
    """The executor's counters in Prometheus' registry: steps by (by, reason)."""
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    return {
        (sample.labels["by"], sample.labels.get("reason", "")): int(sample.value)
        for metric in get_prometheus_registry().collect()
        for sample in metric.samples
        if sample.name == COUNTER
    }


def settled_counters(engine: Engine, expected_total: int, before: dict[tuple[str, str], int]) -> dict[str, int]:
    """Steps counted since `before`, as {"executor": ..., "stock REASON": ...}; waits a little for late reports."""
    deadline = time.monotonic() + 10
    while True:
        engine.llm.llm_engine.do_log_stats()
        now = step_counters()
        since = {key: value - before.get(key, 0) for key, value in now.items()}
        if sum(since.values()) >= expected_total or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    named: Counter[str] = Counter()
    for (by, reason), count in since.items():
        if count:
            named[by if by == "executor" else f"stock {reason}".strip()] += count
    return dict(named)


def operation(name: str) -> str:
    """What ran, by its name in a profile. Some copies the driver makes by a kernel of its own, as addresses allow."""
    return COPY if name.startswith("memcpy32") else name


def profile_kernels(engine: Engine, rows: int, context: int, steps: int = 4) -> dict[str, int]:
    """What ran on the GPU in `steps` decode steps, by name: kernels, copies and fills."""
    llm_engine = engine.llm.llm_engine
    for row in range(rows):
        ids = {"prompt_token_ids": prompt(context, 500 + row)}
        llm_engine.add_request(f"profile-{row}", ids, parameters("", context, 64, None, record=False))
    # Past every prefill, and past the first steps of the pipeline between scheduler and worker.
    for _ in range(12 + rows * context // 1000):
        llm_engine.step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            llm_engine.step()
        torch.cuda.synchronize()
    llm_engine.abort_request([f"profile-{row}" for row in range(rows)])
    while llm_engine.has_unfinished_requests():
        llm_engine.step()
    cuda = torch.autograd.DeviceType.CUDA
    return dict(Counter(operation(event.name) for event in profile.events() if event.device_type == cuda))


def timed_steps(engine: Engine, rows: int, context: int, steps: int) -> list[float]:
    """Seconds of single decode steps of the whole engine, sampling included."""
    llm_engine = engine.llm.llm_engine
    for row in range(rows):
        ids = {"prompt_token_ids": prompt(context, 700 + row)}
        llm_engine.add_request(f"timed-{row}", ids, parameters("", context, steps + 40, None, record=False))
    for _ in range(16 + rows * context // 1000):
        llm_engine.step()
    torch.cuda.synchronize()
    seconds = []
    start = time.perf_counter()
    for _ in range(steps):
        llm_engine.step()
        now = time.perf_counter()
        seconds.append(now - start)
        start = now
    llm_engine.abort_request([f"timed-{row}" for row in range(rows)])
    while llm_engine.has_unfinished_requests():
        llm_engine.step()
    return seconds


def timed_graph(engine: Engine, rows: int, replays: int) -> list[float]:
    """Seconds of single replays of the graph for `rows` rows, on the GPU's clock, without the host's work.

    Replays what the last step of that many rows left in the graph's inputs.
    """
    manager = engine.runner.cudagraph_manager
    (graph,) = (graph for desc, graph in manager.graphs.items() if desc.num_tokens == rows)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    with torch.inference_mode():
        for _ in range(3):
            graph.replay()
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) * 1e-3 for a, b in itertools.pairwise(events)]


@contextmanager
def failing_capture(message: str) -> Iterator[None]:
    """Makes captures of the executor raise RuntimeError(message) in the first layer that has a compressor.

    Where vLLM's attention serves, it raises between fork and join of that layer's side streams; otherwise before the
    layer's MoE.
    """
    from vllm.models.deepseek_v41.attention import DeepseekV4Attention

    from specialized_decode.moe.step import MoEStep
    from specialized_decode.runtime.executor import SpecializedDecode

    methods = [(SpecializedDecode, "run"), (DeepseekV4Attention, "_fused_wqa_wkv_gemm"), (MoEStep, "run")]
    run, project, moe = originals = [getattr(owner, name) for owner, name in methods]
    inside, calls = False, 0

    def run_inside(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside, calls
        inside, calls = torch.cuda.is_current_stream_capturing(), 0
        try:
            return run(self, *args, **kwargs)
        finally:
            inside = False

    def fail_in_attention(self: Any, *args: Any, **kwargs: Any) -> Any:
        if inside and self.compressor is not None:
            raise RuntimeError(message)
        return project(self, *args, **kwargs)

    def fail_before_moe(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if inside and calls == 3:
            raise RuntimeError(message)
        return moe(self, *args, **kwargs)

    replaced = (run_inside, fail_in_attention, fail_before_moe)
    try:
        for (owner, name), function in zip(methods, replaced, strict=True):
            setattr(owner, name, function)
        yield
    finally:
        for (owner, name), function in zip(methods, originals, strict=True):
            setattr(owner, name, function)
