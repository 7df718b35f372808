"""What a phase of an engine process leaves: a line for people, a record, and events for the parent process."""

import argparse
import contextlib
import json
import os
import stat
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu.evidence import tell_on_signal


@dataclass
class Report:
    """A phase's result. line: one line for people; failures: what is wrong, in full; data: numbers for the summary."""

    line: str
    failures: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)


def written() -> int:
    """Bytes of this process's log so far; 0 where its output is no file."""
    sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):
        status = os.fstat(sys.stdout.fileno())
        return status.st_size if stat.S_ISREG(status.st_mode) else 0
    return 0


@dataclass
class Run:
    """One engine process: its arguments, and the records of its phases so far."""

    args: argparse.Namespace
    records: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        tell_on_signal()

    @property
    def events(self) -> Path:
        return Path(self.args.out) / f"{self.args.engine}.events.jsonl"

    def tell(self, event: dict[str, Any]) -> None:
        """Tells the parent process what is going on."""
        with self.events.open("a", encoding="utf-8") as file:
            file.write(json.dumps(event | {"time": time.time()}) + "\n")

    def phase(self, name: str, limit: float, work: Callable[[], Report]) -> bool:
        """Runs a phase and records it; returns whether it passed. limit: seconds, which the parent process enforces."""
        self.tell({"event": "start", "phase": name, "limit": limit, "log": written()})
        start = time.monotonic()
        try:
            report = work()
        except Exception as error:
            traceback.print_exc()
            report = Report(f"{type(error).__name__}: {error}", [f"{type(error).__name__}: {error}"])
        record = {
            "engine": self.args.engine,
            "phase": name,
            "ok": not report.failures,
            "seconds": round(time.monotonic() - start, 1),
            "line": report.line,
            "failures": report.failures,
            "data": report.data,
        }
        self.records.append(record)
        self.tell({"event": "end", **record})
        return not report.failures

    def wanted(self, name: str) -> bool:
        """Whether the phase was asked for."""
        return not self.args.only or name in self.args.only.split(",")
