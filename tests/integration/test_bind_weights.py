"""The views of vLLM's layers hold, byte for byte, what the checkpoint's folder does, after vLLM repacked the layers.

vLLM's model is built and loaded on the CPU by its own loader. The other side is the plain model, which reads the same
folder. Humming's repacking needs a GPU; a stand-in does what it does to a layer: parameters deleted, others in place.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specialized_decode.backbone.model import load_model
from specialized_decode.integration.memory import prepared_bytes, projection_bytes, shared_expert_bytes
from specialized_decode.runtime import UnsupportedTarget
from tests.integration import vllm_model
from tests.integration.loaded import Loaded, process

ATTENTION = (
    *("layer_id", "num_heads", "head_dim", "rope_dim", "q_lora_rank", "o_groups", "o_lora_rank", "window_size"),
    *("compress_ratio", "index_source", "kv_source", "eps", "scale"),
    *("fused_wqa_wkv", "wq_b", "wo_a", "wo_b", "q_norm", "kv_norm", "sinks"),
)
COMPRESSOR = ("ratio", "fused_wkv_wgate", "norm", "eps")
INDEXER = (
    *("num_heads", "head_dim", "topk", "ratio", "eps", "candidate_source", "candidate_consumer"),
    *("candidate_block_size", "wq_b", "weights_proj", "wk", "k_norm"),
)
MOE = ("topk", "scaling", "limit", "gate", "bias", "image_bias", "shared_up", "shared_down")
EXPERTS = ("count", "w13", "w13_scale", "w2", "w2_scale")
MIXER = ("fn", "base", "scale", "rms_eps", "hc_eps", "sinkhorn_iters")
ENGRAM = ("eps", "wkv", "q_weight", "k_weight")


@pytest.fixture(scope="module")
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def loaded(tiny_folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Loaded]:
    found = Loaded(tiny_folder, patch)
    with vllm_model.one_rank(found.config):
        yield found


@pytest.fixture(scope="module")
def model(loaded: Loaded) -> Any:
    """Loaded from the folder and repacked."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    built = loaded.build()
    DefaultModelLoader(loaded.config.load_config).load_weights(built, loaded.config.model_config)
    process(built)
    return built


@pytest.fixture(scope="module")
def target(model: Any) -> Any:
    from specialized_decode.integration.bind import VllmTarget
    from specialized_decode.integration.host import VllmHost

    prepared = model._specialized_decode_prepared
    return VllmTarget(model.model, VllmHost(torch.device("cpu")), prepared)


@pytest.fixture(scope="module")
def plain(tiny_folder: Path) -> Any:
    return load_model(tiny_folder, torch.device("cpu"), 64, 512).model


def assert_same(name: str, found: Any, expected: Any) -> None:
    """Numbers equal, tensors of equal bytes, dense layers of equal weights and scales."""
    if hasattr(expected, "dense"):
        assert_same(f"{name}.weight", found.weight, expected.weight)
        assert_same(f"{name}.scale", found.scale, expected.scale)
    elif isinstance(expected, Tensor):
        assert found.shape == expected.shape, name
        assert found.dtype.itemsize == expected.dtype.itemsize, name
        assert torch.equal(found.detach().contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)), name
    else:
        assert found == expected, name


def assert_view(name: str, found: Any, expected: Any, attributes: tuple[str, ...]) -> None:
    assert (found is None) == (expected is None), name
    if expected is not None:
        for attribute in attributes:
            assert_same(f"{name}.{attribute}", getattr(found, attribute), getattr(expected, attribute))


def test_every_view_holds_the_checkpoints_bytes(target: Any, plain: Any) -> None:
    for bound, layer in zip(target.layers, plain.layers, strict=True):
        name = f"layer {layer.layer_id}"
        assert_view(name, bound, layer, ("layer_id", "attn_norm", "ffn_norm", "eps"))
        assert_view(name, bound.attn_mixer, layer.attn_mixer, MIXER)
        assert_view(name, bound.ffn_mixer, layer.ffn_mixer, MIXER)
        assert_view(f"{name} attn", bound.attn, layer.attn, ATTENTION)
        assert_view(f"{name} compressor", bound.attn.compressor, layer.attn.compressor, COMPRESSOR)
        assert_view(f"{name} indexer", bound.attn.indexer, layer.attn.indexer, INDEXER)
        assert_view(f"{name} ffn", bound.ffn, layer.ffn, MOE)
        assert_view(f"{name} experts", bound.ffn.experts, layer.ffn.experts, EXPERTS)
        assert_view(f"{name} engram", bound.engram, layer.engram, ENGRAM)
        count = layer.attn.cos_sin.shape[0]
        torch.testing.assert_close(bound.attn.cos_sin[:count], layer.attn.cos_sin, rtol=0, atol=2e-6)
    assert torch.equal(target.norm, plain.norm)


def test_every_kind_of_layer_is_among_them(target: Any) -> None:
    """Window only, KV source, index source without one, sharing, candidate source and consumer, Engram, both ratios."""
    attention = [layer.attn for layer in target.layers]
    assert any(attn.kv_source is None for attn in attention)
    assert {attn.compressor.ratio for attn in attention if attn.compressor is not None} == {1, 2}
    assert any(attn.indexer is not None and attn.indexer.wk is None for attn in attention)
    assert any(attn.kv_source is not None and attn.indexer is None for attn in attention)
    assert any(attn.indexer is not None and attn.indexer.candidate_source for attn in attention)
    assert any(attn.indexer is not None and attn.indexer.candidate_consumer for attn in attention)
    assert any(layer.engram is not None for layer in target.layers)


def test_only_dense_fp8_layers_are_copied(model: Any, target: Any) -> None:
    """Norms, BF16 layers, mHC and experts are vLLM's own tensors; repacked layers have a copy, of the bytes said."""
    prepared = model._specialized_decode_prepared
    for bound, layer in zip(target.layers, model.model.layers, strict=True):
        assert bound.attn.q_norm is layer.attn.q_norm.weight
        assert bound.ffn.gate.weight.data_ptr() == layer.ffn.gate.weight.data_ptr()
        assert bound.attn.sinks.data_ptr() == layer.attn.attn_sink.data_ptr()
        assert bound.ffn.experts.w13 is layer.ffn.experts.routed_experts.w13_weight
        assert bound.attn.wq_b.weight.data_ptr() != layer.attn.wq_b.weight.data_ptr()
        # vLLM's own form of these two is another by now.
        assert layer.attn.wq_b.weight.dtype == torch.int32
        assert layer.attn.wo_a.weight.dtype == torch.bfloat16
    names = ("fused_wqa_wkv", "wq_b", "wo_a", "wo_b")
    dense = [getattr(layer.attn, name) for layer in target.layers for name in names]
    dense += [layer.attn.indexer.wq_b for layer in target.layers if layer.attn.indexer is not None]
    dense += [linear for layer in target.layers for linear in (layer.ffn.shared_up, layer.ffn.shared_down)]
    dense += [layer.engram.wkv for layer in target.layers if layer.engram is not None]
    assert len(prepared) == len(dense)
    assert prepared.nbytes == sum(linear.weight.nbytes + linear.scale.nbytes for linear in dense)
    # What the deployment check made room for.
    assert prepared.nbytes == prepared_bytes(model.config, 1)


def test_what_vllm_dequantized_is_the_copys_values(model: Any, target: Any) -> None:
    """wo_a, which vLLM multiplies in BF16, and our FP8 copy of it are the same numbers."""
    from specialized_decode.boundary import reference

    for bound, layer in zip(target.layers, model.model.layers, strict=True):
        values = reference.dequantize(bound.attn.wo_a.weight, bound.attn.wo_a.scale)
        assert torch.equal(values, layer.attn.wo_a.weight.float())


def test_dummy_weights_are_copied_too(loaded: Loaded) -> None:
    """load_format=dummy fills parameters itself, without the model's load_weights."""
    from vllm.config import LoadConfig
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    from specialized_decode.integration.bind_weights import dense_fp8_layers

    built = loaded.build()
    DummyModelLoader(LoadConfig(load_format="dummy")).load_weights(built, loaded.config.model_config)
    layers: dict[str, Any] = dict(dense_fp8_layers(built.model))
    before = {name: (layer.weight.clone(), layer.weight_scale.clone()) for name, layer in layers.items()}
    process(built)
    assert len(layers) == len(built._specialized_decode_prepared) > 0
    for name, layer in layers.items():
        kept = built._specialized_decode_prepared.of(layer)
        weight, scale = before[name]
        assert_same(name, kept.weight, weight)
        assert_same(name, kept.scale.repeat_interleave(32, 0), scale)
        assert weight.float().std() > 0


def test_nothing_is_copied_unless_our_ops_read_it(loaded: Loaded) -> None:
    built = loaded.build(decode_reference_ops=False, decode_kernels=False)
    assert not hasattr(built, "_specialized_decode_prepared")
    assert built.specialized_decode_config.stock
    for module in built.modules():
        assert "process_weights_after_loading" not in vars(getattr(module, "quant_method", None) or object)


@pytest.mark.parametrize(
    ("families", "shared", "projections"),
    [(["boundary", "moe"], True, False), (["attention"], False, True), (True, True, True)],
)
def test_what_kernels_read_is_copied(loaded: Loaded, families: Any, shared: bool, projections: bool) -> None:
    """Of attention, the indexers' queries too, and no BF16 layer. Where none serves, as here, nothing is kept in the
    end."""
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    from specialized_decode.integration import bind
    from specialized_decode.integration.bind_weights import dense_fp8_layers

    built = loaded.build(decode_reference_ops=False, decode_kernels=families)
    DummyModelLoader(LoadConfig(load_format="dummy")).load_weights(built, loaded.config.model_config)
    layers = dict(dense_fp8_layers(built.model))
    process(built)
    prepared = built._specialized_decode_prepared
    wanted = {name for name in layers if (shared and ".shared_experts." in name) or (projections and ".attn." in name)}
    assert projections == any(name.endswith(".indexer.wq_b") for name in wanted)
    assert {name for name, layer in layers.items() if prepared.of(layer) is not None} == wanted
    assert len(prepared) == len(wanted) > 0
    # What the deployment check made room for.
    text = built.config
    assert prepared.nbytes == projection_bytes(text, 1) * projections + shared_expert_bytes(text, 1) * shared
    prepared.drop(bind._projections(built.model, built.specialized_decode_config))
    prepared.drop(bind._shared_experts(built.model, built.specialized_decode_config))
    assert len(prepared) == 0


def test_without_copies_our_ops_are_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from specialized_decode.integration.bind import VllmTarget, build_executor

    monkeypatch.delattr(model, "_specialized_decode_prepared")
    with pytest.raises(UnsupportedTarget, match="found no prepared weights, expected decode_prepared_weights"):
        build_executor(model)
    target = VllmTarget(model.model, None, None)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"layers\.3\.attn\.wq_b: found no prepared weight"):
        _ = target.layers[3].attn.wq_b.weight


@pytest.mark.parametrize("change", ["class", "records"])
def test_blackwells_caches_are_refused_by_name(model: Any, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """Our own ops read Hopper's caches. FlashInfer's class, and other records, bind and are named."""
    from vllm.models.deepseek_v41.nvidia.flashinfer_sparse import DeepseekV4FlashInferMLAAttention

    from specialized_decode.integration.bind import build_executor

    for layer in model.model.layers:
        if change == "class":
            monkeypatch.setattr(layer.attn, "__class__", DeepseekV4FlashInferMLAAttention)
        else:
            monkeypatch.setattr(layer.attn, "kv_mxfp8", True)
    reason = {
        "class": "attention class: found flashinfer_sparse, expected flashmla_sparse",
        "records": "KV cache records: found another form",
    }
    with pytest.raises(UnsupportedTarget, match=reason[change]):
        build_executor(model)


def test_experts_in_another_form_stay_on_vllms_path(target: Any) -> None:
    from specialized_decode.moe import RoutedExpertGemms

    for layer in target.layers:
        reason = RoutedExpertGemms.refusal(layer.ffn)
        assert reason == "experts are in the form of HUMMING, expected the checkpoint's"


class Layer(nn.Module):
    """A dense layer as vLLM has loaded it."""

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.weight, self.weight_scale = nn.Parameter(weight, False), nn.Parameter(scale, False)


FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("weight", "scale", "message"),
    [
        ((64, 64, torch.bfloat16), (64, 2), r"\[N, K\], N a multiple of 32; found torch.bfloat16 \[64, 64\]"),
        ((48, 64, FP8), (48, 2), r"N a multiple of 32; found torch.float8_e4m3fn \[48, 64\]"),
        ((64, 64, FP8), (2, 2), r"scale \[64, 2\] of one byte; found torch.uint8 \[2, 2\]"),
    ],
)
def test_a_layer_in_another_form_is_refused_by_name(
    weight: tuple[int, int, torch.dtype], scale: tuple[int, int], message: str
) -> None:
    from specialized_decode.integration.bind_weights import CheckpointForm

    layer = Layer(torch.zeros(weight[:2]).to(weight[2]), torch.zeros(scale, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match=f"layers.0.wq_b: expected.*{message}"):
        CheckpointForm.of("layers.0.wq_b", layer)


def test_scales_that_differ_within_a_block_are_refused() -> None:
    from specialized_decode.integration.bind_weights import CheckpointForm

    scale = torch.full((64, 2), 120, dtype=torch.uint8)
    scale[33, 1] = 121
    layer = Layer(torch.zeros(64, 64).to(FP8), scale)
    with pytest.raises(RuntimeError, match="found rows of a block that differ"):
        CheckpointForm.of("layers.0.wq_b", layer)
    scale[32:, 1] = 121
    kept = CheckpointForm.of("layers.0.wq_b", Layer(torch.zeros(64, 64).to(FP8), scale))
    assert kept.scale.tolist() == [[120, 120], [120, 121]]
