"""Steps by the executor and by the stock layers, in vLLM's log and on its Prometheus endpoint.

A worker counts; the API server, another process, serves /metrics. The counts travel in a file of prometheus_client's
own multi-process format: its values are updated in place, so that nothing is sent in a step. Where several API servers
share PROMETHEUS_MULTIPROC_DIR, each of them collects that folder already, and the file lies there. Elsewhere it lies
in a folder of this engine's, which `collect` adds to the registry of the process that serves the endpoint.
"""

import functools
import logging
import os
import shutil
import stat
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable
from multiprocessing.util import Finalize
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Metric
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

NAME, HELP = "specialized_decode:steps", "Forward steps by what ran their layers, and why the stock layers did."
LABELS = ("by", "reason")
MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"

# by ("executor" or "stock") and reason.
Key = tuple[str, str]


class StepCounts:
    """Counts an engine's steps, writes them where the endpoint finds them, and logs them.

    folder: for the file, None for none; interval: seconds between two lines of the log, 0 for none but the last.
    """

    def __init__(self, folder: Path | None, interval: float) -> None:
        self._file = None if folder is None else _CountsFile(folder)
        if self._file is not None:
            self._file.add("executor", "", 0)
        self._log, stop = _Log(), threading.Event()
        if interval > 0:
            regularly = threading.Thread(target=self._log.regularly, args=(stop, interval), daemon=True)
            regularly.name = "step counts"
            regularly.start()
        # Also when the counts are dropped without being closed, and when the process exits, forked or not.
        self._finish = Finalize(self, _finish, (self._log, stop), exitpriority=0)

    @classmethod
    def for_engine(cls, vllm_config: "VllmConfig") -> "StepCounts":
        """The counts of an engine, for one of its ranks to keep: counts of several would add up."""
        import vllm.envs as envs

        interval = envs.VLLM_LOG_STATS_INTERVAL
        try:
            return cls(folder(vllm_config), interval)
        except OSError as error:
            logger.warning("Steps are counted in the log alone: %s", error)
            return cls(None, interval)

    @property
    def counts(self) -> Counter[Key]:
        """All steps so far."""
        return self._log.counts

    def record(self, executor: bool, reason: str = "") -> None:
        """Counts a step by the executor, or one on the stock layers for `reason`."""
        key = ("executor", "") if executor else ("stock", reason)
        self.counts[key] += 1
        if self._file is not None:
            self._file.add(*key, 1)

    def close(self) -> None:
        """Logs what was not yet logged. The counts stay on the endpoint as they are."""
        self._finish()


def folder(vllm_config: "VllmConfig") -> Path:
    """Where an engine's counts lie: the same answer in all of its processes on a host.

    Raises OSError where the folder is not this user's own.
    """
    if shared := os.environ.get(MULTIPROCESS):
        return Path(shared)
    root = Path(tempfile.gettempdir(), f"specialized-decode-{os.getuid()}")
    engine = root / vllm_config.instance_id
    for path in (root, engine):
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise OSError(f"{path}: expected a folder of user {os.getuid()}, found one that others may write")
    _remove_at_exit(engine)
    return engine


def collect(vllm_config: "VllmConfig") -> None:
    """Lets this process's endpoint show an engine's counts, from now until the process ends."""
    from prometheus_client import REGISTRY

    if os.environ.get(MULTIPROCESS):
        return
    try:
        _collector(REGISTRY).folders.add(folder(vllm_config))
    except OSError as error:
        logger.warning("Steps are not on the endpoint: %s", error)


def hook_loggers(loggers: ModuleType, asked: Any) -> None:
    """Makes vLLM's Prometheus logger, in the process that serves the endpoint, collect the counts too.

    loggers: vllm.v1.metrics.loggers; asked: vllm_config -> whether the executor was asked for.
    """
    stock = loggers.PrometheusStatLogger.__init__
    if hasattr(stock, "__wrapped__"):
        return

    @functools.wraps(stock)
    def init(self: Any, vllm_config: "VllmConfig", engine_indexes: list[int] | None = None) -> None:
        stock(self, vllm_config, engine_indexes)
        if asked(vllm_config):
            collect(vllm_config)

    loggers.PrometheusStatLogger.__init__ = init


class _CountsFile:
    """Counters in a file of this process's own, in prometheus_client's multi-process format."""

    def __init__(self, path: Path) -> None:
        from prometheus_client.mmap_dict import MmapedDict, mmap_key

        # The part before the first _ names the type of metric; the rest only has to be this process's own.
        self._values = MmapedDict(str(path / f"counter_specialized-decode-{os.getpid()}.db"))
        self._key = functools.cache(lambda *labels: mmap_key(NAME, f"{NAME}_total", list(LABELS), list(labels), HELP))

    def add(self, by: str, reason: str, amount: int) -> None:
        """Adds to the value in the file: an earlier engine of this process may have counted there."""
        key = self._key(by, reason)
        value, _ = self._values.read_value(key)
        self._values.write_value(key, value + amount, 0.0)


class _Log:
    """The counts, and what of them is in the log."""

    def __init__(self) -> None:
        self.counts: Counter[Key] = Counter()
        self._logged: Counter[Key] = Counter()

    def write(self) -> None:
        """Logs what was counted since the last line, if anything was."""
        counts = self.counts.copy()
        new = counts - self._logged
        if new:
            self._logged = counts
            logger.info("Steps: %s; in all %s", _describe(new), _describe(counts))

    def regularly(self, stop: threading.Event, interval: float) -> None:
        while not stop.wait(interval):
            self.write()


def _finish(log: _Log, stop: threading.Event) -> None:
    stop.set()
    log.write()


class _StepsCollector:
    """Shows the counts of this process's engines."""

    def __init__(self) -> None:
        self.folders: set[Path] = set()

    def describe(self) -> "Iterable[Metric]":
        from prometheus_client.core import CounterMetricFamily

        return [CounterMetricFamily(NAME, HELP, labels=LABELS)]

    def collect(self) -> "Iterable[Metric]":
        from prometheus_client.multiprocess import MultiProcessCollector

        files = [str(file) for path in self.folders for file in path.glob("counter_*.db")]
        try:
            merged: Iterable[Metric] = MultiProcessCollector.merge(files)
        except FileNotFoundError:
            # The worker is ending, and has removed its folder.
            return []
        return merged


@functools.cache
def _collector(registry: "CollectorRegistry") -> _StepsCollector:
    collector = _StepsCollector()
    registry.register(collector)
    return collector


@functools.cache
def _remove_at_exit(path: Path) -> None:
    Finalize(None, shutil.rmtree, (path,), {"ignore_errors": True}, exitpriority=0)


def _describe(counts: Counter[Key]) -> str:
    """`12 by the executor, 3 on the stock layers: 2 prefill, 1 no graph`."""
    stock = [(reason, count) for (by, reason), count in counts.most_common() if by == "stock" and count]
    said = f"{counts['executor', '']} by the executor, {sum(count for _, count in stock)} on the stock layers"
    return said + (": " + ", ".join(f"{count} {reason}" for reason, count in stock) if stock else "")
