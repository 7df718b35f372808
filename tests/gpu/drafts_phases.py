"""What one engine with DSpark runs, in one process on one GPU; started by vllm_two_gpus.py.

`python -m tests.gpu.drafts_phases drafts-stock|drafts-executor --folder FOLDER --out OUT ...`
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
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
    Recorded,
    Run,
    compare_drafted,
    coverage,
    judge_drafts,
    judge_rounds,
    known_partings,
    load_runs,
    prompt_length,
    run_batch_and_alone,
    run_drafts,
    save_runs,
    set_rates,
)
from tests.gpu.drafts_steps import Parting, Step, partings
from tests.gpu.engine import (
    SHARED_GPU,
    Engine,
    Steps,
    register_text_model,
    settled_counters,
    step_counters,
    watch_steps,
)
from tests.gpu.executor_phases import executor_option
from tests.gpu.repeatable import make_repeatable
from tests.gpu.report import Report
from tests.gpu.report import Run as PhaseRun

# How often the batch with real drafts is run again, for the rate at which it repeats: one batch of the first forty
# parted (H200, other engines on the same GPU, 2026-11-30).
ROUNDS = 20
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
        **SHARED_GPU,
        "speculative_config": drafting,
        # Stock's own trace replay knows no drafts.
        "enable_trace_replay": False,
        "async_scheduling": False,
    }
    return options if executor is None else options | {"additional_config": executor}


def compare_runs(expected: Run, found: Run) -> dict[str, Apart]:
    """Request by request, by their names."""
    rows = [row for row in expected if row in found]
    return {row: compare_drafted(expected[row], found[row], prompt_length(row)) for row in rows}


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
        next((one.first for one in parts if one.first), ""),
    )


def alone_in_batch(run: Run) -> Run:
    """The requests that ran alone, by the names that they have in the batch."""
    return {row.replace("alone", "row"): one for row, one in run.items() if row.startswith("alone")}


def batch_again(engine: Engine, watch: DraftsWatch, expected: Sequence[Step]) -> list[Parting]:
    """Runs the batch with real drafts ROUNDS times; returns where each parts from `expected`, stock's."""
    set_rates(engine.runner.rejection_sampler, RATES["real"])
    rounds = []
    for _ in range(ROUNDS):
        watch.take_steps()
        run_drafts(engine, watch, LENGTHS)
        rounds.append(
            partings([step for step in expected if step.names[0].startswith("row")], watch.take_steps())["row"]
        )
    return rounds


def described_rounds(rounds: Sequence[Parting], like: str) -> str:
    first = next((f", first: {one.said}" for one in rounds if one.where), "")
    return f"real again: {sum(not one.where for one in rounds)} of {len(rounds)} batches {like}{first}"


def record_drafts(engine: Engine, watch: DraftsWatch, store: Path) -> Report:
    """Runs the batch and its rows alone twice with each of the rates; what differs between batch and alone is noise."""
    runs, steps, repeats, failures, lines = {}, {}, {}, [], []
    noise: dict[str, Apart] = {}
    parted: dict[str, dict[str, Parting]] = {}
    for name, rates in RATES.items():
        set_rates(engine.runner.rejection_sampler, rates)
        watch.take_steps()
        runs[name] = run_batch_and_alone(engine, watch)
        steps[name] = watch.take_steps()
        repeats[name] = compare_runs(runs[name], run_batch_and_alone(engine, watch))
        parted[name] = partings(steps[name], watch.take_steps())
        noise[name] = worst(list(compare_runs(runs[name], alone_in_batch(runs[name])).values()))
        failures += [f"{name}: {failure}" for failure in coverage(name, runs[name])]
        same = sum(one.same for one in repeats[name].values())
        tokens = f"{accepted_by_step(runs[name]):.2f} tokens a step"
        lines.append(f"{name}: {tokens}, {same} of {len(repeats[name])} runs repeat")
    rounds = batch_again(engine, watch, steps["real"])
    own = [*(one for rows in parted.values() for one in rows.values()), *rounds]
    save_runs(store / "drafts.pt", Recorded(runs, steps, repeats, worst(list(noise.values())), own))
    lines.append(described_rounds(rounds, "repeat"))
    first = {name: next((one.first for one in rows.values() if one.first), "") for name, rows in repeats.items()}
    noises = {name: asdict(one) for name, one in noise.items()}
    wheres = {name: said(rows) for name, rows in parted.items()}
    data = {"noise": noises, "apart": first, "parted": wheres, "rounds": [asdict(one) for one in rounds]}
    return Report("; ".join(lines), failures, data)


def said(parted: dict[str, Parting]) -> dict[str, str]:
    """The batches that part, and where."""
    return {name: f"{one.where}: {one.said}" for name, one in parted.items() if one.where}


def check_drafts(engine: Engine, watch: DraftsWatch, args: argparse.Namespace, steps: Steps, store: Path) -> Report:
    """The same on the executor, against stock; its counters too."""
    stock = load_runs(store / "drafts.pt")
    known = known_partings(stock.rounds)
    failures, lines = [], []
    apart: dict[str, dict[str, Any]] = {}
    parted: dict[str, dict[str, str]] = {}
    before, counters = steps.copy(), step_counters()
    for name, rates in RATES.items():
        set_rates(engine.runner.rejection_sampler, rates)
        watch.take_steps()
        run = run_batch_and_alone(engine, watch)
        parts = partings(stock.steps[name], watch.take_steps())
        found = compare_runs(stock.runs[name], run)
        wrong = judge_drafts(name, stock.repeats[name], found, stock.noise, args.expect, parts, known)
        wrong += coverage(name, run)
        failures += [f"{name}: {failure}" for failure in wrong]
        same = sum(one.same for one in found.values())
        lines.append(f"{name}: {accepted_by_step(run):.2f} tokens a step, {same} of {len(found)} runs are stock's")
        apart[name], parted[name] = {row: asdict(one) for row, one in found.items()}, said(parts)
        lines += [f"{name}: {batch} parts at {where}" for batch, where in parted[name].items()]
    rounds = batch_again(engine, watch, stock.steps["real"])
    lines.append(described_rounds(rounds, "are stock's"))
    failures += [f"real again: {failure}" for failure in judge_rounds(rounds, args.expect, known)]
    counted_steps = steps.since(before)
    total = counted_steps.total
    counted = settled_counters(engine, total, counters)
    if sum(counted.values()) != total or counted.get("executor", 0) < LEAST_SHARE * total:
        failures.append(f"counters: found {counted}, expected {total} steps, {LEAST_SHARE:.0%} of them the executor's")
    data = {
        "steps": counted,
        "replays": dict(counted_steps.replays),
        "apart": apart,
        "parted": parted,
        "rounds": [asdict(one) for one in rounds],
    }
    return Report("; ".join([*lines, f"steps {counted}"]), failures, data)


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
            run.phase("drafts", 240, lambda: record_drafts(engine, watch, args.store))
        else:
            run.phase("drafts", 240, lambda: check_drafts(engine, watch, args, steps, args.store))
    return 0 if run.records and all(record["ok"] for record in run.records) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
