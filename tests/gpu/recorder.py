"""A logits processor of vLLM's Model Runner V2 that keeps every step's logits and changes none."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

from specialized_decode.backbone.tokenizer import TRAINED_IDS


@dataclass
class Recording:
    """Logits of one request: [output tokens, TRAINED_IDS], float32, NaN where none came; rest: the largest magnitude
    among the other ids, whose rows of the written checkpoints' heads are zero."""

    logits: Tensor
    rest: Tensor
    prompt_tokens: int
    steps: set[int] = field(default_factory=set)


class Recorder(LogitsProcessor):  # type: ignore[misc, unused-ignore]
    """Records the requests whose `extra_args` have `record`, a name, with `prompt_tokens`."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self.device = req_states.device
        self.recordings: dict[str, Recording] = {}
        self._slots: dict[int, Recording] = {}

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        self._slots.pop(req_idx, None)
        wanted = sampling_params.extra_args or {}
        if "record" not in wanted:
            return False
        shape = (sampling_params.max_tokens, TRAINED_IDS)
        logits = torch.full(shape, float("nan"), device=self.device)
        recording = Recording(logits, torch.zeros((), device=self.device), wanted["prompt_tokens"])
        self.recordings[wanted["record"]] = self._slots[req_idx] = recording
        return True

    def apply(self, logits: Tensor, ctx: Any) -> Tensor:
        for row, slot in enumerate(ctx.idx_mapping_np):
            recording = self._slots.get(int(slot))
            if recording is None:
                continue
            # Which output token this row's logits choose: 0 follows the prompt. Chunks before its end are negative.
            step = int(ctx.seq_lens_upper_bound_np[row]) - recording.prompt_tokens
            if 0 <= step < len(recording.logits):
                recording.logits[step] = logits[row, :TRAINED_IDS]
                recording.rest = torch.maximum(recording.rest, logits[row, TRAINED_IDS:].abs().max())
                recording.steps.add(step)
        return logits

    def take(self) -> dict[str, Recording]:
        """What was recorded since the last call, by name."""
        taken, self.recordings = self.recordings, {}
        self._slots.clear()
        return taken
