"""Every launch of the boundary kernels on one rank, once, for compute-sanitizer; test_gpu_sanitizer.py runs it."""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parent.parent.parent))

import torch

from specialized_decode.boundary.fused import FusedBoundary, FusedCoefficients
from specialized_decode.boundary.types import Pending, UnfinalizedRows
from tests.helpers.step_gates import FixedGroup
from tests.helpers.step_mhc import random_mixer

MAX_ROWS, TOP_K, EPS = 65, 6, 1e-6
# A width without padding, and one whose second part is padded; rows on both sides of the launches' limits.
WIDTHS, ROWS = (5120, 7168), (1, 3, 5, 17, 65)


def boundaries(hidden: int, rows: int) -> int:
    """Returns how many launches there were."""
    device, count = torch.device("cuda"), 0
    fused = FusedBoundary(hidden, MAX_ROWS, FixedGroup(0, []), device)
    output, experts = (
        torch.randn(shape, device=device).bfloat16() for shape in ((rows, hidden), (rows, TOP_K, hidden))
    )
    unfinalized = UnfinalizedRows(experts, torch.rand(rows, TOP_K, device=device), output)
    residual, norm = (
        torch.randn(rows, 4, hidden, device=device).bfloat16(),
        torch.ones(hidden, device=device).bfloat16(),
    )
    post, pre, comb = (torch.rand(shape, device=device) for shape in ((rows, 4), (rows, 4), (rows, 4, 4)))
    pendings: tuple[Pending, ...] = (output, unfinalized)
    for pending in pendings:
        for collapse, quantize in (((pre, norm, EPS), False), ((pre, norm, EPS), True), (None, False)):
            for settled in (False, True):
                fused.run(pending, False, residual, post, comb, collapse, quantize, settled)
                count += 1
    return count


def coefficients(hidden: int, rows: int) -> int:
    device = torch.device("cuda")
    ops, mixer = FusedCoefficients(hidden, MAX_ROWS, device), random_mixer(rows, hidden)
    mixer = replace(mixer, fn=mixer.fn.cuda(), base=mixer.base.cuda(), scale=mixer.scale.cuda())
    ops.prepare_first(mixer)
    ops.prepare(mixer)
    residual = torch.randn(rows, 4, hidden, device=device).bfloat16()
    ops(residual, mixer)
    ops.first(residual[:, 0].contiguous(), residual, mixer)
    ops.mean(residual)
    return 3


def main() -> None:
    count = sum(run(hidden, rows) for hidden in WIDTHS for rows in ROWS for run in (boundaries, coefficients))
    torch.cuda.synchronize()
    print(f"launched {count} times")


if __name__ == "__main__":
    main()
