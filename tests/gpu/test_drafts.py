"""The DSpark script's own logic: what is kept of a step, and that differences are found."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.gpu import drafts, drafts_phases
from tests.gpu.drafts import (
    LENGTHS,
    Apart,
    Drafted,
    DraftsWatch,
    Recorded,
    compare_drafted,
    coverage,
    judge_drafts,
    judge_rounds,
    known_partings,
    load_runs,
    save_runs,
)
from tests.gpu.drafts_phases import accepted_by_step, alone_in_batch, compare_runs, settings, worst
from tests.gpu.drafts_steps import Parting, Step, part, part_of_step, partings
from tests.gpu.engine import Steps

SAME = Apart(8, True, True, True, 0.0, 0.0)


def batch(names: list[str], starts: list[int], positions: list[int], prefilling: list[bool]) -> Any:
    return SimpleNamespace(
        req_ids=names,
        num_tokens=len(positions),
        positions=torch.tensor([*positions, 99]),
        input_ids=torch.tensor([*(100 + at for at in positions), 0]),
        query_start_loc_np=np.array(starts),
        is_prefilling_np=np.array(prefilling),
    )


def test_rejected_drafts_are_left_out_and_later_rows_replace() -> None:
    given: list[Any] = []
    drafted_ids = torch.tensor([[7, 8], [5, 6]])

    def propose(*args: Any, **kwargs: Any) -> torch.Tensor:
        given.append((args, kwargs))
        return drafted_ids

    speculator: Any = SimpleNamespace(propose=propose)
    watch = DraftsWatch(speculator)
    aux = [torch.randn(10, 40).bfloat16() for _ in range(3)]
    sampled, rejected = torch.tensor([1, 4]), torch.tensor([0, 2])
    # A prompt of three tokens, and a verification of six of which two drafts were rejected.
    step = batch(["a-x", "b-y"], [0, 3, 9], [0, 1, 2, 10, 11, 12, 13, 14, 15], [True, False])
    hidden = torch.randn(10, 4, 8).bfloat16()
    assert speculator.propose(step, 1, 2, hidden, aux, sampled, rejected, 4, mm_inputs=None) is drafted_ids
    assert given == [((step, 1, 2, hidden, aux, sampled, rejected, 4), {"mm_inputs": None})]
    speculator.propose(step, 1, 2, hidden, aux, sampled, rejected, dummy_run=True)
    (kept,) = watch.take_steps()
    # The drafter's buffer is its own.
    drafted_ids.zero_()
    first = watch.runs["b"].hashes[13]
    later = [one + 1 for one in aux]
    one, none = torch.tensor([1]), torch.tensor([0])
    speculator.propose(batch(["b-y"], [0, 1], [13], [False]), 1, 2, hidden, later, one, none)
    runs = watch.take()
    assert sorted(runs["a"].hashes) == [0, 1, 2] and runs["a"].accepted == []
    assert sorted(runs["b"].hashes) == [10, 11, 12, 13] and runs["b"].accepted == [4, 1]
    assert not torch.equal(runs["b"].hashes[13], first)
    assert torch.equal(runs["a"].values[1], torch.stack([one[1, ::20] for one in aux]))
    assert watch.take() == {}
    assert kept.names == ["a", "b"] and kept.starts == [0, 3, 9]
    assert kept.positions == [0, 1, 2, 10, 11, 12, 13, 14, 15] and kept.ids == [100 + at for at in kept.positions]
    assert kept.hashes.shape == (9, 4) and torch.equal(kept.hashes[6, :3], first)
    assert kept.yielded == [1, 4] and kept.rejected == [0, 2] and kept.drafts.tolist() == [[7, 8], [5, 6]]
    assert [step.positions for step in watch.take_steps()] == [[13]] and watch.take_steps() == []


def drafted(tokens: list[int], prompt_tokens: int = 2) -> Drafted:
    count = prompt_tokens + len(tokens)
    hashes = {at: torch.tensor([at, 7]) for at in range(count)}
    values = {at: torch.full((2, 3), 1.0 + at) for at in range(count)}
    return Drafted(tokens, [-0.5] * len(tokens), [1] * len(tokens), hashes, values)


def verified(*names: str, start: int = 40) -> Step:
    """A step that verifies two drafts of each request, the second of which is rejected."""
    names = names or ("row0", "row1")
    count = len(names)
    positions = [start + row + at for row in range(count) for at in range(3)]
    starts, hashes = [3 * row for row in range(count + 1)], torch.arange(12 * count).view(3 * count, 4)
    ids, drafts = [7 + at for at in positions], torch.arange(2 * count).view(count, 2)
    return Step(list(names), starts, positions, ids, hashes, [2] * count, [1] * count, drafts)


def test_where_a_step_parts() -> None:
    one = verified()
    assert part_of_step(one, verified()) == Parting()

    def with_hash(at: int, layer: int) -> Step:
        hashes = one.hashes.clone()
        hashes[at:, layer] += 1
        return replace(one, hashes=hashes)

    same_ids = "all input ids are the same"
    cases = [
        (with_hash(4, 1), "step", f"aux state 1 of 2 of 6 tokens, first row1 at position 42 (kept); {same_ids}"),
        (
            with_hash(5, 0),
            "step",
            f"aux state 0 of 1 of 6 tokens, first row1 at position 43 (rejected later); {same_ids}",
        ),
        (with_hash(0, 3), "step", f"hidden state of 6 of 6 tokens, first row0 at position 40 (kept); {same_ids}"),
        (
            replace(one, ids=[*one.ids[:3], 1, *one.ids[4:]]),
            "step",
            "input id of row1 at position 41 (kept): found 1, expected 48",
        ),
        (replace(one, yielded=[2, 3]), "step", "tokens by request: found [2, 3], expected [2, 2]"),
        (
            replace(one, drafts=torch.tensor([[0, 1], [2, 9]])),
            "drafts",
            "drafts of row1: found [2, 9], expected [2, 3]; input ids and all hidden states, of rejected drafts too, "
            "are the same",
        ),
        (verified("row0"), "batch", "requests ['row0'] at [40, 41, 42], expected ['row0', 'row1']"),
    ]
    for other, where, said in cases:
        assert part_of_step(one, other) == Parting(where, said)


def test_the_first_parting_counts() -> None:
    """Other drafts make the next step's rows others."""
    steps = [verified(start=40), verified(start=42), verified("alone0")]
    other_drafts = replace(steps[0], drafts=steps[0].drafts + 1)
    what_follows = replace(steps[1], ids=[1] * 6, hashes=steps[1].hashes + 1)
    found = partings(steps, [other_drafts, what_follows, verified("alone0")])
    assert found["row"].where == "drafts" and found["row"].said.startswith("step 0: drafts of row0")
    assert found["alone0"] == Parting()
    assert part(steps[:2], [steps[0], what_follows]).where == "step"
    assert part(steps, steps[:2]) == Parting("batch", "2 steps, expected 3")
    assert partings(steps, steps[:2])["alone0"].where == "batch"


def test_what_stock_does_by_itself_is_excused_and_nothing_else_is() -> None:
    noise, repeats = replace(SAME, logprob=0.1, rms=0.01), {"row0": SAME, "alone0": SAME}
    apart = {"row0": replace(SAME, whole=False, aux=False, rms=0.005), "alone0": SAME}
    drafts, step = Parting("drafts", "step 7: drafts of row1"), Parting("step", "step 7: aux state 0")
    assert known_partings([Parting()]) == frozenset()
    known = known_partings([Parting(), drafts])
    judged = lambda rows, parted: judge_drafts("real", repeats, rows, noise, "identical", parted, known)
    assert judged(apart, {"row": drafts, "alone0": Parting()}) == []
    # Within stock's noise all the same.
    assert len(judged(apart | {"row0": replace(apart["row0"], rms=0.02)}, {"row": drafts})) == 1
    (failure,) = judged(apart, {"row": step})
    assert failure.endswith("expected what stock repeats; the batch parts in step 7: aux state 0")
    # One batch's drafts excuse no other's rows.
    assert len(judged({"row0": SAME, "alone0": apart["row0"]}, {"row": drafts, "alone0": Parting()})) == 1
    same = Parting()
    assert judge_rounds([same, drafts, same, drafts], "identical", known) == []
    assert judge_rounds([same, drafts], "identical") == ["batch 1: step 7: drafts of row1"]
    assert judge_rounds([same, step], "identical", known) == ["batch 1: step 7: aux state 0"]
    assert judge_rounds([same, drafts, drafts], "identical", known) == [
        "1 of 3 batches are stock's, expected at least half; first: step 7: drafts of row1"
    ]
    assert judge_rounds([step, step], "close") == []


def test_runs_that_part_at_once_have_nothing_to_compare() -> None:
    assert compare_drafted(drafted([4, 5], 1), drafted([3, 5], 1), 1) == Apart(0, False, True, True, 0.0, 0.0)


def test_runs_are_compared_as_far_as_they_agree() -> None:
    one = drafted([4, 5, 6])
    assert compare_drafted(one, drafted([4, 5, 6]), 2).same
    other = drafted([4, 5, 7])
    assert compare_drafted(one, other, 2) == Apart(2, False, True, True, 0.0, 0.0)
    # What follows the parting has other inputs.
    other.hashes[3], other.logprobs[2] = torch.tensor([0, 0]), -9.0
    assert compare_drafted(one, other, 2) == Apart(2, False, True, True, 0.0, 0.0)
    other.hashes[2], other.values[2], other.logprobs[1] = torch.tensor([2, 8]), torch.full((2, 3), 4.0), -0.75
    found = compare_drafted(one, other, 2)
    assert (found.aux, found.logprob) == (False, 0.25) and 0.2 < found.rms < 0.3
    other.accepted = [2, 1]
    assert not compare_drafted(one, other, 2).accepted
    del other.hashes[1]
    with pytest.raises(ValueError, match=r"found: no aux hidden states at positions \[1\]"):
        compare_drafted(one, other, 2)


def test_a_request_that_ends_earlier_is_not_the_same() -> None:
    assert not compare_drafted(drafted([4, 5, 6]), drafted([4, 5]), 2).whole


def test_coverage() -> None:
    def run(*counts: int) -> dict[str, Drafted]:
        return {"row0": Drafted(accepted=list(counts))}

    assert coverage("none", run(1, 1)) == coverage("all", run(6)) == coverage("real", run(1)) == []
    assert coverage("mixed", run(1, 2, 3, 4, 5, 6)) == []
    assert coverage("mixed", run(1, 2, 4)) == ["steps yield [1, 2, 4] tokens, expected [1, 2, 3, 4, 5, 6]"]
    assert coverage("none", run(1, 2)) and coverage("all", run(5, 6)) and coverage("real", run())
    assert accepted_by_step(run(1, 6)) == 3.5


def test_rows_that_stock_repeats_are_exact() -> None:
    noise = replace(SAME, logprob=0.1, rms=0.01)
    assert judge_drafts("mixed", {"a": SAME}, {"a": SAME}, noise, "identical") == []
    for other in (replace(SAME, aux=False), replace(SAME, logprob=1e-6), replace(SAME, whole=False)):
        assert len(judge_drafts("mixed", {"a": SAME}, {"a": other}, noise, "identical")) == 1
        assert judge_drafts("mixed", {"a": SAME}, {"a": other}, noise, "close") == []
        assert judge_drafts("mixed", {"a": replace(SAME, aux=False)}, {"a": other}, noise, "identical") == []
    assert judge_drafts("mixed", {"a": SAME, "b": SAME}, {"a": SAME}, noise, "identical")


def test_other_rows_are_close() -> None:
    noise, repeats = replace(SAME, logprob=0.1, rms=0.01), {"a": SAME}
    for far in (replace(SAME, logprob=0.16), replace(SAME, rms=0.016), replace(SAME, rms=float("nan"))):
        assert len(judge_drafts("real", repeats, {"a": far}, noise, "close")) == 1
    counts = replace(SAME, accepted=False)
    assert judge_drafts("real", repeats, {"a": counts}, noise, "close") == []
    assert judge_drafts("mixed", repeats, {"a": counts}, noise, "close") == [
        "a: other counts of accepted drafts than stock's"
    ]
    assert worst([noise, replace(SAME, rms=0.5, whole=False)]) == Apart(16, False, True, True, 0.1, 0.5)


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    run = {"row0": drafted([4, 5, 6], 1)}
    steps = [verified()]
    recorded = Recorded({"mixed": run}, {"mixed": steps}, {"mixed": {"row0": SAME}}, SAME, [Parting("step", "there")])
    save_runs(tmp_path / "a" / "drafts.pt", recorded)
    found = load_runs(tmp_path / "a" / "drafts.pt")
    assert compare_runs(found.runs["mixed"], run)["row0"].same
    assert partings(steps, found.steps["mixed"]) == {"row": Parting()}
    assert found.repeats == {"mixed": {"row0": SAME}} and found.noise == SAME
    assert known_partings(found.rounds) == {"step"}


def test_settings() -> None:
    stock = settings(None)
    assert "additional_config" not in stock and stock["speculative_config"]["num_speculative_tokens"] == 5
    assert settings({"a": 1}) == stock | {"additional_config": {"a": 1}}


def test_what_differs_first_is_told() -> None:
    one, other = drafted([4, 5, 6]), drafted([4, 5, 7])
    assert compare_drafted(one, drafted([4, 5, 6]), 2).first == ""
    other.accepted = [1, 2]
    other.hashes[2], other.values[2] = torch.tensor([2, 8]), torch.tensor([[1.0] * 3, [3.0, 3.0, 4.5]])
    assert compare_drafted(one, other, 2).first == (
        "position 2 of a prompt of 2: aux state 1: value 40 found 4.5, expected 3; "
        "token 2: found [7], expected [6]; verification 1: found 2 tokens, expected 1"
    )
    repeats = {"a": SAME}
    apart = {"a": replace(SAME, whole=False, first="token 2")}
    assert judge_drafts("mixed", repeats, apart, SAME, "identical") == ["a: token 2; expected what stock repeats"]


def test_requests_run_in_the_batch_and_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def run(engine: Any, watch: Any, lengths: Any, first: int = 0, name: str = "row") -> Any:
        asked.append((list(lengths), first))
        return {f"{name}{index}": drafted([4], length) for index, length in enumerate(lengths, start=first)}

    monkeypatch.setattr(drafts, "run_drafts", run)
    nothing: Any = None
    runs = drafts.run_batch_and_alone(nothing, nothing)
    assert asked == [(list(LENGTHS), 0), *(([length], index) for index, length in enumerate(LENGTHS))]
    assert list(runs) == [f"{kind}{index}" for kind in ("row", "alone") for index in range(4)]
    assert [drafts.prompt_length(row) for row in runs] == [*LENGTHS, *LENGTHS]
    found = compare_runs(runs, alone_in_batch(runs))
    assert list(found) == ["row0", "row1", "row2", "row3"] and all(one.same for one in found.values())


class Scripted:
    """An engine whose batches were recorded, and the watch on it: every run gives the next of `batches`."""

    def __init__(self, batches: list[list[Step]]) -> None:
        self.batches, self.steps, self.rates = batches, list[Step](), list[Any]()
        self.runner = SimpleNamespace(rejection_sampler=self)

    def play(self, *args: Any, **kwargs: Any) -> dict[str, Drafted]:
        self.steps += self.batches.pop(0)
        counts = [2] * 12 if self.rates[-1] is None else [1, 2, 3, 4, 5, 6]
        return {
            f"{kind}{row}": replace(drafted([4], length), accepted=counts)
            for kind in ("row", "alone")
            for row, length in enumerate(LENGTHS)
        }

    def take_steps(self) -> list[Step]:
        taken, self.steps = self.steps, []
        return taken


def test_stock_and_the_executor_run_the_real_batch_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stock's batches and the executor's part by is told, and decides."""
    monkeypatch.setattr(drafts_phases, "run_batch_and_alone", lambda engine, watch: engine.play())
    monkeypatch.setattr(drafts_phases, "run_drafts", lambda engine, watch, lengths: engine.play())
    monkeypatch.setattr(drafts_phases, "set_rates", lambda sampler, rates: sampler.rates.append(rates))
    monkeypatch.setattr(drafts_phases, "coverage", lambda name, run: [])
    monkeypatch.setattr(drafts_phases, "step_counters", dict)
    monkeypatch.setattr(drafts_phases, "settled_counters", lambda *args: {})
    batch, alone = [verified(), verified(start=42)], [verified("alone0")]
    other_drafts = [replace(batch[0], drafts=batch[0].drafts + 1), verified(start=42)]
    other_step = [batch[0], replace(batch[1], hashes=batch[1].hashes + 1)]

    stock: Any = Scripted([[*batch, *alone]] * 8 + [batch] * 19 + [other_drafts])
    report = drafts_phases.record_drafts(stock, stock, tmp_path)
    assert report.failures == [] and stock.batches == [] and stock.rates[-1] is None
    assert "real again: 19 of 20 batches repeat, first: step 0: drafts of row0" in report.line
    assert [one["where"] for one in report.data["rounds"]] == [""] * 19 + ["drafts"]

    def executor(again: list[list[Step]], real: list[Step]) -> Any:
        engine: Any = Scripted([[*batch, *alone]] * 3 + [[*real, *alone], *again])
        args: Any = SimpleNamespace(expect="identical")
        report = drafts_phases.check_drafts(engine, engine, args, Steps(), tmp_path)
        assert engine.batches == []
        return report

    report = executor([batch] * 19 + [other_drafts], other_drafts)
    assert report.failures == [] and "real: row parts at drafts: step 0: drafts of row0" in report.line
    assert report.data["parted"]["real"].keys() == {"row"} and report.data["parted"]["all"] == {}
    (failure,) = executor([batch] * 19 + [other_step], batch).failures
    assert failure.startswith("real again: batch 19: step 1: aux state 0 of 6 of 6 tokens, first row0 at position 42")
    (failure,) = executor([batch] * 9 + [other_drafts] * 11, batch).failures
    assert failure.startswith("real again: 9 of 20 batches are stock's, expected at least half")
