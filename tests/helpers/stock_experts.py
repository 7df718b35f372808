"""Experts in the checkpoint's form with scales of every kind, and what vLLM's Humming backend makes of them."""

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specialized_decode.moe.expert_layout import HummingExperts, Mxfp4Experts, PackedWeight

# The widths of a rank at TP 1, 2, 4 and 8.
WIDTHS = (2304, 1152, 576, 288)

# Ranges of the scales' bytes, the last one excluded.
SCALES = {
    "as in a release": (117, 125),
    "one": (120, 121),
    "further apart than 2**11": (100, 128),
    "above 1": (124, 139),
    "subnormal": (0, 3),
    "some zero": (118, 127),
}


def random_experts(seed: int, count: int, hidden: int, width: int, scales: str, device: str = "cpu") -> Mxfp4Experts:
    """Every code, among them -0 and whole groups of zeros; of "some zero", every tenth scale is 0."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, device=device).to(torch.uint8)

    def projection(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        codes, held = draw(0, 256, count, rows, columns // 2), draw(*SCALES[scales], count, rows, columns // 32)
        lot = draw(0, 20, *held.shape)
        if scales == "some zero":
            held.masked_fill_(lot >= 18, 0)
        codes.masked_fill_((lot == 0).repeat_interleave(16, -1), 0)
        return codes, held

    return Mxfp4Experts(*projection(2 * width, hidden), *projection(hidden, width))


def as_loaded(experts: Mxfp4Experts) -> dict[str, Tensor]:
    """The parameters of vLLM's layer once they are loaded: allocated as zeros, at the width that it rounds up to."""
    from vllm.model_executor.layers.fused_moe.oracle import mxfp4

    count, hidden, width = experts.count, experts.w2.shape[1], experts.w13.shape[1] // 2
    round_up = mxfp4.mxfp4_round_up_hidden_size_and_intermediate_size
    hidden, rounded = round_up(mxfp4.Mxfp4MoeBackend.HUMMING, hidden, width)
    assert hidden == experts.w2.shape[1]
    parameters: dict[str, Tensor] = {}
    for suffix, columns in (("", 2), ("_scale", 32)):
        w13 = experts.w13.new_zeros(count, 2, rounded, hidden // columns)
        w13[:, :, :width] = getattr(experts, "w13" + suffix).unflatten(1, (2, width))
        w2 = experts.w2.new_zeros(count, hidden, rounded // columns)
        w2[:, :, : width // columns] = getattr(experts, "w2" + suffix)
        parameters |= {"w13_weight" + suffix: w13.flatten(1, 2), "w2_weight" + suffix: w2}
    return parameters


def convert(parameters: dict[str, Tensor], patch: pytest.MonkeyPatch) -> Any:
    """A layer whose parameters vLLM has converted, as after loading, with no override of activations by the user."""
    from vllm.model_executor.layers.fused_moe.oracle import mxfp4
    from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp8Dynamic

    no_override = SimpleNamespace(model_config=SimpleNamespace(quantization_config=None))
    patch.setattr(mxfp4, "get_current_vllm_config", lambda: no_override)
    layer: Any = torch.nn.Module()
    for name, tensor in parameters.items():
        layer.register_parameter(name, torch.nn.Parameter(tensor.clone(), requires_grad=False))
    count, hidden, width = layer.w2_weight.shape[0], layer.w2_weight.shape[1], 2 * layer.w2_weight.shape[2]
    layer.moe_config = SimpleNamespace(
        has_bias=False,
        num_local_experts=count,
        activation=SimpleNamespace(is_gated=True),
        intermediate_size_per_partition=width,
        hidden_dim=hidden,
    )
    layer.params_dtype, layer.layer_name = torch.bfloat16, "layers.0.ffn.experts"
    weights = [getattr(layer, name) for name in ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale")]
    backend = mxfp4.Mxfp4MoeBackend.HUMMING
    mxfp4.convert_weight_to_mxfp4_moe_kernel_format(backend, layer, *weights, activation_key=kMxfp8Dynamic)
    return layer


def bound(layer: Any, hidden: int, width: int) -> HummingExperts:
    """The layer's own tensors, of a rank's unpadded `width`."""
    names = [field.name for field in fields(PackedWeight)]
    w13, w2 = (PackedWeight(*(getattr(layer, f"{part}_{name}").data for name in names)) for part in ("w13", "w2"))
    return HummingExperts(w13, w2, hidden, width)


def assert_same_tensors(packed: HummingExperts, layer: Any) -> None:
    """The layer holds exactly the tensors of `packed`: names, dtypes, shapes, bytes."""
    expected = {
        f"{projection}_{name}": tensor
        for projection in ("w13", "w2")
        for name, tensor in vars(getattr(packed, projection)).items()
    }
    found = {name: p for name, p in layer.named_parameters(recurse=False) if name.startswith(("w13_", "w2_"))}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name].data.view(torch.uint8), tensor.view(torch.uint8)), name
