"""vLLM's own ops behind the executor's interface: its decoder layers' attention, MoE, Engram and mHC kernels."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.kernels.mhc.tilelang import mhc_post_tilelang, mhc_pre_delayed_tilelang
from vllm.model_executor.kernels.mhc.triton import hc_collapse_triton
from vllm.models.deepseek_v41.nvidia.model import DeepseekV4DecoderLayer, DeepseekV4Model
from vllm.models.deepseek_v41.nvidia.ops.mhc import mhc_shifted_post_pre

from specialized_decode.boundary import BoundaryLayer, BoundaryState, Pending, QuantizedInput, StepGates


class StockBoundaries:
    """The mHC between sublayers on vLLM's kernels, as its decoder layer calls them; none runs beside a sublayer.

    layers: by layer id. A BoundaryState here holds vLLM's shapes: post is [T, n, 1].
    """

    def __init__(self, layers: Mapping[int, DeepseekV4DecoderLayer]) -> None:
        self.layers = layers

    def first(self, layer: BoundaryLayer, x: Tensor, step: StepGates) -> tuple[Tensor, BoundaryState]:
        """As Boundaries.first, on the projection summed over the streams."""
        stock = self.layers[layer.layer_id]
        assert stock.hc_attn_fn_broadcast is not None, "vLLM sums the first layer's projection once weights are loaded"
        residual = x.unsqueeze(1).expand(-1, stock.hc_mult, -1).contiguous()
        fn = stock.hc_attn_fn_broadcast
        x, state = self._pre(stock, residual, fn, x=x)
        return x, state

    def pre(self, layer: BoundaryLayer, residual: Tensor, state: BoundaryState, step: StepGates) -> Tensor:
        """As Boundaries.pre."""
        stock = self.layers[layer.layer_id]
        x, new = self._pre(stock, residual, stock.hc_attn_fn, pre_mix=state.pre)
        _replace(state, new)
        return x

    def sublayer(
        self,
        layer: BoundaryLayer,
        ffn: bool,
        state: BoundaryState,
        step: StepGates,
        *,
        quantize: bool = False,
        capture_aux: bool = False,
    ) -> tuple[Tensor, QuantizedInput | None, Tensor | None]:
        """As Boundaries.sublayer, without quantized inputs."""
        assert not quantize, "vLLM's mHC kernels hand over no quantized input"
        stock = self.layers[layer.layer_id]
        fn, norm = (stock.hc_ffn_fn, stock.ffn_norm) if ffn else (stock.hc_attn_fn, stock.attn_norm)
        scale, base = (stock.hc_ffn_scale, stock.hc_ffn_base) if ffn else (stock.hc_attn_scale, stock.hc_attn_base)
        residual, post, comb, x, pre, aux = mhc_shifted_post_pre(
            _reduced(state.pending),
            state.residual,
            state.post,
            state.comb,
            fn,
            scale,
            base,
            *_numbers(stock),
            pre_mix=state.pre,
            norm_weight=norm.weight,
            norm_eps=norm.variance_epsilon,
            capture_aux=capture_aux,
        )
        _replace(state, BoundaryState(residual, pre, post, comb))
        return x, None, aux if capture_aux else None

    def post_only(self, state: BoundaryState) -> Tensor:
        """As Boundaries.post_only."""
        residual: Tensor = mhc_post_tilelang(_reduced(state.pending), state.residual, state.post, state.comb)
        state.pending = None
        return residual

    def mean(self, residual: Tensor) -> Tensor:
        """As Boundaries.mean."""
        return residual.mean(dim=1)

    def join(self) -> None:
        """Nothing runs beside a sublayer."""

    @staticmethod
    def _pre(
        stock: DeepseekV4DecoderLayer, residual: Tensor, fn: Tensor, **inputs: Tensor
    ) -> tuple[Tensor, BoundaryState]:
        post, comb, x, pre = mhc_pre_delayed_tilelang(
            residual,
            fn,
            stock.hc_attn_scale,
            stock.hc_attn_base,
            *_numbers(stock),
            norm_weight=stock.attn_norm.weight,
            norm_eps=stock.attn_norm.variance_epsilon,
            **inputs,
        )
        return x, BoundaryState(residual, pre, post, comb)


def _numbers(stock: DeepseekV4DecoderLayer) -> tuple[float, float, float, float, int]:
    """The numbers of vLLM's mHC calls: RMS eps, pre-mix eps, Sinkhorn eps, post factor, Sinkhorn iterations."""
    return stock.rms_norm_eps, stock.hc_eps, stock.hc_eps, stock.hc_post_alpha, stock.hc_sinkhorn_iters


def _replace(state: BoundaryState, new: BoundaryState) -> None:
    state.residual, state.pending = new.residual, None
    state.pre, state.post, state.comb = new.pre, new.post, new.comb


def _reduced(pending: Pending | None) -> Tensor:
    """A sublayer's output summed over the ranks, by vLLM's all-reduce."""
    assert isinstance(pending, Tensor), "vLLM's own sublayers finalize their outputs"
    reduced: Tensor = tensor_model_parallel_all_reduce(pending)
    return reduced


@contextmanager
def partial_output(module: Any, name: str, value: bool) -> Iterator[None]:
    """A module that leaves its output unreduced for as long as its flag `name` is `value`."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


class VllmStockOps:
    """The StockOps of a DeepseekV4Model."""

    def __init__(self, model: DeepseekV4Model) -> None:
        self.model = model
        self._layers = {i: model.layers[i] for i in range(model.start_layer, model.end_layer)}
        self.boundaries = StockBoundaries(self._layers)

    def attention(self, layer_id: int, x: Tensor, positions: Tensor) -> Tensor:
        """x: [T, hidden], positions: [T] -> this rank's part of the output, [T, hidden]."""
        attn = self._layers[layer_id].attn
        with partial_output(attn.wo_b, "reduce_results", False):
            out: Tensor = attn(positions, x, None)
        return out

    def moe(self, layer_id: int, x: Tensor, input_ids: Tensor) -> Tensor:
        """x: [T, hidden], input_ids: [T] -> this rank's part of the finalized output, [T, hidden]."""
        ffn = self._layers[layer_id].ffn
        with partial_output(ffn.experts.moe_config, "skip_final_all_reduce", True):
            out: Tensor = ffn(x, input_ids, None)
        return out

    def engram(self, layer_id: int, residual: Tensor, keep: Tensor) -> Tensor:
        """Injects the rows that the forward staged; of the hash ids the layer reads the count alone, which keep has."""
        out: Tensor = self._layers[layer_id].engram(residual, keep, keep)
        return out

    def finish(self, residual: Tensor, pre: Tensor) -> Tensor:
        """The final streams, collapsed with pre [T, n] and normed, [T, hidden]."""
        hidden: Tensor = self.model.norm(hc_collapse_triton(residual, pre))
        return hidden

    def join(self) -> None:
        """The current stream waits for all that a broken capture forked on vLLM's streams."""
        current = torch.cuda.current_stream()
        if not torch.cuda.is_current_stream_capturing():
            return
        for stream in self._streams():
            with torch.cuda.stream(stream):
                forked = torch.cuda.is_current_stream_capturing()
            # A wait for a stream outside the capture would break it.
            if forked:
                current.wait_stream(stream)

    def _streams(self) -> list[torch.cuda.Stream]:
        streams: dict[int, torch.cuda.Stream] = {}
        for layer in self._layers.values():
            shared = layer.ffn.experts.shared_experts
            found = [*(layer.attn.aux_stream_list or ()), getattr(shared, "_stream", None)]
            found.append(getattr(layer.engram, "_prefetch_stream", None))
            streams |= {stream.cuda_stream: stream for stream in found if stream is not None}
        return list(streams.values())
