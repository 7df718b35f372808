"""The local host: answers what an executor asks of its engine, and captures graphs."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from specialized_decode.backbone.cache import CacheMetadata
from specialized_decode.backbone.context import ForwardContext, GraphMode
from specialized_decode.backbone.graphs import EmulatedDevice, EmulatedStream, Graph, capture

# Up to so many tokens, input projections run on side streams; vLLM's default for the same choice.
MULTI_STREAM_TOKENS = 1024


class SingleRank:
    """The tensor-parallel group of a single process."""

    rank = 0
    size = 1
    process_group = None

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[...] -> [1, ...]: every rank's tensor, in rank order."""
        return tensor.unsqueeze(0)

    def min(self, value: int) -> int:
        """The smallest of all ranks' values."""
        return value


class LocalHost:
    """One process, one device. `context` is the model's forward context."""

    def __init__(self, context: ForwardContext, device: torch.device) -> None:
        self.context, self.device = context, device
        self.tp_group = SingleRank()
        self.multi_stream_threshold = MULTI_STREAM_TOKENS
        self.emulated = None if device.type == "cuda" else EmulatedDevice()

    def forward_context_available(self) -> bool:
        return self.context.metadata is not None

    def capturing(self) -> bool:
        """Whether the current stream is being captured."""
        return torch.cuda.is_current_stream_capturing() if self.emulated is None else self.emulated.capturing

    def graph_mode(self) -> str:
        """NONE, PIECEWISE or FULL: the runtime mode of the running forward, under vLLM's names."""
        return self.context.graph_mode.name

    def attention_metadata(self) -> dict[str, CacheMetadata] | None:
        return self.context.metadata

    def emulated_stream(self, name: str) -> EmulatedStream:
        """A side stream of a device that has none."""
        assert self.emulated is not None, "a CUDA device has streams of its own"
        return self.emulated.stream(name)

    def running(self, metadata: dict[str, CacheMetadata]) -> AbstractContextManager[Any]:
        """The forward context of one eager or captured batch."""
        return self.context.running(metadata, GraphMode.NONE)

    def capture(self, run: Callable[[], None]) -> Graph:
        """Captures `run` into a FULL graph. Errors inside it surface as themselves."""
        return capture(self.emulated, run)
