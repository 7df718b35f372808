"""Greedy generation with the executor: the plain model's tokens, and an account of how each step ran."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from specialized_decode.backbone.engine import NO_GRAPH, PREFILL, Captured, Generation
from specialized_decode.backbone.model import NO_EXECUTOR
from specialized_decode.runtime import DecodeStep
from tests.helpers.runtime_errors import LAYERS
from tests.helpers.runtime_model import IMAGE_IDS, Pair
from tests.runtime.conftest import Folder

Generate = Callable[..., Generation]

SIZES = (1, 2, 4)
TOKENS = 5


@pytest.fixture(scope="module")
def pair(folder: Folder) -> Pair:
    return Pair(folder(LAYERS), max_rows=6, max_context=128, max_tokens=48)


@pytest.fixture(scope="module")
def captured(pair: Pair) -> dict[bool, dict[int, Captured]]:
    """Graphs of SIZES, with the executor and without it."""
    found = {}
    for executor in (False, True):
        pair.model.executor = pair.executor if executor else None
        pair.engine.capture(SIZES)
        found[executor] = dict(pair.engine.graphs)
        pair.engine.graphs.clear()
    return found


@pytest.fixture(autouse=True)
def no_graphs(pair: Pair) -> Iterator[None]:
    """Leaves no test's graphs and executor to the next one."""
    yield
    pair.engine.graphs.clear()
    pair.model.executor = None


@pytest.fixture
def generate(pair: Pair, captured: dict[bool, dict[int, Captured]]) -> Generate:
    """prompts, with the executor or without it, sizes of the graphs to use -> the generation."""

    def run(asked: Sequence[Sequence[int]], executor: bool, sizes: Sequence[int] = SIZES) -> Generation:
        pair.model.executor = pair.executor if executor else None
        pair.engine.graphs = {size: captured[executor][size] for size in sizes}
        return pair.engine.generate(asked, TOKENS)

    return run


def prompts(pair: Pair, count: int) -> list[list[int]]:
    """Prompts of 1 to some 90 tokens, one of them with image tokens."""
    found = [pair.token_ids(length) for length in (1, 30, 47, 63, 90, 8)[:count]]
    found[-1][-1:] = IMAGE_IDS[:2]
    return found


def chunks(pair: Pair, asked: Sequence[Sequence[int]]) -> int:
    """Prefill batches: prompts are filled into chunks of the engine's most tokens, whole or in parts."""
    return -(-sum(map(len, asked)) // pair.engine.max_tokens)


@pytest.mark.parametrize("rows", range(1, 7))
def test_tokens_and_counts(pair: Pair, generate: Generate, rows: int) -> None:
    """Row counts at, between and above the graphs' sizes; every step is accounted for."""
    asked = prompts(pair, rows)
    plain, executed = generate(asked, False), generate(asked, True)
    assert executed.tokens == plain.tokens
    assert all(len(tokens) == TOKENS for tokens in executed.tokens)
    prefills, steps = chunks(pair, asked), TOKENS - 1
    if rows <= max(SIZES):
        assert executed.executor_steps == steps
        assert executed.plain_steps == {PREFILL: prefills}
        assert plain.plain_steps == {PREFILL: prefills, NO_EXECUTOR: steps}
    else:
        assert executed.executor_steps == 0
        assert executed.plain_steps == {PREFILL: prefills, NO_GRAPH: steps}
    assert plain.executor_steps == 0
    for generation in (plain, executed):
        assert generation.executor_steps + sum(generation.plain_steps.values()) == prefills + steps
        assert len(generation.decode_seconds) == steps


def test_only_granted_captures_run_the_executor(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row counts past the executor's most are captured with the plain layers, and counted with the plan's reason."""
    monkeypatch.setattr("specialized_decode.runtime.executor.FUSED_MHC_MAX_ROWS", 2)
    ran: list[int] = []
    run = pair.executor.run

    def counted(step: DecodeStep, *inputs: Any) -> Any:
        ran.append(step.rows)
        return run(step, *inputs)

    monkeypatch.setattr(pair.executor, "run", counted)
    asked = prompts(pair, 3)
    pair.model.executor = pair.executor
    pair.engine.capture(SIZES)
    generation = pair.engine.generate(asked, TOKENS)
    assert ran == [2, 1], "each granted capture runs the executor once; replays run no Python"
    reason = "4 rows are not 1 to 2"
    assert generation.executor_steps == 0
    assert generation.plain_steps == Counter({PREFILL: chunks(pair, asked), reason: TOKENS - 1})
    few = pair.engine.generate(asked[:2], TOKENS)
    assert few.executor_steps == TOKENS - 1
    assert few.plain_steps == {PREFILL: chunks(pair, asked[:2])}
    assert ran == [2, 1]


def test_eager_forwards_stay_plain(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefills, and decoding without a graph, run no executor although one is there."""
    monkeypatch.setattr(pair.executor, "run", lambda *arguments: pytest.fail("ran outside a capture"))
    asked = prompts(pair, 2)
    pair.model.executor = pair.executor
    generation = pair.engine.generate(asked, TOKENS)
    assert generation.executor_steps == 0
    assert sum(generation.plain_steps.values()) == chunks(pair, asked) + TOKENS - 1


@pytest.mark.parametrize("size", SIZES)
def test_padding_to_any_size(pair: Pair, generate: Generate, size: int) -> None:
    """One prompt through each graph. Tokens of two sizes may differ: their GEMMs round differently."""
    asked = prompts(pair, 1)
    executed = generate(asked, True, (size,))
    assert executed.executor_steps == TOKENS - 1
    assert executed.tokens == generate(asked, False, (size,)).tokens


def test_generations_in_a_row(pair: Pair, generate: Generate) -> None:
    """One engine, batches of other row counts after each other: no state of one reaches the next."""
    asked = prompts(pair, 4)
    plain = [generate(asked[:rows], False).tokens for rows in (4, 1, 3, 2)]
    assert [generate(asked[:rows], True).tokens for rows in (4, 1, 3, 2)] == plain


def test_the_plan_decides_in_capture_order(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked once in the run before each capture and once inside it, largest size first."""
    asked: list[tuple[int, bool]] = []
    plan = pair.executor.plan

    def recorded(positions: Any, tensors: object | None) -> Any:
        asked.append((positions.shape[0], pair.host.capturing()))
        return plan(positions, tensors)

    monkeypatch.setattr(pair.executor, "plan", recorded)
    pair.model.executor = pair.executor
    pair.engine.capture((1, 4))
    assert asked == [(4, False), (4, True), (1, False), (1, True)]
