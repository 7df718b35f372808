"""compute-sanitizer over a script that launches kernels."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).absolute().parent.parent.parent
TOOLS = ("memcheck", "racecheck")

needed = pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")


def assert_clean(script: Path, tool: str, launches: int) -> None:
    """`tool` finds nothing in what `script` launches, which it says at its end as "launched N times"."""
    # Every tensor is an allocation of its own, so that memcheck knows where it ends.
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": path}
    command = ["compute-sanitizer", f"--tool={tool}", "--error-exitcode=9", sys.executable, str(script)]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    printed = found.stdout + found.stderr
    assert found.returncode == 0, printed
    assert re.search(rf"^launched {launches} times", printed, re.MULTILINE), printed
    summary = "ERROR SUMMARY: 0 errors" if tool == "memcheck" else "RACECHECK SUMMARY: 0 hazards"
    assert summary in printed, printed
