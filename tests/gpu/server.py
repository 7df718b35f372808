"""A vLLM server in processes of its own: start, metrics, memory, shutdown."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Labels = frozenset[tuple[str, str]]
SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)$")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Metrics:
    """One reading of /metrics."""

    values: Mapping[tuple[str, Labels], float]

    @classmethod
    def parse(cls, text: str) -> "Metrics":
        """Reads Prometheus's text format."""
        values = {}
        for line in text.splitlines():
            if found := SAMPLE.match(line):
                name, labels, value = found.groups()
                values[name, frozenset(LABEL.findall(labels or ""))] = float(value)
        return cls(values)

    def total(self, name: str, **labels: str) -> float:
        """The sum over all samples of that name that have these labels. Raises KeyError where there is no `name`."""
        found = {key[1]: value for key, value in self.values.items() if key[0] == name}
        if not found:
            raise KeyError(f"/metrics: found no {name}")
        return sum(value for given, value in found.items() if given >= labels.items())


def descendants(process: int) -> list[int]:
    """A process, its children, theirs, and so on, by /proc."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name, in parentheses, may hold anything.
            parent = int(path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(path.parent.name))
    found, new = [], [process]
    while new:
        found += new
        new = [child for one in new for child in parents.get(one, [])]
    return found


def own_bytes(processes: Iterable[int]) -> int:
    """Anonymous memory of processes: what they share with others or could read again is left out."""
    total = 0
    for process in processes:
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{process}/status").read_text(encoding="utf-8", errors="replace")
            if found := re.search(r"^RssAnon:\s+(\d+) kB", text, re.MULTILINE):
                total += int(found[1]) * 1024
    return total


def gpu_bytes() -> int:
    """GPU memory used on all GPUs of the host."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return sum(int(line) << 20 for line in subprocess.check_output(command, text=True).split())


def left_behind() -> set[str]:
    """Files that a server of this user could leave: shared memory, and folders of step counts."""
    counts = Path(tempfile.gettempdir(), f"specialized-decode-{os.getuid()}")
    return {str(path) for folder in (Path("/dev/shm"), counts) if folder.is_dir() for path in folder.iterdir()}


@dataclass
class Server:
    """A running server. log: of all of its processes."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @classmethod
    def start(cls, command: Sequence[str], port: int, log: Path, limit: float) -> "Server":
        """Starts it and waits until it is healthy. Raises RuntimeError where it ends, or takes longer than `limit`."""
        with log.open("wb") as output:
            # In this process's group: who ends that, ends the server.
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", *command],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )
        server, until = cls(process, port, log), time.monotonic() + limit
        while time.monotonic() < until:
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with exit status {process.returncode}; its log: {log}")
            with contextlib.suppress(OSError):
                server.get("/health")
                return server
            time.sleep(0.2)
        server.kill()
        raise RuntimeError(f"the server was not healthy after {limit:.0f} s; its log: {log}")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> str:
        """What the server answers. Raises OSError where it does not."""
        with urllib.request.urlopen(f"{self.url}{path}", timeout=10) as answer:
            return str(answer.read().decode())

    def metrics(self) -> Metrics:
        return Metrics.parse(self.get("/metrics"))

    def processes(self) -> list[int]:
        """The server's processes, its own first."""
        return descendants(self.process.pid)

    def kill(self) -> None:
        """Ends all processes at once, those that outlived the first one excepted."""
        for one in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        self.process.wait()

    def stop(self, limit: float) -> list[str]:
        """Asks the server to end, as an operator does; returns what is wrong with how it ended."""
        processes, before = self.processes()[1:], self.log.stat().st_size
        self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(limit)
        except subprocess.TimeoutExpired:
            self.kill()
            return [f"still running after {limit:.0f} s"]
        failures = [] if status == 0 else [f"exit status {status}, expected 0"]
        time.sleep(1)
        left = [one for one in processes if Path(f"/proc/{one}").exists()]
        if left:
            failures.append(f"{len(left)} of its {len(processes)} other processes are still there")
        with self.log.open(encoding="utf-8", errors="replace") as log:
            log.seek(before)
            bad = [line.strip() for line in log if re.search(r"Traceback|\bERROR\b|leaked", line)]
        return failures + [f"log at the end: {line[:300]}" for line in bad[:5]]
