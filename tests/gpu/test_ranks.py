"""The two-GPU script's own logic: what it starts, and that it finds ranks that differ or were not named."""

import os
import queue
import signal
import subprocess
import sys
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import ranks, two_gpu_phases, vllm_two_gpus
from tests.gpu.compare import Difference
from tests.gpu.engine import Outputs
from tests.gpu.outputs import Recorded
from tests.gpu.rank_worker import row_hashes
from tests.gpu.ranks import Alike, compare_ranks, long_script
from tests.gpu.scenarios import MAX_ROWS, largest_batch
from tests.gpu.two_gpu_phases import (
    EXECUTOR_OUTPUTS,
    NAMES,
    STOCK_OUTPUTS,
    check_ranks,
    judge_long,
    lacking_failures,
    lost_failures,
    steps_until_error,
)
from tests.gpu.worker_plugin import LACKING, NAME, REPEATABLE, STALLING, write_metadata

JOBS = """
checkpoint tp2-stock tp2-executor tp2-plain lacking killed stopped http-stock http-executor
checkpoint-drafts drafts-stock drafts-executor vision-stock vision-executor
"""


def taken(hidden: list[int], logits: list[list[float]]) -> dict[str, Any]:
    return {"hidden": torch.tensor(hidden), "recordings": {"a": (torch.tensor(logits),)}}


def test_hashes_tell_values_and_places_apart() -> None:
    rows = torch.randn(3, 5120).bfloat16()
    swapped, other = rows.clone(), rows.clone()
    swapped[0, [7, 9]] = rows[0, [9, 7]]
    other[1, 5119] = -rows[1, 5119]
    first = row_hashes(rows)
    assert torch.equal(first, row_hashes(rows.clone()))
    assert (row_hashes(swapped) != first).tolist() == [True, False, False]
    assert (row_hashes(other) != first).tolist() == [False, True, False]


def test_ranks_are_compared_bit_for_bit() -> None:
    nan = float("nan")
    same = taken([1, 2], [[1.0, 2.0], [nan, nan]])
    assert compare_ranks([same, same]) == Alike(2, 0, 0)
    assert compare_ranks([same, taken([1, 3], [[1.0, 2.0], [nan, nan]])]) == Alike(2, 1, 0)
    assert compare_ranks([taken([1], [[0.0]]), taken([1], [[-0.0]])]) == Alike(1, 0, 1)
    apart = compare_ranks([taken([1], [[0.0, 1.0]]), taken([1], [[0.0, 2.0]])])
    assert apart.first.startswith("rank 1: a: step 0: logit of id 1 found 2, expected 1")
    hidden = compare_ranks([same, same]) + compare_ranks([same, taken([1, 3], [[1.0, 2.0], [nan, nan]])]) + apart
    assert hidden.first == "rank 1: hidden state 1 of 2"
    with pytest.raises(RuntimeError, match="rank 1: found 1 rows"):
        compare_ranks([same, taken([1], [[1.0, 2.0], [nan, nan]])])
    assert check_ranks(Alike(5, 0, 0)) == []
    assert check_ranks(Alike(5, 0, 1)) and check_ranks(Alike(5, 1, 0)) and check_ranks(Alike())


def test_the_script_changes_batches_for_all_its_steps() -> None:
    script = long_script(1000)
    assert script[0].output_tokens == 1000
    assert len({request.name for request in script}) == len(script)
    assert any(request.abort for request in script)
    assert 4 < largest_batch(script) <= MAX_ROWS
    assert max(request.step + request.output_tokens for request in script[1:]) < 1010


def test_rows_that_stock_repeats_are_exact() -> None:
    same, noisy = Difference(steps=4), Difference(steps=4, differing=1, largest=0.1, rms=0.01)
    recorded = Recorded([], [{"a": same, "b": noisy}], noisy)
    assert judge_long({"a": same, "b": noisy}, recorded, "identical") == []
    assert judge_long({"a": noisy, "b": noisy}, recorded, "identical")[0].startswith("a: logits differ in 1 of 4")
    assert judge_long({"a": same, "b": replace(noisy, rms=0.02)}, recorded, "identical")
    # How far other kernels may be from stock is not stock's to say: the plain model judges it.
    far = Difference(steps=4, differing=4, largest=3.0, rms=2.0, argmax_differs=2, gap=2.5)
    assert judge_long({"a": far, "b": far}, recorded, "close") == []
    assert len(judge_long({"a": replace(far, gap=3.5), "b": far}, recorded, "close")) == 1
    assert len(judge_long({"a": replace(far, broken=1), "b": far}, recorded, "close")) == 1
    assert judge_long({"a": same}, recorded, "close") == ["requests: found 1, expected stock's 2"]


def test_both_ranks_say_what_is_missing() -> None:
    first, second = "x here, less on another rank; expected", "found VLLM_HUMMING_USE_F16_ACCUM=1; expected none"
    took = "rank 0: refused after 1.250 s\nrank 1: refused after 1.300 s"
    assert lacking_failures(f"{first}\n{second}\n{took}") == []
    assert len(lacking_failures(f"{first}\n{took}")) == len(lacking_failures(f"{second}\n{took}")) == 1
    assert lacking_failures(f"{first}\n{second}") == ["found ranks [] refusing, expected [0, 1]"]
    late = took.replace("1.300", "31.300")
    assert lacking_failures(f"{first}\n{second}\n{late}") == ["rank 1: raised after 31.3 s, expected at most 10 s"]


@pytest.mark.parametrize(
    "log", ["row 0 of rank 1 did not come within 10 s", "found rank 1 (process 77) ended", "VllmWorker-1 died"]
)
def test_the_lost_rank_is_named_in_time(log: str) -> None:
    assert lost_failures("EngineDeadError", 12, log, 77, NAMES) == []
    assert lost_failures("EngineDeadError", 26, log, 77, NAMES) == [
        "the engine ended after 26.0 s, expected at most 25 s"
    ]
    assert lost_failures("", 12, log, 77, NAMES) == ["the engine went on, expected an error"]
    (failure,) = lost_failures("EngineDeadError", 12, "rank 0 (process 7) ended", 77, NAMES)
    assert failure == "nothing names rank 1; the last line: ['rank 0 (process 7) ended']"


def test_a_stopped_rank_is_named_by_the_executor() -> None:
    vllm = "VllmWorker-1 died"
    assert lost_failures("EngineDeadError", 12, "row 0 of rank 1 did not come", 77, NAMES[:1]) == []
    (failure,) = lost_failures("EngineDeadError", 12, vllm, 77, NAMES[:1])
    assert failure.startswith("nothing names rank 1")


class Stepping:
    """Steps that end with an error at the third, or never."""

    def __init__(self, fails: bool, hangs: bool = False) -> None:
        self.steps, self.fails, self.hangs = 0, fails, hangs

    def has_unfinished_requests(self) -> bool:
        return True

    def step(self) -> None:
        self.steps += 1
        if self.fails and self.steps == 3:
            raise RuntimeError("EngineCore ended")
        if self.hangs:
            queue.Queue[int]().get()
        time.sleep(0.01)


def test_an_engine_is_stepped_until_its_error_or_the_limit() -> None:
    assert steps_until_error(Stepping(fails=True), 5) == "RuntimeError: EngineCore ended"
    for hangs in (False, True):
        began = time.monotonic()
        assert steps_until_error(Stepping(fails=False, hangs=hangs), 0.3) == ""
        assert 0.2 < time.monotonic() - began < 2
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


class Losing:
    """An engine whose second rank is a process that sleeps; its steps end once that is gone, and its log says so."""

    def __init__(self, log: Path, says: str, ends_by_itself: bool) -> None:
        self.log, self.says, self.ends = log, says, ends_by_itself
        self.rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        self.pids, self.llm, self.llm_engine = [os.getpid(), self.rank.pid], self, self
        self.stalls, self.steps = 0, 0

    def add_request(self, *args: Any) -> None:
        assert args[0].startswith("lost-")

    def has_unfinished_requests(self) -> bool:
        return True

    def collective_rpc(self, name: str) -> list[bool]:
        assert name == "tests_stall"
        self.stalls += 1
        return [False, True]

    def step(self) -> None:
        self.steps += 1
        time.sleep(0.001)
        if self.stalls and (self.ends or self.rank.poll() is not None):
            self.log.write_text("before\n" + self.says.format(process=self.rank.pid))
            raise RuntimeError("EngineCore encountered an issue")


@pytest.mark.parametrize(
    ("how", "says", "wrong"),
    [
        (signal.SIGKILL, "Worker proc VllmWorker-1 died unexpectedly", ""),
        (signal.SIGKILL, "found rank 1 (process {process}) ended", ""),
        (signal.SIGKILL, "found rank 1 (process 1) ended", "nothing names rank 1; the last line: ['found rank 1"),
        (None, "row 0 of rank 1 did not come within 10 s", ""),
        (None, "Worker proc VllmWorker-1 died unexpectedly", "nothing names rank 1"),
    ],
)
def test_a_rank_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: signal.Signals | None, says: str, wrong: str
) -> None:
    args: Any = Namespace(engine="killed", out=tmp_path, executor_option='{"decode_kernels": true}', expect="identical")
    (tmp_path / "killed.log").write_text("before\n")
    engine = Losing(tmp_path / "killed.log", says, ends_by_itself=how is None)
    asked: list[Any] = []

    def start(args: Any, executor: Any, **more: Any) -> Losing:
        asked.append((executor, more))
        return engine

    monkeypatch.setattr(two_gpu_phases, "start", start)
    monkeypatch.setattr(two_gpu_phases, "parameters", lambda *given, **more: None)
    try:
        report = two_gpu_phases.check_lost(args, how)
        assert (engine.rank.poll() == -signal.SIGKILL) == (how is not None)
    finally:
        engine.rank.kill()
        engine.rank.wait()
    assert asked[0][0]["decode_kernels"] is True and asked[0][1] == {"load_format": "dummy"}
    assert engine.steps > 100 and engine.stalls == 1
    assert [failure[: len(wrong)] for failure in report.failures] == [wrong] * bool(wrong)
    assert "EngineCore encountered an issue" in report.line


def test_nothing_outlives_the_end() -> None:
    """A child that takes no signal to end, and its own child."""
    sleep = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    program = f"""
import subprocess, sys
from tests.gpu.two_gpu_phases import end_now
child = subprocess.Popen([sys.executable, "-c", {sleep!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid)
end_now(3)
"""
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=vllm_two_gpus.ROOT)
    assert done.returncode == 3
    state = Path(f"/proc/{int(done.stdout)}/stat")
    time.sleep(0.2)
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_requests_alone_have_the_prompts_that_they_have_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def traffic(engine: Any, requests: Any, forced: Any, seeds: Any) -> Any:
        asked.append((requests, forced, seeds))
        (request,) = requests
        return Outputs({request.name: [1]}, {request.name: torch.zeros(1, 2)}), 1

    monkeypatch.setattr(ranks, "run_traffic", traffic)
    script = long_script(1000)
    outputs = Outputs({request.name: [len(request.name)] for request in script}, {})
    engine: Any = None
    found = ranks.run_alone(engine, script, outputs)
    assert list(found.tokens) == list(found.logits) == list(ranks.ALONE)
    for ((request,), forced, seeds), name in zip(asked, ranks.ALONE, strict=True):
        (given,) = (one for one in script if one.name == name)
        assert request == replace(given, step=0) and given.abort is None
        assert forced == {name: outputs.tokens[name]} and script[seeds[name]] == given
    assert {request.prompt_tokens for ((request,), *_) in asked} == {1, 127, 2, 300, 129, 40, 3000, 513}


def test_jobs(tmp_path: Path) -> None:
    args = vllm_two_gpus.arguments(["--out", str(tmp_path), "--work", str(tmp_path / "w")])
    found = {job.name: job for job in vllm_two_gpus.jobs(args)}
    assert list(found) == JOBS.split()
    assert found["tp2-stock"].environment["VLLM_PLUGINS"] == NAME
    assert found["tp2-executor"].environment["VLLM_PLUGINS"] == f"specialized_decode,{NAME}"
    assert found["tp2-executor"].environment[REPEATABLE] == found["lacking"].environment[LACKING] == "1"
    for name in ("killed", "stopped"):
        assert '{"decode_kernels": true}' in found[name].command
        assert found[name].environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == found[name].environment[STALLING] == "1"
    assert "--minutes 1 " in " ".join(found["http-stock"].command)
    assert "--minutes 5 " in " ".join(found["http-executor"].command)
    assert found["http-executor"].files == (tmp_path / "w" / "store" / "http.json",)
    assert found["http-executor"].seconds < args.budget
    for kind, stored in (("drafts", "drafts.pt"), ("vision", "vision.pt")):
        stock, executor = found[f"{kind}-stock"], found[f"{kind}-executor"]
        assert stock.environment == {"VLLM_PLUGINS": ""} and executor.environment == {}
        assert executor.files == (args.store / stored,) and stock.command[3] == executor.command[3]
    assert found["drafts-stock"].command[3] == found["checkpoint-drafts"].command[2]
    assert found["vision-stock"].command[3] == found["checkpoint-drafts"].command[2]
    plain = found["tp2-plain"]
    assert plain.files == tuple(args.store / name for name in (STOCK_OUTPUTS, EXECUTOR_OUTPUTS))
    assert plain.command[3] == found["tp2-executor"].command[3] and plain.environment == {}
    assert found["tp2-executor"].files == plain.files[:1]
    for name in [one for one in JOBS.split()[1:9] if one != "tp2-plain"]:
        assert found[name].environment["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
        assert found[name].command[1] == name


def test_the_plugin_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import entry_points

    write_metadata(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (entry,) = (one for one in entry_points(group="vllm.general_plugins") if one.name == NAME)
    assert entry.load().__name__ == "register"
