"""The mHC between sublayers: all-reduce, post-mix, collapse and norm as one boundary, coefficients beside it."""

from specialized_decode.boundary.all_reduce import BoundaryAllReduce
from specialized_decode.boundary.boundaries import Boundaries, StepBoundaries
from specialized_decode.boundary.publishing import PublishingMxfp8Linear, uses_checked_flashinfer
from specialized_decode.boundary.streams import CudaSideStream, SideStream
from specialized_decode.boundary.types import (
    BoundaryLayer,
    BoundaryState,
    LinearView,
    MixerView,
    Pending,
    QuantizedInput,
    StepGates,
    TpGroup,
    UnfinalizedRows,
)

__all__ = [
    "Boundaries",
    "BoundaryAllReduce",
    "BoundaryLayer",
    "BoundaryState",
    "CudaSideStream",
    "LinearView",
    "MixerView",
    "Pending",
    "PublishingMxfp8Linear",
    "QuantizedInput",
    "SideStream",
    "StepBoundaries",
    "StepGates",
    "TpGroup",
    "UnfinalizedRows",
    "uses_checked_flashinfer",
]
