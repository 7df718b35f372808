"""The soak's script from its start to the server's end, with OpenAI's client and vLLM's requests, and no engine."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import http_phases, server, vllm_one_gpu
from tests.gpu.vllm_one_gpu import read_events


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A soak of seconds, on a host whose nvidia-smi hides processes."""
    monkeypatch.setattr(http_phases, "WARM_SECONDS", 0.5)
    monkeypatch.setattr(http_phases, "READING_SECONDS", 0.3)
    monkeypatch.setattr(server, "query_gpus", lambda what, *more: "" if "apps" in what else "1024\n")
    monkeypatch.setenv("PYTHONPATH", str(vllm_one_gpu.ROOT))
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def phases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, *given: str) -> dict[str, dict[str, Any]]:
    """Runs one server's phases; returns their records."""
    module = "tests.integration.http_server"
    monkeypatch.setattr(http_phases, "serve_command", lambda args, executor, port: [module, str(port), *given])
    work = tmp_path / engine / "".join(given)
    paths = ["--folder", str(tmp_path), "--out", str(work), "--store", str(tmp_path / "store")]
    status = http_phases.main([engine, *paths, "--minutes", "0.06"])
    events = read_events(work / f"{engine}.events.jsonl")
    records = {event["phase"]: event for event in events if event["event"] == "end"}
    assert (status == 0) == all(record["ok"] for record in records.values())
    return records


def test_stock_and_executor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = phases(tmp_path, monkeypatch, "http-stock", "0", "0")
    assert [name for name, one in stock.items() if one["ok"]] == ["start", "soak", "alone", "shutdown"], stock
    assert stock["start"]["data"]["gpu"] == "all processes on its GPUs"
    assert stock["soak"]["data"]["cancelled"] > 3 and len(stock["soak"]["data"]["host"]) >= 6
    assert stock["alone"]["data"]["held"] >= 30 and stock["alone"]["data"]["total"]["rms"] == pytest.approx(0.0071, 0.1)
    good = phases(tmp_path, monkeypatch, "http-executor", "0", "0")
    assert all(one["ok"] for one in good.values()), good
    assert good["soak"]["data"]["steps"]["executor"] > good["soak"]["data"]["steps"]["stock"]
    bad = phases(tmp_path, monkeypatch, "http-executor", "1", "0.5")
    assert [name for name, one in bad.items() if not one["ok"]] == ["alone", "shutdown"]
    assert bad["alone"]["failures"][0].startswith("logits differ by 0.3")
    assert bad["shutdown"]["failures"][0].startswith("left behind: /dev/shm/tests-http-")
    for path in Path("/dev/shm").glob("tests-http-*"):
        path.unlink()


def test_a_server_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = phases(tmp_path, monkeypatch, "http-stock", "no number")
    assert list(found) == ["start"] and found["start"]["failures"][0].startswith("RuntimeError: the server ended with")
    log = (tmp_path / "http-stock" / "no number" / "http-stock.server.log").read_text()
    assert "invalid literal" in log
