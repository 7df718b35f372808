"""The form of benchmarks/results/*.json, which tools/tables.py turns into the tables of the docs."""

import json
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).absolute().parent.parent
FOLDER = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Times:
    """Milliseconds of single steps."""

    median: float
    q1: float
    q3: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Times":
        """Median and quartiles of at least two durations."""
        q1, median, q3 = (round(value * 1e3, 3) for value in statistics.quantiles(seconds, n=4, method="inclusive"))
        return cls(median, q1, q3)


@dataclass(frozen=True)
class Run:
    """One batch shape. context: tokens of each sequence when timing starts; steps: timed steps of each kind;
    plain_ms, executor_ms: elapsed time; *_cpu_ms: the process's CPU time, all threads; identical_tokens of tokens:
    tokens on which the two agree. A field that does not apply is None."""

    rows: int
    context: tuple[int, ...]
    steps: int
    plain_ms: Times
    executor_ms: Times
    identical_tokens: int
    tokens: int
    plain_cpu_ms: Times | None = None
    executor_cpu_ms: Times | None = None


@dataclass(frozen=True)
class Result:
    """What ran where. model: the preset; device: the CPU's or GPU's name; threads: torch's, on a CPU; load: the
    machine's load average over the last minute, before and after; peak_gb: the most memory in use, 1e9 bytes."""

    benchmark: str
    commit: str
    model: str
    layers: int
    hidden_size: int
    heads: int
    expert_width: int
    experts: int
    device: str
    torch: str
    peak_gb: float
    runs: tuple[Run, ...]
    threads: int | None = None
    load: tuple[float, float] | None = None

    def write(self, path: Path) -> None:
        """Writes the result as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def commit() -> str:
    """The checkout's commit, with -dirty where tracked files differ from it; `unknown` outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:  # no git
        return "unknown"
    return result.stdout.strip() if result.returncode == 0 else "unknown"


def write_gpu_result(path: Path, kind: str, given: str | None, fields: dict[str, Any]) -> None:
    """Writes the result of a benchmark of kernels: `fields`, and what ran them. given: the commit, where the checkout
    does not know it."""
    import torch

    about = {"benchmark": path.stem, "kind": kind, "commit": given or commit()}
    about |= {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(about | fields, indent=1) + "\n", encoding="utf-8")
