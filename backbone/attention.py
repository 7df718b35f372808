"""Attention of the plain model: a sliding window, plus the compressed positions that an indexer selects.

One 512-wide latent is key and value of every head; its last 64 dimensions are rotated. Layers without a compressor
or an indexer of their own read the latest source's below them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specialized_decode.backbone.cache import (
    CacheMetadata,
    compressed_name,
    index_name,
    ring_name,
    window_name,
)
from specialized_decode.backbone.config import ModelConfig
from specialized_decode.backbone.context import ForwardContext
from specialized_decode.backbone.formats import (
    decode_fp8,
    decode_kv,
    encode_index_key,
    encode_kv,
    gather_records,
    index_planes,
    kv_planes,
    power_of_two_scale,
    two_to,
    write_records,
)
from specialized_decode.backbone.linear import Linear, rms_norm
from specialized_decode.backbone.rope import rotate

# Bytes of gathered float32 records (or index keys) at a time; rows are processed in chunks of that size. On a CPU
# they stay in its cache.
_GATHER_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}


@dataclass(frozen=True)
class LayerMetadata:
    """The running batch's metadata of one layer's caches; None where the layer has no such cache."""

    window: CacheMetadata
    compressed: CacheMetadata | None
    index: CacheMetadata | None
    ring: CacheMetadata | None


class Selection:
    """Buffers that index sources publish into and later layers read.

    topk_indices: [max tokens, index_topk] int32 compressed positions of the request, -1 padded;
    candidate_blocks: [max tokens, candidate_topk_blocks] int32, -1 padded, or None without a candidate source.
    """

    def __init__(self, config: ModelConfig, max_tokens: int, device: torch.device) -> None:
        self.topk_indices = torch.full((max_tokens, config.index_topk), -1, dtype=torch.int32, device=device)
        self.candidate_blocks: Tensor | None = None
        if config.candidate_source_layer_id >= 0:
            shape = (max_tokens, config.candidate_topk_blocks)
            self.candidate_blocks = torch.full(shape, -1, dtype=torch.int32, device=device)


class Compressor:
    """Pools `ratio` tokens into one latent by a learned softmax gate per dimension; ratio 1 only projects and norms.

    fused_wkv_wgate: [ratio * 512, hidden] BF16, values then scores; norm: [512].
    """

    def __init__(self, ratio: int, fused_wkv_wgate: Linear, norm: Tensor, eps: float) -> None:
        self.ratio, self.fused_wkv_wgate, self.norm, self.eps = ratio, fused_wkv_wgate, norm, eps
        self.state_cache: Tensor | None = None

    def latent(self, kv_score: Tensor, positions: Tensor, ring: CacheMetadata | None) -> Tensor:
        """kv_score: [T, ratio * 512] float32 -> [T, 512] bfloat16, meaningful where a token closes its group.

        Saves the rows of the open group for later steps.
        """
        if self.ratio == 1:
            return rms_norm(kv_score, self.norm, self.eps)
        assert ring is not None and self.state_cache is not None
        previous = self._previous(kv_score, ring, positions)
        self._save(kv_score, ring)
        value, score = torch.stack((previous, kv_score), 1).chunk(2, -1)
        return rms_norm((value * score.softmax(1)).sum(1), self.norm, self.eps)

    def _previous(self, kv_score: Tensor, ring: CacheMetadata, positions: Tensor) -> Tensor:
        """The row before each token's: the batch's, or the ring's for a request's first token here."""
        assert self.state_cache is not None
        rows = torch.arange(kv_score.shape[0], device=kv_score.device)
        first = rows == ring.query_start_loc.long()[ring.token_to_req.long()]
        block = ring.slot_mapping.clamp_min(0) // ring.states
        stored = self.state_cache[block, (positions - 1) % ring.states]
        return torch.where(first.unsqueeze(-1), stored, kv_score[(rows - 1).clamp_min(0)])

    def _save(self, kv_score: Tensor, ring: CacheMetadata) -> None:
        """Stores each request's last rows; older ones of a long chunk would share a ring row with them."""
        assert self.state_cache is not None
        rows = torch.arange(kv_score.shape[0], device=kv_score.device)
        end = ring.query_start_loc.long()[ring.token_to_req.long() + 1]
        kept = (ring.slot_mapping >= 0) & (rows >= end - ring.states)
        slot = torch.where(kept, ring.slot_mapping, 0)
        block, row = slot // ring.states, slot % ring.states
        self.state_cache[block, row] = torch.where(kept.unsqueeze(-1), kv_score, self.state_cache[block, row])


class Indexer:
    """Scores compressed positions with `num_heads` small FP8 queries and selects the best `topk`.

    wq_b: [heads * 128, q rank]; weights_proj: [heads, hidden]; wk: [128, 512] and k_norm [128] where the layer also
    owns the index keys. Candidates: a source publishes its best blocks; a consumer scores inside them only.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer_id: int,
        wq_b: Linear,
        weights_proj: Linear,
        wk: Linear | None,
        k_norm: Tensor | None,
    ) -> None:
        self.num_heads, self.head_dim = config.index_n_heads, config.index_head_dim
        self.topk = config.index_topk
        self.eps = config.rms_norm_eps
        self.ratio = config.compress_ratios[layer_id]
        self.candidate_source = layer_id == config.candidate_source_layer_id
        self.candidate_consumer = config.consumes_candidates(layer_id)
        self.candidate_block_size = config.candidate_block_size
        self.wq_b, self.weights_proj, self.wk, self.k_norm = wq_b, weights_proj, wk, k_norm
        self.k_cache: Tensor | None = None

    @property
    def weight_scale(self) -> float:
        """What head weights are scaled by: one over the root of head width times heads."""
        return (self.head_dim * self.num_heads) ** -0.5

    def store_keys(self, latent: Tensor, cos_sin: Tensor, meta: CacheMetadata) -> None:
        """Turns latents [T, 512] into index keys, rotated by cos_sin [T, 64], and stores those that close a group."""
        assert self.wk is not None and self.k_norm is not None and self.k_cache is not None
        key = rms_norm(self.wk(latent), self.k_norm, self.eps)
        values, scale = encode_index_key(_rotate_tail(key, cos_sin).float())
        write_records(index_planes(self.k_cache), meta.slot_mapping, values, scale.view(torch.uint8))

    def queries(self, qr: Tensor, x: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        """FP8-rounded queries [T, heads, 128] float32 and head weights [T, heads] float32 with their scales in them."""
        q = _rotate_tail(self.wq_b(qr).unflatten(-1, (self.num_heads, -1)), cos_sin.unsqueeze(1)).float()
        scale = two_to(power_of_two_scale(q.abs().amax(-1)))
        fp8 = (q / scale.unsqueeze(-1)).to(torch.float8_e4m3fn).float()
        return fp8, self.weights_proj(x).float() * scale * self.weight_scale

    def scores(self, q: Tensor, weights: Tensor, meta: CacheMetadata, positions: Tensor) -> Tensor:
        """[T, n] float32 scores of the request's compressed positions, -inf past the last closed group."""
        assert self.k_cache is not None
        width = max(meta.max_seq_len // self.ratio, 1)
        columns = torch.arange(width, device=q.device)
        scores = torch.empty(q.shape[0], width, device=q.device)
        step = max(1, _GATHER_BYTES[q.device.type] // (width * self.head_dim * 8))
        for start in range(0, q.shape[0], step):
            rows = slice(start, start + step)
            table = meta.block_table.long()[meta.token_to_req.long()[rows]]
            slots = table[:, columns // meta.states] * meta.states + columns % meta.states
            values, scale = gather_records(index_planes(self.k_cache), slots)
            # Products of FP8 values and their sums are exact in float64, so the order of summation cannot matter.
            dots = q[rows].double() @ decode_fp8(values, torch.float64).transpose(1, 2)
            total = (dots.relu() * weights[rows].unsqueeze(-1)).sum(1)
            scores[rows] = (total * scale.contiguous().view(torch.float32).squeeze(-1)).float()
        closed = (positions + 1) // self.ratio
        return scores.masked_fill(columns >= closed.unsqueeze(-1), -torch.inf)

    def publish_candidates(self, scores: Tensor, positions: Tensor, out: Tensor) -> None:
        """Writes the best blocks by their best score into out [T, blocks] int32; the newest block is always in."""
        size = self.candidate_block_size
        padding = -scores.shape[1] % size
        blocks = torch.nn.functional.pad(scores, (0, padding), value=-torch.inf).unflatten(-1, (-1, size)).amax(-1)
        closed = (positions + 1) // self.ratio
        newest = torch.arange(blocks.shape[1], device=scores.device) == ((closed - 1) // size).unsqueeze(-1)
        blocks = blocks.masked_fill(newest & (closed > 0).unsqueeze(-1), torch.inf)
        _write_best(blocks, out)

    def restrict(self, scores: Tensor, candidate_blocks: Tensor) -> Tensor:
        """-inf outside the candidate blocks [T, blocks]."""
        count = -(-scores.shape[1] // self.candidate_block_size)
        # One flag past the end takes the padding.
        flags = torch.zeros(scores.shape[0], count + 1, dtype=torch.bool, device=scores.device)
        target = torch.where((candidate_blocks >= 0) & (candidate_blocks < count), candidate_blocks, count)
        flags.scatter_(1, target.long(), True)
        columns = torch.arange(scores.shape[1], device=scores.device) // self.candidate_block_size
        return scores.masked_fill(~flags[:, columns], -torch.inf)

    def select(self, scores: Tensor, out: Tensor) -> None:
        """Writes the best `topk` positions of scores [T, n] into out [T, topk] int32, -1 padded."""
        _write_best(scores, out)


def _write_best(scores: Tensor, out: Tensor) -> None:
    """The best columns of scores [T, n] into out [T, k] int32, -1 padded; of equal ones the earlier, NaN never."""
    ranked = scores.masked_fill(scores.isnan(), -torch.inf)
    values, columns = ranked.sort(dim=-1, descending=True, stable=True)
    count = min(out.shape[1], scores.shape[1])
    out.fill_(-1)
    out[:, :count] = torch.where(values[:, :count] > -torch.inf, columns[:, :count], -1)


class Attention:
    """One layer's attention. Weights as in the release, `wq_a` and `wkv` stacked; caches are bound by the model.

    fused_wqa_wkv: [q rank + 512, hidden]; wq_b: [heads * 512, q rank]; wo_a: [groups * o rank, heads * 512 / groups];
    wo_b: [hidden, groups * o rank]; sinks: [heads] float32; cos_sin: [positions, 64] float32.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer_id: int,
        context: ForwardContext,
        selection: Selection,
        fused_wqa_wkv: Linear,
        q_norm: Tensor,
        kv_norm: Tensor,
        wq_b: Linear,
        wo_a: Linear,
        wo_b: Linear,
        sinks: Tensor,
        cos_sin: Tensor,
        compressor: Compressor | None,
        indexer: Indexer | None,
    ) -> None:
        self.layer_id = layer_id
        self.context, self.selection = context, selection
        self.num_heads, self.head_dim, self.rope_dim = (
            config.num_attention_heads,
            config.head_dim,
            config.qk_rope_head_dim,
        )
        self.q_lora_rank, self.o_groups, self.o_lora_rank = config.q_lora_rank, config.o_groups, config.o_lora_rank
        self.window_size, self.eps, self.scale = config.sliding_window, config.rms_norm_eps, config.head_dim**-0.5
        self.compress_ratio = config.compress_ratios[layer_id]
        self.kv_source, self.index_source = config.kv_source(layer_id), config.index_source(layer_id)
        self.fused_wqa_wkv, self.q_norm, self.kv_norm = fused_wqa_wkv, q_norm, kv_norm
        self.wq_b, self.wo_a, self.wo_b, self.sinks, self.cos_sin = wq_b, wo_a, wo_b, sinks, cos_sin
        self.compressor, self.indexer = compressor, indexer
        self.window_cache: Tensor | None = None
        self.compressed_cache: Tensor | None = None

    @property
    def window_prefix(self) -> str:
        """The key of the sliding-window cache's metadata."""
        return window_name(self.layer_id)

    def bind_caches(self, views: dict[str, Tensor]) -> None:
        """Points the layer at its caches, by name; a sharing layer at its source's."""
        self.window_cache = views[window_name(self.layer_id)]
        if self.kv_source is None:
            return
        self.compressed_cache = views[compressed_name(self.kv_source)]
        if self.indexer is not None:
            self.indexer.k_cache = views[index_name(self.kv_source)]
        if self.compressor is not None and self.compress_ratio > 1:
            self.compressor.state_cache = views[ring_name(self.layer_id)]

    def metadata(self) -> LayerMetadata:
        """The running batch's metadata of this layer's caches."""
        found = self.context.metadata
        assert found is not None, "attention runs inside a forward context"
        if self.kv_source is None:
            return LayerMetadata(found[self.window_prefix], None, None, None)
        return LayerMetadata(
            found[self.window_prefix],
            found[compressed_name(self.kv_source)],
            found[index_name(self.kv_source)],
            found.get(ring_name(self.layer_id)),
        )

    def __call__(self, positions: Tensor, x: Tensor) -> Tensor:
        """positions: [T] int64; x: [T, hidden] bfloat16 -> [T, hidden] bfloat16. Writes this step's cache entries."""
        meta = self.metadata()
        cos_sin = self.cos_sin[positions]
        qr, kv = self.fused_wqa_wkv(x).split([self.q_lora_rank, self.head_dim], -1)
        qr, kv = rms_norm(qr, self.q_norm, self.eps), rms_norm(kv, self.kv_norm, self.eps)
        q = _rotate_tail(self.wq_b(qr).unflatten(-1, (self.num_heads, -1)), cos_sin.unsqueeze(1))
        self._store(self.window_cache, kv, cos_sin, meta.window)
        if self.compressor is not None:
            self._compress(x, positions, meta)
        if self.indexer is not None:
            self._index(qr, x, positions, cos_sin, meta)
        out = self._attend(q, positions, meta)
        return self._output(_rotate_tail(out, cos_sin.unsqueeze(1), inverse=True))

    def _store(self, cache: Tensor | None, latent: Tensor, cos_sin: Tensor, meta: CacheMetadata) -> None:
        assert cache is not None
        nope, rope = latent.float().split([self.head_dim - self.rope_dim, self.rope_dim], -1)
        write_records(kv_planes(cache), meta.slot_mapping, *encode_kv(nope, rotate(rope, cos_sin)))

    def _compress(self, x: Tensor, positions: Tensor, meta: LayerMetadata) -> None:
        assert self.compressor is not None and meta.compressed is not None
        kv_score = self.compressor.fused_wkv_wgate(x, torch.float32)
        latent = self.compressor.latent(kv_score, positions, meta.ring)
        # A latent stands for its group's first token.
        cos_sin = self.cos_sin[positions // self.compress_ratio * self.compress_ratio]
        self._store(self.compressed_cache, latent, cos_sin, meta.compressed)
        assert self.indexer is not None and meta.index is not None
        self.indexer.store_keys(latent, cos_sin, meta.index)

    def _index(self, qr: Tensor, x: Tensor, positions: Tensor, cos_sin: Tensor, meta: LayerMetadata) -> None:
        indexer, tokens = self.indexer, x.shape[0]
        assert indexer is not None and meta.index is not None
        scores = indexer.scores(*indexer.queries(qr, x, cos_sin), meta.index, positions)
        blocks = self.selection.candidate_blocks
        if blocks is not None and indexer.candidate_source:
            indexer.publish_candidates(scores, positions, blocks[:tokens])
        elif blocks is not None and indexer.candidate_consumer:
            scores = indexer.restrict(scores, blocks[:tokens])
        indexer.select(scores, self.selection.topk_indices[:tokens])

    def _window_slots(self, positions: Tensor, meta: CacheMetadata) -> Tensor:
        """[T, window] slots of the last `window` positions, -1 before the text's start and for padding."""
        offsets = torch.arange(self.window_size - 1, -1, -1, device=positions.device)
        wanted = positions.unsqueeze(-1) - offsets
        table = meta.block_table.long()[meta.token_to_req.long()]
        slots = table.gather(1, wanted.clamp_min(0) // meta.states) * meta.states + wanted.clamp_min(0) % meta.states
        return torch.where((wanted >= 0) & (meta.slot_mapping >= 0).unsqueeze(-1), slots, -1)

    def _selected_slots(self, tokens: int, meta: LayerMetadata) -> Tensor:
        """[T, topk] slots of the selected compressed positions, -1 padded."""
        compressed = meta.compressed
        assert compressed is not None
        chosen = self.selection.topk_indices[:tokens].long()
        table = compressed.block_table.long()[compressed.token_to_req.long()]
        slots = (
            table.gather(1, chosen.clamp_min(0) // compressed.states) * compressed.states + chosen % compressed.states
        )
        return torch.where((chosen >= 0) & (meta.window.slot_mapping >= 0).unsqueeze(-1), slots, -1)

    def _attend(self, q: Tensor, positions: Tensor, meta: LayerMetadata) -> Tensor:
        """q: [T, heads, 512] bfloat16 -> [T, heads, 512] bfloat16."""
        sources = [(self.window_cache, self._window_slots(positions, meta.window))]
        if meta.compressed is not None:
            sources.append((self.compressed_cache, self._selected_slots(q.shape[0], meta)))
        entries = sum(slots.shape[1] for _, slots in sources)
        step = max(1, _GATHER_BYTES[q.device.type] // (entries * self.head_dim * 4))
        chunks = []
        for start in range(0, q.shape[0], step):
            rows = slice(start, start + step)
            kv = torch.cat([self._read(cache, slots[rows]) for cache, slots in sources], 1)
            valid = torch.cat([slots[rows] >= 0 for _, slots in sources], 1)
            chunks.append(sink_attention(q[rows], kv, valid, self.sinks, self.scale))
        return torch.cat(chunks)

    @staticmethod
    def _read(cache: Tensor | None, slots: Tensor) -> Tensor:
        assert cache is not None
        return decode_kv(*gather_records(kv_planes(cache), slots))

    def _output(self, out: Tensor) -> Tensor:
        """Grouped low-rank output: [T, heads, 512] -> [T, hidden]."""
        grouped = out.flatten(1).unflatten(-1, (self.o_groups, -1)).transpose(0, 1)
        weight = self.wo_a.dense.unflatten(0, (self.o_groups, self.o_lora_rank))
        low = (grouped.to(weight.dtype) @ weight.transpose(1, 2)).to(torch.bfloat16)
        return self.wo_b(low.transpose(0, 1).flatten(1))


def sink_attention(q: Tensor, kv: Tensor, valid: Tensor, sinks: Tensor, scale: float) -> Tensor:
    """Softmax attention whose denominator also holds exp(sink), one a head.

    q: [T, heads, 512]; kv: [T, n, 512] float32, key and value; valid: [T, n] bool; -> [T, heads, 512] bfloat16, zero
    where nothing is valid.
    """
    kv = kv.masked_fill(~valid.unsqueeze(-1), 0.0)
    logits = ((q.float() @ kv.transpose(1, 2)) * scale).masked_fill(~valid.unsqueeze(1), -torch.inf)
    sink = sinks.unsqueeze(-1)
    # Finite, and the total not zero, also where nothing is valid and the sink is -inf, as a padding head's is.
    peak = torch.maximum(logits.amax(-1, keepdim=True), sink).clamp_min(torch.finfo(torch.float32).min)
    weights = torch.exp(logits - peak)
    total = weights.sum(-1, keepdim=True) + torch.exp(sink - peak)
    return (weights @ kv / total.clamp_min(torch.finfo(torch.float32).tiny)).to(torch.bfloat16)


def _rotate_tail(x: Tensor, cos_sin: Tensor, inverse: bool = False) -> Tensor:
    """Rotates the last `rope` dimensions of x (bfloat16), as wide as cos_sin's last; bfloat16."""
    width = cos_sin.shape[-1]
    head, tail = x.split([x.shape[-1] - width, width], -1)
    return torch.cat((head, rotate(tail.float(), cos_sin, inverse).to(torch.bfloat16)), -1)
