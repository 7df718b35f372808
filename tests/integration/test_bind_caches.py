"""The executor's own ops on vLLM's caches and metadata: the same bytes as vLLM's kernels, the plain model's values.

vLLM's cache plan, its allocation, its metadata builders and its Triton kernels are real; interpreted.py runs them on
the CPU, in a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).absolute().parents[2]
CHECKS = ("write_like_vllm", "compress_like_vllm", "read_like_vllm", "decode_like_the_plain_model")
KERNEL_CHECKS = ("kernels_write_like_vllm", "kernels_select_like_the_reference", "decode_on_kernels")


def run(folder: Path, checks: tuple[str, ...]) -> str:
    """What a process said that ran every check up to the first that failed."""
    command = [sys.executable, "-m", "tests.integration.interpreted", str(folder), *checks]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    # Else MKL multiplies few rows by sums whose order depends on where the matrices lie in memory.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "MKL_CBWR": "AUTO", "PYTHONPATH": path}
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900, check=False
    )
    return done.stdout


@pytest.fixture(scope="module")
def said(tiny_folder: Path) -> str:
    return run(tiny_folder, CHECKS)


@pytest.fixture(scope="module")
def kernels_said(tiny_folder: Path) -> str:
    return run(tiny_folder, KERNEL_CHECKS)


@pytest.mark.parametrize("check", CHECKS)
def test_in_tritons_interpreter(said: str, check: str) -> None:
    assert f"passed: {check}\n" in said, said[-4000:]


@pytest.mark.parametrize("check", KERNEL_CHECKS)
def test_kernels_in_tritons_interpreter(kernels_said: str, check: str) -> None:
    assert f"passed: {check}\n" in kernels_said, kernels_said[-4000:]
