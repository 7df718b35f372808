"""Runs pytest on the files that a Bazel test target names."""

import os
import sys
from pathlib import Path

# Python puts the folder that this file links to, in the checkout, in front of the test's own files.
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent]

import pytest  # noqa: E402

INTERPRETER = "--interpreter-from="


def main(argv: list[str]) -> int:
    """Runs pytest on `argv` and returns its exit code.

    --interpreter-from=VARIABLE, first: by the interpreter which that variable names, instead of this one.
    """
    if argv and argv[0].startswith(INTERPRETER):
        variable = argv[0].removeprefix(INTERPRETER)
        python = os.environ.get(variable)
        if not python:
            print(f"error: {variable} is not set; ./test sets it, and bazel test takes it with --test_env={variable}")
            return 2
        # What Bazel put on this interpreter's path is in PYTHONPATH.
        os.execv(python, [python, __file__, *argv[1:]])
    args = ["-c", "pyproject.toml", "--rootdir", os.getcwd(), "-v"]
    if temporary := os.environ.get("TEST_TMPDIR"):
        # For tmp_path alone: as TMPDIR this path would be too long for a Unix socket.
        args.append(f"--basetemp={temporary}/pytest")
    if report := os.environ.get("XML_OUTPUT_FILE"):
        args.append(f"--junitxml={report}")
    # --test_filter
    only = os.environ.get("TESTBRIDGE_TEST_ONLY")
    if only:
        args += ["-k", only]
    code = pytest.main(args + argv)
    # A filter may leave nothing of a file; a file without tests is an error.
    if only and code == pytest.ExitCode.NO_TESTS_COLLECTED:
        return 0
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
