"""VllmHost: what the executor asks its engine, answered by vLLM's forward context, parallel groups and settings."""

import torch
import torch.distributed as dist
import vllm.envs as envs
from torch import Tensor
from vllm.distributed import get_tp_group
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.forward_context import get_forward_context, is_forward_context_available

from specialized_decode.boundary import SideStream


class VllmTpGroup:
    """The tensor-parallel group, over vLLM's coordinator. Every rank calls the same methods in the same order."""

    def __init__(self, group: GroupCoordinator) -> None:
        self._group = group
        self.rank: int = group.rank_in_group
        self.size: int = group.world_size

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks' device group; None for a single rank."""
        return self._group.device_group if self.size > 1 else None

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[...] -> [size, ...]: every rank's tensor, in rank order."""
        gathered: Tensor = self._group.all_gather(tensor.contiguous().unsqueeze(0), dim=0)
        return gathered

    def min(self, value: int) -> int:
        """The smallest of all ranks' values, agreed on the host."""
        if self.size == 1:
            return value
        agreed = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=self._group.cpu_group)
        return int(agreed.item())


class VllmHost:
    """One rank of a vLLM engine. Every answer is host state that all ranks share."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tp_group = VllmTpGroup(get_tp_group())

    @property
    def multi_stream_threshold(self) -> int:
        """Up to so many tokens vLLM runs an attention's input projections on side streams."""
        return int(envs.VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD)

    def forward_context_available(self) -> bool:
        return bool(is_forward_context_available())

    def capturing(self) -> bool:
        """Whether the current stream is being captured."""
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def graph_mode(self) -> str:
        """NONE, PIECEWISE or FULL. vLLM captures FULL graphs with NONE."""
        return str(get_forward_context().cudagraph_runtime_mode.name)

    def attention_metadata(self) -> object | None:
        """Metadata by cache name; None while memory is profiled, a list where vLLM splits a batch."""
        metadata: object | None = get_forward_context().attn_metadata
        return metadata

    def emulated_stream(self, name: str) -> SideStream:
        raise RuntimeError(f"side stream {name}: found device {self.device.type}, expected cuda")
