"""What the decode batches of the attention kernels' tests share: ragged requests, their rows, and block tables."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specialized_decode.backbone.cache import CacheMetadata


@dataclass
class DecodeBatch:
    """One step's batch. shape: of a layer, whose `count` is the rows of a request; contexts: tokens of each request,
    this step's included; 0 for padding."""

    shape: Any
    contexts: tuple[int, ...]
    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        count, requests = self.shape.count, len(self.contexts)
        self.generator = torch.Generator().manual_seed(self.seed)
        self.rows = requests * count
        lengths = torch.tensor(self.contexts).repeat_interleave(count)
        behind = torch.arange(count - 1, -1, -1).repeat(requests)
        self.positions = (lengths - 1 - behind).clamp_min(0).to(self.device)
        self.live = (lengths > behind).to(self.device)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device)

    def metadata(self, states: int, table: Tensor, positions: Tensor, ratio: int, longest: int) -> CacheMetadata:
        """Of a cache of so many states a block: rows write where they close a group of `ratio` positions. table:
        [requests, blocks]; positions [rows], on the CPU; longest: the batch's padded maximum."""
        count, requests = self.shape.count, len(self.contexts)
        owner = torch.arange(requests, dtype=torch.int32).repeat_interleave(count)
        own = (positions // ratio).clamp_max(table.shape[1] * states - 1)
        slots = table[owner.long(), own // states].long() * states + own % states
        writing = self.live.cpu() & ((positions + 1) % ratio == 0)
        return CacheMetadata(
            num_prefills=0,
            num_decodes=requests,
            num_decode_tokens=self.rows,
            max_seq_len=longest,
            states=states,
            slot_mapping=slots.where(writing, -1).to(self.device),
            block_table=table.to(self.device),
            token_to_req=owner.to(self.device),
            query_start_loc=torch.arange(0, self.rows + 1, count, dtype=torch.int32, device=self.device),
        )
