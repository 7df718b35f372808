"""Mixture of experts: noaux_tc routing over sqrt-softplus scores, MXFP4 routed experts, one shared FP8 expert."""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from specialized_decode.backbone.config import IMAGE_TOKEN_ID, IMAGE_TOKEN_SPAN, ModelConfig
from specialized_decode.backbone.formats import dequantize_fp4
from specialized_decode.backbone.linear import Linear, compute_dtype

# Experts are kept dequantized when all of a layer's take no more than this; larger ones are dequantized as used.
_KEEP_BYTES = {"cpu": 64 << 20, "cuda": 4 << 30}
# Dequantized on the fly, so many bytes of experts at a time.
_CHUNK_BYTES = 512 << 20
# Tokens at a time, which bounds the all-experts intermediate.
_CHUNK_TOKENS = 512


def swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit), gate first in the last dimension; bfloat16."""
    gate, up = gate_up.float().chunk(2, -1)
    return (F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)).to(torch.bfloat16)


def rank_experts(biased: Tensor) -> Tensor:
    """[T, E] expert ids by falling score; of equal ones the lower id first, NaN last, as vLLM's router selects."""
    return torch.where(biased.isnan(), -1e30, biased).sort(dim=-1, descending=True, stable=True).indices


class ExpertForm(Protocol):
    """One way to hold a layer's routed experts. layout: its name; the tensors are as it has them."""

    @property
    def layout(self) -> str: ...
    @property
    def w13(self) -> Tensor: ...
    @property
    def w13_scale(self) -> Tensor: ...
    @property
    def w13_scale_2(self) -> Tensor | None: ...
    @property
    def w2(self) -> Tensor: ...
    @property
    def w2_scale(self) -> Tensor: ...
    @property
    def w2_scale_2(self) -> Tensor | None: ...

    def unpacked(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Experts start..stop in the checkpoint's form: w13, w13_scale, w2, w2_scale. Reads nothing back from the
        device: a capture may run it."""


class CheckpointForm:
    """w13 [E, 2 I, K/2], w2 [E, K, I/2] packed e2m1 (gate rows first), scales UE8M0 per 32 along K."""

    layout = "checkpoint"
    w13_scale_2 = w2_scale_2 = None

    def __init__(self, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor) -> None:
        self.w13, self.w13_scale, self.w2, self.w2_scale = w13, w13_scale, w2, w2_scale

    def unpacked(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        part = slice(start, stop)
        return self.w13[part], self.w13_scale[part], self.w2[part], self.w2_scale[part]


class Experts:
    """Routed experts, given in the checkpoint's form (see `CheckpointForm`), held in that or in another."""

    def __init__(self, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor) -> None:
        self._form: ExpertForm = CheckpointForm(w13, w13_scale, w2, w2_scale)
        self.count = w13.shape[0]
        self.dtype = compute_dtype(w13.device)
        expert_bytes = 2 * (w13[0].numel() + w2[0].numel()) * self.dtype.itemsize
        self.chunk = max(1, min(self.count, _CHUNK_BYTES // expert_bytes))
        self.kept = self.count * expert_bytes <= _KEEP_BYTES[w13.device.type]
        self._kept: tuple[Tensor, Tensor] | None = None
        if self.kept:
            self.chunk = self.count
            self._kept = self._dequantize(0, self.count)

    @property
    def layout(self) -> str:
        return self._form.layout

    @property
    def w13(self) -> Tensor:
        return self._form.w13

    @property
    def w13_scale(self) -> Tensor:
        return self._form.w13_scale

    @property
    def w13_scale_2(self) -> Tensor | None:
        return self._form.w13_scale_2

    @property
    def w2(self) -> Tensor:
        return self._form.w2

    @property
    def w2_scale(self) -> Tensor:
        return self._form.w2_scale

    @property
    def w2_scale_2(self) -> Tensor | None:
        return self._form.w2_scale_2

    def hold(self, form: ExpertForm) -> None:
        """Holds the same experts as `form` from here on, releases what they were held in, and computes from `form`.

        Graphs captured before read memory that is released.
        """
        self._form = form
        if self.kept:
            self._kept = None
            self._kept = self._dequantize(0, self.count)

    def dequantized(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Experts start..stop as (w13 [n, 2 I, K], w2 [n, K, I]) in the compute dtype."""
        if self._kept is not None:
            return self._kept[0][start:stop], self._kept[1][start:stop]
        return self._dequantize(start, stop)

    def _dequantize(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        w13, w13_scale, w2, w2_scale = self._form.unpacked(start, stop)
        return dequantize_fp4(w13, w13_scale, self.dtype), dequantize_fp4(w2, w2_scale, self.dtype)


class MoE:
    """One layer's mixture of experts.

    gate: [E, K]; bias, image_bias: [E] float32 (image_bias None for a text-only model); shared_up [2 I, K] (gate
    first), shared_down [K, I].
    """

    def __init__(
        self,
        config: ModelConfig,
        gate: Linear,
        bias: Tensor,
        image_bias: Tensor | None,
        experts: Experts,
        shared_up: Linear,
        shared_down: Linear,
    ) -> None:
        self.topk = config.num_experts_per_tok
        self.scaling = config.routed_scaling_factor
        self.limit = config.swiglu_limit
        self.gate, self.bias, self.image_bias = gate, bias, image_bias
        self.experts, self.shared_up, self.shared_down = experts, shared_up, shared_down
        # Called with the expert ids [T, k] of every batch, where somebody records them.
        self.routing_hook: Callable[[Tensor], None] | None = None

    def route(self, x: Tensor, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Top-k expert ids [T, k] int64 and weights [T, k] float32 of x [T, K] bfloat16."""
        scores = F.softplus(self.gate(x, torch.float32)).sqrt()
        bias = self.bias.expand_as(scores)
        if self.image_bias is not None:
            image = (input_ids >= IMAGE_TOKEN_ID) & (input_ids < IMAGE_TOKEN_ID + IMAGE_TOKEN_SPAN)
            bias = torch.where(image.unsqueeze(-1), self.image_bias, bias)
        ids = rank_experts(scores + bias)[:, : self.topk]
        weights = scores.gather(-1, ids)
        total = weights.sum(-1, keepdim=True)
        return ids, weights * (self.scaling / torch.where(total > 0, total, torch.ones_like(total)))

    def __call__(self, x: Tensor, input_ids: Tensor) -> Tensor:
        """x: [T, K] bfloat16, input_ids: [T] -> [T, K] bfloat16."""
        return torch.cat(
            [
                self._tokens(rows, ids)
                for rows, ids in zip(x.split(_CHUNK_TOKENS), input_ids.split(_CHUNK_TOKENS), strict=True)
            ]
        )

    def _tokens(self, x: Tensor, input_ids: Tensor) -> Tensor:
        ids, weights = self.route(x, input_ids)
        if self.routing_hook is not None:
            self.routing_hook(ids)
        shared = self.shared_down(swiglu(self.shared_up(x), self.limit))
        tokens = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
        chosen = torch.zeros(*ids.shape, x.shape[1], device=x.device)
        for start in range(0, self.experts.count, self.experts.chunk):
            stop = min(start + self.experts.chunk, self.experts.count)
            w13, w2 = self.experts.dequantized(start, stop)
            # Every expert sees every token: shapes stay static, so the layer can run inside a graph.
            hidden = swiglu((x.to(w13.dtype) @ w13.transpose(1, 2)).to(torch.bfloat16), self.limit)
            out = (hidden.to(w2.dtype) @ w2.transpose(1, 2)).to(torch.bfloat16)
            inside = ((ids >= start) & (ids < stop)).unsqueeze(-1)
            picked = out[(ids - start).clamp(0, stop - start - 1), tokens].float()
            chosen = torch.where(inside, picked, chosen)
        return ((chosen * weights.unsqueeze(-1)).sum(1) + shared.float()).to(torch.bfloat16)
