"""The kernels of a single rank in Triton's interpreter, against the reference.

The waits for peers are inline assembly, which no interpreter runs; test_kernels_compile.py and the GPU tests see to it.
"""

import pytest
import torch
from torch import Tensor

from specialized_decode.boundary import reference
from specialized_decode.boundary.types import UnfinalizedRows
from tests.helpers.step_interpreted import (
    EPS,
    ROWS,
    SPECIAL,
    TOPK,
    WIDTHS,
    in_interpreter,
    inputs,
    run_interpreted,
    streams,
)
from tests.helpers.step_mhc import random_mixer, same_bits

Found = dict[tuple[object, ...], list[Tensor]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    result: Found = in_interpreter(run_interpreted, tmp_path_factory.mktemp("interpreted") / "found.pt", 1000)
    return result


@pytest.mark.parametrize("topk", TOPK)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("hidden", WIDTHS)
def test_boundary(found: Found, hidden: int, rows: int, topk: int) -> None:
    given = inputs(hidden, rows, topk)
    new, x, values, scales, alone, plain_x = found["boundary", hidden, rows, topk]
    assert same_bits(alone, new) and same_bits(plain_x, x)
    contribution = given["shared"]
    if topk:
        contribution = reference.finalize(UnfinalizedRows(given["rows"], given["weights"], contribution))
    expected = reference.mix_streams(contribution.float(), given["residual"], given["post"], given["comb"])
    assert_rounding(new, expected)
    assert_rounding(x, reference.rms_norm(reference.collapse(new, given["pre"]), given["norm"], EPS))
    assert x.isnan().any(1).nonzero().flatten().tolist() == ([SPECIAL] if rows > SPECIAL else [])
    numbers = ~x.isnan().any(1)
    quantized = reference.quantize_mxfp8(x)
    assert same_bits(values[numbers], quantized.values[numbers])
    assert same_bits(scales[numbers], quantized.scales[numbers])


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("hidden", WIDTHS)
def test_coefficients(found: Found, hidden: int, rows: int) -> None:
    given, mixer = streams(hidden, rows), random_mixer(hidden, hidden)
    alike = reference.broadcast_streams(given[:, 0], 4)
    for name, residual in (("mixes", given), ("first", alike)):
        expected = reference.coefficients(residual, mixer)
        for ours, theirs in zip(found[name, hidden, rows], expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)
    assert_rounding(found["mean", hidden, rows][0], reference.stream_mean(given))
    assert not found["arrived", hidden, rows][0].any()


def assert_rounding(found: Tensor, expected: Tensor) -> None:
    """Equal but for the last bit of bfloat16, which another order of a float32 sum may turn, and that seldom."""
    assert found.shape == expected.shape and torch.equal(found.isnan(), expected.isnan())
    torch.testing.assert_close(found.float(), expected.float(), rtol=2.0**-7, atol=1e-6, equal_nan=True)
    different = (found != expected) & ~found.isnan()
    assert different.float().mean() < 0.02, f"{int(different.sum())} of {different.numel()} values differ"
