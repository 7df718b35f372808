"""The forward context of the local host: what a layer asks its host while it runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from specialized_decode.backbone.cache import CacheMetadata


class GraphMode(Enum):
    """Mode of the graph being recorded, under vLLM's names. FULL graphs are captured with mode NONE, as vLLM does."""

    NONE = "none"
    PIECEWISE = "piecewise"
    FULL = "full"


class ForwardContext:
    """Holds the running batch's metadata. `metadata` is None outside a forward."""

    def __init__(self) -> None:
        self.metadata: dict[str, CacheMetadata] | None = None
        self.graph_mode = GraphMode.NONE

    @contextmanager
    def running(
        self, metadata: dict[str, CacheMetadata], graph_mode: GraphMode = GraphMode.NONE
    ) -> Iterator["ForwardContext"]:
        """Sets the batch for the forward inside."""
        before = self.metadata, self.graph_mode
        self.metadata, self.graph_mode = metadata, graph_mode
        try:
            yield self
        finally:
            self.metadata, self.graph_mode = before
