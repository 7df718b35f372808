"""When `plan` grants a step, as a table of all that it may depend on, and what `refusal` says otherwise."""

import itertools
from types import MappingProxyType

import pytest
import torch

from specialized_decode.runtime import FUSED_MHC_MAX_ROWS, DecodeStep, SpecializedDecode, captures_pure_decode
from tests.helpers.runtime_hosts import AnsweringHost, window_metadata
from tests.helpers.runtime_model import Layers, Pair
from tests.runtime.conftest import Folder

ROWS = (0, 1, FUSED_MHC_MAX_ROWS, FUSED_MHC_MAX_ROWS + 1)
GROUPS = ("layers.0.attn.swa_cache", "layers.1.attn.swa_cache")
PURE = {name: window_metadata() for name in GROUPS}
# What may stand for the attention metadata; the first two are of a pure decode batch.
METADATA = {
    "pure": PURE,
    "pure, and other caches": {**PURE, "layers.1.attn": window_metadata(5)},
    "prefills": {name: window_metadata(1) for name in GROUPS},
    "prefills in one group": {**PURE, GROUPS[1]: window_metadata(1)},
    "a group missing": {GROUPS[0]: window_metadata()},
    "a group None": {**PURE, GROUPS[1]: None},
    "empty": {},
    "list": [PURE],
    "no dict": MappingProxyType(PURE),
    "None": None,
}
PURE_KINDS = ("pure", "pure, and other caches")


@pytest.fixture(scope="module")
def executor(folder: Folder) -> SpecializedDecode:
    """Of two layers, window caches in two groups, the second layer a candidate source."""
    return Pair(folder(Layers((0, 1), (1,), (1,), 1)), max_rows=2, max_context=64, max_tokens=64).executor


@pytest.fixture
def host(executor: SpecializedDecode, monkeypatch: pytest.MonkeyPatch) -> AnsweringHost:
    host = AnsweringHost(metadata=PURE)
    monkeypatch.setattr(executor, "host", host)
    assert executor.swa_prefixes == GROUPS
    assert executor.candidates is not None
    executor.candidates.warmed.clear()
    return host


def positions(rows: int) -> torch.Tensor:
    """Positions whose values cannot be read: there are none."""
    return torch.empty(rows, dtype=torch.int64, device="meta")


def expected_refusal(
    tensors: object | None, rows: int, context: bool, capturing: bool, mode: str, metadata: str
) -> str | None:
    """The rule in words, in the order in which the reasons are given."""
    if tensors is not None:
        return "pipeline parallelism hands over intermediate tensors"
    if rows in (0, 385):
        return f"{rows} rows are not 1 to 384"
    if not context:
        return "no forward context"
    if not capturing:
        return "not captured into a graph"
    if mode != "NONE" or metadata not in PURE_KINDS:
        return "not a FULL capture of a pure decode batch"
    return None


@pytest.mark.parametrize("tensors", [None, object()], ids=["", "intermediate tensors"])
@pytest.mark.parametrize("rows", ROWS)
def test_decision_table(executor: SpecializedDecode, host: AnsweringHost, rows: int, tensors: object | None) -> None:
    assert executor.candidates is not None
    granted = 0
    for context, capturing, mode, metadata in itertools.product(
        (True, False), (True, False), ("NONE", "PIECEWISE", "FULL"), METADATA
    ):
        host.context, host.captured, host.mode, host.metadata = context, capturing, mode, METADATA[metadata]
        executor.candidates.warmed.clear()
        reason = expected_refusal(tensors, rows, context, capturing, mode, metadata)
        assert executor.refusal(positions(rows), tensors) == reason
        assert executor.candidates.warmed == set(), "asking for the reason changes nothing"
        step = executor.plan(positions(rows), tensors)
        assert (step is not None) == (reason is None)
        if step is not None:
            granted += 1
            assert isinstance(step, DecodeStep)
            assert step.rows == rows
            assert step.executor is executor
        # The run before a capture warms; one inside a capture must not.
        warms = tensors is None and rows in (1, 384) and context and not capturing
        assert executor.candidates.warmed == ({rows} if warms else set())
    assert granted == (len(PURE_KINDS) if tensors is None and rows in (1, 384) else 0)


@pytest.mark.parametrize("rows", range(1, FUSED_MHC_MAX_ROWS + 1, 7))
def test_plan_is_a_function_of_the_graphs_key(executor: SpecializedDecode, host: AnsweringHost, rows: int) -> None:
    """The same row count gives the same step, whatever was planned before."""
    first = executor.plan(positions(rows), None)
    executor.plan(positions(384), None)
    host.captured = False
    executor.plan(positions(rows), None)
    host.captured = True
    assert executor.plan(positions(rows), None) == first


def test_questions_are_asked_in_order(executor: SpecializedDecode, host: AnsweringHost) -> None:
    """Metadata and graph mode exist in a forward alone, so they are not asked for outside one."""
    host.context = False
    executor.plan(positions(1), None)
    assert not {"mode", "metadata"} & set(host.asked)
    host.asked.clear()
    executor.refusal(positions(1), object())
    executor.refusal(positions(0), None)
    assert host.asked == []


def test_warms_every_row_count_once_asked(executor: SpecializedDecode, host: AnsweringHost) -> None:
    assert executor.candidates is not None
    host.captured = False
    for rows in (1, 3, 3, 48, 384, 385):
        executor.plan(positions(rows), None)
    assert executor.candidates.warmed == {1, 3, 48, 384}


def test_warms_nothing_without_candidates(
    executor: SpecializedDecode, host: AnsweringHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "candidates", None)
    for captured in (True, False):
        host.captured = captured
        assert (executor.plan(positions(4), None) is not None) == captured


@pytest.mark.parametrize("capturing", [True, False])
@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL"])
@pytest.mark.parametrize("metadata", METADATA)
def test_captures_pure_decode(capturing: bool, mode: str, metadata: str) -> None:
    host = AnsweringHost(captured=capturing, mode=mode, metadata=METADATA[metadata])
    expected = capturing and mode == "NONE" and metadata in PURE_KINDS
    assert captures_pure_decode(host, GROUPS) == expected


@pytest.mark.parametrize("group", GROUPS)
def test_only_the_named_groups_count(group: str) -> None:
    host = AnsweringHost(metadata={group: window_metadata(), "layers.7.attn.swa_cache": window_metadata(3)})
    assert captures_pure_decode(host, [group])
    assert not captures_pure_decode(host, GROUPS)
    assert captures_pure_decode(host, iter([group, group]))


def test_no_groups_are_no_decode() -> None:
    assert not captures_pure_decode(AnsweringHost(metadata=PURE), ())
