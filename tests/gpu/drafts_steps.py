"""Steps with drafts in the order of time: what two runs of a batch differ in first, the drafts or what came of them.

A later step's tokens follow from an earlier one's drafts, also those that are rejected: kernels that group rows by
expert round a row otherwise beside other drafts. So only the first difference tells where two runs part.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.gpu.rank_worker import row_hashes

# Where runs part: nowhere; vLLM drafted other tokens of the same inputs; the step gave other hidden states or tokens of
# the same inputs; the batches are not the same.
NOWHERE, DRAFTS, STEP, BATCH = "", "drafts", "step", "batch"


@dataclass(frozen=True)
class Step:
    """What the speculator was given after a step of T tokens of R requests, and what it drafted.

    names: of the requests; starts: [R + 1], their first tokens; positions, ids: [T], rejected drafts too; hashes:
    [T, layers + 1] of the aux hidden states, and of the hidden states that the speculator gets; yielded, rejected: [R]
    counts of tokens; drafts: [R, D].
    """

    names: list[str]
    starts: list[int]
    positions: list[int]
    ids: list[int]
    hashes: Tensor
    yielded: list[int]
    rejected: list[int]
    drafts: Tensor

    @classmethod
    def of(
        cls, batch: Any, hidden: Tensor, aux: Sequence[Tensor], sampled: Tensor, rejected: Tensor, hashes: Tensor
    ) -> "Step":
        """A step as vLLM's speculator is told of it, before it drafts. hashes: of `aux`, on the CPU."""
        count, requests = batch.num_tokens, len(batch.req_ids)
        last = row_hashes(hidden[:count].flatten(1)).cpu()
        return cls(
            # vLLM adds to a request's name.
            [name.partition("-")[0] for name in batch.req_ids],
            [int(start) for start in batch.query_start_loc_np[: requests + 1]],
            batch.positions[:count].tolist(),
            batch.input_ids[:count].tolist(),
            torch.cat((hashes, last.unsqueeze(1)), 1),
            sampled[:requests].tolist(),
            rejected[:requests].tolist(),
            torch.zeros(requests, 0),
        )

    def token(self, at: int) -> str:
        """Token `at` in words: whose it is, and what became of it."""
        row = next(row for row in range(len(self.names)) if at < self.starts[row + 1])
        kept = at < self.starts[row + 1] - self.rejected[row]
        return f"{self.names[row]} at position {self.positions[at]} ({'kept' if kept else 'rejected later'})"


@dataclass(frozen=True)
class Parting:
    """Where two runs of a batch part. where: NOWHERE, DRAFTS, STEP or BATCH; said: in words."""

    where: str = NOWHERE
    said: str = ""


def part_of_step(expected: Step, found: Step) -> Parting:
    """What differs between two runs' same step, in the order in which it comes about."""
    if (expected.names, expected.starts, expected.positions) != (found.names, found.starts, found.positions):
        return Parting(BATCH, f"requests {found.names} at {found.positions[:3]}, expected {expected.names}")
    for at, (id_, its) in enumerate(zip(expected.ids, found.ids, strict=True)):
        if id_ != its:
            # The step before had the same drafts: this token it chose.
            return Parting(STEP, f"input id of {expected.token(at)}: found {its}, expected {id_}")
    apart = expected.hashes != found.hashes
    if apart.any():
        layer = int(apart.any(0).nonzero()[0])
        tokens = apart[:, layer].nonzero().flatten().tolist()
        name = f"aux state {layer}" if layer + 1 < apart.shape[1] else "hidden state"
        of = f"{len(tokens)} of {len(apart)} tokens, first {expected.token(tokens[0])}"
        return Parting(STEP, f"{name} of {of}; all input ids are the same")
    if (expected.yielded, expected.rejected) != (found.yielded, found.rejected):
        return Parting(STEP, f"tokens by request: found {found.yielded}, expected {expected.yielded}")
    if not torch.equal(expected.drafts, found.drafts):
        row = int((expected.drafts != found.drafts).any(1).nonzero()[0])
        what = f"found {found.drafts[row].tolist()}, expected {expected.drafts[row].tolist()}"
        inputs = "input ids and all hidden states, of rejected drafts too, are the same"
        return Parting(DRAFTS, f"drafts of {expected.names[row]}: {what}; {inputs}")
    return Parting()


def part(expected: Sequence[Step], found: Sequence[Step]) -> Parting:
    """Where two runs of a batch part first."""
    for place, (one, other) in enumerate(zip(expected, found, strict=False)):
        parting = part_of_step(one, other)
        if parting.where:
            return Parting(parting.where, f"step {place}: {parting.said}")
    if len(expected) != len(found):
        return Parting(BATCH, f"{len(found)} steps, expected {len(expected)}")
    return Parting()


def by_batch(steps: Iterable[Step]) -> dict[str, list[Step]]:
    """Steps by the batch they belong to: "row" of those of row0, row1 and so on, "alone0" and so on of the others."""
    found: dict[str, list[Step]] = defaultdict(list)
    for step in steps:
        found[batch_of(step.names[0])].append(step)
    return dict(found)


def batch_of(name: str) -> str:
    """The batch that a request belongs to, by its name."""
    return "row" if name.startswith("row") else name


def partings(expected: Iterable[Step], found: Iterable[Step]) -> dict[str, Parting]:
    """Where the batches of two runs part, by `batch_of`; a batch of one side alone is one that parts."""
    one, other = by_batch(expected), by_batch(found)
    return {name: part(one.get(name, []), other.get(name, [])) for name in {**one, **other}}
