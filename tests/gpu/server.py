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
# Lines of a log that tell of something wrong.
WRONG = re.compile(r"Traceback|Error\b|\bERROR\b|leaked")
# What is left of a server's processes after the first one has this long.
GONE_SECONDS = 10.0
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


def alive(process: int) -> bool:
    """Whether a process runs; one that ended stays listed where nobody asks for its exit status."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
        return text.rpartition(")")[2].split()[0] not in ("Z", "X")
    return False


def own_bytes(processes: Iterable[int]) -> int:
    """Anonymous memory of processes: what they share with others or could read again is left out."""
    total = 0
    for process in processes:
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{process}/status").read_text(encoding="utf-8", errors="replace")
            if found := re.search(r"^RssAnon:\s+(\d+) kB", text, re.MULTILINE):
                total += int(found[1]) * 1024
    return total


@dataclass(frozen=True)
class GpuMemory:
    """Reads used GPU memory. own: of the asked processes alone, which some containers cannot tell apart; then it is of
    all processes on the GPUs of CUDA_VISIBLE_DEVICES, and tells of a server only where no other runs there."""

    own: bool

    @classmethod
    def of(cls, processes: Sequence[int]) -> "GpuMemory":
        """The reading that works for processes that hold GPU memory."""
        return cls(own=app_bytes(query_gpus("--query-compute-apps=pid,used_memory"), processes) is not None)

    @property
    def scope(self) -> str:
        return "the server's processes" if self.own else "all processes on its GPUs"

    def read(self, processes: Sequence[int]) -> int:
        """Bytes."""
        if self.own:
            return app_bytes(query_gpus("--query-compute-apps=pid,used_memory"), processes) or 0
        return sum(int(line) << 20 for line in query_gpus("--query-gpu=memory.used", *visible_gpus()).split())


def query_gpus(*options: str) -> str:
    """What nvidia-smi answers."""
    return subprocess.check_output(["nvidia-smi", *options, "--format=csv,noheader,nounits"], text=True)


def visible_gpus() -> list[str]:
    """nvidia-smi's option for the GPUs that this process may use; none for all."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return [f"--id={given}"] if given else []


def app_bytes(listed: str, processes: Sequence[int]) -> int | None:
    """GPU memory of processes, by nvidia-smi's list of `pid, MiB`; None where it has none of them, or no sizes."""
    found = [line.split(",") for line in listed.splitlines() if line.strip()]
    sizes = [size.strip() for process, size in found if process.strip().isdigit() and int(process) in processes]
    return sum(int(size) << 20 for size in sizes) if sizes and all(size.isdigit() for size in sizes) else None


def shared_files(processes: Iterable[int]) -> set[str]:
    """What processes hold open or mapped of shared memory and of the folders of step counts."""
    folders = ("/dev/shm/", f"{Path(tempfile.gettempdir(), f'specialized-decode-{os.getuid()}')}/")
    found = set[str]()
    for process in processes:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process}/maps").read_text(encoding="utf-8", errors="replace").splitlines():
                found.add(line.partition("/")[1] + line.partition("/")[2])
            for link in Path(f"/proc/{process}/fd").iterdir():
                with contextlib.suppress(OSError):
                    found.add(os.readlink(link))
    return {path for path in found if path.startswith(folders) and not path.endswith(" (deleted)")}


def form(line: str) -> str:
    """A log line without what differs from run to run: numbers and addresses."""
    return re.sub(r"0x[0-9a-f]+|\d+", "N", line)


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

    def stop(self, limit: float) -> tuple[list[str], list[str]]:
        """Asks the server to end, as an operator does; returns what is wrong with that, and its log's errors."""
        processes, before = self.processes()[1:], self.log.stat().st_size
        self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(limit)
        except subprocess.TimeoutExpired:
            self.kill()
            return [f"still running after {limit:.0f} s"], []
        failures = [] if status == 0 else [f"exit status {status}, expected 0"]
        until = time.monotonic() + GONE_SECONDS
        while (left := [one for one in processes if alive(one)]) and time.monotonic() < until:
            time.sleep(0.1)
        if left:
            failures.append(f"{len(left)} of its {len(processes)} other processes are still there")
        with self.log.open(encoding="utf-8", errors="replace") as log:
            log.seek(before)
            return failures, [line.strip()[:300] for line in log if WRONG.search(line)]
