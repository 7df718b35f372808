"""Phases of an engine without the plugin: they record what the executor is held against."""

import json
from pathlib import Path

from tests.gpu import scenarios
from tests.gpu.compare import Difference, combined, difference
from tests.gpu.engine import Engine, Outputs, Steps, profile_kernels, run_batch, run_traffic
from tests.gpu.outputs import (
    Recorded,
    batch_seeds,
    compare,
    described,
    padded,
    replays_by_rows,
    save_outputs,
    traffic_coverage,
)
from tests.gpu.report import Report


def record_values(engine: Engine, steps: Steps, store: Path) -> Report:
    """Runs every batch freely, then again along its own tokens, then some rows of a batch alone."""
    repeats, failures, graph_steps = [], [], {}
    recorded: list[Outputs] = []
    for index, lengths in enumerate(scenarios.BATCHES):
        before = steps.copy()
        outputs = run_batch(engine, lengths, batch_seeds(index), scenarios.OUTPUT_TOKENS)
        replayed = steps.since(before).replays[len(lengths)]
        graph_steps[",".join(map(str, lengths))] = replayed
        if replayed < scenarios.DECODE_STEPS:
            failures.append(f"batch {lengths}: {replayed} graph replays, expected at least {scenarios.DECODE_STEPS}")
        forced = [outputs.tokens[str(row)] for row in range(len(lengths))]
        again = run_batch(engine, lengths, batch_seeds(index), scenarios.OUTPUT_TOKENS, forced)
        repeats.append(compare(outputs, again))
        recorded.append(outputs)
    alone = []
    for row in scenarios.ALONE:
        index = scenarios.ALONE_BATCH
        tokens = recorded[index].tokens[str(row)]
        length, seed = scenarios.BATCHES[index][row], batch_seeds(index)[row]
        single = run_batch(engine, [length], [seed], scenarios.OUTPUT_TOKENS, [tokens])
        alone.append(difference(recorded[index].logits[str(row)], single.logits["0"]))
    rows = [one for batch in repeats for one in batch.values()]
    noise, repeat = combined(alone), combined(rows)
    save_outputs(store / "values.pt", Recorded(recorded, repeats, noise))
    same = sum(not one.differing for one in rows)
    if not same:
        failures.append("stock repeats itself in no row, so that nothing can be held against it bit for bit")
    by_batch = {name: combined(batch.values()).record() for name, batch in zip(graph_steps, repeats, strict=True)}
    repeated = f"{same} of {len(rows)} rows the same, {described(rows)}"
    line = f"recorded {repeat.steps} steps; again: {repeated}; alone, not in a batch: {described(alone)}"
    data = {
        "repeat": repeat.record(),
        "rows": len(rows),
        "same": same,
        "repeats": by_batch,
        "noise": noise.record(),
        "graph_steps": graph_steps,
    }
    return Report(line, failures, data)


def record_traffic(engine: Engine, steps: Steps, store: Path) -> Report:
    """Plays the script, and again along the same tokens, for what it returns and how well it repeats."""
    before = steps.copy()
    first, _ = run_traffic(engine, scenarios.TRAFFIC)
    counted = steps.since(before)
    again, _ = run_traffic(engine, scenarios.TRAFFIC, padded(scenarios.TRAFFIC, first))
    repeats = compare(first, again)
    repeat, same = combined(repeats.values()), sum(not one.differing for one in repeats.values())
    save_outputs(store / "traffic.pt", Recorded([first], [repeats], Difference()))
    failures = traffic_coverage(counted)
    line = (
        f"{counted.total} steps, {sum(counted.replays.values())} of them graph replays ({replays_by_rows(counted)}); "
        f"again: {same} of {len(repeats)} requests the same, {described([repeat])}"
    )
    return Report(line, failures, {"repeat": repeat.record(), "steps": counted.total, "replays": dict(counted.replays)})


def record_profiles(engine: Engine, store: Path) -> Report:
    """Lists what runs on the GPU in a few decode steps."""
    profiles = {f"{rows}x{context}": profile_kernels(engine, rows, context) for rows, context in scenarios.PROFILED}
    store.mkdir(parents=True, exist_ok=True)
    (store / "profile.json").write_text(json.dumps(profiles, indent=1), encoding="utf-8")
    counts = {name: sum(kernels.values()) for name, kernels in profiles.items()}
    failures = [f"{name}: the profile is empty" for name, count in counts.items() if not count]
    return Report(f"GPU operations in 4 steps: {counts}", failures, {"counts": counts})
