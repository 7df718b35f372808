"""What one engine process runs: phases with a time limit each, a line and a record for each.

`python -m tests.gpu.phases stock|executor|times-stock|times-executor|attention --folder FOLDER --out OUT ...`; started
by vllm_one_gpu.py, which ends a process whose phase outlasts its limit.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

import torch

from tests.gpu import scenarios
from tests.gpu.attention_phases import ROWS, Constants, Graphs, capture_all, check_attention
from tests.gpu.engine import (
    Engine,
    register_text_model,
    timed_graph,
    timed_steps,
    watch_captures,
    watch_steps,
)
from tests.gpu.executor_phases import (
    EXECUTOR_OPTION,
    check_again,
    check_capture_error,
    check_captures,
    check_profiles,
    check_refused,
    check_traffic,
    check_values,
    executor_option,
    options,
)
from tests.gpu.repeatable import make_repeatable
from tests.gpu.report import Report, Run
from tests.gpu.stock_phases import record_profiles, record_traffic, record_values

TIMED = ((1, 300), (8, 300))
TIMED_BLOCKS, TIMED_STEPS = 6, 40


def built(engine: Engine, captured: Sequence[int]) -> Report:
    """The report of a started engine. captured: rows of which the executor ran a capture."""
    data = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "vllm": version("vllm"),
        "seconds": round(engine.seconds, 1),
        # Weights, buffers and graphs' memory; the KV cache takes what they leave of a fixed share.
        "other_gb": round((torch.cuda.memory_allocated() - engine.kv_bytes) / 1e9, 2),
        "weights_gb": round(engine.runner.model_memory_usage / 1e9, 2),
        "kv_gb": round(engine.kv_bytes / 1e9, 2),
        "kv_blocks": engine.kv_blocks,
        "captured_rows": sorted(captured),
    }
    memory = f"{data['other_gb']} GB beside {data['kv_gb']} GB of KV cache"
    return Report(f"started in {engine.seconds:.1f} s, {memory}", data=data)


def measure_times(engine: Engine) -> Report:
    """Whole engine steps and graph replays, the batch sizes taking turns."""
    seconds: dict[str, list[float]] = {f"{rows}x{context}": [] for rows, context in TIMED}
    replays: dict[str, list[float]] = {name: [] for name in seconds}
    for _ in range(TIMED_BLOCKS):
        for rows, context in TIMED:
            seconds[f"{rows}x{context}"] += timed_steps(engine, rows, context, TIMED_STEPS)
            replays[f"{rows}x{context}"] += timed_graph(engine, rows, TIMED_STEPS)
    data = {
        name: {"step_ms": _spread(seconds[name]), "graph_ms": _spread(replays[name]), "steps": len(seconds[name])}
        for name in seconds
    }
    line = "; ".join(
        f"{name}: step {one['step_ms']['median']:.3f} ms, graph {one['graph_ms']['median']:.3f} ms"  # type: ignore[index]
        for name, one in data.items()
    )
    return Report(line, data=data)


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    q1, median, q3 = (round(value * 1e3, 4) for value in statistics.quantiles(seconds, n=4, method="inclusive"))
    return {"median": median, "q1": q1, "q3": q3}


def build_phase(
    run: Run, name: str, captured: Any, graph_sizes: Sequence[int], settings: dict[str, Any]
) -> Engine | None:
    """Starts an engine as a phase of its own; None if it did not start."""
    engines: list[Engine] = []

    def work() -> Report:
        if captured is not None:
            captured.clear()
        engines.append(Engine.build(run.args.folder, graph_sizes, **settings))
        report = built(engines[0], list(captured or ()))
        if captured is not None and "additional_config" in settings:
            asked = settings["additional_config"].get("decode_backend") == EXECUTOR_OPTION["decode_backend"]
            if asked:
                report.failures += check_captures(list(captured), graph_sizes)
            if not asked and captured:
                report.failures.append(
                    f"the executor captured rows {sorted(captured)} with {settings['additional_config']}"
                )
        return report

    run.phase(name, 420, work)
    return engines[0] if engines else None


def engine_options(args: argparse.Namespace, executor: dict[str, Any] | None) -> dict[str, Any]:
    """LLM's options of the engines whose outputs are held against each other."""
    return options(args, executor, **json.loads(args.engine_option))


def run_stock(run: Run) -> None:
    """vLLM as it is, without the package's plugin."""
    steps, store = watch_steps(), Path(run.args.store)
    engine = build_phase(run, "start", None, scenarios.GRAPH_SIZES, engine_options(run.args, None))
    if engine is None:
        return
    if run.wanted("profile"):
        run.phase("profile", 90, lambda: record_profiles(engine, store))
    if run.wanted("values"):
        run.phase("values", 180, lambda: record_values(engine, steps, store))
    if run.wanted("traffic"):
        run.phase("traffic", 90, lambda: record_traffic(engine, steps, store))
    run.phase("shutdown", 60, lambda: record_shutdown(engine, store))


def run_executor(run: Run) -> None:
    """The executor: values and traffic on one engine, then further engines in the same process."""
    args, store = run.args, Path(run.args.store)
    steps, captured = watch_steps(), watch_captures()
    settings = engine_options(args, executor_option(args))
    engine = None
    # An engine takes a minute: none is started for phases that have their own.
    if any(run.wanted(name) for name in ("start", "values", "traffic", "profile", "again")):
        engine = build_phase(run, "start", captured, scenarios.GRAPH_SIZES, settings)
    if engine is not None:
        if run.wanted("values"):
            run.phase("values", 180, lambda: check_values(engine, args, store))
        if run.wanted("traffic"):
            run.phase("traffic", 90, lambda: check_traffic(engine, args, steps, store))
        if run.wanted("profile"):
            run.phase("profile", 90, lambda: check_profiles(engine, store, exact=False))
        run.phase("shutdown", 60, lambda: shut_down(engine, store))
    if run.wanted("off-auto"):
        off_phases(run, "off-auto", captured, {"decode_backend": "auto"})
    if run.wanted("again") and engine is not None:
        second = build_phase(run, "again-start", captured, scenarios.GRAPH_SIZES, settings)
        if second is not None:
            run.phase("again", 60, lambda: check_again(second, store, args.expect))
            run.phase("again-shutdown", 60, lambda: shut_down(second, store))
    if run.wanted("refused"):
        run.phase("refused", 300, lambda: check_refused(args))
    if run.wanted("off-absent"):
        off_phases(run, "off-absent", captured, {})
    if run.wanted("capture-error"):
        run.phase("capture-error", 300, lambda: check_capture_error(args))


def off_phases(run: Run, name: str, captured: Any, value: dict[str, Any]) -> None:
    """An engine with the plugin loaded and the executor not asked for: its kernels are stock's."""
    settings = options(run.args, value, load_format="dummy")
    engine = build_phase(run, f"{name}-start", captured, scenarios.GRAPH_SIZES, settings)
    if engine is None:
        return
    run.phase(name, 90, lambda: check_profiles(engine, Path(run.args.store), exact=True))
    run.phase(f"{name}-shutdown", 60, lambda: shut_down(engine, Path(run.args.store)))


def record_shutdown(engine: Engine, store: Path) -> Report:
    """Ends the stock engine, and records the GPU memory that it does not give back."""
    left, _ = engine.shut_down()
    store.mkdir(parents=True, exist_ok=True)
    (store / "shutdown.json").write_text(json.dumps({"left": left}), encoding="utf-8")
    return Report(f"{left / 1e9:.2f} GB still allocated", data={"left_gb": round(left / 1e9, 3)})


def shut_down(engine: Engine, store: Path) -> Report:
    """Ends an engine; its memory must come back as stock's does, or the next one would not fit."""
    stock = int(json.loads((store / "shutdown.json").read_text(encoding="utf-8"))["left"])
    left, before = engine.shut_down()
    grown, failures = left - before, []
    if grown > stock + 1e9:
        failures = [
            f"{grown / 1e9:.2f} GB more than before still allocated, stock's engine leaves {stock / 1e9:.2f} GB"
        ]
    data = {"left_gb": round(left / 1e9, 3), "grown_gb": round(grown / 1e9, 3)}
    return Report(f"{left / 1e9:.2f} GB still allocated, {grown / 1e9:.2f} GB more than before", failures, data)


def timed_options(executor: dict[str, Any] | None) -> dict[str, Any]:
    """LLM's options of an engine at full depth that is timed."""
    settings: dict[str, Any] = {
        "load_format": "dummy",
        "max_model_len": 16384,
        "max_num_seqs": 8,
        # As the other engines: Humming compiles for every size up to it.
        "max_num_batched_tokens": scenarios.PREFILL_CHUNK,
        "gpu_memory_utilization": 0.88,
        # Neither serves here, and both cost host time.
        "enable_trace_replay": False,
        "disable_log_stats": True,
    }
    return settings if executor is None else settings | {"additional_config": executor}


def run_times(run: Run, executor: dict[str, Any] | None) -> None:
    """Step times of one engine at full depth."""
    captured = watch_captures() if executor is not None else None
    engine = build_phase(run, "start", captured, (1, 8), timed_options(executor))
    if engine is not None:
        run.phase("times", 120, lambda: measure_times(engine))


def run_attention(run: Run) -> None:
    """A layer's attention on vLLM's ops and on the executor's kernels, in one engine at full depth."""
    steps, captured, graphs = watch_steps(), watch_captures(), dict[str, list[Graphs]]()
    settings = timed_options(executor_option(run.args) | {"decode_kernels": True})
    engine = build_phase(run, "start", captured, ROWS, settings)
    if engine is None:
        return
    constants = Constants.of(engine.runner.model_state.executor, max(ROWS))
    if run.phase("capture", 240, lambda: capture_all(engine, captured, constants, graphs)):
        run.phase("attention", 240, lambda: check_attention(engine, steps, graphs))


def check_plugin(engine: str) -> None:
    """Ends the process unless vLLM will find, or will not load, the plugin as this engine needs it."""
    found = [entry.name for entry in entry_points(group="vllm.general_plugins")]
    off = os.environ.get("VLLM_PLUGINS") == ""
    if "stock" in engine and not off:
        raise SystemExit('error: VLLM_PLUGINS is not "", so the plugin would be loaded into a stock engine')
    if "stock" not in engine and "specialized_decode" not in found:
        raise SystemExit(
            f"error: found plugins {found}, expected specialized_decode; is the wheel's metadata on the path?"
        )


def main(argv: list[str]) -> int:
    """Command line; the exit status is 0 when every phase passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=["stock", "executor", "times-stock", "times-executor", "attention"])
    parser.add_argument("--folder", type=Path, required=True, help="the model folder")
    parser.add_argument("--out", type=Path, required=True, help="where events and records go")
    parser.add_argument("--store", type=Path, required=True, help="where stock's tokens and logits are kept")
    parser.add_argument("--only", default="", help="phases to run, with commas; all by default")
    parser.add_argument("--expect", choices=["identical", "close"], default="identical")
    parser.add_argument("--executor-option", default="{}", help="JSON, added to the executor's additional_config")
    parser.add_argument("--engine-option", default="{}", help="JSON, added to LLM's options for both")
    args = parser.parse_args(argv)
    check_plugin(args.engine)
    args.out.mkdir(parents=True, exist_ok=True)
    run = Run(args)
    register_text_model()
    if args.engine in ("stock", "executor"):
        make_repeatable()
    if args.engine == "stock":
        run_stock(run)
    elif args.engine == "executor":
        run_executor(run)
    elif args.engine == "attention":
        run_attention(run)
    else:
        run_times(run, executor_option(args) if args.engine == "times-executor" else None)
    return 0 if run.records and all(record["ok"] for record in run.records) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
