"""Shows on one GPU what the executor does inside vLLM: values, traffic, kernels when off, life cycle, times of steps
and of a layer's attention.

`python -m tests.gpu.vllm_one_gpu --out OUT` from the checkout, with vLLM importable (tools/gpu has a bundle for hosts
without a package index). Each job is a process of its own; each phase of it prints a line, has a time limit and leaves
a record. Run again, it goes on where it stopped: jobs that passed are not run again. OUT gets results.json and the logs
after every phase, and what stock vLLM computed after every job. The exit status is 0 when everything asked for passed.
"""

import argparse
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.results import commit
from tests.gpu.evidence import causes, shortened, standing

ROOT = Path(__file__).absolute().parent.parent.parent
WORK = Path("/tmp/specialized-decode/run")
MODELS = Path("/tmp/specialized-decode/models")
# What the stock engine leaves for the executor's, and for which of its phases; those of all are told apart by none.
STORED = {
    "profile.json": ("profile", "off-auto", "off-absent"),
    "values.pt": ("values", "traffic", "again"),
    "traffic.pt": ("traffic",),
    "shutdown.json": (),
}
LAYERS, TIMED_LAYERS, SHARD_TP = 8, 40, 4
# Imports and the first contact with the GPU, before a process's first phase starts.
FIRST_PHASE_SECONDS = 180.0
# The executor against stock, at full depth.
LEAST_SPEED, MOST_START_UP_SECONDS = 0.98, 30.0
# Failures and causes that are printed of a phase; its record has them all.
PRINTED = 8

Record = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """A process.

    seconds: what it is expected to take, so that none is started that cannot end within the budget; needs: jobs that
    must have passed; files: that must be there; phased: whether it tells of phases, as tests.gpu.phases does; makes: a
    folder that calls side by side may share: it is made once.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    needs: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()
    environment: dict[str, str] = field(default_factory=dict, hash=False)
    phased: bool = True
    makes: Path | None = None


def jobs(args: argparse.Namespace) -> list[Job]:
    """All jobs, the most important first."""
    real, dummy = args.models / f"flash-{LAYERS}-{args.experts}", args.models / f"flash-{TIMED_LAYERS}-{args.experts}"
    store = args.store

    def make(folder: Path, layers: int, *more: str) -> tuple[str, ...]:
        preset = ("--preset", "flash", "--layers", str(layers), "--experts", str(args.experts))
        widths = ("--shard-tp", str(SHARD_TP), "--replace")
        return ("specialized_decode.cli.main", "make-checkpoint", str(folder), *preset, *widths, *more)

    def engine(name: str, folder: Path) -> tuple[str, ...]:
        paths = ("--folder", str(folder), "--out", str(args.work), "--store", str(store))
        option = ("--executor-option", args.executor_option, "--expect", args.expect)
        return ("tests.gpu.phases", name, *paths, *option, "--only", args.only, "--engine-option", args.engine_option)

    off = {"VLLM_PLUGINS": ""}
    return [
        Job("checkpoint", make(real, LAYERS), 60, phased=False),
        Job("configuration", make(dummy, TIMED_LAYERS, "--no-weights"), 20, phased=False),
        Job("stock", engine("stock", real), 150, ("checkpoint",), environment=off),
        Job("executor", engine("executor", real), 200, ("checkpoint",), stored(args.only, store)),
        Job("times-stock", engine("times-stock", dummy), 120, ("configuration",), environment=off),
        Job("times-executor", engine("times-executor", dummy), 120, ("configuration",)),
        Job("attention", engine("attention", dummy), 240, ("configuration",)),
    ]


def stored(only: str, store: Path) -> tuple[Path, ...]:
    """What the executor's phases read of stock's; only: their names with commas, all where empty."""
    wanted = set(filter(None, only.split(",")))
    return tuple(store / name for name, readers in STORED.items() if not wanted or not readers or wanted & {*readers})


def overdue(events: Sequence[Record], started: float, now: float) -> str | None:
    """What took longer than it may, by a process's events; None while all is well.

    Event times and `started`, `now` are seconds of the same clock.
    """
    if not events:
        limit, since, name = FIRST_PHASE_SECONDS, started, "before the first phase"
    elif events[-1]["event"] == "start":
        limit, since, name = events[-1]["limit"], events[-1]["time"], events[-1]["phase"]
    else:  # between phases only Python runs
        limit, since, name = FIRST_PHASE_SECONDS, events[-1]["time"], f"after {events[-1]['phase']}"
    return f"{name}: ran into its limit of {limit:.0f} s" if now - since > limit else None


def read_events(path: Path) -> list[Record]:
    """The events of a process so far; a line still being written is left for later."""
    if not path.exists():
        return []
    return [
        json.loads(line) for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")
    ]


def failed(engine: str, phase: str, seconds: float, why: str) -> Record:
    """The record of something that left none of its own."""
    return {
        "engine": engine,
        "phase": phase,
        "ok": False,
        "seconds": round(seconds, 1),
        "line": why,
        "failures": [why],
        "data": {},
    }


@dataclass
class Session:
    """One call of this script. records: by job, also of earlier calls."""

    args: argparse.Namespace
    start: float
    records: dict[str, list[Record]]
    lines: list[str] = field(default_factory=list)
    # Called after every phase, so that what is known survives the host.
    keep: Callable[[], object] = lambda: None

    def say(self, text: str) -> None:
        """Prints a line and keeps it for the report."""
        line = f"[{time.monotonic() - self.start:6.1f} s] {text}"
        self.lines.append(line)
        print(line, flush=True)

    def left(self) -> float:
        """Seconds of the budget."""
        return float(self.args.budget - (time.monotonic() - self.start))

    def passed(self, name: str, command: Sequence[str] | None = None) -> bool:
        """Whether a job ran, by `command` if given, and all its phases passed."""
        records = self.records.get(name, [])
        same = command is None or all(record.get("command") == list(command) for record in records)
        return bool(records) and same and all(record["ok"] for record in records)

    def run(self, job: Job) -> None:
        """Runs a job unless it passed before, lacks what it needs, or does not fit the budget.

        With other phases, options or folders than before, it is another job.
        """
        if self.passed(job.name, job.command) and not self.args.again:
            self.say(f"{job.name}: passed in an earlier call")
            return
        missing = [name for name in job.needs if not self.passed(name)]
        absent = [str(path) for path in job.files if not path.exists()]
        if missing:
            self.records[job.name] = [failed(job.name, "start", 0, f"not run: {', '.join(missing)} did not pass")]
        elif absent:
            self.records[job.name] = [failed(job.name, "start", 0, f"not run: found no {', '.join(absent)}")]
        elif self.left() < job.seconds:
            why = f"not run: {self.left():.0f} s left, expected to take {job.seconds:.0f} s"
            self.records[job.name] = [failed(job.name, "start", 0, why)]
        else:
            records = self.run_process(job) if job.makes is None else self.make(job, job.makes)
            self.records[job.name] = [record | {"command": list(job.command)} for record in records]
            self.save()
            return
        self.say_record(self.records[job.name][0])

    def make(self, job: Job, folder: Path) -> list[Record]:
        """Runs a job that makes a folder, unless it is there by the same command and commit; other makers wait."""
        mark = folder.with_name(f"{folder.name}.made")
        said = json.dumps([*job.command, self.args.commit or commit()])
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_name(f"{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.is_dir() and mark.exists() and mark.read_text(encoding="utf-8") == said:
                there = {"ok": True, "line": f"{folder}: already there", "failures": []}
                records = [failed(job.name, "write", 0, "") | there]
                self.say_record(records[0])
                return records
            mark.unlink(missing_ok=True)
            records = self.run_process(job)
            if all(record["ok"] for record in records):
                mark.write_text(said, encoding="utf-8")
            return records

    def run_process(self, job: Job) -> list[Record]:
        """Starts a job's process, tells of its phases as they end, and ends it when one outlasts its limit."""
        events_path, log = self.args.work / f"{job.name}.events.jsonl", self.args.work / f"{job.name}.log"
        events_path.unlink(missing_ok=True)
        environment = {key: value for key, value in os.environ.items() if key != "VLLM_PLUGINS"}
        path = os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
        environment |= {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **job.environment}
        command = [sys.executable, "-P", "-m", *job.command]
        started, told, why = time.time(), 0, None
        with log.open("w", encoding="utf-8") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            while True:
                ended = process.poll() is not None
                events = read_events(events_path)
                for place, event in enumerate(events[told:], start=told):
                    if event["event"] == "end":
                        self.say_record(event | self.evidence(job, events[: place + 1]))
                        self.records[job.name] = self.ended(job, events[: place + 1])
                        self.keep()
                told = len(events)
                if ended:
                    break
                if job.phased:
                    why = overdue(events, started, time.time())
                if self.left() < 0:
                    why = f"{job.name}: the budget of {self.args.budget:.0f} s is spent"
                if why:
                    # Where they stand is the only thing that tells why.
                    os.killpg(process.pid, signal.SIGUSR1)
                    time.sleep(1)
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                    break
                time.sleep(0.2)
        records, seconds = self.ended(job, events), time.time() - started
        if not job.phased and process.returncode == 0:
            records = [failed(job.name, "write", seconds, "") | {"ok": True, "line": _last_line(log), "failures": []}]
            self.say_record(records[0])
        elif why or not records or (process.returncode != 0 and all(record["ok"] for record in records)):
            phase = events[-1]["phase"] if events else "start"
            record = failed(job.name, phase, seconds, why or f"ended with exit status {process.returncode}")
            records.append(record | self.evidence(job, [*events, record]))
            self.say_record(records[-1])
            self.say("the end of its log:\n" + _tail(log, 40))
        return records

    def ended(self, job: Job, events: Sequence[Record]) -> list[Record]:
        """The records of the phases that have ended, failed ones with what the logs say."""
        return [
            {name: value for name, value in event.items() if name != "event"} | self.evidence(job, events[: place + 1])
            for place, event in enumerate(events)
            if event["event"] == "end"
        ]

    def evidence(self, job: Job, events: Sequence[Record]) -> Record:
        """What the logs say of the last of `events`, where it failed: the exceptions of all processes since its phase
        began. A worker's is often the one that matters."""
        if events[-1]["ok"]:
            return {}
        begins = [event.get("log", 0) for event in events if event.get("event") == "start"]
        logs = [_since(self.args.work / f"{job.name}.log", begins[-1] if begins else 0)]
        logs += [_since(path, 0) for path in sorted(self.args.work.glob(f"{job.name}.*.log"))]
        found = causes(logs, PRINTED)
        places = [shortened(place) for log in logs for place in standing(log)]
        return {"causes": [one.line() for one in found] + places, "tracebacks": [one.text for one in found]}

    def say_record(self, record: Record) -> None:
        """The one line of a phase, and what went wrong in it."""
        verdict = "ok" if record["ok"] else "FAILED"
        line = shortened(record["line"]) if record["failures"] else record["line"]
        self.say(f"{record['engine']} {record['phase']}: {verdict} in {record['seconds']:.1f} s: {line}")
        failures = [failure for failure in record["failures"] if failure != record["line"]]
        for failure in failures[:PRINTED]:
            self.say(f"    {shortened(failure)}")
        if len(failures) > PRINTED:
            self.say(f"    and {len(failures) - PRINTED} more, in its record")
        for cause in record.get("causes", []):
            self.say(f"    log: {cause}")

    def save(self) -> None:
        """Writes the records, from which a later call goes on."""
        path = self.args.work / "records.json"
        path.with_suffix(".new").write_text(json.dumps(self.records, indent=1) + "\n", encoding="utf-8")
        path.with_suffix(".new").rename(path)


def _since(log: Path, start: int) -> str:
    """The log from byte `start` on."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(start)
        return file.read().decode("utf-8", errors="replace")


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "")


def _tail(log: Path, count: int) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(f"    | {line[:300]}" for line in lines[-count:])


def compare_times(stock: Iterable[Record], executor: Iterable[Record]) -> Record | None:
    """The executor's step times, start-up and memory against stock's; None where one of them was not measured."""
    by_phase = [
        {record["phase"]: record["data"] for record in records if record["ok"]} for records in (stock, executor)
    ]
    if not all("start" in phases and "times" in phases for phases in by_phase):
        return None
    before, after = by_phase
    failures, speeds = [], {}
    for name, one in before["times"].items():
        for clock in ("step_ms", "graph_ms"):
            speed = one[clock]["median"] / after["times"][name][clock]["median"]
            speeds[f"{name} {clock}"] = round(speed, 3)
            if speed < LEAST_SPEED:
                failures.append(f"{name} {clock}: {speed:.3f} times as fast as stock, expected at least {LEAST_SPEED}")
    longer = after["start"]["seconds"] - before["start"]["seconds"]
    if longer > MOST_START_UP_SECONDS:
        failures.append(f"start-up takes {longer:.1f} s longer, expected at most {MOST_START_UP_SECONDS:.0f} s")
    memory = round(after["start"]["other_gb"] - before["start"]["other_gb"], 2)
    line = f"speed over stock {speeds}; start-up {longer:+.1f} s; GPU memory beside the KV cache {memory:+.2f} GB"
    data = {"speeds": speeds, "start_up_seconds": round(longer, 1), "memory_gb": memory}
    return {
        "engine": "both",
        "phase": "compare-times",
        "ok": not failures,
        "seconds": 0.0,
        "line": line,
        "failures": failures,
        "data": data,
    }


def table(records: Iterable[Record]) -> str:
    """The summary, a line a phase."""
    rows = [("engine", "phase", "seconds", "result")]
    rows += [(r["engine"], r["phase"], f"{r['seconds']:.1f}", "ok" if r["ok"] else "FAILED") for r in records]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def write_results(session: Session, records: list[Record], summary: str) -> None:
    """What goes to OUT: few files, as hosts that hand back results limit their number. Each is replaced whole."""
    out: Path = session.args.out
    out.mkdir(parents=True, exist_ok=True)
    args = session.args
    report = [*session.lines, "", *summary.splitlines()]
    result = {"commit": args.commit or commit(), "expect": args.expect, "records": records, "report": report}
    new = out / "results.json.new"
    new.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    new.rename(out / "results.json")
    new = out / "logs.tar.xz.new"
    with tarfile.open(new, "w:xz") as archive:
        for path in sorted(session.args.work.glob("*.log")):
            archive.add(path, path.name)
    new.rename(out / "logs.tar.xz")


def run_jobs(
    args: argparse.Namespace, wanted: Sequence[Job], compared: Callable[[Session], list[Record]] = lambda _: []
) -> int:
    """Runs jobs, and returns the exit status. OUT has what is known after every phase, stock's outputs after every job.

    compared: further records, made of those of all jobs at the end.
    """
    args.work.mkdir(parents=True, exist_ok=True)
    args.models.mkdir(parents=True, exist_ok=True)
    kept = args.work / "records.json"
    session = Session(args, time.monotonic(), json.loads(kept.read_text()) if kept.exists() else {})

    def keep(more: Sequence[Record] = ()) -> list[Record]:
        records = [*(record for job in wanted for record in session.records.get(job.name, [])), *more]
        write_results(session, records, table(records))
        return records

    session.keep = keep
    for job in wanted:
        session.run(job)
        keep()
        if args.store.is_dir():
            shutil.copytree(args.store, args.out / "store", dirs_exist_ok=True)
    records = keep(compared(session))
    print(f"\n{table(records)}")
    return 0 if records and all(record["ok"] for record in records) else 1


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = command_line(str(__doc__), WORK, MODELS)
    parser.add_argument("--only", default="", help="phases to run in the engines, with commas; all by default")
    parser.add_argument("--engine-option", default="{}", help="JSON, added to LLM's options for stock and executor")
    return checked(parser, argv, jobs)


def command_line(description: str, work: Path, models: Path) -> argparse.ArgumentParser:
    """What scripts of jobs have in common. work, models: where logs and model folders go by default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for results")
    parser.add_argument("--jobs", default="", help="jobs to run, with commas; all by default")
    parser.add_argument("--expect", choices=["identical", "close"], default="identical", help="close: on other kernels")
    parser.add_argument("--executor-option", default="{}", help="JSON, added to the executor's additional_config")
    parser.add_argument("--experts", type=int, default=384, help="routed experts of a layer (default: 384)")
    parser.add_argument("--budget", type=float, default=570, help="seconds in all (default: 570)")
    parser.add_argument("--again", action="store_true", help="run jobs again that passed in an earlier call")
    parser.add_argument("--commit", help="the commit, where the checkout is a copy without its history")
    parser.add_argument("--work", type=Path, default=work, help=f"logs and records (default: {work})")
    parser.add_argument("--models", type=Path, default=models, help=f"model folders (default: {models})")
    parser.add_argument("--store", type=Path, help="stock's tokens and logits (default: WORK/store, copied to OUT)")
    return parser


def checked(
    parser: argparse.ArgumentParser, argv: Sequence[str], jobs: Callable[[argparse.Namespace], list[Job]]
) -> argparse.Namespace:
    """The command line's values, whole paths; ends the process where an option or a job is not what is expected."""
    args = parser.parse_args(argv)
    args.out, args.work, args.models = args.out.absolute(), args.work.absolute(), args.models.absolute()
    args.store = (args.store or args.work / "store").absolute()
    for flag in ("executor_option", "engine_option"):
        text = getattr(args, flag, "{}")
        try:
            if not isinstance(json.loads(text), dict):
                raise ValueError("no object")
        except ValueError:
            parser.error(f"--{flag.replace('_', '-')}: found {text!r}, expected a JSON object")
    known = [job.name for job in jobs(args)]
    unknown = [name for name in args.jobs.split(",") if name and name not in known]
    if unknown:
        parser.error(f"--jobs: found {', '.join(unknown)}, expected some of {', '.join(known)}")
    return args


def main(argv: Sequence[str]) -> int:
    """Runs the jobs asked for, prints the summary and writes the results."""
    args = arguments(argv)
    wanted = [job for job in jobs(args) if not args.jobs or job.name in args.jobs.split(",")]

    def times(session: Session) -> list[Record]:
        record = compare_times(session.records.get("times-stock", []), session.records.get("times-executor", []))
        if record is None:
            return []
        session.say_record(record)
        return [record]

    return run_jobs(args, wanted, times)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
