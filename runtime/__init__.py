"""The executor: composes the step packages into captured decode steps."""

from specialized_decode.runtime.decode_step import DecodeStep, step_gates
from specialized_decode.runtime.executor import (
    DecodeConfig,
    DecodeOutput,
    LayerPlan,
    SpecializedDecode,
    UnsupportedTarget,
)
from specialized_decode.runtime.experts import hold_experts
from specialized_decode.runtime.graphs import captures_pure_decode
from specialized_decode.runtime.host import DecoderLayerView, Host, StockOps, Target
from specialized_decode.runtime.kernels import KERNELS, kernel_families
from specialized_decode.runtime.tuning import FUSED_MHC_MAX_ROWS

__all__ = [
    "FUSED_MHC_MAX_ROWS",
    "KERNELS",
    "DecodeConfig",
    "DecodeOutput",
    "DecodeStep",
    "DecoderLayerView",
    "Host",
    "LayerPlan",
    "SpecializedDecode",
    "StockOps",
    "Target",
    "UnsupportedTarget",
    "captures_pure_decode",
    "hold_experts",
    "kernel_families",
    "step_gates",
]
