"""Requests with DSpark: what comes out, how many drafts are accepted, and the aux hidden states of what stays."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.gpu.compare import NOISE_ROOM
from tests.gpu.drafts_steps import Parting, Step, batch_of
from tests.gpu.engine import Engine, run_in_turn
from tests.gpu.rank_worker import row_hashes
from tests.gpu.scenarios import prompt

DRAFTS = 5
# How often a draft at each place is accepted, given in vLLM's form; None for the real decision.
RATES: dict[str, tuple[float, ...] | None] = {
    "none": (0.0,) * DRAFTS,
    "mixed": (0.9, 0.75, 0.55, 0.4, 0.25),
    "all": (1.0,) * DRAFTS,
    "real": None,
}
# One token, the window's edge, and past the top-k.
LENGTHS, TOKENS = (1, 127, 300, 2100), 96
# Tokens of a verification step: 1, 2 and 4 requests.
GRAPH_SIZES = (6, 12, 24)
# Every so many values of an aux hidden state are kept, for a distance; the hash is of all.
KEPT = 20


@dataclass
class Drafted:
    """One request's run.

    tokens, logprobs: its output; accepted: how many tokens each verification step yielded; hashes, values: by position,
    of each aux hidden state [layers] and [layers, hidden / KEPT], of tokens that stayed.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    hashes: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)


Run = dict[str, Drafted]


@dataclass(frozen=True)
class Apart:
    """How two runs of a request differ, over the tokens that they share.

    tokens: shared ones; whole: whether those are all; accepted, aux: whether the accepted counts and the aux hidden
    states' bits are the same; logprob: the largest difference of a token's log-probability; rms: of the aux hidden
    states, relative to their own; first: what differs first.
    """

    tokens: int
    whole: bool
    accepted: bool
    aux: bool
    logprob: float
    rms: float
    first: str = field(default="", compare=False)

    @property
    def same(self) -> bool:
        return self.whole and self.accepted and self.aux and self.logprob == 0


def relative_rms(expected: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """The difference of two lists of tensors over the first's own size; 0 for empty ones."""
    if not expected:  # a prompt of one token, whose first output is another one
        return 0.0
    first, second = torch.stack(list(expected)).double(), torch.stack(list(found)).double()
    return float((first - second).square().mean().sqrt() / first.square().mean().sqrt())


def compare_drafted(expected: Drafted, found: Drafted, prompt_tokens: int) -> Apart:
    """Compares two runs of a request. Raises ValueError where a shared position has no aux hidden states."""
    pairs = list(zip(expected.tokens, found.tokens, strict=False))
    shared = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    whole = shared == len(expected.tokens) == len(found.tokens)
    # The last token is no input; that and what follows it may be computed, and is not asked for.
    positions = range(prompt_tokens + shared - 1)
    for name, run in (("expected", expected), ("found", found)):
        if missing := [position for position in positions if position not in run.hashes]:
            raise ValueError(f"{name}: no aux hidden states at positions {missing[:5]}")
    aux = all(torch.equal(expected.hashes[at], found.hashes[at]) for at in positions)
    first = first_apart(expected, found, prompt_tokens, positions, shared)
    rms = relative_rms(*([run.values[at] for at in positions] for run in (expected, found)))
    # The token at which they part has the same inputs on both sides, but is another one.
    errors = [abs(a - b) for a, b in zip(expected.logprobs[:shared], found.logprobs[:shared], strict=True)]
    return Apart(shared, whole, expected.accepted == found.accepted, aux, max(errors, default=0.0), rms, first)


def first_apart(expected: Drafted, found: Drafted, prompt_tokens: int, positions: Sequence[int], shared: int) -> str:
    """The first position with other aux hidden states, the first other token, and the first other count of tokens."""
    said = []
    for at in positions:
        layers = (expected.hashes[at] != found.hashes[at]).nonzero().flatten().tolist()
        if layers:
            one, other = (run.values[at][layers[0]].float() for run in (expected, found))
            place = int((one - other).abs().argmax())
            where = f"position {at} of a prompt of {prompt_tokens}: aux state {layers[0]}"
            values = f"found {float(other[place]):.5g}, expected {float(one[place]):.5g}"
            said.append(f"{where}: value {place * KEPT} {values}")
            break
    if shared < max(len(expected.tokens), len(found.tokens)):
        said.append(f"token {shared}: found {found.tokens[shared:][:1]}, expected {expected.tokens[shared:][:1]}")
    pairs = zip_longest(expected.accepted, found.accepted)
    for step, (count, its) in enumerate(pairs):
        if count != its:
            said.append(f"verification {step}: found {its} tokens, expected {count}")
            break
    return "; ".join(said)


class DraftsWatch:
    """Keeps what vLLM's speculator is given at each step, apart from the executor."""

    def __init__(self, speculator: Any) -> None:
        self.runs: Run = {}
        self.steps: list[Step] = []
        stock = speculator.propose

        def propose(
            input_batch: Any,
            attn: Any,
            slots: Any,
            hidden: Any,
            aux: Any,
            sampled: Any,
            rejected: Any,
            *args: Any,
            **kw: Any,
        ) -> Any:
            if kw.get("dummy_run"):
                return stock(input_batch, attn, slots, hidden, aux, sampled, rejected, *args, **kw)
            step = self.keep(input_batch, hidden, aux, sampled, rejected)
            drafts = stock(input_batch, attn, slots, hidden, aux, sampled, rejected, *args, **kw)
            # Not read back here: nothing may wait for the drafter that does not wait without the watch.
            self.steps.append(replace(step, drafts=drafts.clone()))
            return drafts

        speculator.propose = propose

    def keep(self, batch: Any, hidden: Tensor, aux: Sequence[Tensor], sampled: Tensor, rejected: Tensor) -> Step:
        """Adds one step's rows to the requests, rejected drafts' left out; returns all of it."""
        count = batch.num_tokens
        positions, starts = batch.positions[:count].tolist(), batch.query_start_loc_np
        hashes = torch.stack([row_hashes(one[:count]) for one in aux], 1).cpu()
        values = torch.stack([one[:count, ::KEPT] for one in aux], 1).cpu()
        yielded, dropped = sampled.tolist(), rejected.tolist()
        for row, name in enumerate(batch.req_ids):
            # vLLM adds to a request's name.
            run = self.runs.setdefault(name.partition("-")[0], Drafted())
            for at in range(int(starts[row]), int(starts[row + 1]) - dropped[row]):
                run.hashes[positions[at]], run.values[positions[at]] = hashes[at], values[at]
            if not batch.is_prefilling_np[row]:
                run.accepted.append(yielded[row])
        return Step.of(batch, hidden, aux, sampled, rejected, hashes)

    def take_steps(self) -> list[Step]:
        """All steps since the last call, of several batches."""
        taken, self.steps = self.steps, []
        return [replace(step, drafts=step.drafts.cpu()) for step in taken]

    def take(self) -> Run:
        """What was kept of the requests since the last call."""
        taken, self.runs = self.runs, {}
        return taken


def set_rates(sampler: Any, rates: Sequence[float] | None) -> None:
    """Sets how often drafts are accepted. sampler: vLLM's RejectionSampler of an engine with synthetic rates."""
    from vllm.v1.spec_decode.utils import unconditional_to_conditional_rates

    conditional = None if rates is None else unconditional_to_conditional_rates(list(rates))
    device = (
        sampler.tests_rates.device if hasattr(sampler, "tests_rates") else sampler.synthetic_conditional_rates.device
    )
    sampler.tests_rates = torch.tensor(conditional or [], dtype=torch.float32, device=device)
    sampler.synthetic_conditional_rates = None if conditional is None else sampler.tests_rates


def run_drafts(engine: Engine, watch: DraftsWatch, lengths: Sequence[int], first: int = 0, name: str = "row") -> Run:
    """Runs one greedy batch, whose requests come in turn. first: the index of its first request, which decides prompts
    and draws; name: what the requests' names begin with."""
    from vllm import SamplingParams

    requests = []
    watch.take()
    for index, length in enumerate(lengths, start=first):
        # Synthetic decisions draw from the request's seed and the token's position.
        sampling = SamplingParams(
            temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=0, seed=77 + index
        )
        requests.append((f"{name}{index}", {"prompt_token_ids": prompt(length, 300 + index)}, sampling))
    results = run_in_turn(engine, requests)
    runs = watch.take()
    for one, output in results.items():
        runs[one].tokens = list(output.token_ids)
        runs[one].logprobs = [
            step[token].logprob for token, step in zip(output.token_ids, output.logprobs, strict=True)
        ]
    return runs


def run_batch_and_alone(engine: Engine, watch: DraftsWatch) -> Run:
    """Runs the batch, `row0` and so on, and each of its requests with no other, `alone0` and so on."""
    runs = run_drafts(engine, watch, LENGTHS)
    for index, length in enumerate(LENGTHS):
        runs |= run_drafts(engine, watch, [length], index, "alone")
    return runs


def prompt_length(row: str) -> int:
    """Of a request by its name."""
    return LENGTHS[int(row.lstrip("rowalne"))]


def coverage(name: str, run: Run) -> list[str]:
    """What a batch with these rates should have caused and did not."""
    found = {count for one in run.values() for count in one.accepted}
    wanted = {"none": {1}, "all": {DRAFTS + 1}, "mixed": set(range(1, DRAFTS + 2))}.get(name)
    if wanted is None:
        return [] if found else ["no verification steps"]
    return [] if found == wanted else [f"steps yield {sorted(found)} tokens, expected {sorted(wanted)}"]


def judge_drafts(
    name: str,
    repeats: dict[str, Apart],
    found: dict[str, Apart],
    noise: Apart,
    expect: str,
    parted: Mapping[str, Parting] | None = None,
    known: Collection[str] = (),
) -> list[str]:
    """What is wrong with the executor's run of a batch, given stock's against itself: rows that stock repeats are
    equal, and all others within what another batch does to stock.

    parted: where its batches part from stock's; known: by what stock's own part, so that these may, and are then held
    to stock's noise.
    """
    failures = (
        [] if found.keys() == repeats.keys() else [f"requests: found {sorted(found)}, expected {sorted(repeats)}"]
    )
    for row, one in found.items():
        where = f"; {one.first}" if one.first else ""
        parting = (parted or {}).get(batch_of(row), Parting())
        if expect == "identical" and row in repeats and repeats[row].same and parting.where not in known:
            begins = f"; the batch parts in {parting.said}" if parting.said else ""
            failures += [] if one.same else [f"{row}: {one.first or asdict(one)}; expected what stock repeats{begins}"]
            continue
        # Drawn by position, whatever the tokens are.
        if RATES[name] is not None and not one.accepted:
            failures.append(f"{row}: other counts of accepted drafts than stock's{where}")
        for what in ("logprob", "rms"):
            value, most = getattr(one, what), NOISE_ROOM * getattr(noise, what)
            if not value <= most:
                failures.append(f"{row}: {what} {value:.4g}, expected at most {most:.4g}{where}")
    return failures


def known_partings(stock: Iterable[Parting]) -> frozenset[str]:
    """By what the executor's batches may part from stock's: what stock's own part by."""
    return frozenset(one.where for one in stock if one.where)


def judge_rounds(rounds: Sequence[Parting], expect: str, known: Collection[str] = ()) -> list[str]:
    """What is wrong with the executor's batches with real drafts, each where it parts from stock's: on stock's kernels
    they part by what is `known` alone, and half of them nowhere, or it is no chance of vLLM's."""
    if expect != "identical":
        return []
    failures = [f"batch {i}: {one.said}" for i, one in enumerate(rounds) if one.where and one.where not in known]
    same = sum(not one.where for one in rounds)
    if 2 * same < len(rounds):
        first = next(one.said for one in rounds if one.where)
        failures.append(f"{same} of {len(rounds)} batches are stock's, expected at least half; first: {first}")
    return failures


@dataclass(frozen=True)
class Recorded:
    """What stock did.

    runs, steps: by rates; repeats: each request's run against its second one; noise: what another batch does, over all
    rates; rounds: where its own batches part that were run again.
    """

    runs: dict[str, Run]
    steps: dict[str, list[Step]]
    repeats: dict[str, dict[str, Apart]]
    noise: Apart
    rounds: list[Parting]


def save_runs(path: Path, recorded: Recorded) -> None:
    """Saves what stock did."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(
        {
            "runs": {name: {row: vars(one) for row, one in run.items()} for name, run in recorded.runs.items()},
            "steps": {name: [vars(one) for one in steps] for name, steps in recorded.steps.items()},
            "repeats": {
                name: {row: asdict(one) for row, one in rows.items()} for name, rows in recorded.repeats.items()
            },
            "noise": asdict(recorded.noise),
            "rounds": [asdict(one) for one in recorded.rounds],
        },
        path,
    )


def load_runs(path: Path) -> Recorded:
    """What `save_runs` saved."""
    data = torch.load(path)
    return Recorded(
        {name: {row: Drafted(**one) for row, one in run.items()} for name, run in data["runs"].items()},
        {name: [Step(**one) for one in steps] for name, steps in data["steps"].items()},
        {name: {row: Apart(**one) for row, one in rows.items()} for name, rows in data["repeats"].items()},
        Apart(**data["noise"]),
        [Parting(**one) for one in data["rounds"]],
    )
