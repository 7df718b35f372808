"""The DSpark script's own logic: what is kept of a step, and that differences are found."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.gpu import drafts
from tests.gpu.drafts import (
    LENGTHS,
    Apart,
    Drafted,
    DraftsWatch,
    compare_drafted,
    coverage,
    judge_drafts,
    load_runs,
    save_runs,
)
from tests.gpu.drafts_phases import accepted_by_step, alone_in_batch, compare_runs, settings, worst

SAME = Apart(8, True, True, True, 0.0, 0.0)


def batch(names: list[str], starts: list[int], positions: list[int], prefilling: list[bool]) -> Any:
    return SimpleNamespace(
        req_ids=names,
        num_tokens=len(positions),
        positions=torch.tensor([*positions, 99]),
        query_start_loc_np=np.array(starts),
        is_prefilling_np=np.array(prefilling),
    )


def test_rejected_drafts_are_left_out_and_later_rows_replace() -> None:
    given: list[Any] = []

    def propose(*args: Any, **kwargs: Any) -> str:
        given.append((args, kwargs))
        return "drafts"

    speculator: Any = SimpleNamespace(propose=propose)
    watch = DraftsWatch(speculator)
    aux = [torch.randn(10, 40).bfloat16() for _ in range(3)]
    sampled, rejected = torch.tensor([1, 4]), torch.tensor([0, 2])
    # A prompt of three tokens, and a verification of six of which two drafts were rejected.
    step = batch(["a-x", "b-y"], [0, 3, 9], [0, 1, 2, 10, 11, 12, 13, 14, 15], [True, False])
    assert speculator.propose(step, 1, 2, 3, aux, sampled, rejected, 4, mm_inputs=None) == "drafts"
    assert given == [((step, 1, 2, 3, aux, sampled, rejected, 4), {"mm_inputs": None})]
    speculator.propose(step, 1, 2, 3, aux, sampled, rejected, dummy_run=True)
    first = watch.runs["b"].hashes[13]
    later = [one + 1 for one in aux]
    speculator.propose(batch(["b-y"], [0, 1], [13], [False]), 1, 2, 3, later, torch.tensor([1]), torch.tensor([0]))
    runs = watch.take()
    assert sorted(runs["a"].hashes) == [0, 1, 2] and runs["a"].accepted == []
    assert sorted(runs["b"].hashes) == [10, 11, 12, 13] and runs["b"].accepted == [4, 1]
    assert not torch.equal(runs["b"].hashes[13], first)
    assert torch.equal(runs["a"].values[1], torch.stack([one[1, ::20] for one in aux]))
    assert watch.take() == {}


def drafted(tokens: list[int], prompt_tokens: int = 2) -> Drafted:
    count = prompt_tokens + len(tokens)
    hashes = {at: torch.tensor([at, 7]) for at in range(count)}
    values = {at: torch.full((2, 3), 1.0 + at) for at in range(count)}
    return Drafted(tokens, [-0.5] * len(tokens), [1] * len(tokens), hashes, values)


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
    save_runs(tmp_path / "a" / "drafts.pt", {"mixed": run}, {"mixed": {"row0": SAME}}, SAME)
    runs, repeats, noise = load_runs(tmp_path / "a" / "drafts.pt")
    assert compare_runs(runs["mixed"], run)["row0"].same
    assert repeats == {"mixed": {"row0": SAME}} and noise == SAME


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
