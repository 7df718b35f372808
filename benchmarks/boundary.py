"""The boundary between two sublayers in CUDA graphs of 100 or more, at V4.1-Flash's widths.

One GPU: `python -m benchmarks.boundary`; two: `torchrun --nproc-per-node 2 -m benchmarks.boundary`. Either writes its
part of benchmarks/results/boundary_h200.json: the boundary kernels, and vLLM's mHC kernels where vLLM is installed, in
turn in one run. vLLM is read through its public Python modules alone and is not needed.
"""

import functools
import json
import os
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.results import FOLDER, commit
from benchmarks.timing import replayed
from specialized_decode.boundary import CudaSideStream
from specialized_decode.boundary.fused import FusedBoundary, FusedCoefficients

HIDDEN, STREAMS, MAX_ROWS, EPS, HC_EPS, SINKHORN = 5120, 4, 384, 1e-20, 1e-6, 20
ROWS = (1, 8, 48, 384)
LAYERS = 40
SUBLAYERS = 2 * LAYERS
# Boundaries of a chain. Every one reads another mixer and other inputs: 80 mixers are 157 MB, three times the L2 cache.
CHAIN = 2 * SUBLAYERS
# Where the coefficients run.
MODES = ("inline", "finished beside", "side", "earlier", "unjoined")
INPUTS = 16
REPLAYS = 30
# A stand-in for a sublayer's weights: 42 MB of bfloat16, 10 us of an H200's memory, in two products.
STAND_IN = 2048
ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}

# name -> microseconds a boundary, of each replay
Times = dict[str, list[float]]


class Group:
    """All processes, or this one alone."""

    def __init__(self) -> None:
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.process_group: dist.ProcessGroup | None = dist.group.WORLD if self.size > 1 else None

    def all_gather(self, tensor: Tensor) -> Tensor:
        parts = tensor.new_empty(self.size, *tensor.shape)
        dist.all_gather_into_tensor(parts, tensor.contiguous())
        return parts

    def min(self, value: int) -> int:
        return int(self.all_gather(torch.tensor([value], device="cuda")).min())


@dataclass(frozen=True)
class Mixer:
    """One sublayer's projection to coefficients."""

    fn: Tensor
    base: Tensor
    scale: Tensor
    rms_eps: float = EPS
    hc_eps: float = HC_EPS
    sinkhorn_iters: int = SINKHORN


@dataclass(frozen=True)
class Mixes:
    """A boundary's inputs beside the contribution."""

    post: Tensor
    comb: Tensor
    pre: Tensor


class Inputs:
    """Weights and inputs of a row count, alike on all ranks."""

    def __init__(self, rows: int) -> None:
        torch.manual_seed(rows)
        k, device = STREAMS * HIDDEN, "cuda"
        self.rows = rows
        self.mixers = [
            Mixer(
                torch.randn(24, k, device=device) * k**-0.5,
                torch.randn(24, device=device) * 0.5,
                torch.rand(3, device=device) + 0.5,
            )
            for _ in range(SUBLAYERS)
        ]
        self.norms = [self.random(HIDDEN) for _ in range(SUBLAYERS)]
        self.outputs = [self.random(rows, HIDDEN) for _ in range(INPUTS)]
        self.streams = [self.random(rows, STREAMS, HIDDEN) for _ in range(INPUTS)]
        combs = [torch.rand(rows, STREAMS, STREAMS, device=device) for _ in range(INPUTS)]
        self.mixes = [
            Mixes(
                torch.rand(rows, STREAMS, device=device),
                comb / comb.sum(1, keepdim=True),
                torch.rand(rows, STREAMS, device=device),
            )
            for comb in combs
        ]

    @staticmethod
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").to(torch.bfloat16)


# --- timing -----------------------------------------------------------------------------------------------------


def capture(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of `run`, which runs twice before: what it compiles and loads is there then."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    custom = _communicator()
    with (
        nullcontext() if custom is None else custom.capture(),
        torch.cuda.graph(graph, capture_error_mode="thread_local"),
    ):
        run()
    return graph


def interleaved(chains: dict[str, tuple[Callable[[], object], int]], replays: int) -> Times:
    """chains: what is captured and how many boundaries it has. All graphs replay in turn; microseconds a boundary."""
    graphs = {name: (capture(run), count) for name, (run, count) in chains.items()}
    return replayed(graphs, replays, dist.barrier if dist.is_initialized() else lambda: None)


# --- chains -----------------------------------------------------------------------------------------------------


class Ours:
    """Chains of the boundary kernels."""

    def __init__(self, inputs: Inputs, group: Group) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self.inputs = inputs
        self.boundary = FusedBoundary(HIDDEN, MAX_ROWS, group, device)
        self.coefficients = FusedCoefficients(HIDDEN, MAX_ROWS, device)
        for mixer in inputs.mixers:
            self.coefficients.prepare(mixer)
        self.side = torch.cuda.Stream()
        self.finishing = CudaSideStream(device)

    def _step(
        self, number: int, x: Tensor, streams: Tensor, mixes: Mixes, settled: bool = True
    ) -> tuple[Tensor, Tensor]:
        collapse = (mixes.pre, self.inputs.norms[number % SUBLAYERS], EPS)
        streams, next_x, _ = self.boundary.run(x, False, streams, mixes.post, mixes.comb, collapse, False, settled)
        assert next_x is not None
        return streams, next_x

    def chain(self, settled: bool = True) -> None:
        """Boundaries alone, each adding what the one before gave, into streams that rotate. settled: as between
        sublayers, streams may be read before the contribution is there; else behind it."""
        self.boundary.restart(False)
        x = self.inputs.outputs[0]
        for number in range(CHAIN):
            at = number % INPUTS
            _, x = self._step(number, x, self.inputs.streams[at], self.inputs.mixes[at], settled)
        self.boundary.end_step()

    def published(self) -> None:
        """As `chain`, with every contribution published by a launch of its own."""
        self.boundary.restart(False)
        x = self.inputs.outputs[0]
        for number in range(CHAIN):
            mixes, streams = self.inputs.mixes[number % INPUTS], self.inputs.streams[number % INPUTS]
            collapse = (mixes.pre, self.inputs.norms[number % SUBLAYERS], EPS)
            self.boundary.publish(x)
            _, next_x, _ = self.boundary.run(x, True, streams, mixes.post, mixes.comb, collapse, False, True)
            assert next_x is not None
            x = next_x
        self.boundary.end_step()

    def inline(self) -> None:
        """Boundary, then the next coefficients on the same stream: all the work of stock's two kernels."""
        self.boundary.restart(False)
        x, streams, mixes = self.inputs.outputs[0], self.inputs.streams[0], self.inputs.mixes[0]
        for number in range(CHAIN):
            # The launch before it is the coefficients', so its residual has been there for two.
            streams, x = self._step(number, x, streams, mixes)
            pre, post, comb = self.coefficients(streams, self.inputs.mixers[number % SUBLAYERS])
            mixes = Mixes(post, comb, pre)
        self.boundary.end_step()

    def alone(self) -> None:
        """The coefficients alone."""
        for number in range(CHAIN):
            self.coefficients(self.inputs.streams[number % INPUTS], self.inputs.mixers[number % SUBLAYERS])

    def sublayers(self, weights: list[tuple[Tensor, Tensor]], mode: str) -> None:
        """80 boundaries with stand-ins for sublayers. mode: coefficients on the `side` stream and joined
        before the boundary, `earlier`: a launch earlier, `inline`, or `none`; `finished beside`: what reads the streams
        inline, the rest on the side stream, joined a launch earlier; `unjoined`: on the side stream and nowhere waited
        for, which is what a flag in memory could gain at most."""
        self.boundary.restart(False)
        x, streams, mixes = self.inputs.outputs[0], self.inputs.streams[0], self.inputs.mixes[0]
        main, beside = torch.cuda.current_stream(), mode in ("side", "earlier", "unjoined")
        kept = []
        for number in range(SUBLAYERS):
            streams, x = self._step(number, x, streams, mixes)
            mixer = self.inputs.mixers[number]
            if beside:
                self.side.wait_stream(main)
                with torch.cuda.stream(self.side):
                    made = self.coefficients(streams, mixer)
                kept.append((streams, made))
            elif mode == "inline":
                made = self.coefficients(streams, mixer)
            elif mode == "finished beside":
                made = self.coefficients(streams, mixer, self.finishing)
            up, down = weights[number % len(weights)]
            middle = x @ up.T
            if mode == "earlier":
                main.wait_stream(self.side)
            self.finishing.join()
            x = middle @ down.T
            if mode == "side":
                main.wait_stream(self.side)
            if mode in ("side", "earlier", "inline", "finished beside"):
                mixes = Mixes(made[1], made[2], made[0])
        if beside:
            main.wait_stream(self.side)
        self.boundary.end_step()


def stand_ins(inputs: Inputs, weights: list[tuple[Tensor, Tensor]]) -> Callable[[], None]:
    """The stand-ins alone, with no boundary between them."""

    def run() -> None:
        x = inputs.outputs[0]
        for number in range(SUBLAYERS):
            up, down = weights[number % len(weights)]
            x = (x @ up.T) @ down.T

    return run


StockStep = Callable[..., tuple[Tensor, ...]]


def stock_step() -> StockStep | None:
    """vLLM's op that a sublayer's boundary calls on Hopper, or None where vLLM cannot be imported."""
    try:
        from vllm.model_executor.kernels.mhc.tilelang import mhc_fused_post_pre_delayed_tilelang
    except Exception as error:
        click.echo(f"no stock kernels: {type(error).__name__}: {error}", err=True)
        return None
    step: StockStep = mhc_fused_post_pre_delayed_tilelang
    return step


def stock_chain(
    inputs: Inputs,
    step: StockStep,
    reduce: Callable[[Tensor], Tensor],
    weights: list[tuple[Tensor, Tensor]] | None = None,
) -> Callable[[], None]:
    """Stock's boundaries: reduce, then mHC post and pre with the coefficients, which stay on the critical path.
    weights: of stand-ins for sublayers between them."""

    def run() -> None:
        first = inputs.mixes[0]
        x, streams = inputs.outputs[0], inputs.streams[0]
        post, comb, pre = first.post.unsqueeze(2), first.comb, first.pre
        for number in range(SUBLAYERS if weights else CHAIN):
            mixer = inputs.mixers[number % SUBLAYERS]
            streams, post, comb, x, pre, _ = step(
                reduce(x), streams, post, comb, mixer.fn, mixer.scale, mixer.base, EPS, HC_EPS, HC_EPS, 2.0, SINKHORN,
                pre_mix=pre, norm_weight=inputs.norms[number % SUBLAYERS], norm_eps=EPS,
            )  # fmt: skip
            if weights:
                up, down = weights[number % len(weights)]
                x = (x @ up.T) @ down.T

    return run


def stock_reduces(rows: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """All-reduces before stock's mHC, by name."""

    def nccl(x: Tensor) -> Tensor:
        # As vLLM's: out of place.
        out = x.clone()
        dist.all_reduce(out)
        return out

    reduces: dict[str, Callable[[Tensor], Tensor]] = {"NCCL": nccl}
    one_shot = _symmetric(rows)
    if one_shot is not None:
        reduces["symm_mem one-shot"] = one_shot
    if _communicator() is not None:
        reduces["vLLM custom"] = _custom
    return reduces


def _symmetric(rows: int) -> Callable[[Tensor], Tensor] | None:
    """torch's one-shot all-reduce over peer memory, with the copy into that memory."""
    import torch.distributed._symmetric_memory as symm_mem

    world = dist.group.WORLD
    assert world is not None
    if rows * HIDDEN > 48 * HIDDEN:
        # Every rank reads everything of every rank: not what one would take for many rows.
        return None
    memory: Tensor = symm_mem.empty((rows, HIDDEN), dtype=torch.bfloat16, device=torch.device("cuda", dist.get_rank()))
    symm_mem.rendezvous(memory, world)

    def one_shot(x: Tensor) -> Tensor:
        memory.copy_(x)
        out: Tensor = torch.ops.symm_mem.one_shot_all_reduce(memory, "sum", world.group_name)
        return out

    return one_shot


@functools.cache
def _communicator() -> Any | None:
    """vLLM's custom all-reduce, or None where it cannot be had."""
    if not dist.is_initialized():
        return None
    try:
        from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce

        communicator = CustomAllreduce(dist.new_group(backend="gloo"), torch.device("cuda", dist.get_rank()))
    except Exception as error:
        click.echo(f"no custom all-reduce of vLLM: {type(error).__name__}: {error}", err=True)
        return None
    if communicator.disabled:
        click.echo("no custom all-reduce of vLLM: it is disabled here", err=True)
        return None
    return communicator


def _custom(x: Tensor) -> Tensor:
    """vLLM's custom all-reduce, whose captures register the graph's tensors with the other ranks."""
    communicator = _communicator()
    assert communicator is not None
    out: Tensor = communicator.custom_all_reduce(x)
    return out


# --- measuring --------------------------------------------------------------------------------------------------


def measure(rows: int, group: Group, stock: StockStep | None, replays: int) -> dict[str, Any]:
    """One row count."""
    inputs = Inputs(rows)
    ours = Ours(inputs, group)
    chains: dict[str, tuple[Callable[[], object], int]] = {"boundary": (ours.chain, CHAIN)}
    chains["boundary, nothing read ahead"] = (lambda: ours.chain(False), CHAIN)
    if group.size > 1:
        chains["publish + boundary"] = (ours.published, CHAIN)
        chains["boundary + coefficients inline"] = (ours.inline, CHAIN)
        # Within one graph a reduce may use a buffer only once at a time; graphs follow each other.
        for name, reduce in stock_reduces(rows).items():
            chains[f"all-reduce alone: {name}"] = (_reduce_chain(inputs, reduce), CHAIN)
            if stock is not None:
                chains[f"stock mHC + {name}"] = (stock_chain(inputs, stock, reduce), CHAIN)
    else:
        chains["boundary + coefficients inline"] = (ours.inline, CHAIN)
        chains["coefficients alone"] = (ours.alone, CHAIN)
        if stock is not None:
            chains["stock mHC"] = (stock_chain(inputs, stock, lambda x: x), CHAIN)
        weights = [(inputs.random(STAND_IN, HIDDEN), inputs.random(HIDDEN, STAND_IN)) for _ in range(8)]
        for up, down in weights:
            up.mul_(HIDDEN**-0.5), down.mul_(STAND_IN**-0.5)
        chains["sublayer, no boundary"] = (stand_ins(inputs, weights), SUBLAYERS)
        if stock is not None:
            chains["sublayer, stock mHC"] = (stock_chain(inputs, stock, lambda x: x, weights), SUBLAYERS)
        for mode in ("none", *MODES):
            chains[f"sublayer, coefficients {mode}"] = (lambda mode=mode: ours.sublayers(weights, mode), SUBLAYERS)  # type: ignore[misc]
    times = interleaved(chains, replays)
    medians = {name: statistics.median(values) for name, values in times.items()}
    quartiles = {name: statistics.quantiles(values, n=4, method="inclusive") for name, values in times.items()}
    run: dict[str, Any] = {
        "rows": rows,
        "ranks": group.size,
        "us": {
            name: {"median": round(median, 3), "q1": round(q1, 3), "q3": round(q3, 3)}
            for name, (q1, median, q3) in quartiles.items()
        },
    }
    if "sublayer, coefficients none" in medians:
        run["timeline"] = timeline(lambda: ours.sublayers(weights, "side"), range(40, 42))
        idle = medians["sublayer, coefficients none"]
        run["step_cost_us"] = {
            mode: round((medians[f"sublayer, coefficients {mode}"] - idle) * SUBLAYERS, 1) for mode in MODES
        }
        run["critical_path_us"] = round(idle - medians["sublayer, no boundary"], 2)
    return run


def timeline(run: Callable[[], object], sublayers: range) -> list[dict[str, Any]]:
    """The kernels of one replay of `run` around some sublayers: name, stream, start and end in us after the first."""
    graph = capture(run)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            graph.replay()
            torch.cuda.synchronize()
    kernels = sorted(
        (event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA),
        key=lambda event: event.time_range.start,
    )
    kernels = kernels[-len(kernels) // 3 :]
    starts = [event.time_range.start for event in kernels if "boundary_kernel" in event.name]
    begin, end = starts[sublayers.start], starts[sublayers.stop]
    return [
        {
            "kernel": event.name,
            "stream": event.device_resource_id,
            "start_us": round(event.time_range.start - begin, 2),
            "end_us": round(event.time_range.end - begin, 2),
        }
        for event in kernels
        if begin <= event.time_range.start < end
    ]


def _reduce_chain(inputs: Inputs, reduce: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    def run() -> None:
        for number in range(CHAIN):
            reduce(inputs.outputs[number % INPUTS])

    return run


def write(path: Path, result: dict[str, Any]) -> None:
    """Writes the result; runs of other numbers of ranks that the file holds stay, each with its own commit."""
    if path.is_file():
        ranks = {run["ranks"] for run in result["runs"]}
        kept = [run for run in json.loads(path.read_text(encoding="utf-8"))["runs"] if run["ranks"] not in ranks]
        result["runs"] = sorted(kept + result["runs"], key=lambda run: (run["ranks"], run["rows"]))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


@click.command()
@click.option("--name", default="boundary_h200", show_default=True, help="Name of the result.")
@click.option("--commit", "given", help="The commit, where the checkout is a copy without its history.")
@click.option("--out", type=click.Path(path_type=Path), default=FOLDER, help="Folder that the result is written to.")
@click.option("--no-stock", is_flag=True, help="Leave vLLM's kernels out.")
@click.option("--replays", type=click.IntRange(min=20), default=REPLAYS, show_default=True)
@click.option("--rows", "only", type=click.IntRange(1, MAX_ROWS), multiple=True, help="Row counts; 1, 8, 48, 384.")
def main(name: str, given: str | None, out: Path, no_stock: bool, replays: int, only: tuple[int, ...]) -> None:
    """Times boundaries on the current GPU, or over all ranks that torchrun has started."""
    os.environ.update(ENVIRONMENT)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    group = Group()
    stock = None if no_stock else stock_step()
    version = None
    if stock is not None:
        from importlib.metadata import version as installed

        version = installed("vllm")
    runs = []
    source = given or commit()
    for rows in only or ROWS:
        run = measure(rows, group, stock, replays)
        runs.append(run | {"commit": source, "torch": torch.__version__, "vllm": version, "replays": replays})
        if group.rank == 0:
            click.echo(f"{rows} rows, {group.size} ranks: " + json.dumps(run["us"]), err=True)
    if group.rank == 0:
        result = {
            "benchmark": name,
            "kind": "boundary",
            "device": torch.cuda.get_device_name(),
            "hidden_size": HIDDEN,
            "chain": CHAIN,
            "runs": runs,
        }
        write(out / f"{name}.json", result)
        for run in runs:
            click.echo(f"{run['rows']} rows, {run['ranks']} ranks, us a boundary:")
            for label, times in run["us"].items():
                click.echo(f"  {label:40s} {times['median']:8.2f} ({times['q1']:.2f} to {times['q3']:.2f})")
            if "step_cost_us" in run:
                click.echo(f"  coefficients' cost per step of 40 layers, us: {run['step_cost_us']}")
                click.echo(f"  a boundary beside stand-ins, us: {run['critical_path_us']}")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(prog_name="boundary")
