"""Inputs that the boundary kernel does not take are refused before any launch."""

import pytest
import torch
from torch import Tensor

from specialized_decode.boundary.fused import FusedBoundary
from specialized_decode.boundary.types import Pending, UnfinalizedRows
from tests.helpers.step_gates import FixedGroup

ROWS, HIDDEN, TOP_K = 2, 64, 3
SHAPES = {
    "residual": (ROWS, 4, HIDDEN),
    "post": (ROWS, 4),
    "comb": (ROWS, 4, 4),
    "pre": (ROWS, 4),
    "norm": (HIDDEN,),
    "pending": (ROWS, HIDDEN),
    "rows": (ROWS, TOP_K, HIDDEN),
    "weights": (ROWS, TOP_K),
    "shared": (ROWS, HIDDEN),
}


def strided(shape: tuple[int, ...]) -> Tensor:
    """Every other value along the last dimension."""
    return torch.zeros(*shape[:-1], 2 * shape[-1], dtype=torch.bfloat16)[..., ::2]


@pytest.mark.parametrize("name", SHAPES)
def test_strided_inputs_are_named(name: str) -> None:
    given = {key: torch.zeros(shape, dtype=torch.bfloat16) for key, shape in SHAPES.items()}
    given[name] = strided(SHAPES[name])
    pending: Pending = given["pending"]
    if name in ("rows", "weights", "shared"):
        pending = UnfinalizedRows(given["rows"], given["weights"], given["shared"])
    boundary = FusedBoundary(HIDDEN, ROWS, FixedGroup(0, []), torch.device("cpu"))
    collapse = (given["pre"], given["norm"], 1e-6)
    with pytest.raises(
        ValueError, match=rf"^boundary: {name}: found shape \[.*\], strides \[.*2\], expected contiguous"
    ):
        boundary.run(pending, False, given["residual"], given["post"], given["comb"], collapse, False)
