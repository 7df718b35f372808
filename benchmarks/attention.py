"""The attention step's kernels in CUDA graphs, at V4.1-Flash's widths of one rank of four.

`python -m benchmarks.attention` writes benchmarks/results/attention_h200.json: each dense projection in a chain of
launches whose weights take turns and do not fit the L2 cache, beside bfloat16 products of cuBLAS over the same widths,
and, where vLLM is installed, its FP8 layer: of all but `wo_a`, which vLLM holds in bfloat16. `wq_b` is there as steps
run it too: with its input's norm, the next launch behind its wait. With `--sweep` it times every launch configuration
that `tuning.candidates` has instead, and writes nothing.
"""

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from benchmarks.boundary import interleaved, write
from benchmarks.results import FOLDER, commit
from benchmarks.stock_linear import StockLinear
from specialized_decode.attention import projection_tuning as tuning
from specialized_decode.attention.fused import project_fp8
from specialized_decode.attention.prepared import PreparedFp8, prepare_fp8

# name -> outputs, columns, groups
PROJECTIONS = {
    "fused_wqa_wkv": (1792, 5120, 1),
    "wq_b": (8192, 1280, 1),
    "wo_a": (2048, 4096, 2),
    "wo_b": (5120, 2048, 1),
}
ROWS = (1, 2, 4, 8, 16)
# Twice the L2 cache of 50 MB, and more.
ROTATED_BYTES = 160_000_000
CHAIN = 80
REPLAYS = 30
# Bytes a microsecond that an H200's memory gave a reading kernel.
MEMORY = 4.41e6


def weights(name: str) -> list[Tensor]:
    """The weights of one projection that take turns."""
    n, k, _ = PROJECTIONS[name]
    count = -(-ROTATED_BYTES // (n * k))
    return [torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn) for _ in range(count)]


def prepare(name: str, rotated: list[Tensor]) -> list[PreparedFp8]:
    """They as the kernel reads them, with one scale."""
    scale = scales(name)
    return [prepare_fp8(weight, scale) for weight in rotated]


def scales(name: str) -> Tensor:
    """Of one projection."""
    n, k, _ = PROJECTIONS[name]
    return torch.full((n // 32, k // 32), 120, dtype=torch.uint8, device="cuda")


def inputs(name: str, rows: int) -> Tensor:
    """x of one projection."""
    _, k, groups = PROJECTIONS[name]
    return torch.randn(rows, groups * k, device="cuda").bfloat16()


def chain(
    name: str, rows: int, prepared: list[PreparedFp8], launch: tuning.Projection | None = None
) -> Callable[[], None]:
    """CHAIN launches of one projection, each on the next weights."""
    x, groups = inputs(name, rows), PROJECTIONS[name][2]

    def run() -> None:
        for number in range(CHAIN):
            project_fp8(x, prepared[number % len(prepared)], groups, launch)

    return run


def chain_normed(rows: int, prepared: list[PreparedFp8]) -> Callable[[], None]:
    """The same of `wq_b` as steps run it, its input columns of a wider tensor."""
    n, k, _ = PROJECTIONS["wq_b"]
    x = torch.randn(rows, k + 512, device="cuda").bfloat16()[:, :k]
    norm, launch = torch.ones(k, dtype=torch.bfloat16, device="cuda"), tuning.waiting(tuning.projection(n, k))

    def run() -> None:
        for number in range(CHAIN):
            project_fp8(x, prepared[number % len(prepared)], launch=launch, norm=norm, eps=1e-6)

    return run


def chain_stock(name: str, rows: int, rotated: list[Tensor]) -> Callable[[], None]:
    """The same by vLLM's layers."""
    x, scale = inputs(name, rows), scales(name)
    layers = [StockLinear(weight, scale) for weight in rotated]

    def run() -> None:
        for number in range(CHAIN):
            layers[number % len(layers)](x)

    return run


def chain_cublas(name: str, rows: int, rotated: list[Tensor]) -> Callable[[], None]:
    """The same in bfloat16."""
    n, k, groups = PROJECTIONS[name]
    wide = [weight.bfloat16().view(groups, n // groups, k).transpose(1, 2) for weight in rotated]
    x = inputs(name, rows).view(rows, groups, k).transpose(0, 1)

    def run() -> None:
        for number in range(CHAIN):
            torch.bmm(x, wide[number % len(wide)])

    return run


# --- configurations ---------------------------------------------------------------------------------------------


def compile_launch(job: tuple[str, tuning.Projection]) -> str | None:
    """Launches a configuration once, in a process of its own, so that the compiled kernel lies in the cache. Returns
    what went wrong."""
    name, launch = job
    n, k, groups = PROJECTIONS[name]
    empty = PreparedFp8(
        torch.zeros(n // 16, k // 32, 32, 4, dtype=torch.int32, device="cuda"),
        torch.zeros(n // 32, k // 32, dtype=torch.uint8, device="cuda"),
    )
    try:
        project_fp8(inputs(name, 1), empty, groups, launch)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return None


def sweep(replays: int) -> None:
    """Times every candidate of every projection at 1 and 8 rows, and prints the fastest beside tuning's choice."""
    begin = time.monotonic()
    jobs = [
        (name, launch) for name, (n, k, groups) in PROJECTIONS.items() for launch in tuning.candidates(n, k, groups)
    ]
    with multiprocessing.get_context("spawn").Pool(min(15, os.cpu_count() or 1)) as pool:
        failures = dict(zip(jobs, pool.map(compile_launch, jobs, chunksize=1), strict=True))
    click.echo(f"{len(jobs)} configurations compiled in {time.monotonic() - begin:.0f} s")
    for job, failure in failures.items():
        if failure:
            click.echo(f"{job}: {failure}")
    tables = [table(name, [job[1] for job in jobs if job[0] == name and not failures[job]], replays)
              for name in PROJECTIONS]  # fmt: skip
    click.echo(f"{time.monotonic() - begin:.0f} s; us at 1 and 8 rows; tuning's choice and the best by their sum")
    click.echo("\n".join(tables))


def table(name: str, launches: list[tuning.Projection], replays: int) -> str:
    """Prints one projection's times and returns the shortest of them."""
    n, k, groups = PROJECTIONS[name]
    prepared = prepare(name, weights(name))
    x = inputs(name, 8)
    expected = project_fp8(x, prepared[0], groups).double()
    for launch in launches:
        error = (project_fp8(x, prepared[0], groups, launch).double() - expected).norm() / expected.norm()
        if not error < 2**-7:
            click.echo(f"{name}, {launch}: WRONG, differs by {error:g}")
    medians: dict[tuning.Projection, list[float]] = {launch: [] for launch in launches}
    for rows in (1, 8):
        chains: dict[str, tuple[Callable[[], object], int]] = {
            str(number): (chain(name, rows, prepared, launch), CHAIN) for number, launch in enumerate(launches)
        }
        for number, values in interleaved(chains, replays).items():
            medians[launches[int(number)]].append(statistics.median(values))
    lines = {
        launch: f"{name:14} {times[0]:6.2f} {times[1]:6.2f}  " + ", ".join(f"{a}={b}" for a, b in
                                                                          launch._asdict().items())
        for launch, times in medians.items()
    }  # fmt: skip
    click.echo("\n".join(lines.values()))
    own = tuning.projection(n, k, groups)
    best = [launch for launch in sorted(medians, key=lambda one: sum(medians[one])) if launch != own]
    head = f"{name}: floor {n * k / MEMORY:.2f}"
    return "\n".join([head, *(lines[launch] for launch in (own, *best[:4]) if launch in lines)])


# --- measuring --------------------------------------------------------------------------------------------------


def measure(rows: int, stock: bool, replays: int) -> dict[str, Any]:
    """One row count: microseconds of each projection; the floor is printed beside them. stock: whether by vLLM's layers
    too."""
    us = {}
    for name, (n, k, groups) in PROJECTIONS.items():
        rotated = weights(name)
        prepared = prepare(name, rotated)
        chains: dict[str, tuple[Callable[[], object], int]] = {
            "kernel": (chain(name, rows, prepared), CHAIN),
            "cuBLAS, bfloat16": (chain_cublas(name, rows, rotated), CHAIN),
        }
        if name == "wq_b":
            chains["kernel, as steps run it"] = chain_normed(rows, prepared), CHAIN
        if stock and groups == 1:
            chains["vLLM"] = chain_stock(name, rows, rotated), CHAIN
        for label, values in interleaved(chains, replays).items():
            q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
            us[f"{name}, {label}"] = {"median": round(median, 3), "q1": round(q1, 3), "q3": round(q3, 3)}
        found = ", ".join(f"{label} {us[f'{name}, {label}']['median']:.2f}" for label in chains)
        click.echo(f"{rows} rows, {name}: {found} us, floor {n * k / MEMORY:.2f}")
    return {"rows": rows, "ranks": 1, "us": us}


def stock_version() -> str | None:
    """vLLM's, or None, with the reason said, where its layers cannot run here."""
    try:
        name = "wo_b"
        StockLinear(weights(name)[0], scales(name))(inputs(name, 1))
        return version("vllm")
    except Exception as error:
        click.echo(f"no stock layer: {type(error).__name__}: {error}", err=True)
        return None


@click.command()
@click.option("--name", default="attention_h200", show_default=True, help="Name of the result.")
@click.option("--commit", "given", help="The commit, where the checkout is a copy without its history.")
@click.option("--out", type=click.Path(path_type=Path), default=FOLDER, help="Folder that the result is written to.")
@click.option("--no-stock", is_flag=True, help="Leave vLLM's layers out.")
@click.option("--replays", type=click.IntRange(min=20), default=REPLAYS, show_default=True)
@click.option("--sweep", "swept", is_flag=True, help="Time all launch configurations instead; writes nothing.")
def main(name: str, given: str | None, out: Path, no_stock: bool, replays: int, swept: bool) -> None:
    """Times the attention kernels on the current GPU."""
    if swept:
        sweep(replays)
        return
    source, stock = given or commit(), None if no_stock else stock_version()
    runs = [
        measure(rows, stock is not None, replays)
        | {"commit": source, "torch": torch.__version__, "vllm": stock, "replays": replays}
        for rows in ROWS
    ]
    result = {"benchmark": name, "kind": "boundary", "unit": "projection", "hidden_size": 5120}
    result["device"] = torch.cuda.get_device_name()
    write(out / f"{name}.json", result | {"chain": CHAIN, "runs": runs})


if __name__ == "__main__":
    main(prog_name="attention")
