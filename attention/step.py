"""AttentionStep: the schedule of one layer's attention. Host code only; the ops are in `reference` and `kernels`."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specialized_decode.attention import index_tuning, mla_tuning, reference
from specialized_decode.attention.candidates import CandidateOverlap
from specialized_decode.attention.index_tables import SparseIndexTables
from specialized_decode.attention.mla import Settled, SparseMlaDecode
from specialized_decode.attention.projections import FusedProjections, LowBatchLinear
from specialized_decode.attention.views import AttentionView, LayerCaches
from specialized_decode.boundary import PublishingMxfp8Linear, QuantizedInput, SideStream, StepGates

if TYPE_CHECKING:
    # Its kernels need Triton, which a machine without a GPU need not have.
    from specialized_decode.attention.fused_index import FusedIndexer, IndexInputs
    from specialized_decode.attention.fused_mla import FusedSparseMla


@dataclass
class AuxStreams:
    """The streams beside attention's critical path: one for the compressor and its caches, one for the indexer."""

    compressor: SideStream
    indexer: SideStream

    def join(self) -> None:
        """Joins both, in whatever state an error left them."""
        self.compressor.join()
        self.indexer.join()


class StockAttention:
    """One layer's attention by the host engine's own layer, which schedules its streams itself."""

    # It takes its input as it is, and keeps candidates to itself.
    mxfp8_input, source, consumer = False, None, None

    def __init__(self, layer: Callable[[Tensor, Tensor], Tensor]) -> None:
        """layer: (x [T, hidden], positions [T]) -> the TP-partial output [T, hidden]."""
        self.layer = layer

    def run(self, x: Tensor, quant: QuantizedInput | None, positions: Tensor, step: StepGates) -> Tensor:
        """As AttentionStep.run."""
        return self.layer(x, positions)


class AttentionStep:
    """One layer's attention in a captured step.

    tables, mla: shared by all layers; publisher: stores `wo_b`'s output into the boundary's mailbox, None where it
    cannot; mxfp8_input: whether the layer takes its input quantized; source, consumer: the candidate overlap of a
    layer that publishes candidate blocks, or restricts itself to them; before_last: called ahead of the last
    projection, where the next boundary's side stream is joined; fused: the kernels around `wq_b`, projections: those of
    low-batch steps, and index: beside `fused`, those of low-batch steps' indexer; None for the reference ops; host: (x,
    positions) -> the TP-partial output by the host engine's own layer, which takes the steps that are not low-batch,
    None where ops of ours do.
    """

    def __init__(
        self,
        attn: AttentionView,
        tables: SparseIndexTables,
        mla: SparseMlaDecode,
        publisher: PublishingMxfp8Linear | None,
        mxfp8_input: bool,
        source: CandidateOverlap | None,
        consumer: CandidateOverlap | None,
        aux: AuxStreams,
        before_last: Callable[[], None] = lambda: None,
        fused: "FusedSparseMla | None" = None,
        projections: FusedProjections | None = None,
        index: "FusedIndexer | None" = None,
        host: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        self.host, self.index = host, index
        self.before_last, self.fused, self.projections = before_last, fused, projections
        self.attn, self.tables, self.mla, self.publisher = attn, tables, mla, publisher
        self.mxfp8_input, self.source, self.consumer, self.aux = mxfp8_input, source, consumer, aux
        kernels = projections or (None, None, None, None)
        self.fused_wqa_wkv = LowBatchLinear(attn.fused_wqa_wkv, kernels[0])
        self.wq_b = LowBatchLinear(attn.wq_b, kernels[1])
        self.wo_a = LowBatchLinear(attn.wo_a, kernels[2], grouped=host is None)
        self.wo_b = LowBatchLinear(attn.wo_b, kernels[3])

    def run(self, x: Tensor, quant: QuantizedInput | None, positions: Tensor, step: StepGates) -> Tensor:
        """x: [T, hidden] bfloat16, the normed input, quant its MXFP8 form where asked for; positions: [T] int64.

        Writes this step's cache entries. Returns the TP-partial output [T, hidden], published where a publisher is
        set and the step is low-batch.
        """
        if self.host is not None and not step.low_batch:
            return self.host(x, positions)
        attn, caches = self.attn, self.attn.metadata()
        if self.fused is not None and step.rows <= mla_tuning.MLA_MAX_ROWS:
            return self._output(self._fused(self.fused, x, positions, caches, step), step)
        cos_sin = attn.cos_sin[positions]
        self._compress(x, positions, caches, step)
        index_weights = self._index_weights(x, step)
        qr, kv = self.fused_wqa_wkv(x, step).split([attn.q_lora_rank, attn.head_dim], 1)
        qr = reference.rms_norm(qr, attn.q_norm, attn.eps)
        self._index(qr, index_weights, positions, caches, step)
        q = self.wq_b(qr, step).unflatten(1, (attn.num_heads, attn.head_dim))
        q = reference.rope_tail(q, cos_sin.unsqueeze(1))
        assert attn.window_cache is not None
        kv = reference.rms_norm(kv, attn.kv_norm, attn.eps)
        reference.insert_kv(attn.window_cache, caches.window.slot_mapping, kv, cos_sin)
        self.aux.join()
        out = self.mla(attn, q, positions, caches)
        return self._output(reference.rope_tail(out, cos_sin.unsqueeze(1), inverse=True), step)

    def _fused(
        self, fused: "FusedSparseMla", x: Tensor, positions: Tensor, caches: LayerCaches, step: StepGates
    ) -> Tensor:
        """Head outputs [T, heads, 512]: norms and insert in one launch ahead of `wq_b`, all else in one behind it.
        Where both are kernels and nobody else reads the normed query, `wq_b` norms it, and the launch behind inserts.

        That launch reads slots, records and latents before the one ahead of it is done. So tables are made first, and
        the others lie a launch back; only where this layer makes a selection or compressed records itself, on streams
        joined just before, it waits.
        """
        attn = self.attn
        window, selected = self.tables.window(attn, caches.window, positions), None
        settled = attn.indexer is None and attn.compressor is None
        if caches.compressed is not None and settled:
            selected = self.tables.selected(attn, caches.compressed, caches.window)
        kernel = self.wq_b.kernel(step)
        if self.index is not None and kernel is not None and step.rows <= index_tuning.MAX_ROWS:
            return self._selecting(fused, self.index, x, positions, caches, step)
        self._compress(x, positions, caches, step)
        index_weights = self._index_weights(x, step)
        projected = self.fused_wqa_wkv(x, step)
        if settled and kernel is not None and fused.inserts(step.rows, caches.compressed is not None):
            qr, latents = projected.split([attn.q_lora_rank, attn.head_dim], 1)
            q = kernel.normed(qr, attn.q_norm, attn.eps)
            return fused(attn, self._heads(q), positions, window, selected, Settled.ALL, None, latents, caches.window)
        qr = fused.norm_insert(attn, projected, positions, caches.window)
        self._index(qr, index_weights, positions, caches, step)
        q = self.wq_b(qr, step)
        self.aux.join()
        if caches.compressed is not None and selected is None:
            selected = self.tables.selected(attn, caches.compressed, caches.window)
        return fused(attn, self._heads(q), positions, window, selected, Settled.ALL if settled else Settled.NOTHING)

    def _selecting(
        self,
        fused: "FusedSparseMla",
        kernels: "FusedIndexer",
        x: Tensor,
        positions: Tensor,
        caches: LayerCaches,
        step: StepGates,
    ) -> Tensor:
        """As `_fused`, of a layer that selects positions by kernels: all on one stream.

        A launch that waits for two streams starts behind both, when nothing of it has been read yet: that cost more
        than any work beside. So what does not depend on each other is in one launch, or starts before the one ahead is
        done: projections of the input are one launch, queries another, which reads the norms' output without a wait
        while the compressor, ahead of it, still runs. Sparse MLA, right behind the selection, reads all else ahead of
        its wait.
        """
        attn = self.attn
        window = self.tables.window(attn, caches.window, positions)
        projected, inputs = kernels.project_all(x) or (self.fused_wqa_wkv(x, step), kernels.project(x))
        # Rounded for both: scores lie close, and other roundings select other positions.
        qr = fused.norm_insert(attn, projected, positions, caches.window)
        if attn.compressor is not None:
            kernels.compress(attn, inputs, positions, caches)
        index_q, q = kernels.queries(qr, settled=attn.compressor is not None)
        selected = self._fused_index(kernels, index_q, inputs, positions, caches, step)
        return fused(attn, self._heads(q), positions, window, selected, Settled.WINDOW)

    def _heads(self, q: Tensor) -> Tensor:
        """[T, heads * 512] -> [T, heads, 512]."""
        return q.unflatten(1, (self.attn.num_heads, self.attn.head_dim))

    @staticmethod
    def _beside(stream: SideStream, step: StepGates) -> AbstractContextManager[None]:
        return stream.fork() if step.overlap_inputs else nullcontext()

    def _compress(self, x: Tensor, positions: Tensor, caches: LayerCaches, step: StepGates) -> None:
        """A KV source's latents into the compressed cache, and the index keys made of them. Depends on x alone."""
        attn, compressor, indexer = self.attn, self.attn.compressor, self.attn.indexer
        if compressor is None:
            return
        assert indexer is not None and indexer.wk is not None and indexer.k_norm is not None
        assert caches.compressed is not None and caches.index is not None
        assert attn.compressed_cache is not None and indexer.k_cache is not None
        with self._beside(self.aux.compressor, step):
            kv_score = compressor.fused_wkv_wgate(x, torch.float32)
            latent = reference.compress(compressor, kv_score, positions, caches.ring)
            # A latent stands for its group's first token.
            cos_sin = attn.cos_sin[positions - positions % compressor.ratio]
            reference.insert_kv(attn.compressed_cache, caches.compressed.slot_mapping, latent, cos_sin)
            key = reference.rms_norm(indexer.wk(latent), indexer.k_norm, indexer.eps)
            reference.insert_index_keys(indexer.k_cache, caches.index.slot_mapping, key, cos_sin)

    def _index_weights(self, x: Tensor, step: StepGates) -> Tensor | None:
        """The indexer's head weights [T, heads] before scaling. Depends on x alone."""
        if self.attn.indexer is None:
            return None
        with self._beside(self.aux.indexer, step):
            return self.attn.indexer.weights_proj(x)

    def _index(
        self,
        qr: Tensor,
        weights: Tensor | None,
        positions: Tensor,
        caches: LayerCaches,
        step: StepGates,
    ) -> None:
        """An index source's selection, and the table of where it lies, for the layers that share it."""
        attn, indexer = self.attn, self.attn.indexer
        if indexer is None:
            return
        assert weights is not None and caches.index is not None and caches.compressed is not None
        assert indexer.k_cache is not None
        with self._beside(self.aux.indexer, step):
            heads = indexer.wq_b(qr).unflatten(1, (indexer.num_heads, indexer.head_dim))
            q, scaled = reference.index_queries(heads, weights, attn.cos_sin[positions])
            # This step's keys are written first; here that stream ends.
            self.aux.compressor.join()
            scores = reference.index_scores(indexer.k_cache, caches.index, indexer.ratio, q, scaled, positions)
            scores = self._candidates(scores, positions, step)
            selection = attn.selection.topk_indices
            selection[: qr.shape[0]] = reference.top_positions(scores, selection.shape[1])
            self.tables.publish(attn.layer_id)
            self.tables.selected(attn, caches.compressed, caches.window)

    def _fused_index(
        self,
        kernels: "FusedIndexer",
        q: Tensor,
        inputs: "IndexInputs",
        positions: Tensor,
        caches: LayerCaches,
        step: StepGates,
    ) -> Tensor:
        """Scores and selects in two launches, of which the last makes the table too, and a candidate source's choice of
        blocks: the selection's slots [T, topk]. q: the indexer's queries as projected."""
        attn, indexer, blocks = self.attn, self.attn.indexer, self.attn.selection.candidate_blocks
        assert indexer is not None and caches.index is not None and caches.compressed is not None
        source, consumer = (self.source, self.consumer) if blocks is not None else (None, None)
        flags = None
        if consumer is not None and blocks is not None:
            width = max(caches.index.max_seq_len // indexer.ratio, 1)
            flags = consumer.join(blocks[: step.rows], width)
        scores = kernels.scores(attn, q, inputs, positions, caches, flags)
        if source is not None and blocks is not None:
            slots, chosen = kernels.choose(attn, scores, positions, caches, blocks[: step.rows])
            source.keep(chosen)
        else:
            slots = kernels.top(attn, scores, positions, caches)
        self.tables.publish(attn.layer_id)
        self.tables.keep(attn, caches.compressed, slots)
        return slots

    def _candidates(self, scores: Tensor, positions: Tensor, step: StepGates) -> Tensor:
        """Publishes the source's candidate blocks, or restricts a consumer's scores to them."""
        indexer, blocks = self.attn.indexer, self.attn.selection.candidate_blocks
        assert indexer is not None
        if blocks is None:
            return scores
        rows, width = scores.shape
        if self.source is not None:
            closed = (positions + 1) // indexer.ratio
            size, count = indexer.candidate_block_size, blocks.shape[1]
            blocks[:rows] = reference.candidate_blocks(scores, closed, size, count)
            self.source.fork(blocks[:rows], width, step)
        elif self.consumer is not None:
            scores = scores.masked_fill(~self.consumer.join(blocks[:rows], width), float("-inf"))
        return scores

    def _output(self, out: Tensor, step: StepGates) -> Tensor:
        """Head outputs [T, heads, 512] -> [T, hidden] through the grouped low-rank projection."""
        low = self.wo_a.grouped(out.flatten(1), self.attn.o_groups, step)
        self.before_last()
        published = self.wo_b.publishes(step)
        if published is not None and self.publisher is not None:
            return self.publisher(low, published)
        return self.wo_b(low, step)
