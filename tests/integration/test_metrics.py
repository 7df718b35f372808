"""Step counters: from a worker's process to vLLM's own endpoint and log."""

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from specialized_decode.integration import metrics
from specialized_decode.integration.metrics import StepCounts

# What a process of an engine starts with: the same configuration, as far as the counters read it.
_PRELUDE = """
import sys
from types import SimpleNamespace
from specialized_decode.integration import log, metrics
config = SimpleNamespace(instance_id=sys.argv[1], additional_config={"decode_backend": "latency_specialized"})
"""
# A worker: counts what its input says, a line a step, and answers each.
_WORKER = """
log.follow_vllm()
counts = metrics.StepCounts.for_engine(config)
print("ready", flush=True)
for line in sys.stdin:
    reason = line.strip()
    counts.record(reason == "executor", "" if reason == "executor" else reason)
    print("counted", flush=True)
"""


def _start(script: str, *arguments: str, **variables: str) -> "subprocess.Popen[str]":
    """A process of its own, in this test's environment."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "VLLM_LOGGING_LEVEL": "INFO", **variables}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def _worker(instance: str, steps: list[str], **variables: str) -> "subprocess.Popen[str]":
    """A worker that has counted `steps`, and is still there."""
    worker = _start(_PRELUDE + _WORKER, instance, **variables)
    assert worker.stdin is not None and worker.stdout is not None
    while worker.stdout.readline() != "ready\n":
        assert worker.poll() is None
    _count(worker, steps)
    return worker


def _count(worker: "subprocess.Popen[str]", steps: list[str]) -> None:
    assert worker.stdin is not None and worker.stdout is not None
    for step in steps:
        worker.stdin.write(f"{step}\n")
        worker.stdin.flush()
        while worker.stdout.readline() != "counted\n":
            assert worker.poll() is None


def _values(text: str) -> dict[tuple[str, str], float]:
    """specialized_decode:steps_total by its labels, from an endpoint's text."""
    line = re.compile(r'^specialized_decode:steps_total\{by="(.*?)",reason="(.*?)"\} (\S+)$', re.MULTILINE)
    return {(by, reason): float(value) for by, reason, value in line.findall(text)}


def _asked(configuration: Any) -> bool:
    return bool(configuration.additional_config.get("decode_backend") == "latency_specialized")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Temporary files of this test's processes lie here."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.delenv(metrics.MULTIPROCESS, raising=False)
    return tmp_path


@pytest.fixture
def scrape(engine_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], str]:
    """Starts vLLM's Prometheus logger on a configuration and reads /metrics from vLLM's own router."""
    from fastapi import FastAPI
    from fastapi.testclient import TestClient
    from vllm.entrypoints.serve.instrumentator.metrics import attach_router
    from vllm.v1.metrics import loggers

    monkeypatch.setattr(loggers.PrometheusStatLogger, "__init__", loggers.PrometheusStatLogger.__init__)
    for _ in range(2):
        metrics.hook_loggers(loggers, _asked)

    def read(configuration: Any) -> str:
        loggers.StatLoggerManager(configuration, [0])
        app = FastAPI()
        attach_router(app)
        answer = TestClient(app).get("/metrics")
        assert answer.status_code == 200
        assert "vllm:num_requests_running" in answer.text
        return str(answer.text)

    return read


def test_a_workers_steps_are_on_the_endpoint(
    temporary: Path, engine_config: Callable[..., Any], scrape: Callable[[Any], str]
) -> None:
    configuration = engine_config()
    assert _values(scrape(configuration)) == {}, "before the worker counts"
    worker = _worker(configuration.instance_id, ["prefill", "executor", "executor", "eager"])
    try:
        text = scrape(configuration)
        assert "# TYPE specialized_decode:steps_total counter" in text
        expected = {("executor", ""): 2.0, ("stock", "prefill"): 1.0, ("stock", "eager"): 1.0}
        assert _values(text) == expected
        _count(worker, ["executor"] * 1000)
        assert _values(scrape(configuration)) == {**expected, ("executor", ""): 1002.0}
    finally:
        worker.communicate()
    assert "specialized_decode:steps_total" not in scrape(configuration), "the engine's folder goes with its worker"


def test_engines_of_one_process_add_up(
    temporary: Path, engine_config: Callable[..., Any], scrape: Callable[[Any], str]
) -> None:
    """One that was shut down, and the one built after it; a counter never falls."""
    first = StepCounts.for_engine(before := engine_config())
    first.record(True)
    assert _values(scrape(before)) == {("executor", ""): 1.0}
    first.close()
    second = StepCounts.for_engine(after := engine_config())
    assert before.instance_id != after.instance_id
    second.record(True)
    second.record(False, "prefill")
    assert _values(scrape(after)) == {("executor", ""): 2.0, ("stock", "prefill"): 1.0}
    second.close()


def test_nothing_is_shown_where_the_executor_was_not_asked_for(
    temporary: Path, engine_config: Callable[..., Any], scrape: Callable[[Any], str]
) -> None:
    scrape(engine_config(additional_config={}))
    assert list(temporary.glob("specialized-decode*")) == []


def test_several_api_servers(temporary: Path, engine_config: Callable[..., Any], monkeypatch: Any) -> None:
    """They share a folder that vLLM makes, and each shows all of it."""
    from prometheus_client import generate_latest
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    shared = temporary / "shared"
    shared.mkdir()
    monkeypatch.setenv(metrics.MULTIPROCESS, str(shared))
    configuration = engine_config()
    worker = _worker(configuration.instance_id, ["executor", "prefill"])
    metrics.collect(configuration)
    try:
        values = _values(generate_latest(get_prometheus_registry()).decode())
    finally:
        worker.communicate()
    assert values == {("executor", ""): 1.0, ("stock", "prefill"): 1.0}
    (file,) = shared.glob("*.db")
    assert file.name == f"counter_specialized-decode-{worker.pid}.db"

    # Two engines of one process, one after the other, write to one file.
    for _ in range(2):
        counts = StepCounts.for_engine(configuration)
        counts.record(True)
        counts.close()
    assert _values(generate_latest(get_prometheus_registry()).decode())["executor", ""] == 3.0


def test_a_folder_of_another_user_is_not_written_to(
    temporary: Path, engine_config: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    (elsewhere := temporary / "elsewhere").mkdir()
    (temporary / f"specialized-decode-{os.getuid()}").symlink_to(elsewhere)
    metrics.collect(engine_config())
    counts = StepCounts.for_engine(engine_config())
    counts.record(True)
    assert counts.counts == {("executor", ""): 1}
    assert list(elsewhere.iterdir()) == []
    warned = [record.getMessage() for record in caplog.records if record.name.startswith("specialized_decode")]
    assert [line.split(":")[0] for line in warned] == [
        "Steps are not on the endpoint",
        "Steps are counted in the log alone",
    ]
    counts.close()


def test_folder_is_private(temporary: Path, engine_config: Callable[..., Any]) -> None:
    path = metrics.folder(engine_config())
    assert [folder.stat().st_mode & 0o777 for folder in (path, path.parent)] == [0o700, 0o700]


# The log.


def test_workers_log() -> None:
    """In vLLM's own format and among its lines: a line while there are new steps, and the rest at the end."""
    script = """
    import time
    from vllm.config import LoggingConfig
    from vllm.logger import configure_logging_if_needed
    log.follow_vllm()
    configure_logging_if_needed(LoggingConfig())
    counts = metrics.StepCounts(None, 0.2)
    for reasons in (["", "", "prefill"], [], ["eager", "eager", "prefill"]):
        for reason in reasons:
            counts.record(not reason, reason)
        time.sleep(0.5)
    counts.record(True)
    """
    worker = _start(_PRELUDE + textwrap.dedent(script), "1")
    output, _ = worker.communicate(timeout=120)
    line = re.compile(r"^(?:\(.*?\) )?INFO \d\d-\d\d \d\d:\d\d:\d\d \[.*metrics\.py:\d+\] (Steps: .*)$", re.MULTILINE)
    assert line.findall(output) == [
        "Steps: 2 by the executor, 1 on the stock layers: 1 prefill; "
        "in all 2 by the executor, 1 on the stock layers: 1 prefill",
        "Steps: 0 by the executor, 3 on the stock layers: 2 eager, 1 prefill; "
        "in all 2 by the executor, 4 on the stock layers: 2 prefill, 2 eager",
        "Steps: 1 by the executor, 0 on the stock layers; "
        "in all 3 by the executor, 4 on the stock layers: 2 prefill, 2 eager",
    ]


def _child(path: str) -> None:
    """Counts a step, and ends without closing."""
    import logging

    handler = logging.FileHandler(path)
    logging.getLogger("specialized_decode").addHandler(handler)
    logging.getLogger("specialized_decode").setLevel(logging.INFO)
    _child.counts = StepCounts(None, 60.0)  # type: ignore[attr-defined]
    _child.counts.record(True)  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_last_steps_are_logged_when_a_process_ends(tmp_path: Path, method: Any) -> None:
    """Forked processes run no atexit handlers."""
    process = get_context(method).Process(target=_child, args=(str(tmp_path / "log"),))
    process.start()
    process.join()
    said = "1 by the executor, 0 on the stock layers"
    assert (tmp_path / "log").read_text() == f"Steps: {said}; in all {said}\n"


def test_nothing_new_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "specialized_decode")
    counts = StepCounts(None, 0)
    counts.close()
    assert caplog.records == []
    counts = StepCounts(None, 0)
    counts.record(False, "no graph")
    del counts
    (record,) = caplog.records
    assert record.getMessage().startswith("Steps: 0 by the executor, 1 on the stock layers: 1 no graph;")
