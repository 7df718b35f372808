"""The job that holds stock and the executor against the plain model: its whole path on a small folder, on the CPU."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specialized_decode.backbone.engine import LocalEngine
from specialized_decode.backbone.model import load_model
from specialized_decode.backbone.tokenizer import TRAINED_IDS
from tests.gpu import plain_phases, two_gpu_phases
from tests.gpu.compare import Difference
from tests.gpu.engine import Outputs, Steps
from tests.gpu.outputs import Recorded, save_outputs
from tests.gpu.plain_phases import Forced, Plain, check_plain, forced_requests, judge_plain, spread_of
from tests.gpu.ranks import Alike
from tests.gpu.scenarios import Request, prompt

SCRIPT = (Request("through", 0, 5, 40), Request("late", 3, 70, 6), Request("gone", 4, 9, 20, abort=9))


def decoded(folder: Path, request: Request, place: int, steps: int) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens and logits of a request, as an engine decodes them: a prefill, and a token a step."""
    engine = LocalEngine(load_model(folder, torch.device("cpu"), 128, 128), 1, 128, 128)
    opened = engine.caches.open(prompt(request.prompt_tokens, 1000 + place))
    logits = [engine.prefill([opened])[0]]
    while len(logits) < steps:
        opened.tokens.append(int(logits[-1][:TRAINED_IDS].argmax()))
        batch = engine.caches.batch([opened], [1])
        hidden = engine.forward(batch)
        assert isinstance(hidden, torch.Tensor)
        opened.computed += 1
        logits.append(engine.model.logits(hidden)[0])
    rows = torch.stack(logits)[:, :TRAINED_IDS]
    return [*opened.tokens[request.prompt_tokens :], int(rows[-1].argmax())], rows


@pytest.fixture(scope="module")
def truth(tiny_folder: Path) -> Outputs:
    """What decoding gives on the tiny folder; the last request ended early."""
    found = Outputs({}, {})
    for place, (request, steps) in enumerate(zip(SCRIPT, (40, 6, 4), strict=True)):
        found.tokens[request.name], found.logits[request.name] = decoded(tiny_folder, request, place, steps)
    return found


def beside(truth: Outputs, error: float, seed: int) -> Outputs:
    """The same tokens, with logits that are `error` (rms) away."""
    generator = torch.Generator().manual_seed(seed)
    noise = {name: torch.randn(one.shape, generator=generator) for name, one in truth.logits.items()}
    return Outputs(truth.tokens, {name: one + error * noise[name] for name, one in truth.logits.items()})


def run_job(folder: Path, work: Path, stock: Outputs, executor: Outputs) -> tuple[int, list[dict[str, Any]]]:
    """The job's process, in this one."""
    for name, side in (("tp2.pt", stock), ("tp2-executor.pt", executor)):
        save_outputs(work / "store" / name, Recorded([side], [], Difference()))
    paths = ["--folder", str(folder), "--out", str(work), "--store", str(work / "store")]
    status = plain_phases.main(["tp2-plain", *paths])
    events = [json.loads(line) for line in (work / "tp2-plain.events.jsonl").read_text().splitlines()]
    return status, [event for event in events if event["event"] == "end"]


@pytest.mark.parametrize(("error", "passes"), [(0.3, True), (0.5, False)])
def test_the_whole_job(
    tiny_folder: Path, truth: Outputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: float, passes: bool
) -> None:
    monkeypatch.setattr(plain_phases.ranks_module, "long_script", lambda steps: SCRIPT)
    status, ended = run_job(tiny_folder, tmp_path, beside(truth, 0.4, 1), beside(truth, error, 2))
    assert [one["phase"] for one in ended] == ["load", "plain"] and ended[0]["ok"], ended
    assert (status == 0) == ended[1]["ok"] == passes, ended[1]
    data = ended[1]["data"]
    # One causal pass gives what decoding gives, but for rounding: what is left is the noise that was added.
    assert data["stock"]["steps"] == data["executor"]["steps"] == 50
    assert data["stock"]["rms"] == pytest.approx(0.4, rel=0.1)
    assert data["executor"]["rms"] == pytest.approx(error, rel=0.1)
    assert data["ratio"] == data["executor"]["rms"] / data["stock"]["rms"]
    assert 0 <= data["own"]["rms"] < 0.2 < data["size"]
    assert f"{data['ratio']:.3f} times stock's error" in ended[1]["line"]


def test_other_tokens_are_told(tiny_folder: Path, truth: Outputs) -> None:
    """A reference that read something else would be as far from both, and would pass everything."""
    plain = Plain(tiny_folder, torch.device("cpu"), 128)
    wrong = Outputs({"through": truth.tokens["through"][::-1]}, {"through": truth.logits["through"]})
    requests = forced_requests(SCRIPT[:1], wrong, wrong)
    report = check_plain(plain, requests, wrong, wrong)
    assert report.data["ratio"] == 1
    assert len(report.failures) == 1 and "these are not the same model and tokens" in report.failures[0]


def test_rows_that_both_sides_have(truth: Outputs) -> None:
    shorter = Outputs(truth.tokens, truth.logits | {"late": truth.logits["late"][:2]})
    found = forced_requests(SCRIPT, truth, shorter)
    assert [(one.name, one.rows) for one in found] == [("through", 40), ("late", 2), ("gone", 4)]
    assert found[1] == Forced("late", prompt(70, 1001), truth.tokens["late"][:2], 2)
    with pytest.raises(ValueError, match="expected stock's"):
        forced_requests(SCRIPT, truth, Outputs({}, {}))
    nothing: Any = None
    assert "no rows of logits were compared" in check_plain(nothing, [], truth, truth).failures


def test_the_executor_may_be_a_tenth_further_than_stock() -> None:
    stock, own = Difference(steps=9, largest=2.0, rms=0.4, argmax_differs=3, gap=1.0), Difference(steps=9, rms=0.1)
    assert judge_plain(stock, replace(stock, rms=0.43), own, 2.0) == []
    assert judge_plain(stock, replace(stock, rms=0.45), own, 2.0) == [
        "the executor's logits are 0.45 (rms) from the plain model's, expected at most 1.1 times stock's 0.4"
    ]
    assert judge_plain(stock, replace(stock, gap=2.5), own, 2.0)[0].startswith("another token is largest in 3 steps")
    assert judge_plain(stock, replace(stock, broken=1), own, 2.0) and judge_plain(stock, stock, own, 0.5)
    assert judge_plain(stock, stock, replace(own, rms=0.5), 2.0) == [
        "the plain model is 0.5 (rms) from itself, expected less than stock's 0.4"
    ]
    assert len(judge_plain(replace(stock, rms=float("nan")), stock, own, 2.0)) == 3
    assert spread_of([torch.tensor([[1.0, 3.0]]), torch.tensor([[10.0, 10.0]])]) == pytest.approx(0.5**0.5)


class Playing:
    """An engine of two ranks whose traffic was played."""

    def __init__(self) -> None:
        self.alike = Alike(3, 0, 0)


def test_the_executors_logits_are_kept(truth: Outputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the comparison with stock fails."""
    played = beside(truth, 0.5, 3)
    counts = Steps(40)

    def traffic(engine: Any, script: Sequence[Request], forced: Any) -> tuple[Outputs, int]:
        assert forced["through"] == truth.tokens["through"]
        return played, 40

    class Counting(Steps):
        def __init__(self, engine: Any) -> None:
            super().__init__()

        def since(self, before: Steps) -> Steps:
            return counts

    monkeypatch.setattr(two_gpu_phases.ranks_module, "long_script", lambda steps: SCRIPT)
    monkeypatch.setattr(two_gpu_phases, "run_traffic", traffic)
    monkeypatch.setattr(two_gpu_phases, "RankSteps", Counting)
    monkeypatch.setattr(two_gpu_phases, "step_counters", dict)
    monkeypatch.setattr(two_gpu_phases, "settled_counters", lambda *args: {"executor": 40})
    monkeypatch.setattr(two_gpu_phases, "check_counters", lambda *args: [])
    monkeypatch.setattr(two_gpu_phases, "STEPS", 40)
    same = {name: Difference(steps=len(one)) for name, one in truth.logits.items()}
    save_outputs(tmp_path / "tp2.pt", Recorded([truth], [same], Difference(steps=4, rms=0.01)))
    engine: Any = Playing()
    for expect, wrong in (("close", 0), ("identical", len(SCRIPT))):
        args: Any = type("Args", (), {"expect": expect})
        assert len(two_gpu_phases.check_long(engine, args, tmp_path).failures) == wrong
        kept = plain_phases.load_outputs(tmp_path / "tp2-executor.pt").outputs[0]
        assert kept.tokens == played.tokens and torch.equal(kept.logits["late"], played.logits["late"])
