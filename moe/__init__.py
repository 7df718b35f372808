"""The MoE step: router, routed and shared experts of one layer, its finalize left to the next boundary."""

from specialized_decode.moe.gemm import RoutedExpertGemms, build_routed_expert_gemms
from specialized_decode.moe.held import hold_experts
from specialized_decode.moe.step import MoEStep
from specialized_decode.moe.views import ExpertsView, HoldableMoE, MoEView

__all__ = [
    "ExpertsView",
    "HoldableMoE",
    "MoEStep",
    "MoEView",
    "RoutedExpertGemms",
    "build_routed_expert_gemms",
    "hold_experts",
]
