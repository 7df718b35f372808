"""The executor's schedule on vLLM's ops gives, bit for bit, what vLLM's own layer loop gives from the same ops.

The model is vLLM's own. Its mHC kernels need a GPU; in their place, for both sides, stand the references that vLLM
ships beside them, and functions of its input and its layer in the place of attention, experts and Engram.
"""

import gc
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from specialized_decode.runtime import DecodeConfig, SpecializedDecode, UnsupportedTarget, step_gates
from tests.gpu import attention_phases
from tests.gpu.attention_phases import VLLM, Constants, LeftOut
from tests.integration import vllm_model

ROWS = (1, 2, 7, 49, 384)


def reference_ops() -> dict[str, Callable[..., Any]]:
    """vLLM's mHC in torch, under the names and with the signatures of its kernels."""
    from vllm.model_executor.kernels.mhc.torch import mhc_post_torch, mhc_pre_delayed_torch

    def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return (x.float() * (x.float().square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()).to(x.dtype)

    def mhc_pre_delayed_tilelang(*args: Any, norm_weight: Tensor, norm_eps: float, **inputs: Any) -> Any:
        post, comb, x, pre = mhc_pre_delayed_torch(*args, **inputs)
        return post, comb, norm(x, norm_weight, norm_eps), pre

    def mhc_shifted_post_pre(
        x: Tensor,
        residual: Tensor,
        post: Tensor,
        comb: Tensor,
        *args: Any,
        capture_aux: bool = False,
        stream: None = None,
        reduce_results: bool = False,
        **inputs: Any,
    ) -> Any:
        assert stream is None and not reduce_results
        residual = mhc_post_torch(x, residual, post, comb)
        aux = residual.mean(dim=1) if capture_aux else residual.new_empty(0, residual.shape[2])
        post, comb, x, pre = mhc_pre_delayed_tilelang(residual, *args, **inputs)
        return residual, post, comb, x, pre, aux

    def hc_collapse_triton(x: Tensor, pre_mix: Tensor) -> Tensor:
        return (x.float() * pre_mix.unsqueeze(2)).sum(1).to(x.dtype)

    return {
        "mhc_post_tilelang": mhc_post_torch,
        "mhc_pre_delayed_tilelang": mhc_pre_delayed_tilelang,
        "mhc_shifted_post_pre": mhc_shifted_post_pre,
        "hc_collapse_triton": hc_collapse_triton,
    }


class Sublayers:
    """Stand-ins for a model's sublayers, and what each of their calls saw."""

    def __init__(self, model: Any, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, int]] = []
        self.flags: list[tuple[bool, bool]] = []
        for i, layer in enumerate(model.model.layers):
            patch.setattr(layer.attn, "forward", self._attention(i, layer))
            patch.setattr(layer.ffn, "forward", self._moe(i, layer))
            if layer.engram is not None:
                patch.setattr(layer.engram, "forward", self._engram(i))

    def _seen(self, what: str, i: int, layer: Any) -> None:
        self.calls.append((what, i))
        self.flags.append((layer.attn.wo_b.reduce_results, layer.ffn.experts.moe_config.skip_final_all_reduce))

    def _attention(self, i: int, layer: Any) -> Callable[..., Tensor]:
        def forward(positions: Tensor, x: Tensor, scaling: None) -> Tensor:
            self._seen("attention", i, layer)
            return (x.float().roll(i + 1, 1) * (0.5 + 0.01 * positions.float().unsqueeze(1))).to(x.dtype)

        return forward

    def _moe(self, i: int, layer: Any) -> Callable[..., Tensor]:
        def forward(x: Tensor, input_ids: Tensor, metadata: None) -> Tensor:
            self._seen("moe", i, layer)
            return (x.float().roll(-i - 1, 1) * (0.7 + 0.001 * input_ids.float().unsqueeze(1))).to(x.dtype)

        return forward

    def _engram(self, i: int) -> Callable[..., Tensor]:
        def forward(residual: Tensor, hashes: Tensor, keep: Tensor) -> Tensor:
            self.calls.append(("engram", i))
            assert hashes.shape[0] == residual.shape[0]
            injected = residual.roll(1, 2) * 0.25
            return residual + torch.where(keep.view(-1, 1, 1), injected, torch.zeros_like(injected))

        return forward


@pytest.fixture(scope="module")
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def model(tiny_folder: Any, patch: pytest.MonkeyPatch) -> Iterator[Any]:
    import vllm.config.vllm
    from vllm.engine.arg_utils import EngineArgs

    patch.setattr(vllm.config.vllm, "HAS_TRITON", True)
    patch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    # Without offload the tables need no pinned memory.
    arguments = EngineArgs(model=str(tiny_folder), max_model_len=512, engram_config={"cpu_offload": False})
    config = arguments.create_engine_config()
    with vllm_model.one_rank(config):
        built = vllm_model.build(config, patch)
        import vllm.models.deepseek_v41.nvidia.model as module

        import specialized_decode.integration.stock as stock

        for name, op in reference_ops().items():
            patch.setattr(module, name, op)
            patch.setattr(stock, name, op)
        yield built


@pytest.fixture
def sublayers(model: Any, monkeypatch: pytest.MonkeyPatch) -> Sublayers:
    return Sublayers(model, monkeypatch)


@pytest.fixture(scope="module")
def executor(model: Any) -> SpecializedDecode:
    from specialized_decode.integration.bind import build_executor

    model.specialized_decode_config = DecodeConfig()
    return build_executor(model)


class Inputs:
    """One batch's inputs to the layers."""

    def __init__(self, model: Any, rows: int) -> None:
        random = torch.Generator().manual_seed(rows)
        self.x = torch.randn(rows, model.config.hidden_size, generator=random).to(torch.bfloat16)
        self.positions = torch.arange(rows) * 3
        self.input_ids = torch.randint(0, 100, (rows,), generator=random)
        self.hashes = torch.zeros(rows, 2, 24, dtype=torch.int64)
        self.mask = torch.rand(rows, generator=random) < 0.7


def by_vllm(model: Any, inputs: Inputs, engram: bool) -> tuple[Tensor, list[Tensor]]:
    """The layers and the head as DeepseekV4Model.forward runs them after its embedding."""
    backbone = model.model
    aux: dict[int, Tensor] = {}
    hashes, mask = (inputs.hashes, inputs.mask) if engram else (None, None)
    layers = range(backbone.start_layer, backbone.end_layer)
    x, residual, post, comb, pre = backbone._run_layers(
        layers, inputs.x, inputs.positions, inputs.input_ids, None, None, None, None, aux, hashes, mask
    )
    streams = backbone._collapse(x, residual, post, comb, aux, inputs.positions.shape[0])
    if backbone._mtp_hidden_buffer is not None:
        backbone._mtp_hidden_buffer[: streams.shape[0]].copy_(streams.flatten(1))
    import vllm.models.deepseek_v41.nvidia.model as module

    hidden = backbone.norm(module.hc_collapse_triton(streams, pre))
    return hidden, [aux[layer] for layer in backbone.aux_hidden_state_layers]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("engram", [True, False])
@pytest.mark.parametrize("drafts", [True, False])
def test_same_bits(
    model: Any,
    executor: SpecializedDecode,
    sublayers: Sublayers,
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    engram: bool,
    drafts: bool,
) -> None:
    """Hidden states, aux hidden states and drafts' buffer, whether the calls come from vLLM or from the executor."""
    backbone, inputs = model.model, Inputs(model, rows)
    count, buffers = len(backbone.layers), [torch.full((400, 4 * inputs.x.shape[1]), float("nan")) for _ in range(2)]
    monkeypatch.setattr(backbone, "aux_hidden_state_layers", (1, 2, count - 1, count) if drafts else ())
    monkeypatch.setattr(backbone, "_mtp_hidden_buffer", buffers[0] if drafts else None)
    expected, expected_aux = by_vllm(model, inputs, engram)
    expected_calls, sublayers.calls = sublayers.calls, []
    monkeypatch.setattr(backbone, "_mtp_hidden_buffer", buffers[1] if drafts else None)
    hashes, mask = (inputs.hashes, inputs.mask) if engram else (None, None)
    step = step_gates(rows, executor)
    output = step.run(inputs.x, inputs.positions, inputs.input_ids, hashes, mask)
    hidden, aux = output if isinstance(output, tuple) else (output, [])
    assert isinstance(output, tuple) == drafts
    assert expected.isfinite().all() and expected.std() > 0
    assert torch.equal(hidden, expected)
    assert len(aux) == len(expected_aux) == (4 if drafts else 0)
    for ours, theirs in zip(aux, expected_aux, strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(buffers[0].nan_to_num(7.0), buffers[1].nan_to_num(7.0))
    assert sublayers.calls == expected_calls
    assert any(what == "engram" for what, _ in sublayers.calls) == engram


@pytest.mark.parametrize("kind", attention_phases.KINDS)
def test_attention_is_left_out_on_both_sides(
    model: Any, executor: SpecializedDecode, sublayers: Sublayers, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Of the layers asked for alone, whoever calls; then all attention is there again."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    numbers, inputs = attention_phases.layers_by_kind(model), Inputs(model, 7)
    for plan in executor.layers:
        assert plan.layer_id in numbers[attention_phases.kind_of(plan.layer.attn)]
    out = numbers[kind]
    with LeftOut(model, executor, out, Constants.of(executor, 8).attention) as left:
        expected, _ = by_vllm(model, inputs, True)
        assert left.calls == len(out) > 0
        by_stock, sublayers.calls = sublayers.calls, []
        found = step_gates(7, executor).run(inputs.x, inputs.positions, inputs.input_ids, inputs.hashes, inputs.mask)
    assert left.calls == 2 * len(out)
    assert isinstance(found, Tensor) and torch.equal(found, expected)
    assert sublayers.calls == by_stock
    called = {i for what, i in by_stock if what == "attention"}
    assert called == set(range(len(model.model.layers))) - set(out)
    whole, _ = by_vllm(model, inputs, True)
    assert not torch.equal(whole, expected)
    found = step_gates(7, executor).run(inputs.x, inputs.positions, inputs.input_ids, inputs.hashes, inputs.mask)
    assert isinstance(found, Tensor) and torch.equal(found, whole)


def test_vllms_side_plans_no_step(model: Any, executor: SpecializedDecode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "refusal", lambda positions, tensors: None)
    positions = torch.arange(2)
    assert executor.plan(positions, None) is not None
    with attention_phases.on_side(executor, VLLM, Constants.of(executor, 8).mixes):
        assert executor.plan(positions, None) is None
    assert executor.plan(positions, None) is not None


def test_rows_are_routed_alike(model: Any, executor: SpecializedDecode) -> None:
    """By the biases that both vLLM's router and the executor's kernels read; they come back."""
    from specialized_decode.moe import reference

    layers = model.model.layers
    before = [layer.ffn.gate.e_score_correction_bias.clone() for layer in layers]
    generator, chosen = torch.Generator().manual_seed(1), []
    with attention_phases.fixed_routing(layers):
        for number, (layer, plan) in enumerate(zip(layers, executor.layers, strict=True)):
            ffn, experts = plan.layer.ffn, layer.ffn.gate.weight.shape[0]
            assert layer.ffn.experts.router.e_score_correction_bias.data_ptr() == ffn.bias.data_ptr()
            logits = torch.randn(8, experts, generator=generator) * 30
            ids, _ = reference.select_experts(logits, ffn.bias, ffn.image_bias, torch.arange(8), ffn.topk, ffn.scaling)
            assert (ids.sort(1).values == ids[0].sort().values).all()
            assert set(ids[0].tolist()) == {(number * ffn.topk + i) % experts for i in range(ffn.topk)}
            chosen.append(frozenset(ids[0].tolist()))
    assert len(set(chosen)) > 1
    for layer, bias in zip(layers, before, strict=True):
        assert torch.equal(layer.ffn.gate.e_score_correction_bias, bias)


def test_vllm_has_what_is_called(model: Any) -> None:
    """Of its runner and its layers, by the phases that no test here can run."""
    from vllm.v1.worker.gpu.input_batch import InputBuffers
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    assert "profile_only" in inspect.signature(GPUModelRunner.capture_model).parameters
    assert callable(GPUModelRunner.get_model)
    assert InputBuffers(2, 4, torch.device("cpu")).seq_lens.shape == (2,)
    for layer in model.model.layers:
        theirs = list(inspect.signature(type(layer.attn).forward).parameters)
        assert theirs == list(inspect.signature(LeftOut._forward).parameters)


def test_graphs_are_captured_beside_those_there_are(model: Any) -> None:
    """An engine goes on with its own, also after an error."""

    class Manager:
        graphs: ClassVar[dict[Any, str]] = {}

    class Runner:
        vllm_config, cudagraph_manager = model.model.vllm_config, Manager()
        error: Exception | None = None

        def capture_model(self, profile_only: bool) -> None:
            from vllm.config import get_current_vllm_config

            assert profile_only and get_current_vllm_config() is self.vllm_config
            assert not self.cudagraph_manager.graphs, "vLLM captures no graph twice"
            for rows in (8, 1):
                self.cudagraph_manager.graphs[descriptor(rows)] = f"new {rows}"
            if self.error is not None:
                raise self.error

    runner, own = Runner(), {descriptor(rows): f"own {rows}" for rows in (8, 1)}
    runner.cudagraph_manager.graphs.update(own)
    assert attention_phases.capture(runner) == {8: "new 8", 1: "new 1"}
    assert runner.cudagraph_manager.graphs == own
    runner.error = RuntimeError("no memory")
    with pytest.raises(RuntimeError, match="no memory"):
        attention_phases.capture(runner)
    assert runner.cudagraph_manager.graphs == own


def descriptor(rows: int) -> Any:
    """vLLM's key of a decode graph."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

    return BatchExecutionDescriptor(CUDAGraphMode.FULL, rows, rows, 1)


def test_outputs_are_partial_within_a_step_alone(model: Any, executor: SpecializedDecode, sublayers: Sublayers) -> None:
    """Attention and experts leave their outputs unreduced in a step, and are as vLLM made them around it."""
    inputs = Inputs(model, 2)
    by_vllm(model, inputs, True)
    assert set(sublayers.flags) == {(True, False)}, "vLLM's own layers reduce"
    sublayers.flags.clear()
    sublayers.calls.clear()
    step_gates(2, executor).run(inputs.x, inputs.positions, inputs.input_ids, inputs.hashes, inputs.mask)
    for (what, _), flags in zip([c for c in sublayers.calls if c[0] != "engram"], sublayers.flags, strict=True):
        assert flags == ((False, False) if what == "attention" else (True, True)), what
    layer = model.model.layers[0]
    assert layer.attn.wo_b.reduce_results and not layer.ffn.experts.moe_config.skip_final_all_reduce


@pytest.mark.parametrize("sublayer", ["attn", "ffn", "engram"])
def test_error_leaves_the_model_as_it_was(
    model: Any, executor: SpecializedDecode, sublayers: Sublayers, monkeypatch: pytest.MonkeyPatch, sublayer: str
) -> None:
    """An error inside vLLM's op comes out as itself, its streams are joined, and the next step is right."""
    inputs, broken, joined = Inputs(model, 3), RuntimeError("broken"), []
    layer = model.model.layers[1]
    assert executor.stock is not None

    def fail(*args: Any) -> Tensor:
        raise broken

    with monkeypatch.context() as patch:
        patch.setattr(getattr(layer, sublayer), "forward", fail)
        patch.setattr(executor.stock, "join", lambda: joined.append(True))
        with pytest.raises(RuntimeError) as caught:
            step_gates(3, executor).run(inputs.x, inputs.positions, inputs.input_ids, inputs.hashes, inputs.mask)
    assert caught.value is broken
    assert joined == [True]
    assert layer.attn.wo_b.reduce_results and not layer.ffn.experts.moe_config.skip_final_all_reduce
    expected, _ = by_vllm(model, inputs, True)
    output = step_gates(3, executor).run(inputs.x, inputs.positions, inputs.input_ids, inputs.hashes, inputs.mask)
    assert torch.equal(output if isinstance(output, Tensor) else output[0], expected)


def test_sums_over_the_ranks_once_a_sublayer(
    model: Any, executor: SpecializedDecode, sublayers: Sublayers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each boundary takes vLLM's all-reduce of the output before it, Engram layers' and the last one's included."""
    import specialized_decode.integration.stock as stock

    reduced: list[Tensor] = []

    def all_reduce(x: Tensor) -> Tensor:
        reduced.append(x)
        return x

    monkeypatch.setattr(stock, "tensor_model_parallel_all_reduce", all_reduce)
    inputs = Inputs(model, 2)
    step_gates(2, executor).run(inputs.x, inputs.positions, inputs.input_ids, inputs.hashes, inputs.mask)
    assert len(reduced) == 2 * len(model.model.layers)
    assert len({id(x) for x in reduced}) == len(reduced)


def test_engines_streams(model: Any, executor: SpecializedDecode) -> None:
    """Every stream that vLLM's sublayers may fork to: its three of attention, experts' and tables' where there are."""
    from specialized_decode.integration.stock import VllmStockOps

    assert isinstance(executor.stock, VllmStockOps)
    streams = executor.stock._streams()
    for layer in model.model.layers:
        assert len(layer.attn.aux_stream_list) == 3
        assert set(layer.attn.aux_stream_list) <= set(streams)
        shared = layer.ffn.experts.shared_experts._stream
        assert shared is not None and shared in streams
    assert len({stream.cuda_stream for stream in streams}) == len(streams)


def test_bound_target(model: Any, executor: SpecializedDecode) -> None:
    """What the executor reads of vLLM's model is vLLM's own, not a copy."""
    target, backbone = executor.target, model.model
    assert target.attention_class == "flashmla_sparse"
    assert target.norm is backbone.norm.weight
    assert (target.config.hidden_size, target.config.hc_mult) == (backbone.config.hidden_size, 4)
    assert target.config.vocab_size == model.config.vocab_size
    assert executor.swa_prefixes == tuple(f"model.layers.{i}.attn.swa_cache" for i in range(len(backbone.layers)))
    for bound, layer in zip(target.layers, backbone.layers, strict=True):
        assert bound.attn_mixer.fn is layer.hc_attn_fn and bound.ffn_mixer.fn is layer.hc_ffn_fn
        assert bound.attn_mixer.base is layer.hc_attn_base and bound.ffn_mixer.scale is layer.hc_ffn_scale
        assert bound.attn_norm is layer.attn_norm.weight and bound.ffn_norm is layer.ffn_norm.weight
        assert bound.eps == layer.rms_norm_eps
        assert (bound.attn_mixer.hc_eps, bound.attn_mixer.sinkhorn_iters) == (layer.hc_eps, layer.hc_sinkhorn_iters)


def test_another_attention_class_is_refused_by_name(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.models.deepseek_v41.nvidia.flashmla import DeepseekV4FlashMLAAttention

    from specialized_decode.integration.bind import build_executor

    class Other(DeepseekV4FlashMLAAttention):
        pass

    monkeypatch.setattr(model.model.layers[3].attn, "__class__", Other)
    model.specialized_decode_config = DecodeConfig()
    with pytest.raises(UnsupportedTarget, match="attention class: found Other, flashmla_sparse, expected one of"):
        build_executor(model)


def test_nothing_holds_a_dropped_executor(model: Any) -> None:
    """With the model goes the executor: neither the plugin nor vLLM's modules keep it."""
    from specialized_decode.integration.bind import build_executor

    model.specialized_decode_config = DecodeConfig()
    model.specialized_decode = build_executor(model)
    dropped = weakref.ref(model.specialized_decode)
    model.specialized_decode = None
    gc.collect()
    assert dropped() is None
