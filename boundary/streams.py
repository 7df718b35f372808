"""Side streams: work that runs beside the critical path, forked from it and joined before it is read."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch


class SideStream(Protocol):
    """A stream beside the current one."""

    @property
    def pending(self) -> bool:
        """Whether forked work has not been joined yet."""

    def fork(self) -> AbstractContextManager[None]:
        """Work inside runs on the side stream, after all that the current stream has been given so far."""

    def join(self) -> None:
        """The current stream waits for the forked work; nothing to do when none is pending."""


class CudaSideStream:
    """A SideStream of a CUDA device. Its waits are events, which a capture turns into graph edges."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self.pending = False

    @contextmanager
    def fork(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream())
        self.pending = True
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        if self.pending:
            self.pending = False
            torch.cuda.current_stream().wait_stream(self._stream)
