"""The model state that builds the executor, and counts what it runs."""

import re
from typing import Any

import torch
from torch import nn
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.models.deepseek_v41.nvidia.model_state import DeepseekV41ModelState
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache

from specialized_decode.integration.metrics import StepCounts
from specialized_decode.runtime import SpecializedDecode

# Names of the requests that vLLM warms its kernels up with; a served request's begins with its endpoint's.
WARM_UP = re.compile(r"_\w*warmup_")


class SpecializedDecodeModelState(DeepseekV41ModelState):
    """vLLM's state for DeepSeek-V4.1, with the executor.

    vLLM makes it after the weights are loaded and before it profiles memory: so the executor's memory is accounted
    for, and its kernels are compiled before the first capture. It goes with the model: nothing else holds it.
    """

    def __init__(
        self, vllm_config: VllmConfig, model: nn.Module, encoder_cache: EncoderCache | None, device: torch.device
    ) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        # The vision wrapper has the text model inside.
        language_model: Any = getattr(model, "language_model", model)
        self.executor: SpecializedDecode = language_model.build_specialized_decode()
        # The ranks run the same steps: the first counts for all, or a step would be as many as there are ranks.
        first = self.executor.host.tp_group.rank == 0
        self.counts = StepCounts.for_engine(vllm_config) if first else None

    def prepare_attn(
        self, input_batch: InputBatch, cudagraph_mode: CUDAGraphMode, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """As vLLM's, and counts the step: of a graph's replay, Python sees this much."""
        metadata: dict[str, Any] = super().prepare_attn(input_batch, cudagraph_mode, *args, **kwargs)
        if self.counts is not None and not is_dummy(input_batch):
            self.counts.record(*who_runs(input_batch, cudagraph_mode, self.executor.granted))
        return metadata


def is_dummy(batch: InputBatch) -> bool:
    """Whether a batch is one of vLLM's own, for a capture or a warm-up.

    A capture's requests have no prompt; those of a warm-up pass for real ones but for their names.
    """
    return not batch.prefill_len_np.any() or WARM_UP.match(batch.req_ids[0]) is not None


def who_runs(batch: InputBatch, mode: CUDAGraphMode, granted: set[int]) -> tuple[bool, str]:
    """Whether the executor runs a batch, and if not, why. granted: the row counts of its graphs."""
    if mode == CUDAGraphMode.FULL:
        if batch.num_tokens_after_padding in granted:
            return True, ""
        return False, "full graph on the stock layers"
    if batch.has_prefill:
        return False, "prefill"
    return False, "decode without a full graph"
