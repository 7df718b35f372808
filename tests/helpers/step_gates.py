"""A step's gates, side streams that forget to wait, and process groups that are none."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specialized_decode.backbone.graphs import EmulatedStream


@dataclass(frozen=True)
class Gates:
    """The gates of a step, all open unless a test shuts one."""

    rows: int
    side_stream: bool = True
    low_batch: bool = True
    overlap_inputs: bool = True
    overlap_candidates: bool = True
    engram_prefetch: bool = True


class ForgetfulStream(EmulatedStream):
    """A side stream whose join lets the current stream go on at once; what an emulated capture must notice."""

    def join(self) -> None:
        self.pending = False


class FixedGroup:
    """One rank of a group whose other ranks always contribute `peers`, in rank order without this rank's own."""

    process_group = None

    def __init__(self, rank: int, peers: list[Tensor]) -> None:
        self.rank, self.size, self.peers = rank, len(peers) + 1, peers

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.stack([*self.peers[: self.rank], tensor, *self.peers[self.rank :]])

    def min(self, value: int) -> int:
        return value
