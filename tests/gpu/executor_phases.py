"""Phases of engines with the plugin: they compare with what stock recorded."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.gpu import scenarios
from tests.gpu.compare import Difference, combined, failures_if_close, failures_if_identical, missing_kernels
from tests.gpu.engine import (
    Engine,
    Steps,
    clear_failed_start,
    failing_capture,
    profile_kernels,
    run_batch,
    run_traffic,
    settled_counters,
    step_counters,
)
from tests.gpu.outputs import (
    batch_seeds,
    compare,
    described,
    failures_beside,
    load_outputs,
    padded,
    replays_by_rows,
    traffic_coverage,
)
from tests.gpu.report import Report

EXECUTOR_OPTION = {"decode_backend": "latency_specialized"}


def options(args: argparse.Namespace, executor: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    """LLM's options of the 8-layer engines."""
    from tests.gpu.recorder import Recorder

    longest = max(max(batch) for batch in scenarios.BATCHES) + scenarios.OUTPUT_TOKENS
    settings: dict[str, Any] = {
        "max_model_len": -(-longest // 1024) * 1024,
        "max_num_seqs": scenarios.MAX_ROWS,
        "max_num_batched_tokens": scenarios.PREFILL_CHUNK,
        "gpu_memory_utilization": 0.5,
        "logits_processors": [Recorder],
    }
    if executor is not None:
        settings["additional_config"] = executor
    return settings | more


def check_captures(captured: Sequence[int], graph_sizes: Sequence[int]) -> list[str]:
    """Whether the executor ran a capture of every graph."""
    missing = [rows for rows in graph_sizes if rows not in captured]
    return [f"the executor captured rows {sorted(captured)}, expected {missing} too"] if missing else []


def check_values(engine: Engine, args: argparse.Namespace, store: Path) -> Report:
    """Runs every batch along stock's tokens and compares.

    Where kernels are the same, rows that stock repeats are equal, a free run's text too; where stock does not repeat
    itself, the executor is no further from it than stock is.
    """
    recorded = load_outputs(store / "values.pt")
    found: list[Difference] = []
    texts, rows, failures, by_batch = 0, 0, [], {}
    for index, (lengths, stock) in enumerate(zip(scenarios.BATCHES, recorded.outputs, strict=True)):
        name = ",".join(map(str, lengths))
        forced = [stock.tokens[str(row)] for row in range(len(lengths))]
        part = compare(stock, run_batch(engine, lengths, batch_seeds(index), scenarios.OUTPUT_TOKENS, forced))
        found += part.values()
        by_batch[name] = combined(part.values()).record()
        if args.expect != "identical":
            continue
        repeats = recorded.repeats[index]
        failures += [f"batch {name}: {failure}" for failure in failures_beside(repeats, part)]
        same = {row for row, one in repeats.items() if not one.differing}
        rows += len(same)
        free = run_batch(engine, lengths, batch_seeds(index), scenarios.OUTPUT_TOKENS, record=False)
        texts += sum(free.tokens[row] == stock.tokens[row] for row in same)
    if texts != rows:
        failures.append(f"{texts} of {rows} texts are stock's, expected all")
    total, noise = combined(found), recorded.noise
    if args.expect != "identical":
        failures += failures_if_close(total, noise)
    line = f"{described(found)}; stock's noise: rms {noise.rms:.4g}; equal texts {texts} of {rows}"
    return Report(line, failures, {"total": total.record(), "noise": noise.record(), "batches": by_batch})


def check_traffic(engine: Engine, args: argparse.Namespace, steps: Steps, store: Path) -> Report:
    """Plays stock's script, compares outputs, and holds the counters against an independent count."""
    recorded = load_outputs(store / "traffic.pt")
    (stock,), (repeats,) = recorded.outputs, recorded.repeats
    # Where every request repeats, they are left to themselves, and their tokens must be stock's too.
    same = args.expect == "identical" and not any(one.differing for one in repeats.values())
    forced = None if same else padded(scenarios.TRAFFIC, stock)
    before, counters = steps.copy(), step_counters()
    outputs, _ = run_traffic(engine, scenarios.TRAFFIC, forced)
    counted = steps.since(before)
    failures = traffic_coverage(counted) + check_counters(settled_counters(engine, counted.total, counters), counted)
    compared = compare(stock, outputs)
    found = combined(compared.values())
    if same:
        failures += failures_if_identical(found)
        failures += [f"{n}: other tokens than stock's" for n, t in stock.tokens.items() if outputs.tokens[n] != t]
    else:
        if args.expect == "identical":
            failures += failures_beside(repeats, compared)
        else:
            failures += failures_if_close(found, load_outputs(store / "values.pt").noise)
        lengths = {name: len(tokens) for name, tokens in stock.tokens.items()}
        failures += [
            f"{n}: {len(t)} tokens, stock {lengths[n]}" for n, t in outputs.tokens.items() if len(t) != lengths[n]
        ]
    line = f"{counted.total} steps ({replays_by_rows(counted)}); {described([found])}"
    return Report(line, failures, {"total": found.record(), "steps": counted.total, "replays": dict(counted.replays)})


def check_counters(counted: dict[str, int], steps: Steps) -> list[str]:
    """The counters against the replays and steps seen at vLLM's runner: each step is counted once, by who ran it."""
    executor = counted.get("executor", 0)
    stock = sum(count for name, count in counted.items() if name != "executor")
    replays = sum(steps.replays.values())
    if (executor, stock) == (replays, steps.total - replays):
        return []
    return [
        f"counters: found {counted}, expected {replays} by the executor and {steps.total - replays} by stock layers"
    ]


def check_profiles(engine: Engine, store: Path, exact: bool) -> Report:
    """Compares what runs in a few decode steps with stock's list: equal to it, or, for the executor, not longer."""
    stock = json.loads((store / "profile.json").read_text(encoding="utf-8"))
    failures, counts, changes = [], {}, {}
    for rows, context in scenarios.PROFILED:
        name = f"{rows}x{context}"
        found = profile_kernels(engine, rows, context)
        counts[name] = (sum(found.values()), sum(stock[name].values()))
        changes[name] = missing_kernels(stock[name], found)
        if exact and changes[name]:
            failures.append(f"{name}: other GPU operations than stock's: {'; '.join(changes[name][:8])}")
        if not exact and counts[name][0] > counts[name][1]:
            failures.append(
                f"{name}: {counts[name][0]} GPU operations in 4 steps, expected at most stock's {counts[name][1]}"
            )
    return Report(
        f"GPU operations in 4 steps (found, stock): {counts}", failures, {"counts": counts, "changes": changes}
    )


def check_again(engine: Engine, store: Path, expect: str) -> Report:
    """A short comparison of an engine that was built a second time in this process."""
    recorded = load_outputs(store / "values.pt")
    index = scenarios.ALONE_BATCH
    lengths, stock, repeats = scenarios.BATCHES[index], recorded.outputs[index], recorded.repeats[index]
    forced = [stock.tokens[str(row)] for row in range(len(lengths))]
    compared = compare(stock, run_batch(engine, lengths, batch_seeds(index), scenarios.OUTPUT_TOKENS, forced))
    found = combined(compared.values())
    failures = failures_beside(repeats, compared) if expect == "identical" else failures_if_close(found, recorded.noise)
    return Report(f"second engine: {described([found])}", failures, {"total": found.record()})


def check_refused(args: argparse.Namespace) -> Report:
    """An unknown value of the option: the engine does not start, and says which value was found."""
    return expect_failure(args, {"decode_backend": "warp_speed"}, ("decode_backend", "warp_speed"))


def check_capture_error(args: argparse.Namespace) -> Report:
    """An error inside a capture: the engine does not start, and the error is that one."""
    message = "injected into the third layer"
    with failing_capture(message):
        return expect_failure(args, executor_option(args), (message,))


def expect_failure(args: argparse.Namespace, executor: dict[str, Any], words: tuple[str, ...]) -> Report:
    """Builds an engine that must fail with a message that holds `words`."""
    try:
        engine = Engine.build(args.folder, scenarios.GRAPH_SIZES, **options(args, executor, load_format="dummy"))
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    else:
        engine.shut_down()
        return Report("the engine started", ["the engine started, expected an error"])
    # Not inside the handler: the error's traceback holds the engine.
    clear_failed_start()
    missing = [word for word in words if word not in said]
    failures = [f"found {said[:2000]!r}, expected a message with {missing}"] if missing else []
    return Report(f"refused: {said[:300]!r}", failures, {"message": said[:4000]})


def executor_option(args: argparse.Namespace) -> dict[str, Any]:
    """additional_config of the executor's engines: on vLLM's own kernels where values must be identical."""
    own = {} if getattr(args, "expect", "close") == "close" else {"decode_kernels": False}
    return EXECUTOR_OPTION | own | json.loads(args.executor_option)
