"""The low-batch projection on a GPU: values against float64, beside the reference's."""

import pytest
import torch
from torch import Tensor

from specialized_decode.attention import projection_tuning as tuning
from specialized_decode.attention import reference as attention_reference
from specialized_decode.attention.fused import MAX_ROWS, FusedLinear, NormedLinear, project_fp8
from specialized_decode.attention.prepared import prepare_fp8
from specialized_decode.backbone.linear import Linear
from specialized_decode.boundary import reference
from tests.attention.shapes import SHAPES
from tests.helpers.poisoned import poisoned

DEVICE = torch.device("cuda")


# Of the tiny model, whose programs have one warp.
SMALL = [(544, 64, 1), (2048, 32, 1), (64, 1024, 2), (64, 64, 1)]


@pytest.mark.parametrize("rows", range(1, MAX_ROWS + 1))
@pytest.mark.parametrize(("n", "k", "groups"), [*SHAPES, *SMALL])
def test_values(n: int, k: int, groups: int, rows: int) -> None:
    generator = torch.Generator(DEVICE).manual_seed(n + k + rows)
    weight = torch.randn(n, k, generator=generator, device=DEVICE).to(torch.float8_e4m3fn)
    scale = torch.randint(115, 125, (n // 32, k // 32), generator=generator, device=DEVICE, dtype=torch.uint8)
    # Rows behind the last are there and hold NaN: nobody may read them.
    padded = torch.full((MAX_ROWS + 1, groups * k), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    x = padded[:rows]
    size = torch.exp2(torch.randint(-8, 8, (rows, 1), generator=generator, device=DEVICE).float())
    x.copy_((torch.randn(rows, groups * k, generator=generator, device=DEVICE) * size).bfloat16())
    with poisoned():
        found = project_fp8(x, prepare_fp8(weight, scale), groups)
    full = reference.dequantize(weight, scale)
    parts = zip(x.chunk(groups, 1), full.chunk(groups), strict=True)
    exact = torch.cat([part.double() @ own.double().T for part, own in parts], 1)
    rounded = exact.to(torch.bfloat16)
    ours, best = (found.double() - exact).norm(), (rounded.double() - exact).norm()
    assert ours <= 1.1 * best, f"found an error of {ours:g}, a rounding of the exact value has {best:g}"
    assert found.isfinite().all()


@pytest.mark.parametrize(("n", "k", "groups"), [SHAPES[number] for number in (0, 3, 7, 9, 11)])
def test_every_candidate(n: int, k: int, groups: int) -> None:
    generator = torch.Generator(DEVICE).manual_seed(n + k)
    weight = torch.randn(n, k, generator=generator, device=DEVICE).to(torch.float8_e4m3fn)
    scale = torch.randint(115, 125, (n // 32, k // 32), generator=generator, device=DEVICE, dtype=torch.uint8)
    x = torch.randn(5, groups * k, generator=generator, device=DEVICE).bfloat16()
    full = reference.dequantize(weight, scale).double()
    parts = zip(x.double().chunk(groups, 1), full.chunk(groups), strict=True)
    exact = torch.cat([part @ own.T for part, own in parts], 1)
    best = (exact.to(torch.bfloat16).double() - exact).norm()
    prepared = prepare_fp8(weight, scale)
    for launch in tuning.candidates(n, k, groups):
        error = (project_fp8(x, prepared, groups, launch).double() - exact).norm()
        assert error <= 1.1 * best, f"{launch}: found an error of {error:g}, a rounding has {best:g}"


def test_a_chain_in_two_buffers() -> None:
    """Launches overlap: each reads what the one before wrote, into memory that the one before that read."""
    n = k = 2048
    generator = torch.Generator(DEVICE).manual_seed(1)
    weights = [torch.randn(n, k, generator=generator, device=DEVICE).to(torch.float8_e4m3fn) for _ in range(20)]
    # About 1 / sqrt(k), so that numbers keep their size.
    scale = torch.full((n // 32, k // 32), 127 - 6, dtype=torch.uint8, device=DEVICE)
    prepared = [prepare_fp8(weight, scale) for weight in weights]
    begin = torch.randn(MAX_ROWS, k, generator=generator, device=DEVICE).bfloat16()

    def run(wait: bool) -> Tensor:
        x = begin
        for number in range(100):
            # The buffer that `x` had before goes back to the allocator here and is the next output.
            x = project_fp8(x, prepared[number % 20])
            if wait:
                torch.cuda.synchronize()
        return x

    expected = run(True)
    assert expected.isfinite().all() and expected.count_nonzero() > 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(False)
    for _ in range(20):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, expected)


def test_zeros_subnormals_and_largest() -> None:
    weight = torch.zeros(32, 32, dtype=torch.uint8, device=DEVICE)
    weight[:, :16] = torch.arange(16, dtype=torch.uint8, device=DEVICE)
    weight[1], weight[2, 0], weight[3, 0] = 0x80, 0x7E, 0xFE
    numbers = weight.view(torch.float8_e4m3fn)
    scale = torch.full((1, 1), 127, dtype=torch.uint8, device=DEVICE)
    x = torch.eye(8, 32, device=DEVICE).bfloat16() * 2.0**-40
    found = project_fp8(x.bfloat16().contiguous(), prepare_fp8(numbers, scale))
    assert torch.equal(found.double(), x.double() @ numbers.double().T)


def test_replays_read_what_is_there_then() -> None:
    weights = [torch.randn(1792, 5120, device=DEVICE).to(torch.float8_e4m3fn) for _ in range(4)]
    scale = torch.full((56, 160), 120, dtype=torch.uint8, device=DEVICE)
    prepared = [prepare_fp8(weight, scale) for weight in weights]
    x = torch.randn(3, 5120, device=DEVICE).bfloat16()
    expected = [project_fp8(x, one) for one in prepared]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [project_fp8(x, one) for one in prepared]
    for _ in range(3):
        x.copy_(torch.randn(3, 5120, device=DEVICE).bfloat16())
        expected = [project_fp8(x, one) for one in prepared]
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize(("n", "k", "groups", "early"), [(8192, 1280, 1, False), (2048, 4096, 2, True)])
def test_a_layer_that_stores_where_it_is_told(n: int, k: int, groups: int, early: bool) -> None:
    weight = torch.randn(n, k, device=DEVICE).to(torch.float8_e4m3fn)
    scale = torch.full((n // 32, k // 32), 120, dtype=torch.uint8, device=DEVICE)
    layer = FusedLinear(Linear(weight, scale), groups, early)
    assert layer.nbytes == n * k + scale.numel()
    x = torch.randn(3, groups * k, device=DEVICE).bfloat16()
    out = torch.full((4, n), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    assert layer(x, out[:3]).data_ptr() == out.data_ptr()
    assert torch.equal(out[:3], project_fp8(x, prepare_fp8(weight, scale), groups)) and out[3].isnan().all()
    with pytest.raises(ValueError, match=rf"expected contiguous bfloat16 \[3, {n}\]"):
        layer(x, out)


@pytest.mark.parametrize("rows", range(1, MAX_ROWS + 1))
@pytest.mark.parametrize(("n", "k"), [(8192, 1280), (4096, 1280), (32768, 1280), (2048, 32)])
def test_a_layer_that_norms(n: int, k: int, rows: int) -> None:
    """Columns of a wider tensor, whose others and whose further rows hold NaN; as good as with the norm apart."""
    generator = torch.Generator(DEVICE).manual_seed(n + rows)
    weight = torch.randn(n, k, generator=generator, device=DEVICE).to(torch.float8_e4m3fn)
    scale = torch.randint(115, 125, (n // 32, k // 32), generator=generator, device=DEVICE, dtype=torch.uint8)
    norm = (1 + 0.2 * torch.randn(k, generator=generator, device=DEVICE)).bfloat16()
    wide = torch.full((MAX_ROWS + 1, k + 512), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    x = wide[:rows, :k]
    size = torch.exp2(torch.randint(-8, 8, (rows, 1), generator=generator, device=DEVICE).float())
    x.copy_((torch.randn(rows, k, generator=generator, device=DEVICE) * size).bfloat16())
    layer, full = NormedLinear(Linear(weight, scale), 512), reference.dequantize(weight, scale).double()
    exact = torch.nn.functional.rms_norm(x.double(), (k,), norm.double(), 1e-20) @ full.T
    apart = layer(attention_reference.rms_norm(x, norm, 1e-20).contiguous())
    found = layer.normed(x, norm, 1e-20)
    ours, theirs = (found.double() - exact).norm(), (apart.double() - exact).norm()
    assert ours <= 1.1 * theirs, f"found an error of {ours:g}, with the norm apart it is {theirs:g}"
    with pytest.raises(ValueError, match=r"projection: norm: found torch.float32"):
        layer.normed(x, norm.float(), 1e-20)


def test_other_inputs_are_refused() -> None:
    prepared = prepare_fp8(
        torch.zeros(32, 64, device=DEVICE).to(torch.float8_e4m3fn),
        torch.full((1, 2), 127, dtype=torch.uint8, device=DEVICE),
    )
    with pytest.raises(ValueError, match=r"found torch.bfloat16 \[17, 64\]"):
        project_fp8(torch.zeros(17, 64, dtype=torch.bfloat16, device=DEVICE), prepared)
    with pytest.raises(ValueError, match=r"found torch.float32 \[1, 64\]"):
        project_fp8(torch.zeros(1, 64, device=DEVICE), prepared)
