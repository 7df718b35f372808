"""Outputs of batches and traffic: kept in files, compared, and described."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tests.gpu import scenarios
from tests.gpu.compare import Difference, combined, difference, failures_if_close, failures_if_identical
from tests.gpu.engine import Outputs, Steps
from tests.gpu.scenarios import Request


def batch_seeds(index: int) -> list[int]:
    """Seeds of the prompts of batch `index`."""
    return [100 * index + row for row in range(len(scenarios.BATCHES[index]))]


def described(values: Sequence[Difference]) -> str:
    total = combined(values)
    return (
        f"{total.differing} of {total.steps} steps differ, largest {total.largest:.4g}, rms {total.rms:.4g}, "
        f"argmax in {total.argmax_differs}"
    )


def compare(expected: Outputs, found: Outputs) -> dict[str, Difference]:
    """Row by row, as far as both go."""
    parts = {}
    for name in (name for name in expected.logits if name in found.logits):
        a, b = expected.logits[name], found.logits[name]
        count = min(len(a), len(b))
        one = difference(a[:count], b[:count])
        parts[name] = replace(one, first=one.first and f"{name}: {one.first}")
    return parts


def failures_beside(repeats: dict[str, Difference], found: dict[str, Difference]) -> list[str]:
    """What is wrong with a run on stock's kernels: rows that stock repeats bit for bit are equal to it, and the others
    together are no further from it than it is from itself."""
    exact = [name for name, one in repeats.items() if not one.differing]
    failures = [f"row {name}: {one}" for name in exact if name in found for one in failures_if_identical(found[name])]
    rest = [name for name in repeats if name not in exact and name in found]
    if rest:
        failures += failures_if_close(combined(found[n] for n in rest), combined(repeats[n] for n in rest))
    return failures


@dataclass(frozen=True)
class Recorded:
    """What stock computed.

    outputs: of each batch; repeats: each row of each batch against itself, run again along the same tokens; noise: rows
    of a batch against the same rows alone.
    """

    outputs: list[Outputs]
    repeats: list[dict[str, Difference]]
    noise: Difference


def save_outputs(path: Path, recorded: Recorded) -> None:
    """Saves tokens and logits; logits as bfloat16 where that is exact."""
    path.parent.mkdir(parents=True, exist_ok=True)
    packed = []
    for one in recorded.outputs:
        logits = {}
        for name, values in one.logits.items():
            short = values.bfloat16()
            logits[name] = short if torch.equal(short.float(), values) else values
        packed.append({"tokens": one.tokens, "logits": logits})
    repeats = [{row: one.record() for row, one in rows.items()} for rows in recorded.repeats]
    torch.save({"outputs": packed, "repeats": repeats, "noise": recorded.noise.record()}, path)


def load_outputs(path: Path) -> Recorded:
    """What `save_outputs` saved, logits as float32."""
    data = torch.load(path)
    outputs = [
        Outputs(one["tokens"], {name: values.float() for name, values in one["logits"].items()})
        for one in data["outputs"]
    ]
    repeats = [{row: Difference(**one) for row, one in rows.items()} for rows in data["repeats"]]
    return Recorded(outputs, repeats, Difference(**data["noise"]))


def padded(requests: Sequence[Request], outputs: Outputs) -> dict[str, list[int]]:
    """Tokens to force on a script's requests: an aborted one runs as long as it did, and not to its last output."""
    wanted = {request.name: request.output_tokens for request in requests}
    return {name: [*tokens, *[100] * (wanted[name] - len(tokens))] for name, tokens in outputs.tokens.items()}


def traffic_coverage(counted: Steps) -> list[str]:
    """What the script should have caused and did not: replays of every graph, and steps outside graphs."""
    missing = [rows for rows in scenarios.GRAPH_SIZES if not counted.replays[rows]]
    failures = [f"no replay of the graph for {rows} rows" for rows in missing]
    if counted.total - sum(counted.replays.values()) < 10:
        failures.append("fewer than 10 steps outside graphs, expected prefills and batches above the largest graph")
    return failures


def replays_by_rows(counted: Steps) -> str:
    return ", ".join(f"{rows} rows: {count}" for rows, count in sorted(counted.replays.items()))
