"""The executor's view of vLLM's model: its decoder layers, their weights and caches, its engine as the executor's host.

Nothing here holds a cache or metadata: what vLLM binds anew for every KV cache is read when a step runs.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.models.deepseek_v41.nvidia.model import DeepseekV4DecoderLayer, DeepseekV4Model

from specialized_decode.integration.bind_attention import BoundAttention
from specialized_decode.integration.bind_weights import BoundLinear, PreparedWeights
from specialized_decode.integration.host import VllmHost
from specialized_decode.integration.stock import VllmStockOps
from specialized_decode.runtime import DecodeConfig, SpecializedDecode, UnsupportedTarget
from specialized_decode.runtime.executor import OPTION

logger = logging.getLogger(__name__)

# vLLM's attention classes by the executor's names. A subclass is another class: it may read another cache.
ATTENTION_CLASSES = {
    "DeepseekV4FlashMLAAttention": "flashmla_sparse",
    "DeepseekV4FlashInferMLAAttention": "flashinfer_sparse",
}
# Where a model keeps its prepared weights, so that they go with it.
_PREPARED = "_specialized_decode_prepared"


def build_executor(language_model: Any) -> SpecializedDecode:
    """The executor over a DeepseekV41LLMForCausalLM whose weights are loaded; collective over the TP group.

    Raises UnsupportedTarget on every rank where any cannot run it.
    """
    config: DecodeConfig = language_model.specialized_decode_config
    prepared: PreparedWeights | None = getattr(language_model, _PREPARED, None)
    target = VllmTarget(language_model.model, VllmHost(language_model.lm_head.weight.device), prepared)
    reason = None if config.stock else own_ops_refusal(target, prepared)
    if reason is not None:
        raise UnsupportedTarget(f"{OPTION} with decode_reference_ops cannot run here: {reason}")
    executor = SpecializedDecode.for_target(target, config, language_model.lm_head.weight)
    if prepared is not None:
        if config.stock:
            # The kernels keep their own form of these, and others do not serve here.
            prepared.drop(_projections(language_model.model, config))
            for plan in executor.layers:
                if plan.moe.gemm is None:
                    prepared.drop(_shared_expert(language_model.model.layers[plan.layer_id]))
        logger.info("Prepared weights: %d dense layers, %.2f GB of this GPU", len(prepared), prepared.nbytes / 1e9)
    return executor


def prepare_weights(language_model: Any) -> None:
    """Has the dense layers of a DeepseekV41LLMForCausalLM copied while they are loaded, where our own ops read them.

    Called once it is built and before it is loaded.
    """
    config: DecodeConfig = language_model.specialized_decode_config
    model = language_model.model
    if not config.prepared_weights or (config.stock and not {"attention", "moe"} & config.kernels):
        return
    read = None if not config.stock else {*_shared_experts(model, config), *_projections(model, config)}
    setattr(language_model, _PREPARED, PreparedWeights.watch(model, read))


def _shared_experts(model: Any, config: DecodeConfig) -> Iterator[nn.Module]:
    """What the MoE kernels read of vLLM's dense layers."""
    if "moe" in config.kernels:
        for number in range(model.start_layer, model.end_layer):
            yield from _shared_expert(model.layers[number])


def _shared_expert(layer: Any) -> tuple[nn.Module, nn.Module]:
    shared = layer.ffn.shared_experts
    return shared.gate_up_proj, shared.down_proj


def _projections(model: Any, config: DecodeConfig) -> Iterator[nn.Module]:
    """What the attention kernels are prepared from. The compressors' and indexers' BF16 layers they read in place."""
    if "attention" in config.kernels:
        for number in range(model.start_layer, model.end_layer):
            attn = model.layers[number].attn
            yield from (attn.fused_wqa_wkv, attn.wq_b, attn.wo_a, attn.wo_b)
            if attn.indexer is not None:
                yield attn.indexer.wq_b


def own_ops_refusal(target: "VllmTarget", prepared: PreparedWeights | None) -> str | None:
    """Why the step packages' own ops cannot run vLLM's layers, or None. Their caches are of Hopper's forms.

    Every rank finds the same: it depends on the configuration and the kind of GPU.
    """
    if prepared is None:
        return "found no prepared weights, expected decode_prepared_weights"
    if target.attention_class != "flashmla_sparse":
        return f"attention class: found {target.attention_class}, expected flashmla_sparse"
    if not all(layer.attn.hopper_records for layer in target.layers):
        return "KV cache records: found another form, expected FlashMLA's of 584 bytes for Hopper"
    return None


@dataclass(frozen=True)
class BoundConfig:
    """The hyper-parameters that the executor reads, under the release's names."""

    hidden_size: int
    hc_mult: int
    vocab_size: int
    rms_norm_eps: float
    num_hidden_layers: int
    candidate_source_layer_id: int


@dataclass(frozen=True)
class BoundMixer:
    """One sublayer's mHC projection; see MixerView."""

    fn: Tensor
    base: Tensor
    scale: Tensor
    rms_eps: float
    hc_eps: float
    sinkhorn_iters: int


class BoundExperts:
    """Routed experts in place, in whatever form vLLM's MoE backend holds them; see ExpertsView."""

    def __init__(self, runner: Any) -> None:
        self._experts = runner.routed_experts
        self.count = int(self._experts.w13_weight.shape[0])
        backend = getattr(self._experts.quant_method, "mxfp4_backend", None)
        self.layout = "unknown" if backend is None else str(backend.value)

    @property
    def w13(self) -> Tensor:
        weight: Tensor = self._experts.w13_weight
        return weight

    @property
    def w13_scale(self) -> Tensor:
        scale: Tensor = self._experts.w13_weight_scale
        return scale

    @property
    def w2(self) -> Tensor:
        weight: Tensor = self._experts.w2_weight
        return weight

    @property
    def w2_scale(self) -> Tensor:
        scale: Tensor = self._experts.w2_weight_scale
        return scale

    @property
    def w13_scale_2(self) -> Tensor:
        """AttributeError where the backend's form has none, and so for w2."""
        scale: Tensor = self._experts.w13_weight_scale_2
        return scale

    @property
    def w2_scale_2(self) -> Tensor:
        scale: Tensor = self._experts.w2_weight_scale_2
        return scale


class BoundMoE:
    """One layer's mixture of experts; see MoEView."""

    def __init__(self, ffn: Any, run: Callable[[Tensor, Tensor], Tensor], prepared: PreparedWeights | None) -> None:
        self._ffn, self._run = ffn, run
        self.topk, self.scaling = int(ffn.n_activated_experts), float(ffn.routed_scaling_factor)
        self.limit = float(ffn.swiglu_limit)
        self.gate = BoundLinear(ffn.gate, prepared)
        self.bias: Tensor = ffn.gate.e_score_correction_bias
        self.image_bias: Tensor | None = ffn.gate.bias_vl
        self.shared_up = BoundLinear(ffn.shared_experts.gate_up_proj, prepared)
        self.shared_down = BoundLinear(ffn.shared_experts.down_proj, prepared)
        self.experts = BoundExperts(ffn.experts)

    @property
    def routing_hook(self) -> Callable[[Tensor], None] | None:
        """Set where vLLM records the experts of each token."""
        hook: Callable[[Tensor], None] | None = self._ffn.experts.router.capture_fn
        return hook

    def __call__(self, x: Tensor, input_ids: Tensor) -> Tensor:
        """vLLM's own experts: [T, hidden], input ids [T] -> this rank's part of the finalized output, [T, hidden]."""
        return self._run(x, input_ids)


class BoundEngram:
    """One Engram layer of a single rank; see EngramView."""

    def __init__(self, engram: Any, prepared: PreparedWeights | None) -> None:
        self._engram = engram
        self.eps = float(engram.eps)
        self.wkv = BoundLinear(engram.wkv, prepared)
        self.q_weight: Tensor = engram.q_weight
        self.k_weight: Tensor = engram.k_weight

    @property
    def staged(self) -> Tensor:
        """Also makes the current stream wait for the look-up, which vLLM may have started on a stream of its own."""
        rows: Tensor = self._engram._ready_rows(self._engram.staged_rows.shape[0])
        return rows.flatten(1)


class BoundLayer:
    """One decoder layer; see DecoderLayerView."""

    def __init__(
        self, layer_id: int, layer: DeepseekV4DecoderLayer, stock: VllmStockOps, prepared: PreparedWeights | None
    ) -> None:
        self.layer_id, self.eps = layer_id, float(layer.rms_norm_eps)
        numbers = (float(layer.rms_norm_eps), float(layer.hc_eps), int(layer.hc_sinkhorn_iters))
        self.attn_mixer = BoundMixer(layer.hc_attn_fn, layer.hc_attn_base, layer.hc_attn_scale, *numbers)
        self.ffn_mixer = BoundMixer(layer.hc_ffn_fn, layer.hc_ffn_base, layer.hc_ffn_scale, *numbers)
        self.attn_norm: Tensor = layer.attn_norm.weight
        self.ffn_norm: Tensor = layer.ffn_norm.weight
        self.attn = BoundAttention(layer.attn, prepared)
        self.ffn = BoundMoE(layer.ffn, partial(stock.moe, layer_id), prepared)
        self.engram = None if layer.engram is None else BoundEngram(layer.engram, prepared)


class VllmTarget:
    """A DeepseekV4Model as the executor's target."""

    def __init__(self, model: DeepseekV4Model, host: VllmHost, prepared: PreparedWeights | None = None) -> None:
        """prepared: copies of the model's dense layers, for our own ops; None where none were taken."""
        self._model, self.host = model, host
        self.stock = VllmStockOps(model)
        ids = range(model.start_layer, model.end_layer)
        self.layers = [BoundLayer(i, model.layers[i], self.stock, prepared) for i in ids]
        config = model.config
        self.config = BoundConfig(
            hidden_size=int(config.hidden_size),
            hc_mult=int(config.hc_mult),
            vocab_size=int(config.vocab_size),
            rms_norm_eps=float(config.rms_norm_eps),
            num_hidden_layers=int(config.num_hidden_layers),
            candidate_source_layer_id=int(getattr(config, "candidate_source_layer_id", -1)),
        )

    @property
    def norm(self) -> Tensor:
        weight: Tensor = self._model.norm.weight
        return weight

    @property
    def mtp_hidden_buffer(self) -> Tensor | None:
        """[max tokens, n * hidden]: where drafts find the final streams; None without drafts."""
        buffer: Tensor | None = self._model._mtp_hidden_buffer
        return buffer

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Asked for by vLLM's drafter once it is set up, after the model."""
        return tuple(self._model.aux_hidden_state_layers)

    @property
    def attention_class(self) -> str:
        """The executor's name of the layers' attention class, vLLM's where it has none, all where they differ."""
        names = {
            type(layer.attn).__name__ for layer in self._model.layers[self._model.start_layer : self._model.end_layer]
        }
        return ", ".join(sorted(ATTENTION_CLASSES.get(name, name) for name in names))

    @property
    def device(self) -> torch.device:
        return self.norm.device
