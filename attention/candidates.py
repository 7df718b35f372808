"""CandidateOverlap: what the candidate consumers derive from the source's blocks, beside the layers between them."""

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

    def reset(self) -> None:
        """Starts a step."""
        self._flags = None

    def warm(self, rows: int) -> None:
        """Makes row count `rows` forkable; runs before each capture, outside it. The reference op compiles nothing."""
        self.warmed.add(rows)

    def fork(self, blocks: Tensor, width: int, step: StepGates) -> None:
        """After the source's indexer: expands blocks [T, count] to flags [T, width]."""
        if step.overlap_candidates and step.rows in self.warmed:
            with self.stream.fork():
                self._flags = reference.candidate_flags(blocks, self.block_size, width)

    def keep(self, flags: Tensor) -> None:
        """The flags [T, width] that the source's own launch has made, on the caller's stream."""
        self._flags = flags

    def join(self, blocks: Tensor, width: int) -> Tensor:
        """The flags [T, width], for a consumer: waits for the fork, or expands here."""
        self.stream.join()
        if self._flags is None:
            self._flags = reference.candidate_flags(blocks, self.block_size, width)
        return self._flags
