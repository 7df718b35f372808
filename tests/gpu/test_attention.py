"""A layer's attention left out of steps: what is captured and timed, and what its numbers may be."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from specialized_decode.backbone.attention import Attention
from specialized_decode.backbone.writer import write_checkpoint
from specialized_decode.boundary import Boundaries
from specialized_decode.boundary.coefficients import ReferenceCoefficients
from specialized_decode.runtime import DecodeStep
from tests.gpu import attention_phases as phases
from tests.gpu.attention_phases import EXECUTOR, STEP, VLLM, Constants, LeftOut
from tests.gpu.engine import Steps
from tests.helpers.runtime_model import Layers, Pair, assert_same, small_checkpoint, unjoined

# A window, a source, a reader, the candidate source, a consumer and a reader of its own.
LAYERS = Layers((0, 2, 2, 1, 1, 1), (1, 3), (1, 3, 4), 3)
KIND_OF = ["window", "source", "reader", "source", "consumer", "reader"]
CONTEXTS = (1, 48, 65, 100)
MOST = max(phases.ROWS)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = write_checkpoint(small_checkpoint(LAYERS), tmp_path_factory.mktemp("attention") / "model")
    return Pair(folder, max_rows=8, max_context=128)


@pytest.fixture
def emulated(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", pair.host.capturing)


def beside(pair: Pair) -> Any:
    """A model whose layers nobody calls, for what is left out of vLLM's."""
    layers = [SimpleNamespace(attn=SimpleNamespace(forward=None)) for _ in pair.backbone.layers]
    return SimpleNamespace(model=SimpleNamespace(layers=layers, start_layer=0, end_layer=len(layers)))


def without(monkeypatch: pytest.MonkeyPatch, pair: Pair, layers: Sequence[int]) -> None:
    """The plain model with zeros in the place of some layers' attention."""
    call = Attention.__call__

    def attention(self: Attention, positions: Tensor, x: Tensor) -> Tensor:
        return torch.zeros_like(x) if self.layer_id in layers else call(self, positions, x)

    monkeypatch.setattr(Attention, "__call__", attention)


def test_kinds(pair: Pair) -> None:
    assert [phases.kind_of(layer.attn) for layer in pair.backbone.layers] == KIND_OF
    model: Any = SimpleNamespace(model=SimpleNamespace(layers=pair.backbone.layers, start_layer=0, end_layer=6))
    found = phases.layers_by_kind(model)
    assert list(found.items()) == [("reader", [2, 5]), ("consumer", [4]), ("source", [1, 3]), ("window", [0])]


@pytest.mark.parametrize("kinds", [1, 2, 3, 4])
def test_the_rest_of_a_step_is_as_it_was(
    pair: Pair, emulated: None, monkeypatch: pytest.MonkeyPatch, kinds: int
) -> None:
    """The executor without attention of some layers is the plain model without it; afterwards both are whole."""
    out = [number for number, kind in enumerate(KIND_OF) if kind in phases.KINDS[:kinds]]
    constants, flags = Constants.of(pair.executor, 8), list[bool]()
    full = pair.executor.all_reduce.full

    def watched(*args: Any, settled: bool = False, **kwargs: Any) -> Any:
        flags.append(settled)
        return full(*args, **kwargs)

    requests = pair.open(CONTEXTS)
    try:
        with phases.replaced(pair.executor.all_reduce, "full", watched):
            with LeftOut(beside(pair), pair.executor, out, constants.attention) as left:
                captured = pair.capture(4)
        assert left.calls == len(out)
        # Two boundaries a layer but for the first: into its attention, and into its experts.
        behind = [number in out for number in range(len(KIND_OF))]
        assert flags == [not behind[0], *(flag for number in range(1, 6) for flag in (True, not behind[number]))]
        before = pair.snapshot()
        found = pair.replayed(captured, pair.batch(requests))
        pair.restore(before)
        whole = pair.plain(pair.batch(requests))
        pair.restore(before)
        with monkeypatch.context() as patch:
            without(patch, pair, out)
            expected = pair.plain(pair.batch(requests))
        assert_same(expected, found)
        assert not torch.equal(whole.hidden, found.hidden)
        pair.restore(before)
        assert_same(*pair.both(pair.capture(4), pair.batch(requests)))
    finally:
        pair.close(requests)


def test_sides(pair: Pair, emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without coefficients a step's streams mix evenly; vLLM's side is no step; a step is what it was."""
    mixes, plan, boundaries = Constants.of(pair.executor, 8).mixes, pair.executor.plan, pair.executor.boundaries
    assert isinstance(boundaries, Boundaries)
    steps: list[DecodeStep] = []
    run = DecodeStep.run

    def watched(self: DecodeStep, *args: Any) -> Any:
        steps.append(self)
        return run(self, *args)

    monkeypatch.setattr(DecodeStep, "run", watched)
    seen = {}
    for side in (STEP, EXECUTOR):
        requests, before = pair.open(CONTEXTS), pair.snapshot()
        with phases.on_side(pair.executor, side, mixes):
            captured = pair.capture(4)
        seen[side] = pair.replayed(captured, pair.batch(requests))
        pair.restore(before)
        pair.close(requests)
    assert [step.side_stream for step in steps] == [True, False]
    assert seen[EXECUTOR].hidden.isfinite().all()
    assert not torch.equal(seen[EXECUTOR].hidden, seen[STEP].hidden)
    with phases.on_side(pair.executor, VLLM, mixes), pytest.raises(AssertionError):
        pair.capture(4)
    assert pair.executor.plan == plan and isinstance(boundaries.coefficients, ReferenceCoefficients)
    assert not unjoined(pair)


def test_even_mixes_keep_the_streams_size() -> None:
    mixes = phases.FixedMixes(8, 4, torch.device("cpu"))
    streams = torch.ones(3, 4, 16)
    pre, post, comb = mixes(streams, None)
    assert (pre.shape, post.shape, comb.shape) == ((3, 4), (3, 4), (3, 4, 4))
    assert torch.equal((pre.unsqueeze(2) * streams).sum(1), torch.ones(3, 16))
    assert torch.equal(torch.einsum("tnm,tmh->tnh", comb, streams), streams)
    assert all(a.is_contiguous() for a in (pre, post, comb))
    assert mixes.first(streams[:, 0], streams, None)[0].data_ptr() == pre.data_ptr()


def test_a_layers_time_is_what_the_graphs_differ_by() -> None:
    """Of kinds of 3 layers of 10 us, 1 of 40 and 2 of 5, in steps that take up to 2 us longer each time."""
    kinds = {"reader": 3, "source": 1, "window": 2}
    noise = [0.0, 1.0, 2.0]
    times = [[base + extra for extra in noise] for base in (180.0, 150.0, 110.0, 100.0)]
    assert phases.layer_times(times, kinds) == {"reader": [10.0] * 3, "source": [40.0] * 3, "window": [5.0] * 3}
    record = phases.side_record(times, kinds)
    assert record["layer_us"]["source"] == {"median": 40.0, "q1": 40.0, "q3": 40.0}
    assert record["graph_us"] == {"median": 181.0, "q1": 180.5, "q3": 181.5}
    assert record["rest_us"]["median"] == 101.0
    with pytest.raises(ValueError, match="zip"):
        phases.layer_times(times[:-1], kinds)


def sides(**changes: Any) -> dict[str, Any]:
    times = {VLLM: (6600.0, 3600.0, 3400.0), EXECUTOR: (3200.0, 2200.0, 2100.0), STEP: (3600.0, 2700.0, 2650.0)}
    kinds = {"reader": 30, "window": 2}
    return {side: phases.side_record([[t] * 4 for t in changes.get(side, ts)], kinds) for side, ts in times.items()}


@pytest.mark.parametrize(
    ("changes", "engine", "said"),
    [
        ({}, 3600.0, []),
        ({VLLM: (6600.0, 6600.0, 3400.0)}, 3600.0, ["vLLM: reader: found 0.00 us a layer, expected more than 0"]),
        ({EXECUTOR: (3200.0, 2000.0, 2100.0)}, 3600.0, ["executor: window: found -50.00 us a layer"]),
        ({VLLM: (6600.0, 600.0, 500.0)}, 3600.0, ["vLLM: without attention: found 500 of 6600 us"]),
        ({}, 3300.0, ["executor's step: found 3600 us, the engine's own graph takes 3300"]),
    ],
)
def test_nonsense_is_found(changes: dict[str, Any], engine: float, said: list[str]) -> None:
    found = phases.nonsense(sides(**changes), {"median": engine, "q1": engine, "q3": engine})
    assert len(found) == len(said)
    assert all(failure.startswith(start) for failure, start in zip(found, said, strict=True))


class ToyRunner:
    """What `capture_side` sees of vLLM's runner. executed: rows that the executor is granted in each capture."""

    def __init__(self, pair: Pair, captured: Counter[int], executed: Sequence[int]) -> None:
        self.model, self.executor = beside(pair), pair.executor
        for layer, own in zip(self.model.model.layers, pair.backbone.layers, strict=True):
            for name in ("compress_ratio", "indexer", "compressor"):
                setattr(layer.attn, name, getattr(own.attn, name))
            layer.attn.forward = lambda positions, x, scaling: None
        self.model_state = SimpleNamespace(executor=self.executor)
        self.captured, self.executed, self.sides = captured, executed, list[tuple[str, int]]()
        self.cudagraph_manager = SimpleNamespace(graphs={})

    def get_model(self) -> Any:
        return self.model

    def capture(self) -> dict[int, str]:
        positions = torch.arange(MOST)
        step = self.executor.plan(positions, None)
        missing = 0
        for layer, plan in zip(self.model.model.layers, self.executor.layers, strict=True):
            for rows in phases.ROWS:
                left_out = layer.attn.forward(positions[:rows], positions, None)
                missing += left_out is not None and left_out.shape[0] == rows
            assert ("run" in vars(plan.attention)) == (left_out is not None)
        self.sides.append(("executor" if step else "vLLM", missing))
        self.captured.update(self.executed if step else ())
        return {rows: f"{rows}" for rows in phases.ROWS}


def test_a_sides_graphs(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, then with one kind more left out each; on the side that was asked for, with all calls left out."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(phases, "capture", lambda runner: runner.capture())
    step = DecodeStep(MOST, True, True, True, True, True, pair.executor)
    monkeypatch.setattr(pair.executor, "plan", lambda positions, tensors: step)
    constants, captured = Constants.of(pair.executor, MOST), Counter[int]()
    runner = ToyRunner(pair, captured, phases.ROWS)
    for side, name in ((VLLM, "vLLM"), (EXECUTOR, "executor"), (STEP, "executor")):
        runner.sides.clear()
        assert phases.capture_side(runner, side, captured, constants) == [{rows: f"{rows}" for rows in phases.ROWS}] * 5
        assert runner.sides == [(name, len(phases.ROWS) * count) for count in (0, 2, 3, 5, 6)]
    runner.executed = (1,)
    with pytest.raises(RuntimeError, match=r"executor without nothing: .* the executor's \{1: 1\}, 0 calls left out"):
        phases.capture_side(runner, EXECUTOR, captured, constants)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with pytest.raises(RuntimeError, match=r"vLLM without reader: .* 0 calls left out; expected .*, 6$"):
        phases.capture_side(runner, VLLM, captured, constants)


class ToyEngine:
    """An engine whose rows decode one step after another; short: tokens that its contexts lack; waits: steps that
    replay no graph, None for all."""

    def __init__(self, steps: Steps, rows: int, context: int, short: int = 0, waits: int | None = 5) -> None:
        self.steps, self.rows, self.waits = steps, rows, waits
        self.requests: dict[str, int] = {}
        self.llm = SimpleNamespace(llm_engine=self)
        lengths = torch.full((8,), context - short + 7, dtype=torch.int32)
        self.runner = SimpleNamespace(input_buffers=SimpleNamespace(seq_lens=lengths))

    def add_request(self, name: str, prompt: dict[str, list[int]], sampling: int) -> None:
        self.requests[name] = sampling + 20

    def step(self) -> None:
        if self.waits:
            self.waits -= 1
        elif self.waits == 0:
            self.steps.replays[self.rows] += 1
        self.requests = {name: left - 1 for name, left in self.requests.items() if left > 1}

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def abort_request(self, names: list[str]) -> None:
        self.requests.clear()


@pytest.mark.parametrize(("short", "waits", "said"), [(0, 5, None), (9, 5, "found contexts"), (0, None, "0 replays")])
def test_a_batch_is_in_decode(monkeypatch: pytest.MonkeyPatch, short: int, waits: int | None, said: str | None) -> None:
    """Graphs are replayed over a batch of whole prompts, and the engine is empty afterwards."""
    monkeypatch.setattr(phases, "parameters", lambda name, context, tokens, forced, record: tokens)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    steps = Steps()
    engine: Any = ToyEngine(steps, 2, 30, short, waits)
    inside = False
    if said is None:
        with phases.decoding(engine, steps, 2, 30):
            inside = steps.replays[2] == 8 and len(engine.requests) == 2
        assert inside
    else:
        with pytest.raises(RuntimeError, match=said), phases.decoding(engine, steps, 2, 30):
            pass
    assert not engine.requests


class Rows(NamedTuple):
    """A graph's key."""

    num_tokens: int


@contextmanager
def entered(*args: Any) -> Iterator[None]:
    yield


def test_the_report(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every graph is timed over every shape; a side's numbers are its own graphs'."""
    took: dict[str, tuple[float, ...]] = {
        VLLM: (660.0, 360.0, 330.0, 290.0, 280.0),
        EXECUTOR: (320.0, 220.0, 212.0, 204.0, 201.0),
    }
    took[STEP] = tuple(time + 30 for time in took[EXECUTOR])
    graphs = {side: [{rows: rows * time for rows in phases.ROWS} for time in times] for side, times in took.items()}
    runner = ToyRunner(pair, Counter(), ())
    runner.cudagraph_manager.graphs = {Rows(rows): rows * 350.0 for rows in phases.ROWS}
    engine: Any = SimpleNamespace(runner=runner)
    for name in ("decoding", "fixed_routing"):
        monkeypatch.setattr(phases, name, entered)
    monkeypatch.setattr(phases, "replay_times", lambda order, rounds: [[graph] * rounds for graph in order])
    report = phases.check_attention(engine, Steps(), graphs)
    assert report.failures == []
    assert report.data["layers"] == {"reader": 2, "consumer": 1, "source": 2, "window": 1}
    assert [(run["rows"], run["context"]) for run in report.data["runs"]] == list(phases.SHAPES)
    last = report.data["runs"][-1]
    assert last["sides"][VLLM]["layer_us"]["reader"]["median"] == MOST * 150
    assert last["sides"][STEP]["rest_us"]["median"] == MOST * 231
    assert last["engine_us"]["median"] == MOST * 350
    assert report.line.endswith("16x8192: reader 2400.0 / 800.0 / 800.0, consumer 480.0 / 128.0 / 128.0, "
                                "source 320.0 / 64.0 / 64.0, window 160.0 / 48.0 / 48.0")  # fmt: skip
    runner.cudagraph_manager.graphs = {Rows(rows): rows * 300.0 for rows in phases.ROWS}
    assert len(phases.check_attention(engine, Steps(), graphs).failures) == len(phases.SHAPES)


def test_all_sides_are_captured(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A boundary is launched first as captures will have it behind what is left out: none may compile it."""
    constants, runner = Constants.of(pair.executor, MOST), ToyRunner(pair, Counter(), ())
    warmed: list[tuple[int, bool]] = []
    full = pair.executor.all_reduce.full

    def watched(pending: Tensor, *args: Any, settled: bool, **kwargs: Any) -> Any:
        warmed.append((pending.shape[0], settled))
        return full(pending, *args, settled=settled, **kwargs)

    def capture_side(runner: Any, side: str, captured: Counter[int], given: Constants) -> list[phases.Graphs]:
        assert warmed == [(rows, False) for rows in phases.ROWS] and given is constants
        return [{1: side}] * 5

    monkeypatch.setattr(pair.executor.all_reduce, "full", watched)
    monkeypatch.setattr(phases, "capture_side", capture_side)
    graphs: dict[str, list[phases.Graphs]] = {}
    report = phases.capture_all(SimpleNamespace(runner=runner), Counter(), constants, graphs)  # type: ignore[arg-type]
    assert graphs == {side: [{1: side}] * 5 for side in phases.SIDES}
    counts = "{'reader': 2, 'consumer': 1, 'source': 2, 'window': 1}"
    assert (report.line, report.failures) == (f"15 times 3 graphs; layers {counts}", [])
    monkeypatch.setattr(phases, "check_kernels", lambda executor: ["on vLLM's"])
    assert phases.capture_all(SimpleNamespace(runner=runner), Counter(), constants, {}).failures  # type: ignore[arg-type]


def test_kernels_are_asked_for(pair: Pair) -> None:
    assert phases.check_kernels(pair.executor) == []
    other: Any = SimpleNamespace(
        layers=[SimpleNamespace(attention=one) for one in (pair.executor.layers[0].attention, 1)], boundaries="x"
    )
    assert phases.check_kernels(other) == [
        "attention: found AttentionStep, int, expected AttentionStep",
        "boundaries: found str, expected Boundaries",
    ]
