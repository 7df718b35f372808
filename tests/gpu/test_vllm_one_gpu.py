"""The script around the engine processes: what it starts, ends, keeps and says."""

import json
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import vllm_one_gpu
from tests.gpu.report import Report, Run
from tests.gpu.vllm_one_gpu import (
    FIRST_PHASE_SECONDS,
    Job,
    Session,
    arguments,
    compare_times,
    jobs,
    main,
    overdue,
    read_events,
    stored,
    table,
)


def record(engine: str, phase: str, ok: bool = True, **data: Any) -> dict[str, Any]:
    failures = [] if ok else ["why"]
    return {
        "engine": engine,
        "phase": phase,
        "ok": ok,
        "seconds": 1.25,
        "line": "said",
        "failures": failures,
        "data": data,
    }


@pytest.fixture
def session(tmp_path: Path) -> Session:
    args = arguments(["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work"), "--models", str(tmp_path)])
    args.work.mkdir()
    return Session(args, time.monotonic(), {})


def module(folder: Path, text: str) -> dict[str, str]:
    """Writes a module `job` and returns the environment that finds it."""
    (folder / "job.py").write_text(text)
    return {"PYTHONPATH": str(folder)}


EVENTS = """
import json, pathlib, sys, time
def tell(**event):
    with pathlib.Path(sys.argv[1]).open("a") as file:
        file.write(json.dumps(event | {"time": time.time()}) + "\\n")
def end(phase, ok):
    failures = [] if ok else ["bad"]
    tell(event="end", engine="it", phase=phase, ok=ok, seconds=0.1, line="done", failures=failures, data={})
def start(phase, limit=9):
    tell(event="start", phase=phase, limit=limit)
"""


def job(session: Session, tmp_path: Path, text: str, **more: Any) -> Job:
    command = ("job", str(session.args.work / "it.events.jsonl"))
    return Job("it", command, 1, environment=module(tmp_path, EVENTS + text), **more)


def test_phases_become_records(session: Session, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "start('a')\nend('a', True)\nstart('b')\nend('b', True)"
    session.run(job(session, tmp_path, text))
    assert [(r["phase"], r["ok"]) for r in session.records["it"]] == [("a", True), ("b", True)]
    assert session.passed("it")
    assert "it a: ok in 0.1 s: done" in capsys.readouterr().out
    assert json.loads((session.args.work / "records.json").read_text()) == session.records


def test_what_passed_is_run_again_with_another_command(session: Session, tmp_path: Path) -> None:
    """Other phases or options of the executor have not passed yet."""
    first = job(session, tmp_path, "end('a', True)")
    session.run(first)
    assert session.passed("it", first.command)
    session.run(replace(first, command=(*first.command, "--only", "b")))
    assert session.records["it"][0]["command"][-1] == "b"
    assert not session.passed("it", first.command)


def test_failed_phase_fails_the_job(session: Session, tmp_path: Path) -> None:
    session.run(job(session, tmp_path, "end('a', True)\nend('b', False)\nsys.exit(1)"))
    assert [r["ok"] for r in session.records["it"]] == [True, False]
    assert not session.passed("it")


def test_a_process_that_dies_fails_even_after_good_phases(
    session: Session, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "end('a', True)\nstart('b')\nprint('last words', flush=True)\nsys.exit(3)"
    session.run(job(session, tmp_path, text))
    good, bad = session.records["it"]
    assert good["ok"]
    assert (bad["phase"], bad["failures"]) == ("b", ["ended with exit status 3"])
    assert "| last words" in capsys.readouterr().out


def test_a_phase_past_its_limit_is_ended(session: Session, tmp_path: Path) -> None:
    begin = time.monotonic()
    text = f"sys.path.insert(0, {str(vllm_one_gpu.ROOT)!r})\nfrom tests.gpu.evidence import tell_on_signal\n"
    session.run(job(session, tmp_path, f"{text}tell_on_signal()\nstart('slow', 0.5)\ntime.sleep(60)"))
    assert time.monotonic() - begin < 30
    (bad,) = session.records["it"]
    assert bad["causes"][0].startswith("stands in job.py:")
    assert (bad["phase"], bad["failures"]) == ("slow", ["slow: ran into its limit of 0 s"])


def test_the_budget_ends_a_job(session: Session, tmp_path: Path) -> None:
    session.args.budget = 3
    session.run(job(session, tmp_path, "start('a', 99)\ntime.sleep(60)"))
    (bad,) = session.records["it"]
    assert bad["failures"] == ["it: the budget of 3 s is spent"]


def test_jobs_that_cannot_run_are_not_started(session: Session, tmp_path: Path) -> None:
    session.run(job(session, tmp_path, "end('a', True)", needs=("before",)))
    assert session.records["it"][0]["failures"] == ["not run: before did not pass"]
    session.run(job(session, tmp_path, "end('a', True)", files=(tmp_path / "absent", tmp_path)))
    assert session.records["it"][0]["failures"] == [f"not run: found no {tmp_path}/absent"]
    session.args.budget = 0.5
    session.run(job(session, tmp_path, "end('a', True)"))
    assert session.records["it"][0]["line"].endswith("s left, expected to take 1 s")


def test_a_passed_job_is_not_run_again_unless_asked(session: Session, tmp_path: Path) -> None:
    session.run(job(session, tmp_path, "end('a', True)"))
    session.run(job(session, tmp_path, "end('again', True)"))
    assert [r["phase"] for r in session.records["it"]] == ["a"]
    session.args.again = True
    session.run(job(session, tmp_path, "end('again', True)"))
    assert [r["phase"] for r in session.records["it"]] == ["again"]


def test_a_job_without_phases(session: Session, tmp_path: Path) -> None:
    session.run(job(session, tmp_path, "print('a bar\\rwrote it')", phased=False))
    assert (session.records["it"][0]["ok"], session.records["it"][0]["line"]) == (True, "wrote it")
    session.args.again = True
    session.run(job(session, tmp_path, "sys.exit(1)", phased=False))
    assert session.records["it"][0]["failures"] == ["ended with exit status 1"]


def test_run_records_what_a_phase_says_and_raises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = arguments(["--out", str(tmp_path)])
    args.engine = "it"
    run = Run(args)

    def broken() -> Report:
        raise RuntimeError("from the middle")

    assert run.phase("good", 5, lambda: Report("fine", data={"a": 1}))
    assert not run.phase("wrong", 5, lambda: Report("odd", ["not as expected"]))
    assert not run.phase("raises", 5, broken)
    capsys.readouterr()
    events = read_events(run.events)
    assert [(e["event"], e["phase"]) for e in events] == [
        (kind, phase) for phase in ("good", "wrong", "raises") for kind in ("start", "end")
    ]
    assert [r["failures"] for r in run.records] == [[], ["not as expected"], ["RuntimeError: from the middle"]]
    assert events[1]["data"] == {"a": 1}


WORKER = "(Worker_TP1 pid=7) ERROR 11-30 12:00:00 [a.py:1] "


def test_what_a_failed_phase_leaves(session: Session, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its workers' exceptions, of its own log and of a server's; not those of a phase that passed before it."""
    log = session.args.work / "it.log"
    trace = "print({0!r} + 'Traceback (most recent call last):\\n' + {0!r} + {1!r}, flush=True)"
    (session.args.work / "it.server.log").write_text("Traceback (most recent call last):\nOSError: the server's\n")
    text = f"""
import os
start("a")
{trace.format(WORKER, "ValueError: expected here")}
end("a", True)
tell(event="start", phase="b", limit=9, log=os.fstat(1).st_size)
{trace.format(WORKER, "ValueError: the reason " + "x" * 400)}
end("b", False)
sys.exit(1)
"""
    session.run(job(session, tmp_path, text))
    good, bad = session.records["it"]
    assert "causes" not in good and log.exists()
    assert [cause[:25] for cause in bad["causes"]] == ["Worker_TP1: ValueError: t", "OSError: the server's"]
    assert max(map(len, bad["causes"])) == 300 and len(bad["tracebacks"][0]) > 400
    assert "    log: Worker_TP1: ValueError: the reason" in capsys.readouterr().out


def test_many_failures_are_printed_in_part(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    many = record("it", "a", ok=False) | {"failures": [f"{i} " + "y" * 500 for i in range(20)], "causes": []}
    session.say_record(many)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10 and lines[-1].endswith("and 12 more, in its record")
    assert all(len(line) < 330 for line in lines)


def test_a_run_says_where_its_log_stands(tmp_path: Path) -> None:
    """By bytes of its standard output, if that is a file."""
    program = "from tests.gpu.report import written; print('twelve bytes', end=''); print(written())"
    with (tmp_path / "log").open("w") as output:
        subprocess.run([sys.executable, "-c", program], stdout=output, cwd=vllm_one_gpu.ROOT, check=True)
    assert (tmp_path / "log").read_text() == "twelve bytes12\n"
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=vllm_one_gpu.ROOT, check=True)
    assert done.stdout == b"twelve bytes0\n"


def test_a_folder_is_made_once(session: Session, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "it"
    text = f"import pathlib, sys; pathlib.Path({str(folder)!r}).mkdir(parents=True, exist_ok=True); print('made')"
    one = job(session, tmp_path, text, phased=False, makes=folder)
    again = replace(session, records={})
    session.run(one)
    again.run(one)
    assert session.records["it"][0]["line"] == "made"
    assert again.records["it"][0]["line"] == f"{folder}: already there" and again.passed("it", one.command)
    # Another commit makes another folder; one that fails is not taken for made.
    again.records.clear()
    again.args.commit = "c0ffee"
    (tmp_path / "job.py").write_text("import sys; sys.exit(1)")
    again.run(one)
    again.run(one)
    assert again.records["it"][0]["failures"] == ["ended with exit status 1"]


def test_overdue() -> None:
    assert overdue([], 100, 100 + FIRST_PHASE_SECONDS - 1) is None
    assert overdue([], 100, 101 + FIRST_PHASE_SECONDS) == "before the first phase: ran into its limit of 180 s"
    started = {"event": "start", "phase": "values", "limit": 30, "time": 50.0}
    assert overdue([started], 0, 79) is None
    assert overdue([started], 0, 81) == "values: ran into its limit of 30 s"
    ended = {"event": "end", "phase": "values", "time": 60.0}
    assert overdue([started, ended], 0, 200) is None
    assert overdue([started, ended], 0, 241) == "after values: ran into its limit of 180 s"


def test_an_unfinished_line_is_left_for_later(tmp_path: Path) -> None:
    path = tmp_path / "events"
    assert read_events(path) == []
    path.write_text('{"event": "start"}\n{"event": "e')
    assert read_events(path) == [{"event": "start"}]


def times(start: float, allocated: float, **medians: float) -> list[dict[str, Any]]:
    data: dict[str, Any] = {
        name: {"step_ms": {"median": value}, "graph_ms": {"median": value / 2}} for name, value in medians.items()
    }
    return [record("t", "start", seconds=start, other_gb=allocated), record("t", "times", **data)]


def test_times_are_compared() -> None:
    good = compare_times(times(60, 100, a=7.0, b=9.0), times(85, 101.5, a=7.1, b=4.5))
    assert good is not None
    assert good["ok"]
    assert good["data"] == {
        "speeds": {"a step_ms": 0.986, "a graph_ms": 0.986, "b step_ms": 2.0, "b graph_ms": 2.0},
        "start_up_seconds": 25,
        "memory_gb": 1.5,
    }
    bad = compare_times(times(60, 100, a=7.0), times(91, 100, a=7.2))
    assert bad is not None
    assert bad["failures"] == [
        "a step_ms: 0.972 times as fast as stock, expected at least 0.98",
        "a graph_ms: 0.972 times as fast as stock, expected at least 0.98",
        "start-up takes 31.0 s longer, expected at most 30 s",
    ]


def test_times_need_both_sides() -> None:
    whole = times(60, 100, a=7.0)
    assert compare_times(whole, []) is None
    assert compare_times(whole[:1], whole) is None
    assert compare_times(whole, [whole[0], {**whole[1], "ok": False}]) is None


def test_table() -> None:
    assert table([record("stock", "start"), record("executor", "values", ok=False)]) == (
        "engine    phase   seconds  result\nstock     start   1.2      ok\nexecutor  values  1.2      FAILED"
    )


def test_jobs(tmp_path: Path) -> None:
    given = ["--executor-option", '{"a": 1}', "--engine-option", '{"seed": 1}', "--only", "values"]
    args = arguments(["--out", str(tmp_path), *given])
    by_name = {one.name: one for one in jobs(args)}
    assert by_name["stock"].environment == by_name["times-stock"].environment == {"VLLM_PLUGINS": ""}
    assert by_name["executor"].environment == {}
    assert '{"a": 1}' in by_name["executor"].command
    assert all('{"seed": 1}' in by_name[name].command for name in ("stock", "executor"))
    assert all(need in by_name for one in by_name.values() for need in one.needs)
    # Both sides of attention are one engine's, with the plugin and at full depth.
    timed, attention = by_name["times-executor"], by_name["attention"]
    assert attention.environment == {} and attention.needs == timed.needs == ("configuration",)
    assert attention.command[2:] == timed.command[2:] and attention.command[1] == "attention"
    # Stock and executor serve the same folder.
    folders = [by_name[name].command[by_name[name].command.index("--folder") + 1] for name in ("stock", "executor")]
    assert folders[0] == folders[1] == by_name["checkpoint"].command[2]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--jobs", "stock,none"], "--jobs: found none, expected some of checkpoint, configuration, stock"),
        (["--executor-option", "[1]"], "--executor-option: found '[1]', expected a JSON object"),
        (["--executor-option", "{"], "--executor-option: found '{', expected a JSON object"),
        (["--engine-option", "1"], "--engine-option: found '1', expected a JSON object"),
        (["--expect", "similar"], "invalid choice: 'similar'"),
    ],
)
def test_bad_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], said: str) -> None:
    with pytest.raises(SystemExit):
        arguments(["--out", str(tmp_path), *argv])
    assert said in capsys.readouterr().err


def test_main_writes_results_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    work, out = tmp_path / "work", tmp_path / "out"
    events = str(work / "it.events.jsonl")
    environment = module(tmp_path, EVENTS + "end('a', True)")
    monkeypatch.setattr(vllm_one_gpu, "jobs", lambda args: [Job("it", ("job", events), 1, environment=environment)])
    (work / "store").mkdir(parents=True)
    (work / "store" / "values.pt").write_text("kept")
    argv = ["--out", str(out), "--work", str(work), "--models", str(tmp_path), "--commit", "c0ffee"]
    assert main(argv) == 0
    result = json.loads((out / "results.json").read_text())
    assert (result["commit"], [r["phase"] for r in result["records"]]) == ("c0ffee", ["a"])
    assert "it      a      0.1      ok" in result["report"]
    assert (out / "store" / "values.pt").read_text() == "kept"
    with tarfile.open(out / "logs.tar.xz") as archive:
        assert archive.getnames() == ["it.log"]
    module(tmp_path, EVENTS + "end('a', False)\nsys.exit(1)")
    assert main(argv) == 0
    assert "it: passed in an earlier call" in capsys.readouterr().out
    assert main([*argv, "--again"]) == 1


def test_results_are_kept_after_every_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host may go away at any time: the second phase finds the first one's results."""
    work, out = tmp_path / "work", tmp_path / "out"
    text = f"""
start("a")
end("a", True)
start("b")
path = pathlib.Path({str(out / "results.json")!r})
until = time.time() + 5
while not path.exists() and time.time() < until:
    time.sleep(0.05)
end("b", [r["phase"] for r in json.loads(path.read_text())["records"]] == ["a"])
"""
    environment = module(tmp_path, EVENTS + text)
    command = ("job", str(work / "it.events.jsonl"))
    monkeypatch.setattr(vllm_one_gpu, "jobs", lambda args: [Job("it", command, 1, environment=environment)])
    assert main(["--out", str(out), "--work", str(work), "--models", str(tmp_path)]) == 0


def test_what_the_executors_phases_need_of_stocks(tmp_path: Path) -> None:
    """All by default; of some phases, what they read, and what tells memory apart."""
    names = {only: [path.name for path in stored(only, tmp_path)] for only in ("", "values", "traffic,profile")}
    assert names[""] == ["profile.json", "values.pt", "traffic.pt", "shutdown.json"]
    assert names["values"] == ["values.pt", "shutdown.json"]
    assert names["traffic,profile"] == ["profile.json", "values.pt", "traffic.pt", "shutdown.json"]
