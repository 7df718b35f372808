"""The attention step's kernels in CUDA graphs, at V4.1-Flash's widths of one rank of four.

`python -m benchmarks.attention` writes benchmarks/results/attention_h200.json: each dense projection in a chain of
launches whose weights take turns and do not fit the L2 cache, beside bfloat16 products of cuBLAS over the same widths.
With `--sweep` it times every launch configuration that `tuning.candidates` has instead, and writes nothing.
"""

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from benchmarks.boundary import interleaved, write
from benchmarks.results import FOLDER, commit
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
ROWS = (1, 2, 4, 8)
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
    n, k, _ = PROJECTIONS[name]
    scale = torch.full((n // 32, k // 32), 120, dtype=torch.uint8, device="cuda")
    return [prepare_fp8(weight, scale) for weight in rotated]


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


def measure(rows: int, replays: int) -> dict[str, Any]:
    """One row count: microseconds of each projection, and how many times the floor of its weights' bytes that is."""
    us = {}
    for name, (n, k, _) in PROJECTIONS.items():
        rotated = weights(name)
        chains: dict[str, tuple[Callable[[], object], int]] = {
            "kernel": (chain(name, rows, prepare(name, rotated)), CHAIN),
            "cuBLAS, bfloat16": (chain_cublas(name, rows, rotated), CHAIN),
        }
        for label, values in interleaved(chains, replays).items():
            q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
            us[f"{name}, {label}"] = {"median": round(median, 3), "q1": round(q1, 3), "q3": round(q3, 3)}
        floor = n * k / MEMORY
        click.echo(f"{rows} rows, {name}: {us[f'{name}, kernel']['median']:.2f} us, floor {floor:.2f}, cuBLAS "
                   f"{us[f'{name}, cuBLAS, bfloat16']['median']:.2f}")  # fmt: skip
    return {"rows": rows, "ranks": 1, "us": us}


@click.command()
@click.option("--name", default="attention_h200", show_default=True, help="Name of the result.")
@click.option("--commit", "given", help="The commit, where the checkout is a copy without its history.")
@click.option("--out", type=click.Path(path_type=Path), default=FOLDER, help="Folder that the result is written to.")
@click.option("--replays", type=click.IntRange(min=20), default=REPLAYS, show_default=True)
@click.option("--sweep", "swept", is_flag=True, help="Time all launch configurations instead; writes nothing.")
def main(name: str, given: str | None, out: Path, replays: int, swept: bool) -> None:
    """Times the attention kernels on the current GPU."""
    if swept:
        sweep(replays)
        return
    source = given or commit()
    runs = [
        measure(rows, replays) | {"commit": source, "torch": torch.__version__, "vllm": None, "replays": replays}
        for rows in ROWS
    ]
    result = {"benchmark": name, "kind": "boundary", "unit": "projection", "hidden_size": 5120}
    result["device"] = torch.cuda.get_device_name()
    write(out / f"{name}.json", result | {"chain": CHAIN, "runs": runs})


if __name__ == "__main__":
    main(prog_name="attention")
