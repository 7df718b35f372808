"""What the tests call in each worker process by vLLM's `collective_rpc`: a worker extension."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.gpu.engine import Steps, watch_steps

EXTENSION = "tests.gpu.rank_worker.RankWorker"


def row_hashes(rows: Tensor) -> Tensor:
    """A 64-bit sum [rows] over each row of 16-bit values [rows, width], every place with an odd factor of its own."""
    bits = rows.contiguous().view(torch.int16).to(torch.int64)
    places = torch.arange(bits.shape[1], device=bits.device, dtype=torch.int64)
    return (bits * (places * 6364136223846793005 + 1442695040888963407).bitwise_or(1)).sum(1)


class RankWorker:
    """Methods of vLLM's worker. The names begin with `tests_`, as no method of its own does."""

    def tests_watch(self) -> int:
        """Counts steps and hashes hidden states from here on; returns the process's id."""
        worker: Any = self
        worker.tests_steps, worker.tests_hidden = watch_steps(), []
        model = worker.model_runner.model
        stock = model.compute_logits

        def compute_logits(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            worker.tests_hidden.append(row_hashes(hidden))
            return stock(hidden, *args, **kwargs)

        model.compute_logits = compute_logits
        return os.getpid()

    def tests_count(self) -> tuple[int, dict[int, int]]:
        """Steps so far, and replays by rows."""
        steps: Steps = self.tests_steps  # type: ignore[attr-defined]
        return steps.total, dict(steps.replays)

    def tests_take(self, folder: str) -> str:
        """Saves the recorded logits and the hashes of hidden states since the last call; returns the file."""
        worker: Any = self
        processors = worker.model_runner.sampler.logits_processors
        (recorder,) = (one for one in processors if type(one).__name__ == "Recorder")
        recordings = {
            name: (one.logits.cpu(), one.rest.cpu(), one.prompt_tokens, one.steps)
            for name, one in recorder.take().items()
        }
        hidden = torch.cat(worker.tests_hidden).cpu() if worker.tests_hidden else torch.zeros(0, dtype=torch.int64)
        worker.tests_hidden.clear()
        path = Path(folder) / f"rank{worker.rank}.pt"
        torch.save({"recordings": recordings, "hidden": hidden}, path)
        return str(path)

    def tests_stall(self) -> bool:
        """Makes this rank stand still in its next decode step, if it is the one that can; returns whether it is."""
        worker: Any = self
        stall = getattr(worker.model_runner.model_state.executor, "tests_stall", None)
        if stall is not None:
            stall.begin()
        return stall is not None

    def tests_memory(self) -> tuple[int, int]:
        """Bytes of GPU memory allocated, and blocks of the KV cache."""
        worker: Any = self
        return torch.cuda.memory_allocated(), int(worker.model_runner.kv_cache_config.num_blocks)
