"""The phases' own logic, on a model of three lines in the engine's place: it finds what a wrong executor would do."""

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.gpu import attention_phases, executor_phases, outputs, phases, scenarios, stock_phases
from tests.gpu.compare import Difference
from tests.gpu.engine import COPY, Outputs, Steps, operation
from tests.gpu.report import Report, Run

IDS = 11


@dataclass
class ToyEngine:
    """Logits follow from the token before; what a test changes stands for a defect."""

    steps: Steps = field(default_factory=Steps)
    error: float = 0.0
    error_from: int = 0
    # Rows of the batches and traffic that chance adds noise to, as atomics do; every call has noise of its own.
    chance_rows: int = 0
    calls: int = 0
    lose: str = ""
    uncounted: int = 0
    counted: dict[str, int] = field(default_factory=dict)
    kernels: dict[str, int] = field(default_factory=lambda: {"gemm": 8, "norm": 4})

    def row(
        self, prompt: int, tokens: int, forced: Sequence[int] | None, batch: int = 1
    ) -> tuple[list[int], torch.Tensor]:
        """Output tokens and logits of one request, in a batch of so many."""
        last, rows, chosen = prompt, [], []
        self.calls += 1
        noise = torch.Generator().manual_seed(self.calls)
        for step in range(tokens):
            logits = torch.randn(IDS, generator=torch.Generator().manual_seed(last)).bfloat16().float()
            if batch == self.chance_rows:
                logits = logits + 0.01 * torch.randn(IDS, generator=noise)
            rows.append(logits + (self.error if step >= self.error_from else 0.0) * torch.arange(IDS))
            last = forced[step] if forced else int(rows[-1].argmax())
            chosen.append(last)
        return chosen, torch.stack(rows)

    def run_batch(
        self,
        lengths: Sequence[int],
        seeds: Sequence[int],
        output_tokens: int,
        forced: Sequence[Sequence[int]] | None = None,
        record: bool = True,
    ) -> Outputs:
        self.steps.total += output_tokens
        self.steps.replays[len(lengths)] += output_tokens - 1
        given: Sequence[Sequence[int] | None] = forced or [None] * len(seeds)
        rows = {str(i): self.row(seed, output_tokens, given[i], len(seeds)) for i, seed in enumerate(seeds)}
        logits = {name: row[1] for name, row in rows.items()} if record else {}
        return Outputs({name: row[0] for name, row in rows.items()}, logits)

    def run_traffic(self, requests: Any, forced: dict[str, list[int]] | None = None) -> tuple[Outputs, int]:
        replays = {1: 40, 2: 30, 4: 20, 8: 50}
        self.steps.total += 200
        self.steps.replays.update(replays)
        self.counted = {"executor": 140, "stock prefill": 60 - self.uncounted}
        rows = {}
        for seed, request in enumerate(requests):
            count = request.output_tokens if request.abort is None else max(0, request.abort - request.step - 3)
            given = forced[request.name] if forced else None
            tokens, logits = self.row(seed, max(1, count), given, len(requests))
            rows[request.name] = (tokens[:count], logits[:count])
        if self.lose:
            rows[self.lose] = (rows[self.lose][0][:-1], rows[self.lose][1][:-1])
        return Outputs({name: row[0] for name, row in rows.items()}, {name: row[1] for name, row in rows.items()}), 200


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends the phases' calls of the engine to the toy."""
    monkeypatch.setattr(scenarios, "OUTPUT_TOKENS", scenarios.DECODE_STEPS + 1)
    for module in (stock_phases, executor_phases):
        monkeypatch.setattr(module, "run_batch", lambda engine, *args, **more: engine.run_batch(*args, **more))
        monkeypatch.setattr(module, "run_traffic", lambda engine, *args: engine.run_traffic(*args))
        monkeypatch.setattr(module, "profile_kernels", lambda engine, rows, context: dict(engine.kernels))
    monkeypatch.setattr(executor_phases, "settled_counters", lambda engine, total, before: engine.counted)
    monkeypatch.setattr(executor_phases, "step_counters", dict)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


def stock(store: Path, chance_rows: int = 0) -> list[Report]:
    """Runs the stock engine's phases."""
    engine = ToyEngine(chance_rows=chance_rows)
    return [
        stock_phases.record_profiles(engine, store),  # type: ignore[arg-type]
        stock_phases.record_values(engine, engine.steps, store),  # type: ignore[arg-type]
        stock_phases.record_traffic(engine, engine.steps, store),  # type: ignore[arg-type]
    ]


@pytest.fixture
def recorded(store: Path) -> Path:
    """What the stock engine recorded."""
    if not (store / "traffic.pt").exists():
        stock(store)
    return store


def arguments(expect: str = "identical") -> argparse.Namespace:
    return argparse.Namespace(expect=expect, executor_option="{}")


def values(engine: ToyEngine, store: Path, expect: str = "identical") -> Report:
    return executor_phases.check_values(engine, arguments(expect), store)  # type: ignore[arg-type]


def traffic(engine: ToyEngine, store: Path, expect: str = "identical") -> Report:
    return executor_phases.check_traffic(engine, arguments(expect), engine.steps, store)  # type: ignore[arg-type]


def test_stock_is_recorded(tmp_path: Path) -> None:
    profile, recorded, played = stock(tmp_path)
    assert [report.failures for report in (profile, recorded, played)] == [[], [], []]
    rows = sum(map(len, scenarios.BATCHES))
    assert recorded.data["repeat"]["steps"] == rows * scenarios.OUTPUT_TOKENS
    assert recorded.data["noise"]["steps"] == len(scenarios.ALONE) * scenarios.OUTPUT_TOKENS
    assert set(recorded.data["graph_steps"].values()) == {scenarios.DECODE_STEPS}
    assert played.data["replays"] == {1: 40, 2: 30, 4: 20, 8: 50}


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    exact = torch.randn(3, 4).bfloat16().float()
    fine = torch.tensor([[1.0 + 2**-20]])
    noise = Difference(steps=3, rms=0.5)
    repeats = [{"0": Difference(steps=3), "1": Difference(steps=4, differing=1, largest=0.5)}]
    recorded = outputs.Recorded([Outputs({"0": [1, 2]}, {"0": exact, "1": fine})], repeats, noise)
    outputs.save_outputs(tmp_path / "a" / "x.pt", recorded)
    back = outputs.load_outputs(tmp_path / "a" / "x.pt")
    (loaded,) = back.outputs
    assert (loaded.tokens, back.repeats, back.noise) == ({"0": [1, 2]}, repeats, noise)
    assert torch.equal(loaded.logits["0"], exact)
    assert torch.equal(loaded.logits["1"], fine)
    assert loaded.logits["0"].dtype == torch.float32


def test_an_executor_that_is_stock_passes(recorded: Path) -> None:
    for expect in ("identical", "close"):
        assert values(ToyEngine(), recorded, expect).failures == []
        assert traffic(ToyEngine(), recorded, expect).failures == []
    rows = sum(map(len, scenarios.BATCHES))
    assert values(ToyEngine(), recorded).line.endswith(f"equal texts {rows} of {rows}")


def test_other_values_are_found(recorded: Path) -> None:
    late = ToyEngine(error=1e-3, error_from=100)
    report = values(late, recorded)
    rows = sum(map(len, scenarios.BATCHES))
    steps = rows * scenarios.OUTPUT_TOKENS
    found = f"{rows * (scenarios.OUTPUT_TOKENS - 100)} of {steps} steps differ"
    assert report.line.startswith(found)
    assert len([one for one in report.failures if "expected none" in one]) == rows
    assert traffic(late, recorded).failures
    # The toy's stock has no noise of its own, so nothing else is close to it either.
    assert "expected at most 1.5 times stock's own noise, 0" in values(late, recorded, "close").failures[0]


@pytest.mark.parametrize("rows", [8, len(scenarios.TRAFFIC)])
def test_where_stock_does_not_repeat_its_own_noise_is_the_limit(tmp_path: Path, rows: int) -> None:
    """Batches of 8 rows, or the traffic, differ from run to run; everything else is still held to the bit."""
    _, recorded, _ = stock(tmp_path, rows)
    assert recorded.failures == []
    differing = [name for name, one in recorded.data["repeats"].items() if one["differing"]]
    assert all(name.count(",") == 7 for name in differing) and len(differing) == (2 if rows == 8 else 0)
    noisy = ToyEngine(chance_rows=rows, calls=10_000)
    assert values(noisy, tmp_path).failures == []
    assert traffic(noisy, tmp_path).failures == []
    wrong = ToyEngine(chance_rows=rows, calls=10_000, error=0.05)
    found = values(wrong, tmp_path).failures
    assert sum("expected at most 1.5 times stock's own noise" in one for one in found) == len(differing)
    rows_in_all, noisy_rows = recorded.data["rows"], recorded.data["rows"] - recorded.data["same"]
    assert (rows_in_all, noisy_rows) == (sum(map(len, scenarios.BATCHES)), 8 * len(differing))
    assert sum("expected none" in one for one in found) == rows_in_all - noisy_rows
    assert traffic(wrong, tmp_path).failures


def test_stock_that_never_repeats_is_no_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenarios, "BATCHES", ((300,) * 8, (1, 2, 3, 4, 5, 6, 7, 8)))
    monkeypatch.setattr(scenarios, "ALONE_BATCH", 1)
    _, recorded, _ = stock(tmp_path, 8)
    assert recorded.failures == ["stock repeats itself in no row, so that nothing can be held against it bit for bit"]


class Ended:
    """An engine whose end leaves some memory."""

    def __init__(self, left: int, before: int = 0) -> None:
        self.left, self.before = left, before

    def shut_down(self) -> tuple[int, int]:
        return self.left, self.before


@pytest.mark.parametrize(
    ("left", "before", "failures"), [(2.5e9, 0, 0), (3.2e9, 0, 1), (5.2e9, 2.8e9, 0), (5.2e9, 2.0e9, 1)]
)
def test_an_engine_leaves_no_more_memory_than_stocks(tmp_path: Path, left: int, before: int, failures: int) -> None:
    phases.record_shutdown(Ended(2_000_000_000), tmp_path)  # type: ignore[arg-type]
    report = phases.shut_down(Ended(int(left), int(before)), tmp_path)  # type: ignore[arg-type]
    assert len(report.failures) == failures
    if failures:
        assert report.failures[0] == "3.20 GB more than before still allocated, stock's engine leaves 2.00 GB"


def test_lost_tokens_are_found(recorded: Path) -> None:
    for expect, message in (("identical", "late: other tokens than stock's"), ("close", "late: 69 tokens, stock 70")):
        assert traffic(ToyEngine(lose="late"), recorded, expect).failures == [message]


def test_uncounted_steps_are_found(recorded: Path) -> None:
    (failure,) = traffic(ToyEngine(uncounted=1), recorded).failures
    assert failure == (
        "counters: found {'executor': 140, 'stock prefill': 59}, expected 140 by the executor and 60 by stock layers"
    )


def test_steps_of_the_wrong_side_are_found() -> None:
    steps = Steps(10, Counter({1: 4, 8: 2}))
    assert executor_phases.check_counters({"executor": 6, "stock prefill": 3, "stock": 1}, steps) == []
    assert executor_phases.check_counters({"executor": 5, "stock prefill": 5}, steps)
    assert executor_phases.check_counters({}, steps)


def test_traffic_that_misses_a_case_is_found() -> None:
    whole = Steps(100, Counter(dict.fromkeys(scenarios.GRAPH_SIZES, 10)))
    assert outputs.traffic_coverage(whole) == []
    assert outputs.traffic_coverage(replace(whole, replays=Counter({1: 10, 2: 10, 8: 10}))) == [
        "no replay of the graph for 4 rows"
    ]
    assert outputs.traffic_coverage(replace(whole, total=45)) == [
        "fewer than 10 steps outside graphs, expected prefills and batches above the largest graph"
    ]


def test_copies_by_the_drivers_own_kernel_are_copies() -> None:
    assert operation("memcpy32_post") == operation("Memcpy DtoD (Device -> Device)") == COPY
    assert operation("Memcpy DtoH (Device -> Pinned)") != COPY
    assert operation("mhc_post_tilelang_kernel") == "mhc_post_tilelang_kernel"


def test_profiles(recorded: Path) -> None:
    check = executor_phases.check_profiles
    assert check(ToyEngine(), recorded, exact=True).failures == []  # type: ignore[arg-type]
    fewer = ToyEngine(kernels={"gemm": 8, "fused": 2})
    assert check(fewer, recorded, exact=False).failures == []  # type: ignore[arg-type]
    (failure, *_) = check(fewer, recorded, exact=True).failures  # type: ignore[arg-type]
    assert failure == "1x300: other GPU operations than stock's: fused: found 2, expected 0; norm: found 0, expected 4"
    more = ToyEngine(kernels={"gemm": 8, "norm": 4, "copy": 1})
    (failure, *_) = check(more, recorded, exact=False).failures  # type: ignore[arg-type]
    assert failure == "1x300: 13 GPU operations in 4 steps, expected at most stock's 12"


def test_second_engine(recorded: Path) -> None:
    check = executor_phases.check_again
    assert check(ToyEngine(), recorded, "identical").failures == []  # type: ignore[arg-type]
    assert check(ToyEngine(error=0.1), recorded, "identical").failures  # type: ignore[arg-type]


def test_captures() -> None:
    assert executor_phases.check_captures([8, 4, 2, 1], scenarios.GRAPH_SIZES) == []
    found = executor_phases.check_captures([8, 1], scenarios.GRAPH_SIZES)
    assert found == ["the executor captured rows [1, 8], expected [2, 4] too"]


@pytest.mark.parametrize(
    ("rows", "failures"), [([1, 8], []), ([], ["the executor captured rows [], expected [1, 8] too"])]
)
def test_timed_graphs_are_the_executors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rows: list[int], failures: list[str]
) -> None:
    """Without a capture of its own, what is timed would be stock."""
    captured: Counter[int] = Counter()

    def build(folder: Path, sizes: Sequence[int], **settings: Any) -> str:
        captured.update(rows)
        return "engine"

    monkeypatch.setattr(phases.Engine, "build", build)
    monkeypatch.setattr(phases, "built", lambda engine, captured: Report("started"))
    run = Run(argparse.Namespace(out=tmp_path, folder=tmp_path, engine="times-executor", only=""))
    settings = {"additional_config": executor_phases.EXECUTOR_OPTION}
    started: Any = phases.build_phase(run, "start", captured, (1, 8), settings)
    assert started == "engine"
    assert run.records[0]["failures"] == failures


@pytest.mark.parametrize(("only", "started"), [("refused", False), ("again,refused", True), ("", True)])
def test_the_first_engine_is_started_for_its_phases(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, only: str, started: bool
) -> None:
    names: list[str] = []
    monkeypatch.setattr(phases, "watch_steps", Steps)
    monkeypatch.setattr(phases, "watch_captures", Counter)
    monkeypatch.setattr(phases, "options", lambda args, executor, **more: {})
    monkeypatch.setattr(phases, "build_phase", lambda run, name, *rest: names.append(name))
    monkeypatch.setattr(phases.Run, "phase", lambda self, name, limit, work: names.append(name))
    phases.run_executor(
        Run(argparse.Namespace(store=tmp_path, only=only, executor_option="{}", engine_option="{}", expect="identical"))
    )
    assert ("start" in names) == started
    assert "refused" in names


@pytest.mark.parametrize(
    ("captured", "then"), [(True, ["start", "capture", "attention"]), (False, ["start", "capture"])]
)
def test_attention_is_timed_on_kernels_once_captured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, captured: bool, then: list[str]
) -> None:
    """Whatever the executor's other engines run on."""
    names: list[str] = []
    executor = SimpleNamespace(
        target=SimpleNamespace(config=SimpleNamespace(hidden_size=8, hc_mult=4)), device=torch.device("cpu")
    )
    engine = SimpleNamespace(runner=SimpleNamespace(model_state=SimpleNamespace(executor=executor)))

    def build(run: Run, name: str, watched: Any, sizes: Sequence[int], settings: dict[str, Any]) -> Any:
        names.append(name)
        option = {"decode_backend": "latency_specialized", "decode_kernels": True, "a": 1}
        assert settings["additional_config"] == option and sizes == attention_phases.ROWS and watched is not None
        return engine

    def phase(self: Run, name: str, limit: float, work: Any) -> bool:
        names.append(name)
        return captured

    monkeypatch.setattr(phases, "watch_steps", Steps)
    monkeypatch.setattr(phases, "watch_captures", Counter)
    monkeypatch.setattr(phases, "build_phase", build)
    monkeypatch.setattr(phases.Run, "phase", phase)
    phases.run_attention(Run(argparse.Namespace(expect="identical", executor_option='{"a": 1}')))
    assert names == then


def test_times(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[int] = []

    def timed(engine: Any, rows: int, context: int, steps: int) -> list[float]:
        order.append(rows)
        return [rows * 1e-3] * steps

    monkeypatch.setattr(phases, "timed_steps", timed)
    monkeypatch.setattr(phases, "timed_graph", lambda engine, rows, replays: [rows * 5e-4] * replays)
    report = phases.measure_times(None)  # type: ignore[arg-type]
    assert order == [1, 8] * phases.TIMED_BLOCKS
    steps = phases.TIMED_BLOCKS * phases.TIMED_STEPS
    assert report.data["8x300"] == {
        "step_ms": {"median": 8.0, "q1": 8.0, "q3": 8.0},
        "graph_ms": {"median": 4.0, "q1": 4.0, "q3": 4.0},
        "steps": steps,
    }
    assert report.line == "1x300: step 1.000 ms, graph 0.500 ms; 8x300: step 8.000 ms, graph 4.000 ms"


def test_expected_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    cleared: list[bool] = []
    monkeypatch.setattr(executor_phases, "options", lambda args, executor, **more: {})
    monkeypatch.setattr(executor_phases, "clear_failed_start", lambda: cleared.append(True))
    args = argparse.Namespace(folder=Path("folder"), executor_option="{}")

    def build(folder: Path, sizes: Sequence[int], **settings: Any) -> Any:
        raise ValueError("decode_backend: found 'warp_speed', expected one of auto, latency_specialized")

    monkeypatch.setattr(executor_phases.Engine, "build", build)
    assert executor_phases.check_refused(args).failures == []
    (failure,) = executor_phases.expect_failure(args, {}, ("decode_backend", "injected")).failures
    assert failure.endswith("expected a message with ['injected']")
    assert len(cleared) == 2


@pytest.mark.parametrize(("engine", "plugins"), [("stock", None), ("times-stock", None), ("executor", "")])
def test_a_plugin_in_the_wrong_place_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, engine: str, plugins: str | None
) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if plugins is not None:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
    monkeypatch.setattr(phases, "entry_points", lambda group: [])
    with pytest.raises(SystemExit, match="error: "):
        phases.check_plugin(engine)
