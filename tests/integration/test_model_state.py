"""The model state over vLLM's own: when it builds the executor, and which steps it counts."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch


@pytest.fixture(scope="module")
def module() -> Any:
    import specialized_decode.integration.model_state as module

    return module


def dummy(requests: int, tokens: int) -> Any:
    """A batch as vLLM makes them for captures, profiling and warm-up."""
    from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers

    return InputBatch.make_dummy(requests, tokens, InputBuffers(16, 64, torch.device("cpu")))


def real(requests: int, tokens: int, padded: int | None = None, prefilling: int = 0) -> Any:
    """The same with prompts, of which `prefilling` are not yet done."""
    batch = dummy(requests, tokens)
    batch.prefill_len_np = np.full(requests, 5, dtype=np.int32)
    batch.is_prefilling_np[:prefilling] = True
    batch.has_prefill = prefilling > 0
    batch.num_tokens_after_padding = padded or tokens
    return batch


def test_dummy_batches_are_told_from_real_ones(module: Any) -> None:
    assert module.is_dummy(dummy(1, 1)) and module.is_dummy(dummy(3, 8))
    assert not module.is_dummy(real(1, 1)) and not module.is_dummy(real(3, 3, prefilling=1))


def test_warm_ups_are_told_from_real_batches(module: Any) -> None:
    """By the names that vLLM gives their requests."""
    import inspect

    from vllm.v1.worker.gpu import warmup

    assert 'req_ids = [f"_warmup_{i}_" for i in range(num_reqs)]' in inspect.getsource(warmup._warmup_kernels)
    prefix = inspect.signature(warmup.run_mixed_prefill_decode_warmup).parameters["req_id_prefix"].default
    assert 'f"{req_id_prefix}_decode_"' in inspect.getsource(warmup.run_mixed_prefill_decode_warmup)
    for name, expected in (
        ("_warmup_0_", True),
        (f"{prefix}_decode_", True),
        ("0-1a2b3c4d", False),
        ("cmpl-_warmup_0_", False),
    ):
        batch = real(1, 1)
        batch.req_ids = [name]
        assert module.is_dummy(batch) == expected, name


@pytest.mark.parametrize(
    ("mode", "padded", "prefilling", "expected"),
    [
        ("FULL", 4, 0, (True, "")),
        ("FULL", 8, 0, (False, "full graph on the stock layers")),
        # A chunk of one token that vLLM runs as a decode.
        ("FULL", 4, 1, (True, "")),
        ("PIECEWISE", 4, 1, (False, "prefill")),
        ("PIECEWISE", 4, 0, (False, "decode without a full graph")),
        ("NONE", 3, 2, (False, "prefill")),
        ("NONE", 3, 0, (False, "decode without a full graph")),
    ],
)
def test_who_runs(module: Any, mode: str, padded: int, prefilling: int, expected: tuple[bool, str]) -> None:
    from vllm.config import CUDAGraphMode

    assert module.who_runs(real(3, 3, padded, prefilling), CUDAGraphMode[mode], {1, 2, 4}) == expected


class Counts:
    """What is recorded."""

    def __init__(self) -> None:
        self.steps: list[tuple[bool, str]] = []

    def record(self, executor: bool, reason: str = "") -> None:
        self.steps.append((executor, reason))


@pytest.fixture
def build(module: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """Makes a state of the real class over a model; vLLM's part answers without a device."""
    from vllm.models.deepseek_v41.nvidia.model_state import DeepseekV41ModelState

    def init(self: Any, vllm_config: Any, model: Any, encoder_cache: Any, device: Any) -> None:
        self.model = model

    def prepare_attn(self: Any, batch: Any, mode: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {"args": args, "kwargs": kwargs}

    monkeypatch.setattr(DeepseekV41ModelState, "__init__", init)
    monkeypatch.setattr(DeepseekV41ModelState, "prepare_attn", prepare_attn)
    monkeypatch.setattr(module.StepCounts, "for_engine", classmethod(lambda cls, vllm_config: Counts()))
    return lambda model: module.SpecializedDecodeModelState(None, model, None, torch.device("cpu"))


class TextModel:
    """A text model whose executor has graphs of 1, 2 and 4 rows."""

    def __init__(self, rank: int = 0) -> None:
        self.host = SimpleNamespace(tp_group=SimpleNamespace(rank=rank))
        self.built: list[Any] = []

    def build_specialized_decode(self) -> Any:
        self.built.append(SimpleNamespace(granted={1, 2, 4}, host=self.host))
        return self.built[-1]


def test_builds_the_executor(build: Callable[[Any], Any]) -> None:
    """Once, of the text model itself or of the one in the vision wrapper."""
    for wrap in (lambda model: model, lambda model: SimpleNamespace(language_model=model)):
        text = TextModel()
        state = build(wrap(text))
        assert text.built == [state.executor]


def test_an_error_of_the_builder_stops_the_engine(build: Callable[[Any], Any]) -> None:
    def fail() -> None:
        raise RuntimeError("cannot run here")

    with pytest.raises(RuntimeError, match="cannot run here"):
        build(SimpleNamespace(build_specialized_decode=fail))


def test_counts_every_real_step_once(build: Callable[[Any], Any]) -> None:
    from vllm.config import CUDAGraphMode

    state = build(TextModel())
    none, full = CUDAGraphMode.NONE, CUDAGraphMode.FULL
    for batch, mode in (
        (dummy(2, 2), none),
        (real(3, 9, prefilling=3), none),
        (dummy(4, 4), full),
        (real(3, 3, 4), full),
        (real(5, 5, 8), full),
    ):
        out = state.prepare_attn(batch, mode, "tables", "slots", "groups", "config", for_capture=False)
        assert out == {"args": ("tables", "slots", "groups", "config"), "kwargs": {"for_capture": False}}
    assert state.counts.steps == [
        (False, "prefill"),
        (True, ""),
        (False, "full graph on the stock layers"),
    ]


def test_one_rank_counts_for_all(build: Callable[[Any], Any]) -> None:
    """The endpoint adds up what an engine's processes have counted."""
    from vllm.config import CUDAGraphMode

    states = [build(TextModel(rank)) for rank in range(2)]
    for state in states:
        state.prepare_attn(real(3, 3, 4), CUDAGraphMode.FULL, "tables")
    assert [state.counts and state.counts.steps for state in states] == [[(True, "")], None]


def test_signature_is_vllms(module: Any) -> None:
    """The runner passes by position what is handed on, the batch and the mode first."""
    import inspect

    from vllm.models.deepseek_v41.nvidia.model_state import DeepseekV41ModelState

    names = list(inspect.signature(DeepseekV41ModelState.prepare_attn).parameters)
    assert names[:3] == ["self", "input_batch", "cudagraph_mode"]
    assert "prepare_attn" in vars(module.SpecializedDecodeModelState)
    assert list(inspect.signature(DeepseekV41ModelState.__init__).parameters) == [
        "self",
        "vllm_config",
        "model",
        "encoder_cache",
        "device",
    ]
