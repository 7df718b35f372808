"""The boundary kernels over two GPUs of this host; `peers.py` holds what the ranks run."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).absolute().parent / "peers.py"
ROOT = SCRIPT.parent.parent.parent
RANKS = 2

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason=f"needs {RANKS} CUDA devices")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run_ranks(*argv: str, seconds: float, codes: tuple[int, ...] = (0,) * RANKS) -> str:
    """Runs a case on both ranks within a time limit; returns what they printed. codes: how each rank must end."""
    shared = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryFile("w+") as output:
        processes = []
        for rank in range(RANKS):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": path}
            command = [sys.executable, str(SCRIPT), *argv]
            environment = {**os.environ, **shared, **own}
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output))
        limit = time.monotonic() + seconds
        try:
            # Once a rank has ended as it should not, the others wait for it in vain.
            while any(one.poll() is None for one in processes) and time.monotonic() < limit:
                if any(one.poll() not in (None, code) for one, code in zip(processes, codes, strict=True)):
                    break
                time.sleep(0.1)
        finally:
            found = tuple(one.poll() for one in processes)
            for one in processes:
                if one.poll() is None:
                    one.kill()
                one.wait()
        output.seek(0)
        printed = output.read()
    assert found == codes, f"exit codes {found} (None: over {seconds:g} s, or after another's failure)\n{printed}"
    return printed


def test_values() -> None:
    assert re.search(r"^values: 756 boundaries right", run_ranks("values", seconds=420), re.MULTILINE)


def test_graphs() -> None:
    assert re.search(r"^graphs: 150 replays of 9 graphs right", run_ranks("graphs", seconds=240), re.MULTILINE)


def test_soak() -> None:
    printed = run_ranks("soak", "1000000", seconds=240)
    found = re.search(r"^soak: (\d+) boundaries, 0 mismatches, ([\d.]+) seconds", printed, re.MULTILINE)
    assert found and int(found[1]) >= 1_000_000, printed
    assert float(found[2]) < 120, printed


def test_aborted() -> None:
    assert re.search(r"^aborted: 35 aborted steps", run_ranks("aborted", seconds=240), re.MULTILINE)


def test_freed() -> None:
    assert re.search(r"^freed: 12 executors built and freed", run_ranks("freed", seconds=120), re.MULTILINE)


@pytest.mark.parametrize("deadline", [3, 10])
def test_stalled(deadline: int) -> None:
    printed = run_ranks("stalled", str(deadline), seconds=120)
    message = rf"rank 0: boundary 8: row \d of rank 1 did not come within {deadline} s"
    found = re.search(rf"^stalled: ([\d.]+) s: PeerTimeout: {message}", printed, re.MULTILINE)
    assert found, printed
    assert float(found[1]) < 15, printed


def test_killed() -> None:
    """Whether the dead rank's memory outlives it or not, the other one names it."""
    printed = run_ranks("killed", seconds=120, codes=(0, -signal.SIGKILL))
    found = re.search(r"^killed: ([\d.]+) s: Peer(Lost|Timeout): rank 0: .*rank 1", printed, re.MULTILINE)
    assert found, printed
    assert float(found[1]) < 15, printed
