"""What every command has: a version, help, and errors without a traceback."""

import pytest

import specialized_decode
from tests.cli.conftest import Invoke, refused

COMMANDS: dict[str, tuple[str, ...]] = {
    "decode": ("--prompt", "--tokens", "--rows", "--device", "--context", "--kernels"),
    "make-checkpoint": (
        *("--preset", "--layers", "--experts", "--shard-tp", "--drafts", "--seed"),
        *("--no-weights", "--workers", "--replace"),
    ),
    "doctor": ("--deployment", "--tp", "--vllm-args", "--json"),
}


def test_version(invoke: Invoke) -> None:
    result = invoke("--version")
    assert result.exit_code == 0
    assert result.stdout == f"specialized-decode, version {specialized_decode.__version__}\n"


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_names_the_commands(invoke: Invoke, flag: str) -> None:
    result = invoke(flag)
    assert result.exit_code == 0
    assert result.stdout.startswith("Usage: specialized-decode [OPTIONS] COMMAND [ARGS]...\n")
    listed = result.stdout.partition("Commands:\n")[2].splitlines()
    assert sorted(line.split()[0] for line in listed) == sorted(COMMANDS)
    assert all(len(line.split()) > 2 for line in listed), "each with a word of what it does"


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_of_a_command(invoke: Invoke, command: str, flag: str) -> None:
    result = invoke(command, flag)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(f"Usage: specialized-decode {command} [OPTIONS] ")
    options = result.stdout.partition("Options:\n")[2]
    named = [line.split()[0] for line in options.splitlines() if line.startswith("  -")]
    assert tuple(named) == (*COMMANDS[command], "-h,")
    assert max(map(len, result.stdout.splitlines())) <= 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bench",), "No such command 'bench'."),
        (("decode", "--nothing"), "No such option"),
        (("doctor", "a", "b"), "Got unexpected extra argument (b)"),
    ],
)
def test_wrong_command_lines(invoke: Invoke, arguments: tuple[str, ...], message: str) -> None:
    assert message in refused(invoke(*arguments), code=2)
