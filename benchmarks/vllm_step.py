"""Whole engine steps of vLLM 0.33.0, stock and with the executor, as tests/gpu/vllm_one_gpu.py timed them.

`python -m benchmarks.vllm_step OUT/results.json --name vllm_step_h200` writes benchmarks/results/vllm_step_h200.json.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.conversion import conversion
from benchmarks.results import Times
from specialized_decode.backbone.presets import flash_plan

JOBS = {"stock": "times-stock", "executor": "times-executor"}


@dataclass(frozen=True)
class StepTimes:
    """step_ms: a step of the engine, scheduler and sampler included; graph_ms: the graph's replay alone."""

    step_ms: Times
    graph_ms: Times


@dataclass(frozen=True)
class VllmRun:
    """One batch shape. context: tokens of each row when timing starts; steps: timed steps of each engine."""

    rows: int
    context: int
    steps: int
    stock: StepTimes
    executor: StepTimes


@dataclass(frozen=True)
class VllmResult:
    """What ran where. start_up_seconds, other_gb (GPU memory beside the KV cache, 1e9 bytes): of both engines."""

    benchmark: str
    commit: str
    layers: int
    shard_tp: int
    heads: int
    expert_width: int
    experts: int
    device: str
    torch: str
    vllm: str
    start_up_seconds: dict[str, float]
    other_gb: dict[str, float]
    runs: tuple[VllmRun, ...]
    kind: str = "vllm_step"


def convert(results: dict[str, Any], name: str, layers: int, experts: int, shard_tp: int) -> VllmResult:
    """The result file's content from that of vllm_one_gpu.py. Raises ValueError where a phase is missing or failed."""
    data: dict[str, dict[str, Any]] = {}
    for side, job in JOBS.items():
        records = {record["phase"]: record for record in results["records"] if record["engine"] == job}
        for phase in ("start", "times"):
            if not records.get(phase, {"ok": False})["ok"]:
                raise ValueError(f"{job}: found no {phase} that passed, expected one of both engines")
        data[side] = {phase: record["data"] for phase, record in records.items()}
    start, times = ({side: data[side][phase] for side in JOBS} for phase in ("start", "times"))
    text = flash_plan(layers=layers, experts=experts, shard_tp=shard_tp).config["text_config"]
    return VllmResult(
        benchmark=name,
        commit=results["commit"],
        layers=layers,
        shard_tp=shard_tp,
        heads=text["num_attention_heads"],
        expert_width=text["moe_intermediate_size"],
        experts=experts,
        device=start["stock"]["device"],
        torch=start["stock"]["torch"],
        vllm=start["stock"]["vllm"],
        start_up_seconds={side: start[side]["seconds"] for side in JOBS},
        other_gb={side: start[side]["other_gb"] for side in JOBS},
        runs=tuple(_run(shape, {side: times[side][shape] for side in JOBS}) for shape in times["stock"]),
    )


def _run(shape: str, sides: dict[str, dict[str, Any]]) -> VllmRun:
    """One shape, `ROWSxCONTEXT`, of both engines."""
    rows, context = map(int, shape.split("x"))
    found = {side: StepTimes(Times(**one["step_ms"]), Times(**one["graph_ms"])) for side, one in sides.items()}
    return VllmRun(rows, context, min(one["steps"] for one in sides.values()), found["stock"], found["executor"])


def lines(result: VllmResult) -> Iterator[str]:
    """A line for every run."""
    for run in result.runs:
        stock, executor = run.stock.step_ms.median, run.executor.step_ms.median
        yield f"{run.rows} rows: {stock:.3f} ms, {executor:.3f} ms, {stock / executor:.3f}x"


main = conversion(convert, lines, "vllm_step_h200")


if __name__ == "__main__":
    main(prog_name="vllm_step")
