"""DecodeStep: the host-side gates of one captured step, all derived from its row count."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from specialized_decode.runtime.tuning import FUSED_MHC_MAX_ROWS

if TYPE_CHECKING:
    from specialized_decode.runtime.executor import DecodeOutput, SpecializedDecode


class DecodeStep(NamedTuple):
    """One step's gates.

    rows: T; side_stream: the next mHC coefficients and aux means run on the mHC side stream; low_batch: low-batch
    GEMMs (routed experts, dense projections, publishing wo_b); overlap_inputs: attention's side projections run on
    aux streams; overlap_candidates: the candidate source forks the consumers' expansion; engram_prefetch: the Engram
    WKV runs ahead of the layers; executor: who runs it.
    """

    rows: int
    side_stream: bool
    low_batch: bool
    overlap_inputs: bool
    overlap_candidates: bool
    engram_prefetch: bool
    executor: SpecializedDecode

    def run(
        self, x: Tensor, positions: Tensor, input_ids: Tensor, engram_hashes: Tensor | None, engram_mask: Tensor | None
    ) -> DecodeOutput:
        """Hands the layers to the executor; see SpecializedDecode.run."""
        return self.executor.run(self, x, positions, input_ids, engram_hashes, engram_mask)


def step_gates(rows: int, executor: SpecializedDecode) -> DecodeStep:
    """The gates of a step of `rows` rows. Raises ValueError outside 1 to FUSED_MHC_MAX_ROWS."""
    if not 0 < rows <= FUSED_MHC_MAX_ROWS:
        raise ValueError(f"step: found {rows} rows, expected 1 to {FUSED_MHC_MAX_ROWS}")
    gates = executor.gates
    return DecodeStep(
        rows=rows,
        side_stream=rows <= gates.mhc_overlap,
        low_batch=rows <= gates.low_batch,
        overlap_inputs=rows <= executor.host.multi_stream_threshold,
        overlap_candidates=rows <= gates.overlap,
        engram_prefetch=rows <= gates.engram_prefetch,
        executor=executor,
    )
