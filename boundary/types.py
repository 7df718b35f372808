"""Types that cross the step packages' borders: what a boundary reads of the model, and what it is handed."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


class StepGates(Protocol):
    """The host-side gates of one captured step; `runtime.DecodeStep` is one."""

    @property
    def rows(self) -> int: ...
    @property
    def side_stream(self) -> bool: ...
    @property
    def low_batch(self) -> bool: ...
    @property
    def overlap_inputs(self) -> bool: ...
    @property
    def overlap_candidates(self) -> bool: ...
    @property
    def engram_prefetch(self) -> bool: ...


class TpGroup(Protocol):
    """The tensor-parallel group. Every rank calls the same methods in the same order."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    @property
    def process_group(self) -> ProcessGroup | None:
        """torch's group of the same ranks, over which peer memory is set up; None for a single rank."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[...] -> [size, ...]: every rank's tensor, in rank order."""

    def min(self, value: int) -> int:
        """The smallest of all ranks' values."""


class LinearView(Protocol):
    """A dense layer: weight [N, K] FP8 e4m3 with UE8M0 scale [N/32, K/32], or BF16 with scale None.

    Calling it is the stock path: [T, K] bfloat16 -> [T, N].
    """

    @property
    def weight(self) -> Tensor: ...
    @property
    def scale(self) -> Tensor | None: ...

    def __call__(self, x: Tensor, out_dtype: torch.dtype = ...) -> Tensor: ...


class StoringProjection(Protocol):
    """A projection [T, K] bfloat16 -> [T, N] that stores its outputs where it is told to."""

    def __call__(self, x: Tensor, out: Tensor) -> object: ...


class MixerView(Protocol):
    """One sublayer's mHC projection: fn [(2 + n) n, n hidden], base [(2 + n) n], scale [3], all float32."""

    @property
    def fn(self) -> Tensor: ...
    @property
    def base(self) -> Tensor: ...
    @property
    def scale(self) -> Tensor: ...
    @property
    def rms_eps(self) -> float: ...
    @property
    def hc_eps(self) -> float: ...
    @property
    def sinkhorn_iters(self) -> int: ...


class BoundaryLayer(Protocol):
    """What a boundary reads of a decoder layer: both sublayers' mixers and input norms [hidden]."""

    @property
    def layer_id(self) -> int: ...
    @property
    def attn_mixer(self) -> MixerView: ...
    @property
    def ffn_mixer(self) -> MixerView: ...
    @property
    def attn_norm(self) -> Tensor: ...
    @property
    def ffn_norm(self) -> Tensor: ...
    @property
    def eps(self) -> float: ...


class QuantizedInput(NamedTuple):
    """A sublayer's input as MXFP8: values [T, hidden] float8_e4m3fn, scales UE8M0 [T, hidden / 32] uint8."""

    values: Tensor
    scales: Tensor


@dataclass(frozen=True)
class UnfinalizedRows:
    """A MoE output before its top-k sum: rows [T, k, hidden], weights [T, k] float32, shared [T, hidden]."""

    rows: Tensor
    weights: Tensor
    shared: Tensor


# A sublayer's TP-partial output: as a tensor [T, hidden] (published or not), or left unfinalized.
Pending = Tensor | UnfinalizedRows


@dataclass
class BoundaryState:
    """What the boundaries carry from sublayer to sublayer.

    residual: [T, n, hidden] streams that the running sublayer reads; post [T, n] and comb [T, n, n]: its mixes; pre
    [T, n]: the pre-mix that collapses the *next* input; pending: the running sublayer's output, once it is there.
    """

    residual: Tensor
    pre: Tensor
    post: Tensor
    comb: Tensor
    pending: Pending | None = None
