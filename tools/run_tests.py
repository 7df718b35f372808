"""Runs every check and prints the totals: `python -m tools.run_tests`, which ./test sets up and calls."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlparse

from tools import lint

ROOT = lint.ROOT
BUILD = ROOT / "build"
# The interpreter that has vLLM, for tests/integration.
VLLM_PYTHON = "SPECIALIZED_DECODE_VLLM_PYTHON"
INTEGRATION = "tests/integration"
# Given to the tests on a GPU host; Bazel's tests see no other variable of the caller.
GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "CUDA_HOME", "TRITON_PTXAS_PATH")


@dataclass
class Totals:
    """Counts of cases, and the names of those that failed."""

    passed: int = 0
    skipped: int = 0
    failures: list[str] = field(default_factory=list)

    def add(self, name: str, passed: bool) -> None:
        """Counts one case."""
        if passed:
            self.passed += 1
        else:
            self.failures.append(name)

    def add_junit(self, path: Path, name: str) -> None:
        """Counts the cases of a JUnit XML file; `name` stands for the file in the list of failures."""
        for case in ElementTree.parse(path).iter("testcase"):
            if case.find("failure") is not None or case.find("error") is not None:
                self.failures.append(f"{name} {case.get('name')}")
            elif case.find("skipped") is not None:
                self.skipped += 1
            else:
                self.passed += 1

    def __str__(self) -> str:
        return f"{self.passed} passed, {len(self.failures)} failed, {self.skipped} skipped"


def add_bazel_events(totals: Totals, lines: Iterable[str]) -> None:
    """Counts the test cases that a Bazel build event file (JSON, one event a line) names.

    A target counts once, however often it was tried, and at least one failure if Bazel calls it failed:
    one that was not built or ran out of time has no report of its own.
    """
    reports: dict[str, Path | None] = {}
    statuses: dict[str, str] = {}
    for line in lines:
        event = json.loads(line)
        key = event["id"]
        if "testResult" in key and "testResult" in event:
            outputs = {out["name"]: out.get("uri", "") for out in event["testResult"].get("testActionOutput", [])}
            uri = outputs.get("test.xml")
            reports[key["testResult"]["label"]] = Path(unquote(urlparse(uri).path)) if uri else None
        elif "testSummary" in key:
            # Without a summary of its own, the event says that the test was aborted.
            status = event.get("testSummary", {}).get("overallStatus", "NO_STATUS")
            statuses[key["testSummary"]["label"]] = status
    for label, status in sorted(statuses.items()):
        before = len(totals.failures)
        report = reports.get(label)
        if report is not None and report.exists():
            totals.add_junit(report, label)
        if status not in ("PASSED", "FLAKY") and len(totals.failures) == before:
            totals.failures.append(f"{label} ({status})")


def bazel_outputs(lines: Iterable[str]) -> Iterator[Path]:
    """The files that the targets of a Bazel build event file produced."""
    for line in lines:
        for file in json.loads(line).get("namedSetOfFiles", {}).get("files", []):
            yield Path(unquote(urlparse(file.get("uri", "")).path))


def _section(title: str) -> None:
    print(f"\n== {title}", flush=True)


def _lint(totals: Totals) -> None:
    for check, title in zip(lint.CHECKS, ("ruff check", "ruff format --check", "mypy"), strict=True):
        _section(title)
        if lint.installed(check):
            totals.add(title, lint.run(check))
        else:
            print("skipped: not installed")
            totals.skipped += 1


def _bazel(command: list[str], arguments: list[str], events: Path) -> int:
    events.unlink(missing_ok=True)
    action, *rest = arguments
    options = [f"--build_event_json_file={events}", "--noshow_progress", "--color=no", "--keep_going"]
    environment = dict(os.environ, SPECIALIZED_DECODE_PYTHON=sys.executable)
    options.append("--repo_env=SPECIALIZED_DECODE_PYTHON")
    # The wrapper of tools/offline sets the variable itself, to an interpreter inside its root folder.
    return subprocess.run([*command, action, *options, *rest], cwd=ROOT, env=environment).returncode


def _lines(events: Path) -> list[str]:
    return events.read_text().splitlines() if events.exists() else []


def _bazel_tests(totals: Totals, bazel: list[str], gpu: bool) -> None:
    _section("bazel test //...")
    arguments = ["test"]
    if VLLM_PYTHON in os.environ:
        arguments.append(f"--test_env={VLLM_PYTHON}={os.environ[VLLM_PYTHON]}")
    if gpu:
        arguments.append("--config=gpu")
        arguments += [f"--test_env={name}={os.environ[name]}" for name in GPU_VARIABLES if name in os.environ]
    before = len(totals.failures)
    events = BUILD / "test-events.json"
    code = _bazel(bazel, [*arguments, "//..."], events)
    add_bazel_events(totals, _lines(events))
    # 3: tests failed, and they are counted. Anything else is a target that could not be built or loaded,
    # which has no test to name.
    if code not in (0, 3) or (code == 3 and len(totals.failures) == before):
        totals.failures.append(f"bazel test //... (exit status {code})")


def _bazel_wheel(totals: Totals, bazel: list[str]) -> None:
    _section("bazel build //:wheel")
    events = BUILD / "wheel-events.json"
    code = _bazel(bazel, ["build", "//:wheel"], events)
    wheels = [path for path in bazel_outputs(_lines(events)) if path.suffix == ".whl"] if code == 0 else []
    for wheel in wheels:
        target = ROOT / "dist" / wheel.name
        target.parent.mkdir(exist_ok=True)
        # Bazel's outputs are read-only, and a copy of one could not be overwritten by the next.
        target.unlink(missing_ok=True)
        shutil.copyfile(wheel, target)
        print(f"dist/{wheel.name}")
    totals.add("bazel build //:wheel", bool(wheels))


def _pytest(totals: Totals) -> None:
    _run_pytest(totals, sys.executable, "pytest", "tests", f"--ignore={INTEGRATION}")
    _run_pytest(totals, os.environ.get(VLLM_PYTHON, sys.executable), "pytest with vLLM", INTEGRATION)


def _run_pytest(totals: Totals, python: str, title: str, *arguments: str) -> None:
    _section(title)
    report = BUILD / "pytest.xml"
    report.unlink(missing_ok=True)
    before = len(totals.failures)
    code = subprocess.run([python, "-m", "pytest", f"--junitxml={report}", *arguments], cwd=ROOT).returncode
    if report.exists():
        totals.add_junit(report, title)
    if code != 0 and len(totals.failures) == before:
        totals.failures.append(f"{title} (exit status {code})")


def main(argv: list[str]) -> int:
    """Command line: [--gpu] -- [BAZEL COMMAND]; without a command the tests run through plain pytest."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", action="store_true", help="run the GPU tests too")
    parser.add_argument("bazel", nargs="*", help="the command that runs Bazel")
    args = parser.parse_args(argv)
    if args.gpu:
        import torch

        if not torch.cuda.is_available():
            print(f"error: --gpu: the torch of {sys.executable} finds no CUDA device", file=sys.stderr)
            return 2
    BUILD.mkdir(exist_ok=True)
    totals = Totals()
    _lint(totals)
    if args.bazel:
        _bazel_tests(totals, args.bazel, args.gpu)
        _bazel_wheel(totals, args.bazel)
    else:
        _pytest(totals)
    print()
    for failure in totals.failures:
        print(f"failed: {failure}")
    print(totals, flush=True)
    return 1 if totals.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
