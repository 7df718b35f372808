"""The executor's view of vLLM's model: its decoder layers, their weights and caches, its engine as the executor's host.

Nothing here holds a cache or metadata: what vLLM binds anew for every KV cache is read when a step runs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.models.deepseek_v41.nvidia.model import DeepseekV4DecoderLayer, DeepseekV4Model

from specialized_decode.integration.host import VllmHost
from specialized_decode.integration.stock import VllmStockOps
from specialized_decode.runtime import SpecializedDecode

# vLLM's attention classes by the executor's names. A subclass is another class: it may read another cache.
ATTENTION_CLASSES = {
    "DeepseekV4FlashMLAAttention": "flashmla_sparse",
    "DeepseekV4FlashInferMLAAttention": "flashinfer_sparse",
}


def build_executor(language_model: Any) -> SpecializedDecode:
    """The executor over a DeepseekV41LLMForCausalLM whose weights are loaded; collective over the TP group.

    Raises UnsupportedTarget on every rank where any cannot run it.
    """
    target = VllmTarget(language_model.model, VllmHost(language_model.lm_head.weight.device))
    return SpecializedDecode.for_target(target, language_model.specialized_decode_config, language_model.lm_head.weight)


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


class BoundAttention:
    """One layer's attention."""

    def __init__(self, attn: Any) -> None:
        self._attn = attn

    @property
    def window_prefix(self) -> str:
        """Under which the metadata of the layer's sliding-window cache is found."""
        return str(self._attn.swa_cache_layer.prefix)


class BoundMoE:
    """One layer's mixture of experts."""

    def __init__(self, run: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._run = run

    def __call__(self, x: Tensor, input_ids: Tensor) -> Tensor:
        """vLLM's own experts: [T, hidden], input ids [T] -> this rank's part of the finalized output, [T, hidden]."""
        return self._run(x, input_ids)


class BoundLayer:
    """One decoder layer; see DecoderLayerView."""

    def __init__(self, layer_id: int, layer: DeepseekV4DecoderLayer, stock: VllmStockOps) -> None:
        self.layer_id, self.eps = layer_id, float(layer.rms_norm_eps)
        numbers = (float(layer.rms_norm_eps), float(layer.hc_eps), int(layer.hc_sinkhorn_iters))
        self.attn_mixer = BoundMixer(layer.hc_attn_fn, layer.hc_attn_base, layer.hc_attn_scale, *numbers)
        self.ffn_mixer = BoundMixer(layer.hc_ffn_fn, layer.hc_ffn_base, layer.hc_ffn_scale, *numbers)
        self.attn_norm: Tensor = layer.attn_norm.weight
        self.ffn_norm: Tensor = layer.ffn_norm.weight
        # The rest of these views comes with the kernels that read it; vLLM's own ops take none.
        self.attn: Any = BoundAttention(layer.attn)
        self.ffn: Any = BoundMoE(lambda x, input_ids: stock.moe(layer_id, x, input_ids))
        self.engram: Any = layer.engram


class VllmTarget:
    """A DeepseekV4Model as the executor's target."""

    def __init__(self, model: DeepseekV4Model, host: VllmHost) -> None:
        self._model, self.host = model, host
        self.stock = VllmStockOps(model)
        ids = range(model.start_layer, model.end_layer)
        self.layers = [BoundLayer(i, model.layers[i], self.stock) for i in ids]
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
