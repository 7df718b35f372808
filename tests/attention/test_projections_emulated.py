"""The projections' kernels, run on the CPU by tests.helpers.emulated_kernels, against float64."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specialized_decode.attention import fused, fused_index
from specialized_decode.attention import projection_tuning as tuning
from specialized_decode.attention import reference as attention_reference
from specialized_decode.attention.kernels import index_projection, projection
from specialized_decode.attention.prepared import prepare_fp8
from specialized_decode.boundary import reference
from specialized_decode.boundary.kernels import fragments
from tests.helpers.emulated_kernels import emulate
from tests.helpers.index_case import IndexCase, Shape, assert_projected
from tests.helpers.step_linear import fp8_linear
from tests.helpers.step_mhc import same_bits

# Small, for time: the release's widths are those of the tests on a GPU.
INDEXED = [
    Shape(hidden=1280, heads=4, q_rank=320),
    Shape(ratio=2, heads=20, hidden=640, q_rank=64),
    Shape(compressor=False, heads=8, q_rank=320),
]

# One, all of a program's, and some of a second program's.
ROWS = (1, 8, 13)


def indexed(shape: Shape, rows: int, monkeypatch: pytest.MonkeyPatch) -> IndexCase:
    emulate(monkeypatch, fused_index, (index_projection, projection, fragments))
    emulate(monkeypatch, fused, (projection, fragments))
    return IndexCase(shape, (9, 0, 200, 1, 5, 4, 3, 2, 7, 0, 131, 6, 8)[:rows], rows)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", INDEXED)
def test_index_projection(shape: Shape, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = indexed(shape, rows, monkeypatch)
    kernels = fused_index.FusedIndexer(case.attn, fused_index.fused_bins(case.device))
    partial = kernels.project(case.x).partial
    assert partial.shape[0] == kernels.launch.splits and kernels.project_all(case.x) is None
    assert_projected(case, partial)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", INDEXED)
def test_projections_of_the_input_and_of_queries(shape: Shape, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one launch each: what they give apart."""
    case = indexed(shape, rows, monkeypatch)
    wqa_wkv = fused.FusedLinear(fp8_linear(1, 64, shape.hidden, shape.hidden**-0.5, case.device))
    wq_b = fused.FusedLinear(fp8_linear(2, 64, shape.q_rank, shape.q_rank**-0.5, case.device))
    alone = fused_index.FusedIndexer(case.attn, fused_index.fused_bins(case.device))
    own: Any = SimpleNamespace(fused_wqa_wkv=wqa_wkv, wq_b=wq_b)
    expected = wqa_wkv(case.x), alone.wq_b(case.qr), wq_b(case.qr)
    together = fused_index.FusedIndexer(case.attn, fused_index.fused_bins(case.device), own)
    found = together.project_all(case.x)
    assert found is not None
    assert same_bits(found[0], expected[0])
    assert found[1].heads == alone.first_head
    assert_projected(case, found[1].partial)
    for settled in (False, True):
        index_q, q = together.queries(case.qr, settled)
        assert same_bits(index_q, expected[1]) and same_bits(q, expected[2])
    assert all(map(same_bits, (together.wq_b(case.qr), wq_b(case.qr)), expected[1:])), "of a copy of both"
    assert together.nbytes == alone.nbytes


def test_projections_of_other_inputs_are_not_joined() -> None:
    device = torch.device("cpu")
    layers = [fused.FusedLinear(fp8_linear(1, 64, k, 1.0, device)) for k in (64, 128)]
    with pytest.raises(ValueError, match=r"projections: found \[64, 64\], \[64, 128\], expected two of one input"):
        fused.JoinedLinear(*layers)


@pytest.mark.parametrize(("n", "k", "groups"), [(544, 64, 1), (64, 1024, 2), (64, 5120, 1), (128, 1280, 1)])
def test_projection(n: int, k: int, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, fused, (projection, fragments))
    generator = torch.Generator().manual_seed(n + k)
    weight = torch.randn(n, k, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.randint(115, 125, (n // 32, k // 32), generator=generator, dtype=torch.uint8)
    prepared, full = prepare_fp8(weight, scale), reference.dequantize(weight, scale).double()
    for rows in ROWS:
        x = torch.randn(rows, groups * k, generator=generator).bfloat16()
        parts = zip(x.double().chunk(groups, 1), full.chunk(groups), strict=True)
        exact = torch.cat([part @ own.T for part, own in parts], 1)
        best = (exact.to(torch.bfloat16).double() - exact).norm()
        for launch in dict.fromkeys((tuning.projection(n, k, groups), *tuning.candidates(n, k, groups)[-3:])):
            error = (fused.project_fp8(x, prepared, groups, launch).double() - exact).norm()
            assert error <= 1.1 * best, f"{launch}: found an error of {error:g}, a rounding has {best:g}"


@pytest.mark.parametrize("rows", ROWS)
def test_projection_that_norms(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of a wider tensor, as good as with the norm apart."""
    emulate(monkeypatch, fused, (projection, fragments))
    generator = torch.Generator().manual_seed(rows)
    linear = fp8_linear(3, 64, 1280, 1280**-0.5, torch.device("cpu"))
    layer, full = fused.NormedLinear(linear, 512), reference.dequantize(linear.weight, linear.scale).double()
    x = torch.randn(rows, 1280 + 512, generator=generator).bfloat16()[:, :1280]
    norm = (1 + 0.2 * torch.randn(1280, generator=generator)).bfloat16()
    exact = torch.nn.functional.rms_norm(x.double(), (1280,), norm.double(), 1e-20) @ full.T
    apart = layer(attention_reference.rms_norm(x, norm, 1e-20).contiguous())
    ours, theirs = ((one.double() - exact).norm() for one in (layer.normed(x, norm, 1e-20), apart))
    assert ours <= 1.1 * theirs, f"found an error of {ours:g}, with the norm apart it is {theirs:g}"
