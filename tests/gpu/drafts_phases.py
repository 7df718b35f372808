"""What one engine with DSpark runs, in one process on one GPU; started by vllm_two_gpus.py.

`python -m tests.gpu.drafts_phases drafts-stock|drafts-executor --folder FOLDER --out OUT ...`
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.gpu.drafts import (
    DRAFTS,
    GRAPH_SIZES,
    LENGTHS,
    RATES,
    TOKENS,
    Apart,
    DraftsWatch,
    Run,
    compare_drafted,
    coverage,
    judge_drafts,
    load_runs,
    run_drafts,
    save_runs,
    set_rates,
)
from tests.gpu.engine import Engine, Steps, register_text_model, settled_counters, step_counters, watch_steps
from tests.gpu.executor_phases import executor_option
from tests.gpu.repeatable import make_repeatable
from tests.gpu.report import Report
from tests.gpu.report import Run as PhaseRun

# Of all steps of the batches, those that the executor must have run: few are prefills.
LEAST_SHARE = 0.5


def settings(executor: dict[str, Any] | None) -> dict[str, Any]:
    """LLM's options: synthetic rates, which are changed between batches."""
    rates = RATES["mixed"]
    assert rates is not None
    drafting = {
        "method": "dspark",
        "num_speculative_tokens": DRAFTS,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": list(rates),
    }
    options: dict[str, Any] = {
        "max_model_len": 4096,
        "max_num_seqs": len(LENGTHS),
        "max_num_batched_tokens": 4096,
        "gpu_memory_utilization": 0.6,
        "speculative_config": drafting,
        # Stock's own trace replay knows no drafts.
        "enable_trace_replay": False,
        "async_scheduling": False,
    }
    return options if executor is None else options | {"additional_config": executor}


def compare_runs(expected: Run, found: Run) -> dict[str, Apart]:
    """Request by request, by their names."""
    lengths = {f"row{index}": length for index, length in enumerate(LENGTHS)}
    return {row: compare_drafted(expected[row], found[row], lengths[row]) for row in expected.keys() & found.keys()}


def accepted_by_step(run: Run) -> float:
    counts = [count for one in run.values() for count in one.accepted]
    return sum(counts) / max(1, len(counts))


def worst(parts: Sequence[Apart]) -> Apart:
    """The largest differences among several comparisons."""
    return Apart(
        sum(one.tokens for one in parts),
        all(one.whole for one in parts),
        all(one.accepted for one in parts),
        all(one.aux for one in parts),
        max(one.logprob for one in parts),
        max(one.rms for one in parts),
    )


def record_drafts(engine: Engine, watch: DraftsWatch, store: Path) -> Report:
    """Runs the batch twice with each of the rates, and its rows alone."""
    runs, repeats, noise, failures, lines = {}, {}, {}, [], []
    for name, rates in RATES.items():
        set_rates(engine.runner.rejection_sampler, rates)
        runs[name] = run_drafts(engine, watch, LENGTHS)
        repeats[name] = compare_runs(runs[name], run_drafts(engine, watch, LENGTHS))
        alone: Run = {}
        for index, length in enumerate(LENGTHS):
            alone |= run_drafts(engine, watch, [length], index)
        noise[name] = worst(list(compare_runs(runs[name], alone).values()))
        failures += [f"{name}: {failure}" for failure in coverage(name, runs[name])]
        same = sum(one.same for one in repeats[name].values())
        lines.append(f"{name}: {accepted_by_step(runs[name]):.2f} tokens a step, {same} of {len(LENGTHS)} rows repeat")
    save_runs(store / "drafts.pt", runs, repeats, noise)
    return Report("; ".join(lines), failures, {"noise": {name: vars(one) for name, one in noise.items()}})


def check_drafts(engine: Engine, watch: DraftsWatch, args: argparse.Namespace, steps: Steps, store: Path) -> Report:
    """The same on the executor, against stock; its counters too."""
    runs, repeats, noise = load_runs(store / "drafts.pt")
    failures, lines = [], []
    before, counters = steps.copy(), step_counters()
    for name, rates in RATES.items():
        set_rates(engine.runner.rejection_sampler, rates)
        run = run_drafts(engine, watch, LENGTHS)
        found = compare_runs(runs[name], run)
        wrong = coverage(name, run) + judge_drafts(name, repeats[name], found, noise[name], args.expect)
        failures += [f"{name}: {failure}" for failure in wrong]
        same = sum(one.same for one in found.values())
        lines.append(f"{name}: {accepted_by_step(run):.2f} tokens a step, {same} of {len(LENGTHS)} rows are stock's")
    total = steps.since(before).total
    counted = settled_counters(engine, total, counters)
    if sum(counted.values()) != total or counted.get("executor", 0) < LEAST_SHARE * total:
        failures.append(f"counters: found {counted}, expected {total} steps, {LEAST_SHARE:.0%} of them the executor's")
    return Report("; ".join([*lines, f"steps {counted}"]), failures, {"steps": counted})


def main(argv: Sequence[str]) -> int:
    """Command line; the exit status is 0 when every phase passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=["drafts-stock", "drafts-executor"])
    parser.add_argument("--folder", type=Path, required=True, help="the model folder, with drafts")
    parser.add_argument("--out", type=Path, required=True, help="where events and records go")
    parser.add_argument("--store", type=Path, required=True, help="where stock's runs are kept")
    parser.add_argument("--expect", choices=["identical", "close"], default="identical")
    parser.add_argument("--executor-option", default="{}", help="JSON, added to the executor's additional_config")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    run, engines = PhaseRun(args), list[Engine]()
    executor = None if args.engine == "drafts-stock" else executor_option(args)
    register_text_model()
    make_repeatable()
    steps = watch_steps()

    def start() -> Report:
        engines.append(Engine.build(args.folder, GRAPH_SIZES, **settings(executor)))
        return Report(f"started in {engines[0].seconds:.1f} s; {TOKENS} tokens a request")

    if run.phase("start", 420, start):
        (engine,) = engines
        watch = DraftsWatch(engine.runner.speculator)
        if executor is None:
            run.phase("drafts", 120, lambda: record_drafts(engine, watch, args.store))
        else:
            run.phase("drafts", 120, lambda: check_drafts(engine, watch, args, steps, args.store))
    return 0 if run.records and all(record["ok"] for record in run.records) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
