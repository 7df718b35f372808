"""A tensor-parallel group of real processes over gloo, and the boundary work that each of them does.

The processes are spawned and import this module, so it holds what they run.
"""

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from specialized_decode.backbone.graphs import EmulatedDevice
from specialized_decode.boundary import Boundaries, BoundaryAllReduce, Pending, PublishingMxfp8Linear, UnfinalizedRows
from tests.helpers.step_gates import Gates
from tests.helpers.step_mhc import random_bf16, random_layer

HIDDEN, ROWS, INNER = 64, 9, 32
LAYERS = 2


class GlooGroup:
    """A group of processes; bytes travel, since not every backend knows bfloat16."""

    process_group = None

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_gather(self, tensor: Tensor) -> Tensor:
        mine = tensor.contiguous().view(torch.uint8)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine)
        return torch.stack(parts).view(tensor.dtype)

    def min(self, value: int) -> int:
        smallest = torch.tensor([value])
        dist.all_reduce(smallest, dist.ReduceOp.MIN)
        return int(smallest)


def contribution(rank: int, kind: str) -> Tensor | UnfinalizedRows:
    """What `rank` adds; sizes differ from rank to rank so much that another order of the sum shows."""
    size, seed = 2.0 ** (18 * (rank % 2)), 1000 * rank
    if kind == "unfinalized":
        weights = torch.rand(ROWS, 3, generator=torch.Generator().manual_seed(seed))
        rows = random_bf16(seed + 1, ROWS, 3, HIDDEN, size=size)
        return UnfinalizedRows(rows, weights, random_bf16(seed + 2, ROWS, HIDDEN))
    return random_bf16(seed + 3, ROWS, HIDDEN, size=size)


def projection(rank: int) -> tuple[Tensor, Tensor]:
    """The shard of an output projection that `rank` holds: its inputs and a prepared weight."""
    seed = 1000 * rank
    return random_bf16(seed + 4, ROWS, INNER), random_bf16(seed + 5, HIDDEN, INNER, size=4.0 ** (rank % 2)).float()


def rank_work(all_reduce: BoundaryAllReduce, rank: int) -> dict[str, Tensor]:
    """One of every kind of boundary, then a chain of sublayers whose outputs differ from rank to rank."""
    found = {}
    for kind in ("plain", "unfinalized"):
        found[kind] = all_reduce.reduce(contribution(rank, kind))
    found["published"] = all_reduce.reduce(PublishingMxfp8Linear(all_reduce)(*projection(rank)))
    boundaries = Boundaries(all_reduce, EmulatedDevice().stream("mhc"), 4)
    step, x = Gates(ROWS), random_bf16(7, ROWS, HIDDEN)
    layers = [random_layer(number, HIDDEN) for number in range(LAYERS)]
    x, state = boundaries.first(layers[0], x, step)
    for number, layer in enumerate(layers):
        if number:
            x, quant, mean = boundaries.sublayer(layer, False, state, step, quantize=True, capture_aux=True)
            boundaries.join()
            assert quant is not None and mean is not None
            found |= {"values": quant.values.view(torch.uint8), "scales": quant.scales, "aux": mean}
        state.pending = _shard(x, rank)
        boundaries.join()
        x, _, _ = boundaries.sublayer(layer, True, state, step)
        state.pending = _shard(x, rank)
        boundaries.join()
    return found | {"input": x, "streams": boundaries.post_only(state), "pre": state.pre}


def _shard(x: Tensor, rank: int) -> Pending:
    return x * (-1.5) ** rank


def run_rank(rank: int, size: int, folder: str) -> None:
    """One process of a group: leaves what it found in `folder`, which the group meets in too."""
    torch.set_num_threads(1)
    # The loopback: the host's name need not resolve.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    try:
        group = GlooGroup(rank, size)
        found = rank_work(BoundaryAllReduce(HIDDEN, ROWS, group, torch.device("cpu")), rank)
        found["min"] = torch.tensor([group.min(10 - rank)])
        torch.save(found, Path(folder, f"{rank}.pt"))
    finally:
        dist.destroy_process_group()
