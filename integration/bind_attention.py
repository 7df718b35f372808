"""One attention layer of vLLM's as the attention step reads it: its weights, and its caches and metadata in a step.

No cache and no metadata is held: vLLM binds them anew for each KV cache, the throwaway one of its memory profile too.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from vllm.forward_context import get_forward_context

from specialized_decode.integration.bind_weights import BoundLinear, PreparedWeights


@dataclass(frozen=True)
class BoundRing:
    """A compressor's open rows in a batch; see RingView."""

    states: int
    slot_mapping: Tensor
    token_to_req: Tensor
    query_start_loc: Tensor


@dataclass(frozen=True)
class BoundCache(BoundRing):
    """A paged cache in a batch; see CacheView. Equal for the layers of a group, which share vLLM's metadata."""

    block_table: Tensor
    max_seq_len: int


@dataclass(frozen=True)
class BoundCaches:
    """See LayerCaches."""

    window: BoundCache
    compressed: BoundCache | None
    index: BoundCache | None
    ring: BoundRing | None


class BoundSelection:
    """What the indexers publish; see SelectionView. The model has one of each for all its layers."""

    def __init__(self, attn: Any) -> None:
        self._attn = attn

    @property
    def topk_indices(self) -> Tensor:
        buffer: Tensor = self._attn.topk_indices_buffer
        return buffer

    @property
    def candidate_blocks(self) -> Tensor | None:
        buffer: Tensor | None = self._attn.candidate_block_buffer
        return buffer


class BoundCompressor:
    """See CompressorView."""

    def __init__(self, compressor: Any, prepared: PreparedWeights | None) -> None:
        self._compressor = compressor
        self.ratio, self.eps = int(compressor.compress_ratio), float(compressor.rms_norm_eps)
        self.fused_wkv_wgate = BoundLinear(compressor.fused_wkv_wgate, prepared)
        self.norm: Tensor = compressor.norm.weight

    @property
    def state_cache(self) -> Tensor | None:
        cache = self._compressor.state_cache
        return None if cache is None else _bound(cache.kv_cache)


class BoundIndexer:
    """See IndexerView."""

    def __init__(self, attn: Any, prepared: PreparedWeights | None) -> None:
        indexer = attn.indexer
        self._indexer = indexer
        self.num_heads, self.head_dim, self.topk = int(indexer.n_head), int(indexer.head_dim), int(indexer.topk_tokens)
        self.ratio, self.eps = int(indexer.compress_ratio), float(attn.eps)
        source = int(attn.candidate_source_layer)
        self.candidate_source = attn.layer_id == source
        self.candidate_consumer = 0 <= source < attn.layer_id
        self.candidate_block_size = int(attn.candidate_block_size)
        self.wq_b = BoundLinear(indexer.wq_b, prepared)
        self.weights_proj = BoundLinear(indexer.weights_proj, prepared)
        self.wk = BoundLinear(indexer.wk, prepared) if indexer.owns_k else None
        self.k_norm: Tensor | None = indexer.k_norm.weight if indexer.owns_k else None

    @property
    def k_cache(self) -> Tensor | None:
        return _bound(self._indexer.k_cache.kv_cache)


class BoundAttention:
    """One layer's attention; see AttentionView. Heads beyond this rank's, which vLLM pads with, are left out."""

    def __init__(self, attn: Any, prepared: PreparedWeights | None) -> None:
        self._attn = attn
        self.layer_id = int(attn.layer_id)
        self.num_heads, self.head_dim, self.rope_dim = (
            int(attn.n_local_heads),
            int(attn.head_dim),
            int(attn.rope_head_dim),
        )
        self.q_lora_rank, self.o_groups, self.o_lora_rank = (
            int(attn.q_lora_rank),
            int(attn.n_local_groups),
            int(attn.o_lora_rank),
        )
        self.window_size, self.compress_ratio = int(attn.window_size), int(attn.compress_ratio)
        self.index_source: int | None = attn.index_source_layer_id
        self.kv_source: int | None = attn.kv_source_layer_id
        self.eps, self.scale = float(attn.eps), float(attn.scale)
        self.fused_wqa_wkv, self.wq_b, self.wo_a = (
            BoundLinear(layer, prepared) for layer in (attn.fused_wqa_wkv, attn.wq_b, attn.wo_a)
        )
        self.wo_b = BoundLinear(attn.wo_b, prepared, reduces=True)
        self.q_norm: Tensor = attn.q_norm.weight
        self.kv_norm: Tensor = attn.kv_norm.weight
        self.cos_sin: Tensor = attn.rotary_emb.cos_sin_cache
        self.compressor = None if attn.compressor is None else BoundCompressor(attn.compressor, prepared)
        self.indexer = None if attn.indexer is None else BoundIndexer(attn, prepared)
        self.selection = BoundSelection(attn)
        # vLLM keeps other records on Blackwell, and index keys with other scales.
        self.hopper_records = attn.kv_cache_dtype == "fp8_ds_mla" and not attn.kv_mxfp8
        # Under which the metadata of the layer's sliding-window cache is found.
        self.window_prefix = str(attn.swa_cache_layer.prefix)

    @property
    def sinks(self) -> Tensor:
        sinks: Tensor = self._attn.attn_sink.data[: self.num_heads]
        return sinks

    @property
    def window_cache(self) -> Tensor | None:
        return _bound(self._attn.swa_cache_layer.kv_cache)

    @property
    def compressed_cache(self) -> Tensor | None:
        return None if self.kv_source is None else _bound(self._attn._compressed_kv_cache())

    def metadata(self) -> BoundCaches:
        """The running forward's. Raises RuntimeError where vLLM gives none, as while it profiles memory."""
        batch = get_forward_context().attn_metadata
        if not isinstance(batch, dict):
            raise RuntimeError(f"{self._attn.prefix}: found attention metadata {type(batch).__name__}, expected a dict")
        attn, found = self._attn, batch[self.window_prefix]
        window = BoundCache(
            states=_states(self.window_cache),
            slot_mapping=found.slot_mapping,
            token_to_req=found.token_to_req_indices,
            query_start_loc=found.query_start_loc,
            block_table=found.block_table,
            max_seq_len=int(attn.max_model_len),
        )
        return BoundCaches(window, self._compressed(batch), self._index(batch, window), self._ring(batch))

    def _compressed(self, batch: dict[str, Any]) -> BoundCache | None:
        if self.kv_source is None:
            return None
        found = batch[self._attn.compressed_cache_prefix]
        return BoundCache(
            states=_states(self.compressed_cache),
            slot_mapping=found.slot_mapping,
            token_to_req=found.req_id_per_token,
            query_start_loc=found.query_start_loc,
            block_table=found.block_table,
            max_seq_len=int(found.max_seq_len),
        )

    def _index(self, batch: dict[str, Any], window: BoundCache) -> BoundCache | None:
        """vLLM's metadata of index keys leaves the requests of the tokens to the window's."""
        if self.indexer is None:
            return None
        found = batch[self._attn.indexer.k_cache.prefix]
        return BoundCache(
            states=_states(self.indexer.k_cache),
            slot_mapping=found.slot_mapping,
            token_to_req=window.token_to_req,
            query_start_loc=window.query_start_loc,
            block_table=found.block_table,
            max_seq_len=int(found.max_seq_len),
        )

    def _ring(self, batch: dict[str, Any]) -> BoundRing | None:
        compressor = self._attn.compressor
        if compressor is None or compressor.state_cache is None:
            return None
        found = batch[compressor.state_cache.prefix]
        states = _states(compressor.state_cache.kv_cache)
        return BoundRing(states, found.slot_mapping, found.token_to_req_indices, found.query_start_loc)


def _bound(cache: Tensor) -> Tensor | None:
    """A cache as vLLM has bound it; it holds an empty tensor before."""
    return cache if cache.numel() else None


def _states(cache: Tensor | None) -> int:
    """States of a page: of the tensor, which vLLM may have split into smaller blocks than its specification's."""
    if cache is None:
        raise RuntimeError("found no KV cache, expected it bound before a step runs")
    return cache.shape[1]
