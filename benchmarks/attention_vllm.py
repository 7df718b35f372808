"""A layer's attention in vLLM 0.33.0, on its ops and on the executor's kernels, as tests/gpu/vllm_one_gpu.py timed it.

`python -m benchmarks.attention_vllm OUT/results.json --name attention_vllm_h200` writes
benchmarks/results/attention_vllm_h200.json.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.conversion import conversion
from benchmarks.results import Times
from specialized_decode.backbone.presets import flash_plan

JOB, PHASES = "attention", ("start", "capture", "attention")
# What tests/gpu/attention_phases.py calls its sides.
SIDES = {"stock": "vLLM", "executor": "executor", "step": "executor's step"}


@dataclass(frozen=True)
class Side:
    """Microseconds. layer_us: of one layer's attention, by kind of layer; graph_us: of the whole graph; rest_us: of the
    graph without any attention."""

    layer_us: dict[str, Times]
    graph_us: Times
    rest_us: Times

    @classmethod
    def of(cls, record: dict[str, Any]) -> "Side":
        layers = {kind: Times(**times) for kind, times in record["layer_us"].items()}
        return cls(layers, Times(**record["graph_us"]), Times(**record["rest_us"]))


@dataclass(frozen=True)
class AttentionRun:
    """One batch shape. context: tokens of each row when timing starts; engine_us: the graph that the engine replays."""

    rows: int
    context: int
    stock: Side
    executor: Side
    step: Side
    engine_us: Times


@dataclass(frozen=True)
class AttentionResult:
    """What ran where. counts: layers of each kind; replays: of each graph, in turn."""

    benchmark: str
    commit: str
    layers: int
    shard_tp: int
    heads: int
    device: str
    torch: str
    vllm: str
    counts: dict[str, int]
    replays: int
    runs: tuple[AttentionRun, ...]
    kind: str = "attention_vllm"


def convert(results: dict[str, Any], name: str, layers: int, experts: int, shard_tp: int) -> AttentionResult:
    """The result file's content from that of vllm_one_gpu.py. Raises ValueError where a phase is missing or failed."""
    records = {record["phase"]: record for record in results["records"] if record["engine"] == JOB}
    for phase in PHASES:
        if not records.get(phase, {"ok": False})["ok"]:
            raise ValueError(f"{JOB}: found no {phase} that passed, expected one")
    start, found = records["start"]["data"], records["attention"]["data"]
    text = flash_plan(layers=layers, experts=experts, shard_tp=shard_tp).config["text_config"]
    runs = []
    for run in found["runs"]:
        sides = {field: Side.of(run["sides"][side]) for field, side in SIDES.items()}
        runs.append(AttentionRun(run["rows"], run["context"], engine_us=Times(**run["engine_us"]), **sides))
    return AttentionResult(
        benchmark=name,
        commit=results["commit"],
        layers=layers,
        shard_tp=shard_tp,
        heads=text["num_attention_heads"],
        device=start["device"],
        torch=start["torch"],
        vllm=start["vllm"],
        counts=found["layers"],
        replays=found["replays"],
        runs=tuple(runs),
    )


def lines(result: AttentionResult) -> Iterator[str]:
    """Of each run, a line for every kind of layer."""
    for run in result.runs:
        for kind, stock in run.stock.layer_us.items():
            ours = run.executor.layer_us[kind].median
            yield f"{run.rows} rows, context {run.context}, {kind}: {stock.median:.1f} us, {ours:.1f} us"


main = conversion(convert, lines, "attention_vllm_h200")


if __name__ == "__main__":
    main(prog_name="attention_vllm")
