"""The DeepSeek-V4.1 text model: embedding, decoder layers over four residual streams, head."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from specialized_decode.backbone.attention import Attention, Compressor, Indexer, Selection
from specialized_decode.backbone.cache import Batch, Caches
from specialized_decode.backbone.config import ModelConfig
from specialized_decode.backbone.context import ForwardContext
from specialized_decode.backbone.engram import Engram, NgramHash, image_mask
from specialized_decode.backbone.errors import CheckpointError, PromptError
from specialized_decode.backbone.folder import ModelFolder
from specialized_decode.backbone.host import LocalHost
from specialized_decode.backbone.linear import Linear, compute_dtype, project, rms_norm
from specialized_decode.backbone.mhc import Coefficients, Mixer, collapse, post_mix
from specialized_decode.backbone.moe import Experts, MoE
from specialized_decode.backbone.rope import cos_sin_table
from specialized_decode.backbone.tensors import TensorSpec, text_tensors
from specialized_decode.backbone.tokenizer import compressed_token_map, load_tokenizer

# What a forward returns: hidden states [T, hidden], or those and the aux hidden states asked for, in that order.
ModelOutput = Tensor | tuple[Tensor, list[Tensor]]
Progress = Callable[[int, int, str], None]


NO_EXECUTOR = "no executor"


class Step(Protocol):
    """A step that an executor granted: runs the layers in the model's place."""

    def run(
        self, x: Tensor, positions: Tensor, input_ids: Tensor, engram_hashes: Tensor | None, engram_mask: Tensor | None
    ) -> Any: ...


class Executor(Protocol):
    """What the model asks before each forward: a step, or None to run the layers itself."""

    def plan(self, positions: Tensor, intermediate_tensors: object | None) -> Step | None: ...

    def refusal(self, positions: Tensor, intermediate_tensors: object | None) -> str | None:
        """Why `plan` grants the running forward no step, or None where it does."""

    def compute_logits(self, hidden: Tensor) -> Tensor: ...


class Carried(NamedTuple):
    """What one sublayer hands to the next: its output, the streams it read and its coefficients."""

    output: Tensor
    residual: Tensor
    mix: Coefficients


class DecoderLayer:
    """One layer: attention and MoE, each collapsed out of the streams and mixed back into them."""

    def __init__(
        self,
        layer_id: int,
        attn: Attention,
        ffn: MoE,
        engram: Engram | None,
        attn_mixer: Mixer,
        ffn_mixer: Mixer,
        attn_norm: Tensor,
        ffn_norm: Tensor,
        eps: float,
    ) -> None:
        self.layer_id, self.attn, self.ffn, self.engram = layer_id, attn, ffn, engram
        self.attn_mixer, self.ffn_mixer = attn_mixer, ffn_mixer
        self.attn_norm, self.ffn_norm, self.eps = attn_norm, ffn_norm, eps

    def __call__(self, residual: Tensor, pre: Tensor, positions: Tensor, input_ids: Tensor) -> tuple[Carried, Tensor]:
        """residual: [T, n, hidden] streams entering (Engram already injected); pre: [T, n], the carried pre-mix.

        Returns what the FFN hands on and the pre-mix for the next layer.
        """
        attn_mix = self.attn_mixer(residual)
        x = rms_norm(collapse(residual, pre), self.attn_norm, self.eps)
        residual = post_mix(self.attn(positions, x), residual, attn_mix)
        ffn_mix = self.ffn_mixer(residual)
        x = rms_norm(collapse(residual, attn_mix.pre), self.ffn_norm, self.eps)
        return Carried(self.ffn(x, input_ids), residual, ffn_mix), ffn_mix.pre


class Model:
    """The decoder stack. `set_aux_layers` names the layers whose entering streams' mean is returned too."""

    attention_class = "plain"
    # What an executor runs here are the reference ops: no ops of the model's own stand in for them.
    stock = None

    def __init__(
        self, config: ModelConfig, context: ForwardContext, embedding: Tensor, layers: list[DecoderLayer], norm: Tensor
    ) -> None:
        self.config, self.context = config, context
        self.embedding, self.layers, self.norm = embedding, layers, norm
        self.host = LocalHost(context, embedding.device)
        self.aux_layers: tuple[int, ...] = ()
        self.mtp_hidden_buffer: Tensor | None = None

    def set_aux_layers(self, layers: tuple[int, ...]) -> None:
        """Layer L asks for the mean of the streams entering it; L = number of layers, for those leaving the last."""
        bad = [layer for layer in layers if not 0 < layer <= self.config.num_hidden_layers]
        if bad:
            raise ValueError(f"aux layers: found {bad[0]}, expected 1 to {self.config.num_hidden_layers}")
        self.aux_layers = layers

    def keep_mtp_hidden(self, max_tokens: int) -> None:
        """Allocates the buffer [max tokens, n * hidden] that every forward leaves the final streams in."""
        width = self.config.hc_mult * self.config.hidden_size
        self.mtp_hidden_buffer = torch.zeros(max_tokens, width, dtype=torch.bfloat16, device=self.embedding.device)

    def run_layers(
        self,
        x: Tensor,
        positions: Tensor,
        input_ids: Tensor,
        engram_hashes: Tensor | None,
        engram_mask: Tensor | None,
    ) -> ModelOutput:
        """x: [T, hidden] embeddings. The plain layers, the final collapse and the norm."""
        streams = self.config.hc_mult
        residual = x.unsqueeze(1).expand(-1, streams, -1)
        # The first layer reads stream 0.
        pre = torch.zeros(x.shape[0], streams, device=x.device)
        pre[:, 0] = 1.0
        aux: dict[int, Tensor] = {}
        for layer in self.layers:
            if layer.layer_id in self.aux_layers:
                aux[layer.layer_id] = _stream_mean(residual)
            if layer.engram is not None and engram_hashes is not None and layer.layer_id > 0:
                assert engram_mask is not None
                residual = layer.engram(residual, engram_mask)
            carried, pre = layer(residual, pre, positions, input_ids)
            residual = post_mix(*carried)
        if len(self.layers) in self.aux_layers:
            aux[len(self.layers)] = _stream_mean(residual)
        if self.mtp_hidden_buffer is not None:
            self.mtp_hidden_buffer[: x.shape[0]].copy_(residual.flatten(1))
        hidden = rms_norm(collapse(residual, pre), self.norm, self.config.rms_norm_eps)
        return (hidden, [aux[layer] for layer in self.aux_layers]) if self.aux_layers else hidden


class DeepseekV41:
    """The model with its head, hash state and caches' bindings; what the local host runs."""

    def __init__(self, config: ModelConfig, model: Model, lm_head: Tensor, ngram_hash: NgramHash | None) -> None:
        self.config, self.model, self.lm_head, self.ngram_hash = config, model, lm_head, ngram_hash
        self.executor: Executor | None = None
        # Why the last forward ran the plain layers; None when an executor's step ran them.
        self.refusal: str | None = NO_EXECUTOR
        self.selection = model.layers[0].attn.selection

    @property
    def device(self) -> torch.device:
        return self.lm_head.device

    def bind_caches(self, caches: Caches) -> None:
        for layer in self.model.layers:
            layer.attn.bind_caches(caches.views)

    def engram_inputs(self, batch: Batch) -> tuple[Tensor | None, Tensor | None]:
        """Hashes [T, Engram layers, columns] and the mask [T] of tokens that take part; None without Engram.

        Starts every Engram layer's lookup.
        """
        if self.ngram_hash is None:
            return None, None
        meta = next(iter(batch.metadata.values()))
        starts = meta.query_start_loc[:-1]
        hashes = self.ngram_hash(batch.input_ids, batch.positions, starts, meta.token_to_req, batch.lookback_ids)
        for layer in self.model.layers:
            if layer.engram is not None:
                layer.engram.prepare(hashes)
        return hashes, ~image_mask(batch.input_ids)

    def forward(self, batch: Batch, use_engram: bool = True) -> ModelOutput:
        """Runs `batch` inside the current forward context: an executor's step where it grants one."""
        step = None
        self.refusal = NO_EXECUTOR
        if self.executor is not None:
            step = self.executor.plan(batch.positions, None)
            self.refusal = self.executor.refusal(batch.positions, None)
        hashes, mask = self.engram_inputs(batch) if use_engram else (None, None)
        x = self.model.embedding[batch.input_ids]
        run = self.model.run_layers if step is None else step.run
        output: ModelOutput = run(x, batch.positions, batch.input_ids, hashes, mask)
        return output

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, hidden] -> [T, vocabulary] float32."""
        return project(hidden, self.lm_head, torch.float32)


def _stream_mean(residual: Tensor) -> Tensor:
    return residual.float().mean(1).to(torch.bfloat16)


class _Loader:
    """Builds the model from a folder, tensor by tensor."""

    def __init__(
        self, folder: ModelFolder, config: ModelConfig, device: torch.device, max_tokens: int, max_context: int
    ) -> None:
        self.folder, self.config, self.device = folder, config, device
        self.specs: dict[str, TensorSpec] = text_tensors(config)
        folder.check(self.specs)
        self.context = ForwardContext()
        self.selection = Selection(config, max_tokens, device)
        self.cos_sin = {flag: cos_sin_table(config, flag, max_context).to(device) for flag in (False, True)}

    def tensor(self, name: str) -> Tensor:
        return self.folder.tensor(name, self.specs[name], self.device)

    def pair(self, name: str) -> tuple[Tensor, Tensor | None]:
        """A dense layer's weight and its scale, where it has one."""
        scale = f"{name}.scale"
        return self.tensor(f"{name}.weight"), self.tensor(scale) if scale in self.specs else None

    def linear(self, *names: str) -> Linear:
        return Linear.stacked([self.pair(name) for name in names]) if len(names) > 1 else Linear(*self.pair(names[0]))

    def attention(self, layer: int) -> Attention:
        c, at = self.config, f"layers.{layer}.attn"
        ratio = c.compress_ratios[layer]
        compressor = None
        if layer in c.kv_source_layer_ids:
            parts = [f"{at}.compressor.wkv", f"{at}.compressor.wgate"][:ratio]
            norm = self.tensor(f"{at}.compressor.norm.weight")
            compressor = Compressor(ratio, self.linear(*parts), norm, c.rms_norm_eps)
        indexer = None
        if layer in c.index_source_layer_ids:
            owns = layer in c.kv_source_layer_ids
            wk = self.linear(f"{at}.indexer.wk") if owns else None
            k_norm = self.tensor(f"{at}.indexer.k_norm.weight") if owns else None
            wq_b, weights = self.linear(f"{at}.indexer.wq_b"), self.linear(f"{at}.indexer.weights_proj")
            indexer = Indexer(c, layer, wq_b, weights, wk, k_norm)
        return Attention(
            c,
            layer,
            self.context,
            self.selection,
            fused_wqa_wkv=self.linear(f"{at}.wq_a", f"{at}.wkv"),
            q_norm=self.tensor(f"{at}.q_norm.weight"),
            kv_norm=self.tensor(f"{at}.kv_norm.weight"),
            wq_b=self.linear(f"{at}.wq_b"),
            wo_a=self.linear(f"{at}.wo_a"),
            wo_b=self.linear(f"{at}.wo_b"),
            sinks=self.tensor(f"{at}.attn_sink"),
            cos_sin=self.cos_sin[ratio > 0],
            compressor=compressor,
            indexer=indexer,
        )

    def experts(self, layer: int) -> Experts:
        at = f"layers.{layer}.ffn.experts"
        parts: dict[str, list[Tensor]] = {"w13": [], "w13_scale": [], "w2": [], "w2_scale": []}
        for expert in range(self.config.n_routed_experts):
            tensors = {
                (w, kind): self.tensor(f"{at}.{expert}.{w}.{kind}").view(torch.uint8)
                for w in ("w1", "w2", "w3")
                for kind in ("weight", "scale")
            }
            for suffix, kind in (("", "weight"), ("_scale", "scale")):
                parts[f"w13{suffix}"].append(torch.cat((tensors["w1", kind], tensors["w3", kind])))
                parts[f"w2{suffix}"].append(tensors["w2", kind])
        return Experts(*(torch.stack(parts.pop(name)) for name in ("w13", "w13_scale", "w2", "w2_scale")))

    def moe(self, layer: int) -> MoE:
        at = f"layers.{layer}.ffn"
        return MoE(
            self.config,
            gate=self.linear(f"{at}.gate"),
            bias=self.tensor(f"{at}.gate.bias"),
            image_bias=self.tensor(f"{at}.gate.bias_vl") if self.config.has_image_bias else None,
            experts=self.experts(layer),
            shared_up=self.linear(f"{at}.shared_experts.w1", f"{at}.shared_experts.w3"),
            shared_down=self.linear(f"{at}.shared_experts.w2"),
        )

    def engram(self, layer: int) -> Engram | None:
        if layer not in self.config.engram_layer_ids:
            return None
        at, index = f"layers.{layer}.engram", self.config.engram_layer_ids.index(layer)
        table, scale = self.tensor(f"{at}.embed.weight"), self.tensor(f"{at}.embed.scale")
        q, k = self.tensor(f"{at}.q_weight"), self.tensor(f"{at}.k_weight")
        wkv, max_tokens = self.linear(f"{at}.wkv"), self.selection.topk_indices.shape[0]
        return Engram(self.config, index, table, scale, wkv, q, k, max_tokens)

    def mixer(self, layer: int, sublayer: str) -> Mixer:
        c, at = self.config, f"layers.{layer}.hc_{sublayer}"
        fn, base, scale = (self.tensor(f"{at}_{part}") for part in ("fn", "base", "scale"))
        return Mixer(fn, base, scale, c.rms_norm_eps, c.hc_eps, c.hc_sinkhorn_iters)

    def layer(self, layer: int) -> DecoderLayer:
        return DecoderLayer(
            layer,
            self.attention(layer),
            self.moe(layer),
            self.engram(layer),
            self.mixer(layer, "attn"),
            self.mixer(layer, "ffn"),
            self.tensor(f"layers.{layer}.attn_norm.weight"),
            self.tensor(f"layers.{layer}.ffn_norm.weight"),
            self.config.rms_norm_eps,
        )

    def model(self, progress: Progress) -> DeepseekV41:
        count = self.config.num_hidden_layers
        layers = []
        for layer in range(count):
            progress(layer, count, f"layer {layer}")
            layers.append(self.layer(layer))
        embedding, norm = self.tensor("embed.weight"), self.tensor("norm.weight")
        head = self.tensor("head.weight").to(compute_dtype(self.device))
        ngram_hash = self.ngram_hash()
        progress(count, count, "loaded")
        return DeepseekV41(self.config, Model(self.config, self.context, embedding, layers, norm), head, ngram_hash)

    def ngram_hash(self) -> NgramHash | None:
        if not self.config.engram_layer_ids:
            return None
        token_map, size = compressed_token_map(load_tokenizer(self.folder.path))
        if size != self.config.engram_compressed_vocab_size:
            raise CheckpointError(
                f"{self.config.source}: text_config.engram_compressed_vocab_size: found "
                f"{self.config.engram_compressed_vocab_size}, expected {size}, what the folder's tokenizer yields"
            )
        return NgramHash(self.config, token_map, self.device)


def load_model(
    folder: str | Path,
    device: torch.device,
    max_tokens: int,
    max_context: int,
    progress: Progress = lambda done, total, what: None,
) -> DeepseekV41:
    """Loads a model folder onto `device`, for batches of up to `max_tokens` and contexts of up to `max_context`.

    Raises ConfigError or CheckpointError, each naming file, key, found and expected.
    """
    config = ModelConfig.from_folder(folder)
    if max_context > config.max_position_embeddings:
        raise PromptError(
            f"context: found {max_context} tokens, expected at most max_position_embeddings, "
            f"{config.max_position_embeddings} ({config.source})"
        )
    with ModelFolder(folder) as opened:
        return _Loader(opened, config, device, max_tokens, max_context).model(progress)
