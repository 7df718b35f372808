"""What one engine process of two ranks runs; started by vllm_two_gpus.py.

`python -m tests.gpu.two_gpu_phases tp2-stock|tp2-executor|lacking|killed|stopped --folder FOLDER --out OUT ...`
"""

import argparse
import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.gpu import ranks as ranks_module
from tests.gpu import scenarios
from tests.gpu.compare import (
    Difference,
    combined,
    failures_if_close,
    failures_if_identical,
    failures_if_unsound,
)
from tests.gpu.engine import SHARED_GPU, parameters, run_traffic, settled_counters, step_counters
from tests.gpu.evidence import ask_where
from tests.gpu.executor_phases import check_counters, executor_option, options
from tests.gpu.outputs import Recorded, compare, described, load_outputs, padded, replays_by_rows, save_outputs
from tests.gpu.ranks import Alike, RanksEngine, RankSteps, run_alone
from tests.gpu.report import Report, Run
from tests.gpu.server import descendants
from tests.gpu.worker_plugin import REFUSED_SETTING

RANKS, STEPS = 2, 1000
# In the store: stock's tokens and logits, and the executor's along them; plain_phases.py judges both.
STOCK_OUTPUTS, EXECUTOR_OUTPUTS = "tp2.pt", "tp2-executor.pt"
# The mailbox's own deadline, and what the engine may take after it.
DEADLINE_SECONDS, AFTER_SECONDS = 10.0, 15.0
AGREE_SECONDS = 10.0
# How the loss of rank 1 is told: by the executor's mailbox, by its processes' watch, and by vLLM, which sees one end.
NAMES = ("of rank 1 did not come", "rank 1 (process {process})", "VllmWorker-1 died")


def start(args: argparse.Namespace, executor: dict[str, Any] | None, **more: Any) -> RanksEngine:
    """An engine of two ranks."""
    settings = options(args, executor, **SHARED_GPU, **more)
    return RanksEngine.start(args.folder, scenarios.GRAPH_SIZES, RANKS, Path(args.out), **settings)


def described_ranks(alike: Alike) -> str:
    first = f", first {alike.first}" if alike.first else ""
    return f"{alike.rows} rows: hidden states differ between ranks in {alike.hidden}, logits in {alike.logits}{first}"


def check_ranks(alike: Alike) -> list[str]:
    """What is wrong with the ranks' results of the executor: any bit that differs, or nothing compared."""
    if not alike.rows:
        return ["no hidden states of the ranks were compared"]
    return [f"{described_ranks(alike)}; expected none"] if alike.hidden or alike.logits else []


def record_long(engine: RanksEngine, store: Path) -> Report:
    """Plays the long script on stock, again along its tokens, and some of its requests alone: what stock computes, how
    well it repeats, and what another batch does to it."""
    script, steps = ranks_module.long_script(STEPS), RankSteps(engine)
    before = steps.copy()
    first, _ = run_traffic(engine, script)
    counted = steps.since(before)
    again, _ = run_traffic(engine, script, padded(script, first))
    repeats = compare(first, again)
    alone = compare(first, run_alone(engine, script, first))
    noise = combined(alone.values())
    save_outputs(store / STOCK_OUTPUTS, Recorded([first], [repeats], noise))
    line = (
        f"{counted.total} steps ({replays_by_rows(counted)}); again: {described(list(repeats.values()))}; "
        f"alone: {described(list(alone.values()))}; {described_ranks(engine.alike)}"
    )
    failures = [] if counted.total >= STEPS else [f"{counted.total} steps, expected at least {STEPS}"]
    if not noise.rms:
        failures.append("requests alone give the same logits as among others, so that nothing tells what is close")
    data = {"steps": counted.total, "noise": noise.record(), "ranks": vars(engine.alike)}
    return Report(line, failures, data)


def judge_long(found: dict[str, Difference], recorded: Recorded, expect: str) -> list[str]:
    """What is wrong with the executor's logits: rows that stock repeats are equal, the others within stock's noise.

    On kernels of its own (`expect` "close") they are finite, and choose another token only where stock's choice was
    not clear. How far they may be from stock's, which has an error of its own, is for the job `tp2-plain` to judge.
    """
    (repeats,) = recorded.repeats
    if found.keys() != repeats.keys():
        return [f"requests: found {len(found)}, expected stock's {len(repeats)}"]
    if expect != "identical":
        return failures_if_unsound(combined(found.values()))
    exact = [name for name, one in repeats.items() if not one.differing]
    failures = [f"{name}: {wrong}" for name in exact for wrong in failures_if_identical(found[name])]
    rest = [name for name in repeats if name not in exact]
    if rest:
        failures += failures_if_close(combined(found[n] for n in rest), combined(repeats[n] for n in rest))
    return failures


def check_long(engine: RanksEngine, args: argparse.Namespace, store: Path) -> Report:
    """Plays the long script along stock's tokens: logits, both ranks' bits, and the counters."""
    recorded, script, steps = load_outputs(store / STOCK_OUTPUTS), ranks_module.long_script(STEPS), RankSteps(engine)
    (stock,) = recorded.outputs
    before, counters = steps.copy(), step_counters()
    outputs, _ = run_traffic(engine, script, padded(script, stock))
    counted = steps.since(before)
    save_outputs(store / EXECUTOR_OUTPUTS, Recorded([outputs], [], Difference()))
    found = compare(stock, outputs)
    failures = judge_long(found, recorded, args.expect) + check_ranks(engine.alike)
    failures += check_counters(settled_counters(engine, counted.total, counters), counted)
    if counted.total < STEPS:
        failures.append(f"{counted.total} steps, expected at least {STEPS}")
    line = f"{counted.total} steps; {described(list(found.values()))}; {described_ranks(engine.alike)}"
    return Report(line, failures, {"total": combined(found.values()).record(), "ranks": vars(engine.alike)})


def check_lacking(args: argparse.Namespace) -> Report:
    """Rank 1 has a setting that the check refuses: the engine does not start, and both ranks have said why."""
    began = time.monotonic()
    try:
        start(args, executor_option(args), load_format="dummy").shut_down()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    else:
        return Report("the engine started", ["the engine started, expected an error"])
    seconds = time.monotonic() - began
    failures = lacking_failures(log_text(args))
    took = ", ".join(f"rank {rank} in {found} s" for rank, found in refusals(log_text(args)).items())
    data = {"seconds": round(seconds, 1), "refused": refusals(log_text(args))}
    return Report(f"refused after {seconds:.1f} s ({took}): {said[:160]!r}", failures, data)


def refusals(log: str) -> dict[int, float]:
    """How long each rank's check took until it raised."""
    return {int(rank): float(seconds) for rank, seconds in re.findall(r"rank (\d+): refused after ([\d.]+) s", log)}


def lacking_failures(log: str) -> list[str]:
    """What the log lacks: each rank's message, the first's that another rank has less, the second's own reason; and
    how long each took to raise it."""
    wanted = {"rank 0": "here, less on another rank", "rank 1": f"found {REFUSED_SETTING}=1; expected"}
    failures = [f"{who}: found no {text!r} in the log" for who, text in wanted.items() if text not in log]
    took = refusals(log)
    if took.keys() != set(range(RANKS)):
        failures.append(f"found ranks {sorted(took)} refusing, expected {list(range(RANKS))}")
    return failures + [
        f"rank {rank}: raised after {seconds:.1f} s, expected at most {AGREE_SECONDS:.0f} s"
        for rank, seconds in took.items()
        if seconds > AGREE_SECONDS
    ]


def check_lost(args: argparse.Namespace, how: signal.Signals | None) -> Report:
    """Rank 1 stands still in the middle of a decode step, and a second later is ended by the signal `how`, if given.

    The engine must end in time, with an error that names the rank.
    """
    engine = start(args, executor_option(args), load_format="dummy")
    llm, before = engine.llm.llm_engine, len(log_text(args))
    for row in range(8):
        ids = {"prompt_token_ids": scenarios.prompt(64, row)}
        llm.add_request(f"lost-{row}", ids, parameters("", 64, 4000, None, record=False))
    for _ in range(100):
        llm.step()
    stalled = engine.llm.collective_rpc("tests_stall")
    began = time.monotonic()
    ending = threading.Timer(1.0, os.kill, (engine.pids[1], how)) if how is not None else None
    if ending is not None:
        ending.start()
    said = steps_until_error(llm, DEADLINE_SECONDS + AFTER_SECONDS)
    seconds = time.monotonic() - began
    if not said:
        ask_where(descendants(os.getpid()))
    # What the processes still have to say, before they are ended.
    time.sleep(2)
    # A rank that stands still is alive to vLLM, so that only the executor's own message can name it.
    names = NAMES if how is not None else NAMES[:1]
    failures = lost_failures(said, seconds, log_text(args)[before:], engine.pids[1], names)
    if stalled != [False, True]:
        failures.append(f"ranks that stood still: found {stalled}, expected the second alone")
    return Report(f"{said[:200]!r} after {seconds:.1f} s", failures, {"seconds": round(seconds, 1)})


def steps_until_error(llm: Any, limit: float) -> str:
    """Steps an engine for at most `limit` seconds; returns the error that ended it, "" where none did."""

    def late(*_: Any) -> None:
        raise TimeoutError

    # A step waits for its output without end where its worker does.
    old = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        while llm.has_unfinished_requests():
            llm.step()
    except TimeoutError:
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    return ""


def end_now(status: int) -> None:
    """Ends this process and all that it started: what is left of a broken engine may hold the GPU, or never end."""
    for process in descendants(os.getpid())[:0:-1]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def lost_failures(said: str, seconds: float, log: str, process: int, names: Sequence[str]) -> list[str]:
    """What is wrong with how an engine ended whose rank 1 is gone: no error, too late, or named by none of `names`."""
    failures = [] if said else ["the engine went on, expected an error"]
    limit = DEADLINE_SECONDS + AFTER_SECONDS
    if seconds > limit:
        failures.append(f"the engine ended after {seconds:.1f} s, expected at most {limit:.0f} s")
    found = f"{said}\n{log}"
    if not any(name.format(process=process) in found for name in names):
        last = [line for line in found.splitlines() if line.strip()][-1:]
        failures.append(f"nothing names rank 1; the last line: {last}")
    return failures


def log_text(args: argparse.Namespace) -> str:
    """This process's log, its workers' lines too: vllm_two_gpus.py sends both there."""
    sys.stdout.flush()
    path = Path(args.out) / f"{args.engine}.log"
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def main(argv: list[str]) -> int:
    """Command line; the exit status is 0 when every phase passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=["tp2-stock", "tp2-executor", "lacking", "killed", "stopped"])
    parser.add_argument("--folder", type=Path, required=True, help="the model folder")
    parser.add_argument("--out", type=Path, required=True, help="where events and records go")
    parser.add_argument("--store", type=Path, required=True, help="where stock's tokens and logits are kept")
    parser.add_argument("--expect", choices=["identical", "close"], default="identical")
    parser.add_argument("--executor-option", default="{}", help="JSON, added to the executor's additional_config")
    args = parser.parse_args(argv)
    args.only = ""
    args.out.mkdir(parents=True, exist_ok=True)
    run = Run(args)
    if args.engine in ("killed", "stopped"):
        how = signal.SIGKILL if args.engine == "killed" else None
        run.phase(args.engine, 420, lambda: check_lost(args, how))
    elif args.engine == "lacking":
        run.phase(args.engine, 420, lambda: check_lacking(args))
    else:
        run_long(run)
    status = 0 if run.records and all(record["ok"] for record in run.records) else 1
    if args.engine in ("killed", "stopped", "lacking"):
        end_now(status)
    return status


def run_long(run: Run) -> None:
    """One engine and the long script, on stock or on the executor."""
    args, store, engines = run.args, Path(run.args.store), list[RanksEngine]()
    executor = None if args.engine == "tp2-stock" else executor_option(args)

    def build() -> Report:
        engines.append(start(args, executor))
        return Report(f"started in {engines[0].seconds:.1f} s", data={"seconds": round(engines[0].seconds, 1)})

    if not run.phase("start", 420, build):
        return
    (engine,) = engines
    if executor is None:
        run.phase("long", 240, lambda: record_long(engine, store))
    else:
        run.phase("long", 240, lambda: check_long(engine, args, store))
    run.phase("shutdown", 60, lambda: Report(f"left {engine.shut_down()[0]} bytes in the scheduler's process"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
