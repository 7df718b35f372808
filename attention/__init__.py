"""The attention step: projections, caches, indexer and sparse MLA of one layer, scheduled over side streams."""

from specialized_decode.attention.candidates import CandidateOverlap
from specialized_decode.attention.index_tables import SparseIndexTables
from specialized_decode.attention.mla import SparseMlaDecode
from specialized_decode.attention.projections import LowBatchLinear
from specialized_decode.attention.step import AttentionStep, StockAttention
from specialized_decode.attention.views import (
    AttentionView,
    CacheView,
    CompressorView,
    IndexerView,
    LayerCaches,
    RingView,
)

__all__ = [
    "AttentionStep",
    "AttentionView",
    "CacheView",
    "CandidateOverlap",
    "CompressorView",
    "IndexerView",
    "LayerCaches",
    "LowBatchLinear",
    "RingView",
    "SparseIndexTables",
    "SparseMlaDecode",
    "StockAttention",
]
