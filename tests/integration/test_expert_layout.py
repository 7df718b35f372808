"""`moe.expert_layout` against vLLM and Humming on a CPU, bit for bit.

vLLM's loader and conversion and Humming's Python run as they are, Humming's two kernels compiled for the host.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")

from specialized_decode.backbone.presets import CheckpointPlan
from specialized_decode.backbone.writer import tiny_plan, write_checkpoint
from specialized_decode.moe.expert_layout import pack, projections, unpack
from tests.helpers.stock_experts import SCALES, WIDTHS, as_loaded, assert_same_tensors, bound, convert, random_experts
from tests.integration import vllm_model
from tests.integration.humming_host import HostHumming

# No multiple of what vLLM and Humming round up to.
ODD_WIDTH = 96


@pytest.fixture(scope="module")
def humming(tmp_path_factory: pytest.TempPathFactory) -> HostHumming:
    return HostHumming(tmp_path_factory.mktemp("humming"))


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize(("hidden", "width"), [*((256, width) for width in WIDTHS), (160, ODD_WIDTH)])
def test_as_converted(
    hidden: int, width: int, scales: str, humming: HostHumming, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = random_experts(width, 2, hidden, width, scales)
    humming.launched.clear()
    with humming.running():
        layer = convert(as_loaded(experts), monkeypatch)
    assert humming.launched == 2 * ["process_mxfp4_w4a8", "weight_repack_nk"]
    packed = pack(*vars(experts).values())
    assert_same_tensors(packed, layer)
    held = unpack(bound(layer, hidden, width))
    assert all(torch.equal(*pair) for pair in zip(vars(held).values(), vars(unpack(packed)).values(), strict=True))


def test_padding(humming: HostHumming, monkeypatch: pytest.MonkeyPatch) -> None:
    """Humming's own account of shapes and padding."""
    for width in WIDTHS:
        experts = random_experts(0, 1, 256, width, "one")
        with humming.running():
            configs = convert(as_loaded(experts), monkeypatch).humming_configs
        found = [(configs[name].shape_n, configs[name].shape_k) for name in ("w13", "w2")]
        assert found == [(shape.rows, shape.columns) for shape in projections(256, width)]
        for config in configs.values():
            assert (str(config.a_dtype), config.input_scale_group_size) == ("float8e4m3", 128)
            assert config.use_packed_k_layout and config.use_fused_e8m0_scale and not config.has_zero_point


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    plan = tiny_plan()
    config: Any = plan.config
    config = config | {"text_config": config["text_config"] | {"moe_intermediate_size": ODD_WIDTH}}
    return write_checkpoint(CheckpointPlan(config), tmp_path_factory.mktemp("checkpoint") / "odd")


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Any]:
    """vLLM's model, loaded by its loader."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    arguments = EngineArgs(
        model=str(folder), max_model_len=512, max_num_batched_tokens=512, engram_config={"cpu_offload": False}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
        config = arguments.create_engine_config()
        with vllm_model.one_rank(config):
            model = vllm_model.build(config, patch)
            DefaultModelLoader(config.load_config).load_weights(model, config.model_config)
            yield model


def test_from_the_checkpoint(folder: Path, model: Any, humming: HostHumming, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the folder's tensors to the layer's, by vLLM's backend selection, allocation, loader and conversion."""
    experts = model.model.layers[0].ffn.experts.routed_experts
    method = experts.quant_method
    assert method.mxfp4_backend.name == "HUMMING"
    # The GEMMs need a device; they leave the weights as they are.
    monkeypatch.setattr(method, "_build_moe_kernel", lambda layer: None)
    with humming.running():
        method.process_weights_after_loading(experts)
    source = {name: tensor for shard in folder.glob("*.safetensors") for name, tensor in load_file(shard).items()}

    def stacked(*parts: str) -> list[torch.Tensor]:
        count = experts.moe_config.num_experts
        names = [[f"layers.0.ffn.experts.{expert}.{part}" for part in parts] for expert in range(count)]
        return [
            torch.stack([torch.cat([source[f"{name}.{kind}"].view(torch.uint8) for name in row]) for row in names])
            for kind in ("weight", "scale")
        ]

    w13, w13_scale = stacked("w1", "w3")
    assert w13.shape[1] == 2 * ODD_WIDTH
    assert_same_tensors(pack(w13, w13_scale, *stacked("w2")), experts)
