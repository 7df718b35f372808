"""The benchmark of decode steps on a CPU runs, and says when its goal is missed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks.decode_cpu import GOAL_PEAK_GB, GOAL_STEPS_PER_SECOND, main, misses
from benchmarks.results import Result, Run, Times, commit, write_gpu_result
from tools import tables

MET = Times.of([0.9 / GOAL_STEPS_PER_SECOND] * 3)
MISSED = Times.of([1.1 / GOAL_STEPS_PER_SECOND] * 3)
RUN = Run(rows=1, context=(1,), steps=3, plain_ms=MISSED, executor_ms=MET, identical_tokens=3, tokens=3)
RESULT = Result("b", "c", "tiny", 1, 64, 1, 32, 2, "a CPU", "2.11", GOAL_PEAK_GB / 2, (RUN,))


def test_quartiles_in_milliseconds() -> None:
    assert Times.of([0.005, 0.001, 0.004, 0.002, 0.003]) == Times(median=3.0, q1=2.0, q3=4.0)


def test_goal_met() -> None:
    assert not misses(RESULT)


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (replace(RESULT, runs=(replace(RUN, executor_ms=MISSED),)), "executor: found 13.6 steps/s"),
        (replace(RESULT, runs=(replace(RUN, identical_tokens=2),)), "tokens: found 2 of 3 identical"),
        (replace(RESULT, peak_gb=GOAL_PEAK_GB), "peak memory: found 1.50 GB"),
    ],
)
def test_goal_missed(result: Result, said: str) -> None:
    (miss,) = misses(result)
    assert miss.startswith(said)


def test_runs(tiny_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "results" / "decode_cpu.json"
    outcome = CliRunner().invoke(main, ["--folder", str(tiny_folder), "--steps", "2", "--out", str(out)])
    assert outcome.exit_code == 0, outcome.output
    (run,) = json.loads(out.read_text())["runs"]
    assert run["rows"] == 3
    assert run["identical_tokens"] == run["tokens"] == 15


def test_refuses_a_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("keep")
    outcome = CliRunner().invoke(main, ["--folder", str(tmp_path), "--out", str(tmp_path / "r.json")])
    assert outcome.exit_code == 2
    assert (tmp_path / "mine").read_text() == "keep"


def test_a_result_of_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables can be made of it; a commit that was given goes before the checkout's."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    runs = [{"rows": 1, "us": {"kernels": {"median": 2.0, "q1": 1.0, "q3": 3.0}}}]
    path = tmp_path / "new" / "attention_step_gpu.json"
    write_gpu_result(path, "attention_step", "0123abc", {"ranks": 4, "context": 9, "replays": 7, "runs": runs})
    found = json.loads(path.read_text())
    assert (found["benchmark"], found["commit"], found["device"]) == ("attention_step_gpu", "0123abc", "a GPU")
    assert tables.table(found).splitlines()[2] == "| kernels | 2.00 (1.00 to 3.00) |"
    write_gpu_result(path, "attention_step", None, {})
    assert json.loads(path.read_text())["commit"] == commit()
