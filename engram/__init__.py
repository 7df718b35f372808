"""Engram's part of a step: the WKV chain ahead of the layers, the injection at its layer."""

from specialized_decode.engram.prefetch import EngramPrefetch, StockEngram
from specialized_decode.engram.views import EngramView

__all__ = ["EngramPrefetch", "EngramView", "StockEngram"]
