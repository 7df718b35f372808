"""The logits processor of the GPU script, under vLLM's interface."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from specialized_decode.backbone.tokenizer import TRAINED_IDS
from tests.gpu.engine import parameters
from tests.gpu.recorder import Recorder

VOCAB = TRAINED_IDS + 8


@pytest.fixture
def recorder() -> Recorder:
    return Recorder(None, SimpleNamespace(device=torch.device("cpu")))


def context(slots: list[int], lengths: list[int]) -> Any:
    """A step's rows: request slots, and tokens that each request's next token sees. Padded as vLLM's may be."""
    return SimpleNamespace(
        idx_mapping_np=np.array(slots, np.int32), seq_lens_upper_bound_np=np.array([*lengths, 0], np.int32)
    )


def logits(*values: float) -> torch.Tensor:
    rows = torch.zeros(len(values), VOCAB)
    rows[:, :TRAINED_IDS] = torch.tensor(values)[:, None]
    return rows


def test_rows_go_to_their_requests_and_steps(recorder: Recorder) -> None:
    assert recorder.add_request(3, parameters("a", 10, 4, None, record=True))
    assert recorder.add_request(0, parameters("b", 2, 2, [7, 8], record=True))
    assert not recorder.add_request(1, parameters("", 2, 2, None, record=False))
    given = logits(1.0, 2.0, 3.0)
    assert torch.equal(
        recorder.apply(given, context([3, 0, 1], [6, 2, 2])), logits(1.0, 2.0, 3.0)
    )  # a: within its prompt
    recorder.apply(logits(4.0, 5.0), context([0, 3], [3, 10]))
    recorder.apply(logits(6.0, 7.0), context([3, 0], [11, 4]))  # b: past its last token
    taken = recorder.take()
    assert taken.keys() == {"a", "b"}
    assert (taken["a"].steps, taken["b"].steps) == ({0, 1}, {0, 1})
    assert taken["a"].logits[:2, 0].tolist() == [5.0, 6.0]
    assert taken["b"].logits[:, TRAINED_IDS - 1].tolist() == [2.0, 4.0]
    assert bool(taken["a"].logits[2:].isnan().all())
    assert recorder.take() == {}


def test_a_reused_slot_belongs_to_the_new_request(recorder: Recorder) -> None:
    recorder.add_request(0, parameters("old", 2, 3, None, record=True))
    recorder.add_request(0, SamplingParams(max_tokens=3))
    recorder.apply(logits(9.0), context([0], [2]))
    assert recorder.take()["old"].steps == set()


def test_logits_of_untrained_ids_are_noticed(recorder: Recorder) -> None:
    recorder.add_request(0, parameters("a", 1, 2, None, record=True))
    rows = logits(1.0)
    rows[0, VOCAB - 1] = -0.5
    recorder.apply(rows, context([0], [1]))
    recorder.apply(logits(1.0), context([0], [2]))
    assert float(recorder.take()["a"].rest) == 0.5
