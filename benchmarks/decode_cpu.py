"""The tiny model on a CPU: plain steps and replayed executor steps, interleaved.

`python -m benchmarks.decode_cpu` writes benchmarks/results/decode_cpu.json; with --check it exits with 1 where the
goal is missed.
"""

import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
import torch
from torch import Tensor

from benchmarks.results import FOLDER, Result, Run, Times, commit
from specialized_decode.backbone.cache import Request
from specialized_decode.backbone.corpus import corpus
from specialized_decode.backbone.engine import Generation, LocalEngine
from specialized_decode.backbone.model import DeepseekV41, Executor, load_model
from specialized_decode.backbone.tokenizer import load_tokenizer
from specialized_decode.backbone.writer import is_current, tiny_plan, write_checkpoint
from specialized_decode.runtime import DecodeConfig, SpecializedDecode

# The goal: on 2 cores, 3 rows at so many steps a second, logits and argmax included, in so much memory.
GOAL_STEPS_PER_SECOND = 15
GOAL_PEAK_GB = 1.5

# Start and length of three pieces of the text that ships with the package: short, past the window, past the top-k.
_PIECES = ((0, 90), (2000, 700), (5000, 1500))
_CHUNK_TOKENS = 512
WARM_UP_STEPS = 3


@dataclass
class Decoding:
    """One way to decode: an engine with caches of its own, its requests and the times of their steps."""

    engine: LocalEngine
    executor: Executor | None
    requests: list[Request]
    generation: Generation
    logits: Tensor
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

    @classmethod
    def start(
        cls, model: DeepseekV41, prompts: list[list[int]], context: int, build: Callable[[], Executor] | None
    ) -> "Decoding":
        """Prefills the prompts with the plain layers; with an executor, captures its step then."""
        model.executor = None
        engine = LocalEngine(model, len(prompts), context, _CHUNK_TOKENS)
        requests = [engine.caches.open(prompt) for prompt in prompts]
        logits = engine.prefill(requests)
        if build is not None:
            model.executor = build()
            engine.capture([len(prompts)])
        return cls(engine, model.executor, requests, Generation([]), logits)

    def step(self) -> None:
        """Decodes one token of every request."""
        self.engine.model.executor = self.executor
        start, cpu_start = time.perf_counter(), time.process_time()
        for request, token in zip(self.requests, self.logits.argmax(-1).tolist(), strict=True):
            request.tokens.append(token)
        self.logits = self.engine.decode(self.requests, self.generation)
        if self.logits.is_cuda:
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - start)
        self.cpu_seconds.append(time.process_time() - cpu_start)


def timed_run(plain: Decoding, executor: Decoding, lengths: Sequence[int], steps: int) -> Run:
    """Steps both in turn, after a few to warm up. lengths: tokens of each prompt."""
    for _ in range(WARM_UP_STEPS + steps):
        plain.step()
        executor.step()
    if executor.generation.executor_steps != WARM_UP_STEPS + steps:
        raise click.ClickException(f"the executor did not run every step: {dict(executor.generation.plain_steps)}")
    pairs = [
        (a, b)
        for one, other, length in zip(plain.requests, executor.requests, lengths, strict=True)
        for a, b in zip(one.tokens[length:], other.tokens[length:], strict=True)
    ]
    timed = slice(WARM_UP_STEPS, None)
    return Run(
        rows=len(lengths),
        context=tuple(length + WARM_UP_STEPS for length in lengths),
        steps=steps,
        plain_ms=Times.of(plain.seconds[timed]),
        executor_ms=Times.of(executor.seconds[timed]),
        identical_tokens=sum(a == b for a, b in pairs),
        tokens=len(pairs),
        plain_cpu_ms=None if plain.logits.is_cuda else Times.of(plain.cpu_seconds[timed]),
        executor_cpu_ms=None if plain.logits.is_cuda else Times.of(executor.cpu_seconds[timed]),
    )


def measure(folder: Path, steps: int) -> Result:
    """Decodes `steps` timed steps each way from the tiny model in `folder`."""
    tokenizer = load_tokenizer(folder)
    prompts = [tokenizer.encode(corpus()[start : start + length]).ids for start, length in _PIECES]
    lengths = [len(prompt) for prompt in prompts]
    context = max(lengths) + steps + WARM_UP_STEPS + 1
    load_before = os.getloadavg()[0]
    model = load_model(folder, torch.device("cpu"), _CHUNK_TOKENS, context)

    def build() -> Executor:
        return SpecializedDecode.for_target(model.model, DecodeConfig(), model.lm_head)

    # A graph keeps the caches that it was captured on; plain steps use those bound last.
    executor = Decoding.start(model, prompts, context, build)
    plain = Decoding.start(model, prompts, context, None)
    run = timed_run(plain, executor, lengths, steps)
    config = model.config
    return Result(
        benchmark="decode_cpu",
        commit=commit(),
        model="tiny",
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        heads=config.num_attention_heads,
        expert_width=config.moe_intermediate_size,
        experts=config.n_routed_experts,
        device=_cpu_name(),
        torch=torch.__version__,
        peak_gb=round(_peak_bytes() / 1e9, 3),
        runs=(run,),
        threads=torch.get_num_threads(),
        load=(round(load_before, 2), round(os.getloadavg()[0], 2)),
    )


def misses(result: Result) -> list[str]:
    """Where `result` misses the goal, in words."""
    found = []
    for run in result.runs:
        rate = 1e3 / run.executor_ms.median
        if rate < GOAL_STEPS_PER_SECOND:
            found.append(f"executor: found {rate:.1f} steps/s, expected at least {GOAL_STEPS_PER_SECOND}")
        if run.identical_tokens != run.tokens:
            found.append(f"tokens: found {run.identical_tokens} of {run.tokens} identical, expected all")
    if result.peak_gb >= GOAL_PEAK_GB:
        found.append(f"peak memory: found {result.peak_gb:.2f} GB, expected less than {GOAL_PEAK_GB} GB")
    return found


def _cpu_name() -> str:
    """The CPU's model name; the architecture where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _peak_bytes() -> int:
    # KiB on Linux, bytes on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _default_folder() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "specialized-decode" / "tiny"


@click.command()
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    default=_default_folder,
    help="The tiny model; written where it is not there or not current.  [default: in the user's cache folder]",
)
@click.option("--steps", type=click.IntRange(min=2), default=60, show_default=True, help="Timed steps of each kind.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads of torch.  [default: torch's own choice]")
@click.option(
    "--out", type=click.Path(path_type=Path), default=FOLDER / "decode_cpu.json", help="Where the result is written."
)
@click.option("--check", is_flag=True, help="Exit with 1 where the goal is missed.")
def main(folder: Path, steps: int, threads: int | None, out: Path, check: bool) -> None:
    """Times decode steps of the tiny model on this CPU: the plain layers and the executor, in turn."""
    if threads is not None:
        torch.set_num_threads(threads)
    if not is_current(folder, tiny_plan()):
        if not (folder == _default_folder() or not folder.exists() or not any(folder.iterdir())):
            raise click.UsageError(f"--folder: found something other than the tiny model in {folder}")
        folder.parent.mkdir(parents=True, exist_ok=True)
        write_checkpoint(tiny_plan(), folder, replace=True)
    result = measure(folder, steps)
    result.write(out)
    (run,) = result.runs
    click.echo(f"{result.device}, {result.threads} threads, torch {result.torch}, load {result.load}")
    for name, times, cpu in (
        ("plain", run.plain_ms, run.plain_cpu_ms),
        ("executor", run.executor_ms, run.executor_cpu_ms),
    ):
        assert cpu is not None
        click.echo(
            f"{name:<9} {times.median:.1f} ms a step ({times.q1:.1f} to {times.q3:.1f}), "
            f"{1e3 / times.median:.1f} steps/s, {cpu.median:.1f} ms of CPU time"
        )
    click.echo(f"identical tokens {run.identical_tokens} of {run.tokens}, peak memory {result.peak_gb:.2f} GB")
    found = misses(result)
    for miss in found:
        click.echo(f"goal missed: {miss}", err=True)
    if check and found:
        sys.exit(1)


if __name__ == "__main__":
    main(prog_name="decode_cpu")
