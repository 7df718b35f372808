"""vLLM's own DeepSeek-V4.1 model on a CPU: its real modules and weights, with stand-ins for what needs a device."""

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

H200 = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=141 << 30)


class NoStream:
    """A CUDA stream's name: nothing runs on it."""

    numbers = itertools.count(1)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.cuda_stream = next(self.numbers)


class NoEvent:
    """A CUDA event that nobody records."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


@contextmanager
def one_rank(vllm_config: Any) -> Iterator[None]:
    """vLLM's parallel groups of a single rank, and its configuration set."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    with set_current_vllm_config(vllm_config):
        parallel_state.init_distributed_environment(1, 0, f"file:///tmp/one-rank-{os.getpid()}", 0, "gloo")
        parallel_state.initialize_model_parallel(1)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


def build(vllm_config: Any, patch: pytest.MonkeyPatch) -> Any:
    """A DeepseekV41LLMForCausalLM on the CPU, its float parameters filled with small random numbers."""
    import vllm.models.deepseek_v41.nvidia.model as module

    patch.setattr(torch.cuda, "Stream", NoStream)
    patch.setattr(torch.cuda, "Event", NoEvent)
    patch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    patch.setattr(torch.cuda, "get_device_properties", lambda device=0: H200)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = module.DeepseekV41LLMForCausalLM(vllm_config=vllm_config, prefix="")
    finally:
        torch.set_default_dtype(before)
    random = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.dtype in (torch.float32, torch.bfloat16):
            parameter.data.copy_(torch.randn(parameter.shape, generator=random) * 0.3 + 0.1)
    model.process_weights_after_loading()
    return model
