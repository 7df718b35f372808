"""An engine of several ranks: vLLM's scheduler in this process, a worker process for each rank."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tests.gpu.compare import first_difference
from tests.gpu.engine import Engine, Outputs, Steps, run_traffic
from tests.gpu.rank_worker import EXTENSION
from tests.gpu.scenarios import Request


def long_script(steps: int) -> tuple[Request, ...]:
    """Requests whose batch sizes change all the time, over `steps` engine steps: one runs through, others come and go.

    Some are aborted, and some prompts are longer than a prefill chunk.
    """
    lengths = (1, 127, 2, 300, 129, 40, 3000, 513)
    others = [
        Request(f"r{i}", 10 * i + 5, lengths[i % 8], 8 + 11 * i % 53, 10 * i + 25 if i % 9 == 4 else None)
        for i in range(max(1, steps // 10 - 8))
    ]
    return (Request("through", 0, 40, steps), *others)


# Requests of the long script that also run alone: of all prompt lengths, none aborted.
ALONE = tuple(f"r{i}" for i in (0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 12))


def run_alone(engine: Engine, script: Sequence[Request], outputs: Outputs) -> Outputs:
    """Runs ALONE of a script one after another, each with no other, along the tokens that it got among others."""
    found = Outputs({}, {})
    for name in ALONE:
        (request,) = (one for one in script if one.name == name)
        forced = {name: outputs.tokens[name]}
        one, _ = run_traffic(engine, [replace(request, step=0)], forced, seeds={name: script.index(request)})
        found.tokens.update(one.tokens)
        found.logits.update(one.logits)
    return found


@dataclass(frozen=True)
class Alike:
    """What all ranks gave, against the first. rows: hidden states compared; hidden, logits: of those and of the
    recorded logits' rows, how many differ in any bit; first: the first of them."""

    rows: int = 0
    hidden: int = 0
    logits: int = 0
    first: str = field(default="", compare=False)

    def __add__(self, other: "Alike") -> "Alike":
        rows, hidden, logits = self.rows + other.rows, self.hidden + other.hidden, self.logits + other.logits
        return Alike(rows, hidden, logits, self.first or other.first)


def compare_ranks(taken: Sequence[dict[str, Any]]) -> Alike:
    """Compares what the ranks saved. Raises RuntimeError where they did not run the same steps."""
    first, total = taken[0], Alike()
    for rank, other in enumerate(taken[1:], start=1):
        if other["hidden"].shape != first["hidden"].shape or other["recordings"].keys() != first["recordings"].keys():
            raise RuntimeError(
                f"rank {rank}: found {len(other['hidden'])} rows of {sorted(other['recordings'])}, "
                f"expected rank 0's {len(first['hidden'])} of {sorted(first['recordings'])}"
            )
        apart_at = (first["hidden"] != other["hidden"]).nonzero().flatten().tolist()
        said = f"rank {rank}: hidden state {apart_at[0]} of {len(first['hidden'])}" if apart_at else ""
        logits = 0
        for name, (values, *_) in first["recordings"].items():
            # Bits, not values: rows that were never recorded are NaN on both sides.
            apart = values.view(torch.int32) != other["recordings"][name][0].view(torch.int32)
            logits += int(apart.any(1).sum())
            if apart.any() and not said:
                said = f"rank {rank}: {name}: {first_difference(values, other['recordings'][name][0]) or 'bits alone'}"
        total += Alike(len(first["hidden"]), len(apart_at), logits, said)
    return total


@dataclass
class RanksEngine(Engine):
    """As Engine, its runner in worker processes. alike: the ranks' comparison since the start; pids: by rank."""

    folder: Path = Path()
    alike: Alike = field(default_factory=Alike)
    pids: list[int] = field(default_factory=list)

    @classmethod
    def start(cls, model: Path, graph_sizes: Sequence[int], ranks: int, work: Path, **options: Any) -> "RanksEngine":
        """Starts vLLM with a worker process for each rank. Steps are scheduled one after another, so that two runs of
        a script have the same batches."""
        settings = {
            "tensor_parallel_size": ranks,
            "distributed_executor_backend": "mp",
            "worker_extension_cls": EXTENSION,
            "async_scheduling": False,
        }
        built = cls.build(model, graph_sizes, **settings | options)
        built.folder = work / "taken"
        built.folder.mkdir(parents=True, exist_ok=True)
        built.pids = built.llm.collective_rpc("tests_watch")
        return built

    def take(self) -> dict[str, Any]:
        """Rank 0's recordings; the other ranks' are compared with them."""
        from tests.gpu.recorder import Recording

        files = self.llm.collective_rpc("tests_take", args=(str(self.folder),))
        taken = [torch.load(file) for file in files]
        self.alike += compare_ranks(taken)
        return {name: Recording(*parts) for name, parts in taken[0]["recordings"].items()}

    @property
    def kv_blocks(self) -> int:
        return int(self.llm.collective_rpc("tests_memory")[0][1])


class RankSteps(Steps):
    """Steps that rank 0 counts; another rank that counts otherwise is an error."""

    def __init__(self, engine: RanksEngine) -> None:
        super().__init__()
        self.engine = engine

    def copy(self) -> Steps:
        first, *others = self.engine.llm.collective_rpc("tests_count")
        if any(other != first for other in others):
            raise RuntimeError(f"steps by rank: found {[first, *others]}, expected the same on all")
        return Steps(first[0], Counter(first[1]))

    def since(self, before: Steps) -> Steps:
        return self.copy().since(before)
