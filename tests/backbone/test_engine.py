"""The local engine: what it refuses, how it cuts prefills, and that one generation leaves nothing to the next."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from specialized_decode.backbone.engine import NO_GRAPH, PREFILL, Generation, LocalEngine
from specialized_decode.backbone.errors import PromptError
from specialized_decode.backbone.model import NO_EXECUTOR, DeepseekV41, load_model
from specialized_decode.backbone.writer import write_checkpoint
from tests.helpers.small_plan import few_layers_plan
from tests.helpers.wide_math import WideMath

VOCAB = 600
ROWS, CONTEXT, CHUNK = 4, 96, 96
# One token; an odd number within the window of 48; past the window, the top-k of 32 and the candidates' 48 positions.
LENGTHS = (1, 21, 70)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DeepseekV41:
    folder = write_checkpoint(few_layers_plan(), tmp_path_factory.mktemp("engine") / "few")
    return load_model(folder, torch.device("cpu"), CHUNK, CONTEXT)


@pytest.fixture
def engine(model: DeepseekV41) -> LocalEngine:
    return LocalEngine(model, ROWS, CONTEXT, CHUNK)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    random = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCAB, (length,), generator=random).tolist() for length in LENGTHS]


def _free(engine: LocalEngine) -> tuple[list[int], list[int], list[int], int]:
    caches = engine.caches
    return (
        sorted(caches.window.free),
        sorted(caches.compressed.free),
        sorted(caches.free_rings),
        len(caches.open_requests),
    )


@pytest.mark.parametrize(
    ("asked", "tokens", "message"),
    [
        ([], 1, "prompts: found 0, expected 1 to 4, the engine's rows"),
        ([[3]] * 5, 1, "prompts: found 5, expected 1 to 4, the engine's rows"),
        ([[3]], 0, "tokens: found 0, expected at least 1"),
        ([[3], []], 1, "prompt 1: found no tokens, expected at least 1"),
        ([[3, 599, 600, 700]], 1, "prompt 0: found token 600, expected 0 to 599"),
        ([[3], [4, -1]], 1, "prompt 1: found token -1, expected 0 to 599"),
        (
            [[3], [3] * 60],
            37,
            "prompt 1: found 60 tokens and 37 to generate, expected at most 96 together, the context",
        ),
    ],
)
def test_refusals(engine: LocalEngine, asked: list[list[int]], tokens: int, message: str) -> None:
    before = _free(engine)
    with pytest.raises(PromptError) as caught:
        engine.generate(asked, tokens)
    assert str(caught.value) == message
    assert _free(engine) == before


def test_the_whole_context_and_every_row_are_usable(engine: LocalEngine) -> None:
    generation = engine.generate([[599] * (CONTEXT - 2)] * ROWS, 2)
    assert [len(tokens) for tokens in generation.tokens] == [2] * ROWS
    assert generation.tokens[0] == generation.tokens[3]


def test_batches_larger_than_the_model_holds_are_refused(model: DeepseekV41) -> None:
    LocalEngine(model, 2, CONTEXT, CHUNK)
    for rows, chunk in ((2, CHUNK + 1), (CHUNK + 1, 16)):
        with pytest.raises(ValueError, match=rf"found batches of {CHUNK + 1} tokens, expected at most {CHUNK}, the"):
            LocalEngine(model, rows, CONTEXT, chunk)


@pytest.fixture(scope="module")
def whole(model: DeepseekV41, prompts: list[list[int]]) -> tuple[Tensor, list[list[int]]]:
    """Logits after the prompts and the tokens generated, prefilled in one batch, in wide arithmetic."""
    return _wide(model, prompts, CHUNK)


def _wide(model: DeepseekV41, asked: Sequence[Sequence[int]], chunk: int) -> tuple[Tensor, list[list[int]]]:
    engine = LocalEngine(model, ROWS, CONTEXT, chunk)
    logits: list[Tensor] = []
    prefill = engine.prefill

    def seen(*arguments: Any) -> Tensor:
        logits.append(prefill(*arguments))
        return logits[0]

    with pytest.MonkeyPatch.context() as patch, WideMath():
        patch.setattr(engine, "prefill", seen)
        tokens = engine.generate(asked, 4).tokens
    return logits[0], tokens


@pytest.mark.parametrize("chunk", [11, 37, 91])
def test_chunk_size_does_not_change_the_tokens(
    model: DeepseekV41, prompts: list[list[int]], whole: tuple[Tensor, list[list[int]]], chunk: int
) -> None:
    """Chunks end at odd positions, inside a compression group, and span requests."""
    logits, tokens = _wide(model, prompts, chunk)
    torch.testing.assert_close(logits, whole[0], rtol=0, atol=1e-5)
    assert tokens == whole[1]


@pytest.mark.parametrize("row", range(len(LENGTHS)))
def test_other_rows_do_not_change_a_row(
    model: DeepseekV41, prompts: list[list[int]], whole: tuple[Tensor, list[list[int]]], row: int
) -> None:
    """Within 1e-5, of logits of deviation 3, once rounding does not depend on the batch; see WideMath."""
    logits, tokens = _wide(model, [prompts[row]], CHUNK)
    torch.testing.assert_close(logits, whole[0][row : row + 1], rtol=0, atol=1e-5)
    assert tokens == [whole[1][row]]
    assert whole[0].std() == pytest.approx(3, rel=0.2)


def test_order_of_prompts_is_the_order_of_rows(
    model: DeepseekV41, prompts: list[list[int]], whole: tuple[Tensor, list[list[int]]]
) -> None:
    logits, tokens = _wide(model, prompts[::-1], CHUNK)
    torch.testing.assert_close(logits, whole[0].flip(0), rtol=0, atol=1e-5)
    assert tokens == whole[1][::-1]
    assert len({tuple(row) for row in tokens}) == len(tokens), "rows that cannot be told apart show nothing"


def test_prefill_reports_every_chunk(model: DeepseekV41, prompts: list[list[int]]) -> None:
    small = LocalEngine(model, ROWS, CONTEXT, 40)
    requests = [small.caches.open(prompt) for prompt in prompts]
    counts: list[int] = []
    assert small.prefill(requests, counts.append).shape == (3, VOCAB)
    assert counts == [40, 40, 12]
    assert [request.computed for request in requests] == list(LENGTHS)


def test_generation_twice_in_a_row(engine: LocalEngine, prompts: list[list[int]]) -> None:
    """The same tokens, and every block, ring and slot is back."""
    before = _free(engine)
    first = engine.generate(prompts, 5)
    assert _free(engine) == before
    other = engine.generate([prompts[2][::-1], prompts[1]], 3)
    assert _free(engine) == before
    again = engine.generate(prompts, 5)
    assert _free(engine) == before
    assert first.tokens == again.tokens
    assert first.tokens[2][:3] != other.tokens[0]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["prefill", "decode"])
def test_blocks_are_given_back_after_an_error(
    engine: LocalEngine,
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    error: type[BaseException],
) -> None:
    before = _free(engine)
    run = getattr(engine, where)

    def fail(*arguments: Any) -> None:
        run(*arguments)
        assert _free(engine) != before
        raise error

    monkeypatch.setattr(engine, where, fail)
    with pytest.raises(error):
        engine.generate(prompts, 3)
    assert _free(engine) == before


def test_progress_and_times(engine: LocalEngine, prompts: list[list[int]]) -> None:
    steps: list[int] = []
    generation = engine.generate(prompts, 3, steps.append)
    assert steps == [1, 2, 3]
    assert len(generation.decode_seconds) == 2
    assert all(0 < seconds < 60 for seconds in generation.decode_seconds)
    assert (generation.executor_steps, generation.plain_steps) == (0, Counter({NO_EXECUTOR: 2, PREFILL: 1}))
    assert engine.generate([[5]], 1).decode_seconds == []


@pytest.fixture
def replays(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[int]]]:
    """Sizes of the graphs replayed so far."""
    sizes: list[int] = []
    replay = engine.replay

    def counted(captured: Any, *arguments: Any) -> Tensor:
        sizes.append(captured.batch.num_tokens)
        return replay(captured, *arguments)

    monkeypatch.setattr(engine, "replay", counted)
    yield lambda: sizes


def test_plain_graphs_give_the_eager_tokens(
    engine: LocalEngine, prompts: list[list[int]], replays: Callable[[], list[int]]
) -> None:
    eager = [engine.generate(prompts[:rows], 5) for rows in (3, 1)]
    assert replays() == []
    before = _free(engine)
    sizes: list[int] = []
    engine.capture([1, 3], sizes.append)
    assert sizes == [3, 1]
    assert _free(engine) == before
    graphs = [engine.generate(prompts[:rows], 5) for rows in (3, 1)]
    assert replays() == [3] * 4 + [1] * 4
    assert [generation.tokens for generation in graphs] == [generation.tokens for generation in eager]
    for generation in graphs:
        assert generation.executor_steps == 0
        assert generation.plain_steps == {PREFILL: 1, NO_EXECUTOR: 4}


def test_padding_of_a_plain_graph_changes_nothing(
    engine: LocalEngine, prompts: list[list[int]], replays: Callable[[], list[int]]
) -> None:
    with WideMath():
        eager = engine.generate(prompts, 4)
        engine.capture([4])
        padded = engine.generate(prompts, 4)
    assert replays() == [4] * 3
    assert padded.tokens == eager.tokens


def test_more_rows_than_the_largest_graph_run_eagerly(
    engine: LocalEngine, prompts: list[list[int]], replays: Callable[[], list[int]]
) -> None:
    eager = engine.generate(prompts, 3)
    engine.capture([2])
    generation: Generation = engine.generate(prompts, 3)
    assert generation.plain_steps == {PREFILL: 1, NO_GRAPH: 2}
    assert generation.tokens == eager.tokens
    assert replays() == []
