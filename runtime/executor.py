"""SpecializedDecode: the decoder layers of pure decode batches, run inside FULL graphs in the stock layers' place."""

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from specialized_decode.attention import (
    AttentionStep,
    CandidateOverlap,
    SparseIndexTables,
    SparseMlaDecode,
    StockAttention,
)
from specialized_decode.attention.select import index_unsupported, mla_unsupported, projections_unsupported
from specialized_decode.attention.step import AuxStreams
from specialized_decode.boundary import (
    Boundaries,
    BoundaryAllReduce,
    BoundaryState,
    CudaSideStream,
    PublishingMxfp8Linear,
    QuantizedInput,
    SideStream,
    StepBoundaries,
)
from specialized_decode.boundary import reference as boundary_reference
from specialized_decode.boundary.select import unsupported
from specialized_decode.engram import EngramPrefetch, EngramView, StockEngram
from specialized_decode.logits import LowBatchHead
from specialized_decode.moe import MoEStep, RoutedExpertGemms, build_routed_expert_gemms
from specialized_decode.runtime.decode_step import DecodeStep, step_gates
from specialized_decode.runtime.graphs import captures_pure_decode
from specialized_decode.runtime.host import DecoderLayerView, Target, device_of
from specialized_decode.runtime.kernels import KERNELS
from specialized_decode.runtime.tuning import FUSED_MHC_MAX_ROWS, GATES, gpu_family
from specialized_decode.runtime.warmup import warm_up

if TYPE_CHECKING:
    from specialized_decode.attention.fused_index import FusedIndexer
    from specialized_decode.attention.fused_mla import FusedSparseMla
    from specialized_decode.attention.projections import FusedProjections
    from specialized_decode.attention.views import AttentionView
    from specialized_decode.boundary.fused import FusedBoundary, FusedCoefficients

logger = logging.getLogger(__name__)

OPTION = "decode_backend=latency_specialized"
ATTENTION_CLASSES = ("plain", "flashmla_sparse", "flashinfer_sparse")

# Hidden states [T, hidden], or those and the aux hidden states in the order asked for.
DecodeOutput = Tensor | tuple[Tensor, list[Tensor]]


class UnsupportedTarget(RuntimeError):
    """The executor cannot run this backbone here; the message says why and names the option that asked for it."""


@dataclass(frozen=True)
class DecodeConfig:
    """autotune: kernels may time their candidates at start; jit_warmup: everything a step can need is compiled and
    run once at start, so that no capture compiles; kernels: the families (KERNELS) that run where they serve; stock:
    what no kernel of ours serves runs on the host engine's own ops, where it has any; False takes the reference ops,
    for checks; prepared_weights: an engine that repacks its dense weights may keep a copy of them as released, for our
    own ops."""

    autotune: bool = False
    jit_warmup: bool = True
    kernels: frozenset[str] = frozenset()
    stock: bool = True
    prepared_weights: bool = True


@dataclass(frozen=True)
class LayerPlan:
    """One layer of the executor: the backbone's layer and the steps that run it."""

    layer_id: int
    layer: DecoderLayerView
    attention: AttentionStep | StockAttention
    moe: MoEStep
    engram: EngramView | None


class SpecializedDecode:
    """The executor over one backbone's local layers. Build it with `for_target`, once the weights are loaded."""

    def __init__(self, target: Target, config: DecodeConfig, lm_head: Tensor) -> None:
        self.target, self.config, self.host = target, config, target.host
        self.device = device_of(target)
        self.gates = GATES[gpu_family(self.device)]
        widths = target.config
        group = self.host.tp_group
        self.stock = target.stock if config.stock else None
        fused, coefficients = self._boundary_kernels()
        self.all_reduce = BoundaryAllReduce(widths.hidden_size, FUSED_MHC_MAX_ROWS, group, self.device, fused)
        self.mhc_stream: SideStream | None = None
        self.boundaries = self._boundaries(coefficients)
        self.tables = SparseIndexTables()
        self.sparse_mla: FusedSparseMla | None = None
        self.aux_streams: AuxStreams | None = None
        self.candidates: CandidateOverlap | None = None
        self.layers = self._plan_layers()
        self.engram = self._engram()
        # Row counts of the captures that got a step.
        self.granted: set[int] = set()
        self.swa_prefixes = tuple(dict.fromkeys(plan.layer.attn.window_prefix for plan in self.layers))
        self.head = LowBatchHead(lm_head, group, widths.vocab_size)

    @classmethod
    def for_target(cls, backbone: Target, config: DecodeConfig, lm_head: Tensor) -> "SpecializedDecode":
        """Builds the executor; collective over the TP group.

        lm_head: [vocab local, hidden]. Raises UnsupportedTarget on every rank when any rank cannot run it.
        """
        reasons = _refusals(backbone, config)
        if backbone.host.tp_group.min(0 if reasons else 1) == 0:
            said = "; ".join(reasons) or "another rank of the TP group cannot run it; see its message"
            raise UnsupportedTarget(f"{OPTION} cannot run here: {said}")
        executor = cls(backbone, config, lm_head)
        if config.jit_warmup:
            warm_up(executor)
        return executor

    def refusal(self, positions: Tensor, intermediate_tensors: object | None) -> str | None:
        """Why the running forward stays on the stock layers, or None where a step is granted."""
        rows = positions.shape[0]
        if intermediate_tensors is not None:
            return "pipeline parallelism hands over intermediate tensors"
        if not 0 < rows <= FUSED_MHC_MAX_ROWS:
            return f"{rows} rows are not 1 to {FUSED_MHC_MAX_ROWS}"
        if not self.host.forward_context_available():
            return "no forward context"
        if not self.host.capturing():
            return "not captured into a graph"
        if not captures_pure_decode(self.host, self.swa_prefixes):
            return "not a FULL capture of a pure decode batch"
        return None

    def plan(self, positions: Tensor, intermediate_tensors: object | None) -> DecodeStep | None:
        """The step that runs the running forward's layers, or None for the stock layers.

        positions: [T]. Before each capture a forward runs outside it; that one warms the candidate overlap.
        """
        reason = self.refusal(positions, intermediate_tensors)
        if reason is None:
            self.granted.add(positions.shape[0])
            return step_gates(positions.shape[0], self)
        in_range = intermediate_tensors is None and 0 < positions.shape[0] <= FUSED_MHC_MAX_ROWS
        if (
            in_range
            and self.candidates is not None
            and self.host.forward_context_available()
            and not self.host.capturing()
        ):
            self.candidates.warm(positions.shape[0])
        return None

    def run(
        self,
        step: DecodeStep,
        x: Tensor,
        positions: Tensor,
        input_ids: Tensor,
        engram_hashes: Tensor | None,
        engram_mask: Tensor | None,
    ) -> DecodeOutput:
        """Runs the layers of one step.

        x: [T, hidden] embeddings; positions, input_ids: [T]; engram_hashes: [T, Engram layers, columns] or None for
        layers without Engram; engram_mask: [T] bool, False for tokens that take no part. On any exception every
        forked stream is joined before the error goes on, and the next step starts clean.
        """
        self._forget()
        self.all_reduce.reset()
        try:
            return self._run(step, x, positions, input_ids, engram_hashes, engram_mask)
        except BaseException:
            if self.stock is not None:
                self.stock.join()
            raise
        finally:
            self._join_side_work()
            # A capture's tensors live in its graph's memory, which is given back with the graph.
            self._forget()

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden: [T, hidden] -> all ranks' logits [T, vocab] float32."""
        return self.head(hidden)

    def _forget(self) -> None:
        """Drops what one step derived for its layers to share."""
        self.tables.reset()
        if self.candidates is not None:
            self.candidates.reset()

    def _run(
        self,
        step: DecodeStep,
        x: Tensor,
        positions: Tensor,
        input_ids: Tensor,
        engram_hashes: Tensor | None,
        engram_mask: Tensor | None,
    ) -> DecodeOutput:
        mask = engram_mask if engram_hashes is not None else None
        if mask is not None and step.engram_prefetch:
            self.engram.start(step.rows)
        state: BoundaryState | None = None
        aux: dict[int, Tensor] = {}
        for plan in self.layers:
            x, quant, state = self._enter(plan, x, state, step, mask, aux)
            state.pending = plan.attention.run(x, quant, positions, step)
            # Unless the sublayer has, a launch earlier: a boundary is delayed by a join right before it.
            self.boundaries.join()
            x, _, _ = self.boundaries.sublayer(plan.layer, True, state, step)
            state.pending = plan.moe.run(x, input_ids, step)
            self.boundaries.join()
        assert state is not None, "a backbone has layers"
        residual = self.boundaries.post_only(state)
        self.all_reduce.end_step()
        if len(self.layers) in self.target.aux_layers:
            aux[len(self.layers)] = self.boundaries.mean(residual)
        self._join_side_work()
        return self._head(residual, state.pre, aux)

    def _enter(
        self,
        plan: LayerPlan,
        x: Tensor,
        state: BoundaryState | None,
        step: DecodeStep,
        engram_mask: Tensor | None,
        aux: dict[int, Tensor],
    ) -> tuple[Tensor, QuantizedInput | None, BoundaryState]:
        """The boundary into a layer's attention: its input, that input's MXFP8 form, the new state."""
        layer, wants_aux = plan.layer, plan.layer_id in self.target.aux_layers
        if state is None:
            # On the first layer Engram is never applied: the streams are still the bare embedding.
            x, state = self.boundaries.first(layer, x, step)
            return x, None, state
        if plan.engram is not None and engram_mask is not None:
            residual = self.boundaries.post_only(state)
            if wants_aux:
                aux[plan.layer_id] = self.boundaries.mean(residual)
            residual = self.engram.forward(plan.layer_id, residual, engram_mask)
            return self.boundaries.pre(layer, residual, state, step), None, state
        quantize = plan.attention.mxfp8_input
        x, quant, mean = self.boundaries.sublayer(layer, False, state, step, quantize=quantize, capture_aux=wants_aux)
        if mean is not None:
            aux[plan.layer_id] = mean
        return x, quant, state

    def _head(self, residual: Tensor, pre: Tensor, aux: dict[int, Tensor]) -> DecodeOutput:
        """residual: [T, n, hidden] final streams; pre: [T, n] -> hidden states, and the aux ones if any."""
        buffer = self.target.mtp_hidden_buffer
        if buffer is not None:
            buffer[: residual.shape[0]].copy_(residual.flatten(1))
        if self.stock is not None:
            hidden = self.stock.finish(residual, pre)
        else:
            collapsed = boundary_reference.collapse(residual, pre)
            hidden = boundary_reference.rms_norm(collapsed, self.target.norm, self.target.config.rms_norm_eps)
        wanted = self.target.aux_layers
        return (hidden, [aux[layer] for layer in wanted]) if wanted else hidden

    def _join_boundaries(self) -> None:
        self.boundaries.join()

    def side_streams(self) -> list[SideStream]:
        """Every stream that a step may fork to."""
        streams = [*self.engram.streams.values()]
        if self.aux_streams is not None:
            streams += [self.aux_streams.compressor, self.aux_streams.indexer]
        if self.candidates is not None:
            streams.append(self.candidates.stream)
        return streams if self.mhc_stream is None else [*streams, self.mhc_stream]

    def _join_side_work(self) -> None:
        """Joins every stream that a step may have forked, and drops what nobody waited for.

        A join that fails keeps no other from being tried; its error goes on unless the step's own does already.
        """
        failures = []
        for join in (*(stream.join for stream in self.side_streams()), self.engram.join):
            try:
                join()
            except RuntimeError as error:
                failures.append(error)
        if failures and sys.exc_info()[1] is None:
            raise failures[0]

    def _stream(self, name: str) -> SideStream:
        return CudaSideStream(self.device) if self.device.type == "cuda" else self.host.emulated_stream(name)

    def _boundary_kernels(self) -> "tuple[FusedBoundary, FusedCoefficients] | tuple[None, None]":
        """The boundary's kernels, or None where the reference ops run."""
        widths, group = self.target.config, self.host.tp_group
        reason = self._not_asked("boundary")
        reason = reason or unsupported(widths.hidden_size, widths.hc_mult, group, self.device)
        if reason is not None:
            logger.info("Boundaries run on %s: %s", "reference ops" if self.stock is None else "the host's ops", reason)
            return None, None
        # Its kernels need Triton, which a machine without a GPU need not have.
        from specialized_decode.boundary.fused import FusedBoundary, FusedCoefficients

        fused = FusedBoundary(widths.hidden_size, FUSED_MHC_MAX_ROWS, group, self.device)
        return fused, FusedCoefficients(widths.hidden_size, FUSED_MHC_MAX_ROWS, self.device)

    def _boundaries(self, coefficients: "FusedCoefficients | None") -> StepBoundaries:
        """coefficients: the kernel beside the boundary's, or None."""
        if self.stock is not None and coefficients is None:
            return self.stock.boundaries
        self.mhc_stream = self._stream("mhc")
        boundaries = Boundaries(self.all_reduce, self.mhc_stream, self.target.config.hc_mult, coefficients)
        boundaries.coefficients.prepare_first(self.target.layers[0].attn_mixer)
        for layer in self.target.layers:
            boundaries.coefficients.prepare(layer.attn_mixer)
            boundaries.coefficients.prepare(layer.ffn_mixer)
        if coefficients is not None:
            logger.info("Boundary kernels: prepared weights take %.1f MB", coefficients.prepared_bytes / 1e6)
        return boundaries

    def _engram(self) -> EngramPrefetch | StockEngram:
        # No op of ours gathers the ranks' columns of a WKV.
        stock = self.stock if self.host.tp_group.size == 1 else self.target.stock
        if stock is not None:
            return StockEngram(stock.engram)
        engrams = {plan.layer_id: plan.engram for plan in self.layers if plan.engram is not None}
        streams = {layer: self._stream(f"engram {layer}") for layer in engrams}
        return EngramPrefetch(engrams, streams, FUSED_MHC_MAX_ROWS)

    def _candidates(self, layers: Sequence[DecoderLayerView]) -> CandidateOverlap | None:
        source = self.target.config.candidate_source_layer_id
        sizes = [
            layer.attn.indexer.candidate_block_size
            for layer in layers
            if layer.attn.indexer is not None and layer.layer_id == source
        ]
        return CandidateOverlap(self._stream("candidates"), sizes[0]) if sizes else None

    def _not_asked(self, family: str) -> str | None:
        return None if family in self.config.kernels else f"{family} kernels were not asked for"

    def _plan_layers(self) -> list[LayerPlan]:
        layers: Sequence[DecoderLayerView] = self.target.layers
        attentions = self._attentions(layers)
        gemms = self._gemms(layers)
        plans = []
        for layer, attention, gemm in zip(layers, attentions, gemms, strict=True):
            moe = MoEStep(layer.ffn, gemm, self.gates.low_batch, self._join_boundaries)
            engram = layer.engram if layer.layer_id > 0 else None
            plans.append(LayerPlan(layer.layer_id, layer, attention, moe, engram))
        return plans

    @property
    def _own_boundaries(self) -> bool:
        """Whether boundaries take what is published or unfinalized; a host's own take finalized tensors."""
        return self.stock is None or self.boundaries is not self.stock.boundaries

    def _gemms(self, layers: Sequence[DecoderLayerView]) -> Sequence[RoutedExpertGemms | None]:
        asked = self._not_asked("moe")
        reason = asked or (None if self._own_boundaries else "the host's boundaries add no unfinalized rows up")
        if self.stock is not None and reason is not None:
            logger.info("Routed experts run on the host's ops: %s", reason)
            return [None] * len(layers)
        return build_routed_expert_gemms([layer.ffn for layer in layers], kernels=asked is None)

    def _attentions(self, layers: Sequence[DecoderLayerView]) -> Sequence[AttentionStep | StockAttention]:
        """Beside a host's ops a step's attention runs on kernels in all layers or in none, so that who selects and who
        reads the selection are of a kind; without, on reference ops and kernels."""
        if self.stock is None:
            return self._attention_steps(layers, {})
        host = {layer.layer_id: partial(self.stock.attention, layer.layer_id) for layer in layers}
        reason = self._attention_unsupported(layers)
        if reason is not None:
            logger.info("Attention runs on the host's ops: %s", reason)
            return [StockAttention(host[layer.layer_id]) for layer in layers]
        logger.info("Attention: steps of up to %d rows run on kernels", self.gates.low_batch)
        return self._attention_steps(layers, host)

    def _attention_unsupported(self, layers: Sequence[DecoderLayerView]) -> str | None:
        """Why kernels do not serve all of the layers' attention, or None."""
        reason = self._not_asked("attention")
        # Where vLLM keeps other records.
        if reason is None and self.target.attention_class == "flashinfer_sparse":
            reason = "FlashInfer's records are not those that the kernels read"
        for attn in (layer.attn for layer in layers):
            reason = reason or mla_unsupported(attn, self.device) or projections_unsupported(attn, self.device)
            if attn.indexer is not None or attn.compressor is not None:
                reason = reason or index_unsupported(attn, self.device)
        return reason

    def _attention_steps(
        self, layers: Sequence[DecoderLayerView], host: Mapping[int, Callable[[Tensor, Tensor], Tensor]]
    ) -> list[AttentionStep]:
        """host: by layer, what runs its steps of more rows than kernels take."""
        self.aux_streams = AuxStreams(self._stream("compressor"), self._stream("indexer"))
        self.candidates = self._candidates(layers)
        self.sparse_mla = self._sparse_mla_kernels(layers)
        fused_projections = self._projection_kernels(layers)
        fused_indexer = self._index_kernels(layers)
        mla = SparseMlaDecode(self.tables, FUSED_MHC_MAX_ROWS)
        publisher = PublishingMxfp8Linear.build(self.all_reduce, self.device) if self._own_boundaries else None
        steps = []
        for layer in layers:
            indexer = layer.attn.indexer
            own = fused_projections(layer.attn) if fused_projections is not None else None
            step = AttentionStep(
                layer.attn,
                self.tables,
                mla,
                publisher,
                # No projection of ours takes MXFP8 inputs yet.
                mxfp8_input=False,
                source=self.candidates if indexer is not None and indexer.candidate_source else None,
                consumer=self.candidates if indexer is not None and indexer.candidate_consumer else None,
                aux=self.aux_streams,
                before_last=self._join_boundaries,
                fused=self.sparse_mla,
                projections=own,
                index=fused_indexer(layer.attn, own) if fused_indexer is not None and indexer is not None else None,
                host=host.get(layer.layer_id),
            )
            steps.append(step)
        if fused_projections is not None:
            taken = sum(step.projections.nbytes for step in steps if step.projections is not None)
            logger.info("Low-batch projections: prepared weights take %.1f MB", taken / 1e6)
        if fused_indexer is not None:
            taken = sum(step.index.nbytes for step in steps if step.index is not None)
            logger.info("Index kernels: prepared weights take %.1f MB", taken / 1e6)
        return steps

    def _index_kernels(
        self, layers: Sequence[DecoderLayerView]
    ) -> "Callable[[AttentionView, FusedProjections | None], FusedIndexer] | None":
        """What prepares a selecting layer, and its projections, for the kernels of compressor and indexer, which run
        beside those of sparse MLA; or None where the reference ops run."""
        reason = None if self.sparse_mla is not None else "sparse MLA has no kernels"
        selecting = [layer.attn for layer in layers if layer.attn.indexer is not None]
        reason = reason or (None if selecting else "no layer selects here")
        for attn in selecting:
            reason = reason or index_unsupported(attn, self.device)
        if reason is not None:
            logger.info("Indexers run on reference ops: %s", reason)
            return None
        from specialized_decode.attention.fused_index import FusedIndexer, fused_bins

        bins = fused_bins(self.device)
        return lambda attn, projections: FusedIndexer(attn, bins, projections)

    def _projection_kernels(
        self, layers: Sequence[DecoderLayerView]
    ) -> "Callable[[AttentionView], FusedProjections] | None":
        """What prepares a layer's projections for the kernels, or None where the reference ops run."""
        reason = self._not_asked("attention")
        for layer in layers:
            reason = reason or projections_unsupported(layer.attn, self.device)
        if reason is not None:
            logger.info("Low-batch projections run on reference ops: %s", reason)
            return None
        from specialized_decode.attention.fused import fused_projections

        return fused_projections

    def _sparse_mla_kernels(self, layers: Sequence[DecoderLayerView]) -> "FusedSparseMla | None":
        """The kernels around `wq_b`, which also make the index tables, or None where the reference ops run."""
        reason = self._not_asked("attention")
        for layer in layers:
            reason = reason or mla_unsupported(layer.attn, self.device)
        if reason is not None:
            logger.info("Sparse MLA runs on reference ops: %s", reason)
            return None
        from specialized_decode.attention.fused_mla import FusedSparseMla, FusedTables

        attn = layers[0].attn
        self.tables = SparseIndexTables(FusedTables())
        topk = attn.selection.topk_indices.shape[1]
        return FusedSparseMla(attn.num_heads, attn.window_size, topk, FUSED_MHC_MAX_ROWS, self.device)


def _refusals(target: Target, config: DecodeConfig) -> list[str]:
    """Why the executor cannot run `target`, all of it."""
    reasons = []
    if unknown := config.kernels - KERNELS:
        reasons.append(f"kernels: found {', '.join(sorted(unknown))}, expected {', '.join(sorted(KERNELS))}")
    if target.attention_class not in ATTENTION_CLASSES:
        known = ", ".join(ATTENTION_CLASSES)
        reasons.append(f"attention class: found {target.attention_class}, expected one of {known}")
    try:
        gpu_family(device_of(target))
    except ValueError as error:
        reasons.append(str(error))
    group, widths = target.host.tp_group, target.config
    # The host's own ops bring their all-reduce along.
    own_all_reduce = "boundary" in config.kernels or not config.stock or target.stock is None
    if group.size > 1 and own_all_reduce and device_of(target).type == "cuda":
        reason = unsupported(widths.hidden_size, widths.hc_mult, group, device_of(target))
        if reason is not None:
            reasons.append(reason)
    hidden = target.config.hidden_size
    if hidden % boundary_reference.MX_BLOCK:
        reasons.append(f"hidden size: found {hidden}, expected a multiple of {boundary_reference.MX_BLOCK}")
    if not target.layers:
        reasons.append("layers: found none, expected at least one on this rank")
    return reasons
