"""The attention step's kernels in CUDA graphs, at V4.1-Flash's widths of one rank of four.

`python -m benchmarks.attention` writes benchmarks/results/attention_h200.json: each dense projection in a chain of
launches whose weights take turns and do not fit the L2 cache, beside bfloat16 products of cuBLAS over the same widths.
"""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.boundary import interleaved, write
from benchmarks.results import FOLDER, commit
from specialized_decode.attention.fused import project_fp8
from specialized_decode.attention.prepared import prepare_fp8

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


def chain(name: str, rows: int, ours: bool) -> Callable[[], None]:
    """CHAIN launches of one projection, each on the next weights."""
    n, k, groups = PROJECTIONS[name]
    count = -(-ROTATED_BYTES // (n * k))
    x = torch.randn(rows, groups * k, device="cuda").bfloat16()
    scale = torch.full((n // 32, k // 32), 120, dtype=torch.uint8, device="cuda")
    weights = [torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn) for _ in range(count)]
    if ours:
        prepared = [prepare_fp8(weight, scale) for weight in weights]

        def run() -> None:
            for number in range(CHAIN):
                project_fp8(x, prepared[number % count], groups)

        return run
    wide = [weight.bfloat16().view(groups, n // groups, k).transpose(1, 2) for weight in weights]
    inputs = x.view(rows, groups, k).transpose(0, 1)

    def run_cublas() -> None:
        for number in range(CHAIN):
            torch.bmm(inputs, wide[number % count])

    return run_cublas


def measure(rows: int, replays: int) -> dict[str, Any]:
    """One row count: microseconds of each projection, and how many times the floor of its weights' bytes that is."""
    us = {}
    for name, (n, k, _) in PROJECTIONS.items():
        chains: dict[str, tuple[Callable[[], object], int]] = {
            "kernel": (chain(name, rows, True), CHAIN),
            "cuBLAS, bfloat16": (chain(name, rows, False), CHAIN),
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
def main(name: str, given: str | None, out: Path, replays: int) -> None:
    """Times the attention kernels on the current GPU."""
    source = given or commit()
    runs = [
        measure(rows, replays) | {"commit": source, "torch": torch.__version__, "vllm": None, "replays": replays}
        for rows in ROWS
    ]
    result = {"benchmark": name, "kind": "boundary", "device": torch.cuda.get_device_name(), "hidden_size": 5120}
    write(out / f"{name}.json", result | {"chain": CHAIN, "runs": runs})


if __name__ == "__main__":
    main(prog_name="attention")
