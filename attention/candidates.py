"""CandidateOverlap: what the candidate consumers derive from the source's blocks, beside the layers between them."""

from collections.abc import Callable
from contextlib import nullcontext

from torch import Tensor

from specialized_decode.attention import reference
from specialized_decode.boundary import SideStream, StepGates


class CandidateOverlap:
    """Expands the source's candidate blocks once for all consumers.

    `warmed` row counts may fork to the side stream inside a capture; others expand where they are first read. The
    expansion is a bool flag per compressed position.
    """

    def __init__(self, stream: SideStream, block_size: int) -> None:
        self.stream, self.block_size = stream, block_size
        self.warmed: set[int] = set()
        self._flags: Tensor | None = None
        self._read: tuple[Tensor, ...] = ()

    def reset(self) -> None:
        """Starts a step."""
        self._flags, self._read = None, ()

    def warm(self, rows: int) -> None:
        """Makes row count `rows` forkable; runs before each capture, outside it. The reference op compiles nothing."""
        self.warmed.add(rows)

    def fork(self, blocks: Tensor, width: int, step: StepGates) -> None:
        """After the source's indexer: expands blocks [T, count] to flags [T, width]."""
        if step.overlap_candidates and step.rows in self.warmed:
            with self.stream.fork():
                self._flags = reference.candidate_flags(blocks, self.block_size, width)

    def choose(self, choose: Callable[[], Tensor], read: tuple[Tensor, ...], step: StepGates) -> None:
        """After the source's scores: `choose` publishes blocks and returns their flags [T, width]; beside what follows
        where the step may fork. read: what it reads that this step has made."""
        forks = step.overlap_candidates and step.rows in self.warmed
        with self.stream.fork() if forks else nullcontext():
            self._flags = choose()
        # Another stream reads them: their memory serves nothing else in this step.
        self._read = read

    def join(self, blocks: Tensor, width: int) -> Tensor:
        """The flags [T, width], for a consumer: waits for the fork, or expands here."""
        self.stream.join()
        if self._flags is None:
            self._flags = reference.candidate_flags(blocks, self.block_size, width)
        return self._flags
