"""`moe.expert_layout` against vLLM and Humming on the GPU: the tensors bit for bit, and what its GEMM multiplies by."""

from typing import Any

import pytest
import torch
from torch import Tensor

from specialized_decode.moe.expert_layout import pack, shard_width, unpack
from specialized_decode.moe.reference import unpack_fp4
from tests.helpers.stock_experts import SCALES, WIDTHS, as_loaded, assert_same_tensors, bound, convert, random_experts

HIDDEN = 5120
DEVICE = torch.device("cuda")
# Columns of each expert that a GEMM picks out, beside the first and the last.
PICKED = 126


@pytest.fixture(autouse=True)
def stock() -> None:
    """Skips where the form is not the one in question."""
    pytest.importorskip("vllm")
    pytest.importorskip("humming")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0: elsewhere Humming has other forms")


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize(("hidden", "width"), [*((HIDDEN, width) for width in WIDTHS), (160, 96)])
def test_tensors(hidden: int, width: int, scales: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed on the GPU and packed on the CPU: what vLLM holds."""
    experts = random_experts(width, 3, hidden, width, scales, DEVICE.type)
    layer = convert(as_loaded(experts), monkeypatch)
    assert_same_tensors(pack(*vars(experts).values()), layer)
    on_cpu = pack(*(tensor.cpu() for tensor in vars(experts).values()))
    assert_same_tensors(on_cpu, layer.cpu())


def _picked(layer: Any, name: str, columns: Tensor) -> Tensor:
    """Stock's grouped GEMM on one-hot rows, `columns` [E, R] of each expert -> [E, R, rows of the projection]."""
    from vllm.utils.humming import GemmType, create_humming_locks, get_heuristics_config, humming_forward

    config = layer.humming_configs[name]
    count, rows = columns.shape
    width = config.shape_k - config.pad_shape_k
    inputs = torch.nn.functional.one_hot(columns.flatten(), width).to(torch.float8_e4m3fn)
    outputs = torch.full((count * rows, config.shape_n - config.pad_shape_n), torch.nan, device=DEVICE).bfloat16()
    gemm = GemmType.GROUPED_CONTIGUOUS
    humming_forward(
        config,
        inputs=inputs,
        weight=getattr(layer, f"{name}_weight"),
        weight_scale=getattr(layer, f"{name}_weight_scale"),
        weight_scale_2=getattr(layer, f"{name}_weight_scale_2"),
        input_scale=torch.ones(count * rows, -(-width // 128), device=DEVICE),
        outputs=outputs,
        expert_layout=torch.arange(0, (count + 1) * rows, rows, device=DEVICE),
        locks=create_humming_locks(DEVICE),
        valid_shape_m=count * rows,
        compute_config={"gemm_type": gemm.value},
        tuning_config=get_heuristics_config(config, gemm_type=gemm),
    )
    return outputs.unflatten(0, (count, rows))


@pytest.mark.parametrize("scales", ["as in a release", "further apart than 2**11", "some zero"])
@pytest.mark.parametrize("width", WIDTHS)
def test_weights_that_the_stock_gemm_multiplies_by(width: int, scales: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One-hot rows pick columns out, exact in bfloat16: they are those of `unpack`, from what the layer holds."""
    experts = random_experts(width, 3, HIDDEN, width, scales, DEVICE.type)
    layer = convert(as_loaded(experts), monkeypatch)
    held = unpack(bound(layer, HIDDEN, width))
    shard = shard_width(width)
    generator = torch.Generator(DEVICE).manual_seed(width)
    for name, size, codes, scale in (
        ("w13", HIDDEN, held.w13, held.w13_scale),
        ("w2", width, held.w2, held.w2_scale),
    ):
        columns = torch.randint(size, (3, PICKED + 2), generator=generator, device=DEVICE)
        columns[:, 0], columns[:, -1] = 0, size - 1
        found = _picked(layer, name, columns)
        if name == "w13":
            found = found.unflatten(2, (2, shard))[..., :width].flatten(2)
        weights = unpack_fp4(codes, scale, torch.bfloat16)
        expected = weights.gather(2, columns[:, None].expand(-1, weights.shape[1], -1)).transpose(1, 2)
        assert torch.equal(found, expected), name
