"""compute-sanitizer over every launch of the MoE kernels."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).absolute().parent / "sanitized.py"
ROOT = SCRIPT.parent.parent.parent

pytestmark = pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_clean(tool: str) -> None:
    # Every tensor is an allocation of its own, so that memcheck knows where it ends.
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": path}
    command = ["compute-sanitizer", f"--tool={tool}", "--error-exitcode=9", sys.executable, str(SCRIPT)]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    printed = found.stdout + found.stderr
    assert found.returncode == 0, printed
    assert re.search(r"^launched 32 times", printed, re.MULTILINE), printed
    summary = "ERROR SUMMARY: 0 errors" if tool == "memcheck" else "RACECHECK SUMMARY: 0 hazards"
    assert summary in printed, printed
