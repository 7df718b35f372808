"""Hosts and groups that answer what a test tells them to."""

from dataclasses import dataclass, field
from types import SimpleNamespace

from torch import Tensor

from specialized_decode.boundary import SideStream


@dataclass
class RecordedGroup:
    """A tensor-parallel group whose other ranks vote `others`; `votes` are this rank's."""

    others: int = 1
    size: int = 2
    rank: int = 0
    votes: list[int] = field(default_factory=list)
    process_group: None = None

    def min(self, value: int) -> int:
        self.votes.append(value)
        return min(value, self.others)

    def all_gather(self, tensor: Tensor) -> Tensor:
        raise AssertionError("nothing is gathered while an executor is built or planned with")


@dataclass
class AnsweringHost:
    """Answers what a plan may ask. `asked` are the questions in order."""

    context: bool = True
    captured: bool = True
    mode: str = "NONE"
    metadata: object | None = None
    multi_stream_threshold: int = 1024
    tp_group: RecordedGroup = field(default_factory=RecordedGroup)
    asked: list[str] = field(default_factory=list)

    def forward_context_available(self) -> bool:
        self.asked.append("context")
        return self.context

    def capturing(self) -> bool:
        self.asked.append("capturing")
        return self.captured

    def graph_mode(self) -> str:
        self.asked.append("mode")
        return self.mode

    def attention_metadata(self) -> object | None:
        self.asked.append("metadata")
        return self.metadata

    def emulated_stream(self, name: str) -> SideStream:
        raise AssertionError("a plan makes no stream")


def window_metadata(num_prefills: int = 0) -> SimpleNamespace:
    """One window cache's metadata: the one host field that a plan reads."""
    return SimpleNamespace(num_prefills=num_prefills)
