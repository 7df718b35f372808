"""The command line in this process and as a process of its own, and a small folder to run it on."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import specialized_decode
from specialized_decode.backbone.writer import write_checkpoint
from specialized_decode.cli.main import main
from tests.helpers.small_plan import few_layers_plan

# Arguments -> what the command printed and how it ended.
Invoke = Callable[..., Result]
Run = Callable[..., "subprocess.CompletedProcess[str]"]
STEP_TIME = r"\d+\.\d\d ms a decode step \(median of {}\)"


@pytest.fixture(scope="session")
def invoke() -> Invoke:
    """Runs a command here. An exception that would end in a traceback is raised as itself."""

    def run(*arguments: object) -> Result:
        return CliRunner().invoke(
            main, [str(a) for a in arguments], prog_name="specialized-decode", catch_exceptions=False
        )

    return run


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """A process's environment, in which it finds the package and uses one thread."""
    root = str(Path(specialized_decode.__file__).absolute().parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def command() -> list[str]:
    return [sys.executable, "-P", "-m", "specialized_decode.cli.main"]


@pytest.fixture(scope="session")
def run(command: list[str], environment: dict[str, str]) -> Run:
    """Runs a command as a process, with `variables` set."""

    def start(*arguments: object, **variables: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*command, *map(str, arguments)],
            env=environment | variables,
            capture_output=True,
            encoding="utf-8",
            timeout=120,
            check=False,
        )

    return start


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers and 600 tokens, to be read only."""
    return write_checkpoint(few_layers_plan(), tmp_path_factory.mktemp("cli") / "small")


@pytest.fixture
def folder_copy(small_folder: Path, tmp_path: Path) -> Path:
    """A copy of the small folder that a test may damage."""
    return Path(shutil.copytree(small_folder, tmp_path / "copy"))


def refused(result: Result, code: int = 1) -> str:
    """The error message of a command that printed nothing else."""
    assert result.stdout == ""
    assert result.exit_code == code
    assert "Traceback" not in result.stderr
    *_, message = result.stderr.partition("Error: ")
    assert message.endswith("\n")
    return message.removesuffix("\n")


def texts(stdout: str) -> list[tuple[int, str, str, str]]:
    """Prompt length, its end, the plain layers' text and the executor's, for every row in order."""
    found = re.findall(
        r"^\[(\d+)\] (\d+) tokens, \.\.\. (.*)\n    plain    (.*)\n    executor (.*)$", stdout, re.MULTILINE
    )
    assert [int(number) for number, *_ in found] == list(range(1, len(found) + 1))
    return [(int(length), end, plain, executor) for _, length, end, plain, executor in found]


def line(stdout: str, label: str) -> str:
    lines = [line for line in stdout.splitlines() if line.startswith(label)]
    assert len(lines) == 1, stdout
    return lines[0].removeprefix(label).strip()
