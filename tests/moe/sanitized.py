"""Every launch of the MoE kernels, once, for compute-sanitizer; test_gpu_sanitizer.py runs it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parent.parent.parent))

import torch

from specialized_decode.moe.fused import FusedMoE
from tests.helpers.held_moe import held_moe, inputs

HIDDEN, EXPERTS = 5120, 32
# A width of whole tiles of 64 columns, and one that ends within a tile.
WIDTHS, ROWS = (576, 288), (1, 2, 3, 8)


def main() -> None:
    count = 0
    for width in WIDTHS:
        moe = FusedMoE(held_moe(width, EXPERTS, HIDDEN, width, "cuda"))
        for rows in ROWS:
            routing = moe.route(*inputs(rows, rows, HIDDEN, "cuda"))
            out = moe.down(routing, moe.up(routing))
            assert out.rows.isfinite().all() and out.shared.isfinite().all()
            count += 4
    torch.cuda.synchronize()
    print(f"launched {count} times")


if __name__ == "__main__":
    main()
