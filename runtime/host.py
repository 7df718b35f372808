"""The seam between the executor and the engine that runs it."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from specialized_decode.attention import AttentionView
from specialized_decode.boundary import BoundaryLayer, SideStream, StepBoundaries, TpGroup
from specialized_decode.engram import EngramView
from specialized_decode.moe import MoEView


class Host(Protocol):
    """What a step's plan may ask. Every answer is host state that all ranks share; nothing reads the device back."""

    @property
    def tp_group(self) -> TpGroup: ...
    @property
    def multi_stream_threshold(self) -> int: ...

    def forward_context_available(self) -> bool:
        """Whether a forward is running."""

    def capturing(self) -> bool:
        """Whether the current stream is being captured."""

    def graph_mode(self) -> str:
        """The running forward's graph mode: NONE, PIECEWISE or FULL."""

    def attention_metadata(self) -> object | None:
        """The attention metadata: a mapping of cache name to metadata, or something else outside plain batches."""

    def emulated_stream(self, name: str) -> SideStream:
        """A side stream on a device that has none; never asked on CUDA."""


class DecoderLayerView(BoundaryLayer, Protocol):
    """One decoder layer."""

    @property
    def attn(self) -> AttentionView: ...
    @property
    def ffn(self) -> MoEView: ...
    @property
    def engram(self) -> EngramView | None: ...


class StockOps(Protocol):
    """A host engine's own ops, for what no kernel of ours serves. T rows, streams [T, n, hidden] bfloat16.

    Sublayer outputs are this rank's parts, whatever the engine's own forward does; `boundaries` sums them. A layer's
    MoE is a call of its view.
    """

    @property
    def boundaries(self) -> StepBoundaries: ...

    def attention(self, layer_id: int, x: Tensor, positions: Tensor) -> Tensor:
        """x: [T, hidden], positions: [T] -> [T, hidden]; writes the step's cache entries."""

    def engram(self, layer_id: int, residual: Tensor, keep: Tensor) -> Tensor:
        """Injects the rows that the forward looked up before its layers; keep: [T] bool."""

    def finish(self, residual: Tensor, pre: Tensor) -> Tensor:
        """The final streams, collapsed with pre [T, n] and normed, [T, hidden]."""

    def join(self) -> None:
        """After an error: the current stream waits for what the engine's ops had forked."""


class TargetConfig(Protocol):
    """The hyper-parameters that the executor reads, under the release's names."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def hc_mult(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def candidate_source_layer_id(self) -> int: ...


class Target(Protocol):
    """A backbone's local layers, bound to its host. `attention_class` names how its attention is implemented."""

    @property
    def norm(self) -> Tensor: ...
    @property
    def mtp_hidden_buffer(self) -> Tensor | None: ...
    @property
    def aux_layers(self) -> tuple[int, ...]: ...
    @property
    def attention_class(self) -> str: ...
    @property
    def stock(self) -> StockOps | None: ...

    @property
    def config(self) -> TargetConfig: ...
    @property
    def layers(self) -> Sequence[DecoderLayerView]: ...
    @property
    def host(self) -> Host: ...


class PrefillCount(Protocol):
    """The one field of a window cache's metadata that says whether a batch only decodes."""

    @property
    def num_prefills(self) -> int: ...


Metadata = Mapping[str, PrefillCount]


def device_of(target: Target) -> torch.device:
    """The device that the target's weights are on."""
    return target.norm.device
