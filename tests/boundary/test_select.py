"""Every reason for which the kernels do not serve, and that there is none where they do."""

from dataclasses import dataclass

import pytest
import torch

from specialized_decode.boundary import select
from tests.helpers.step_gates import FixedGroup

HIDDEN, STREAMS = 5120, 4
GPU = torch.device("cuda", 0)


@dataclass
class Machine:
    """The GPUs that torch reports. `apart` are the pairs without peer access."""

    capability: tuple[int, int] = (9, 0)
    count: int = 8
    current: int = 0
    apart: frozenset[tuple[int, int]] = frozenset()

    def can_access(self, own: int, peer: int) -> bool:
        assert own != peer, "torch refuses the question"
        return (own, peer) not in self.apart


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: machine.capability)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: machine.count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: machine.current)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", machine.can_access)
    return machine


def group(size: int, rank: int = 0) -> FixedGroup:
    return FixedGroup(rank, [torch.zeros(1)] * (size - 1))


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (10, 3), (12, 0)])
def test_served(machine: Machine, capability: tuple[int, int], size: int) -> None:
    machine.capability = capability
    assert select.unsupported(HIDDEN, STREAMS, group(size), GPU) is None


@pytest.mark.parametrize("hidden", [64, 96, 5120, 7168, 8192])
def test_served_widths(machine: Machine, hidden: int) -> None:
    assert select.unsupported(hidden, STREAMS, group(1), GPU) is None


def test_cpu() -> None:
    """No GPU is asked about."""
    assert select.unsupported(HIDDEN, STREAMS, group(1), torch.device("cpu")) == "device: found cpu, expected cuda"


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9)])
def test_older_gpus(machine: Machine, capability: tuple[int, int]) -> None:
    machine.capability = capability
    found = f"{capability[0]}.{capability[1]}"
    expected = f"GPU: found compute capability {found}, expected 9.0 or later"
    assert select.unsupported(HIDDEN, STREAMS, group(1), GPU) == expected


@pytest.mark.parametrize("streams", [1, 2, 3, 5, 8])
def test_other_streams(machine: Machine, streams: int) -> None:
    expected = f"hc_mult: found {streams}, expected 4"
    assert select.unsupported(HIDDEN, streams, group(1), GPU) == expected


@pytest.mark.parametrize("hidden", [8224, 16384, 5104, 33, 32, 16])
def test_other_widths(machine: Machine, hidden: int) -> None:
    expected = f"hidden size: found {hidden}, expected a multiple of 32 from 64 to 8192"
    assert select.unsupported(hidden, STREAMS, group(1), GPU) == expected


def test_more_ranks(machine: Machine) -> None:
    machine.count = 16
    expected = "tensor parallelism: found 16 ranks, expected at most 8"
    assert select.unsupported(HIDDEN, STREAMS, group(16), GPU) == expected


def test_gpus_that_a_rank_cannot_see(machine: Machine) -> None:
    machine.count = 1
    expected = "peer access: found 1 GPUs visible to this rank, expected the 4 of the group"
    assert select.unsupported(HIDDEN, STREAMS, group(4), GPU) == expected
    assert select.unsupported(HIDDEN, STREAMS, group(1), GPU) is None


def test_gpus_without_peer_access(machine: Machine) -> None:
    machine.apart = frozenset({(1, 3)})
    expected = "peer access: found none from GPU 1 to GPU 3, expected NVLink between them"
    assert select.unsupported(HIDDEN, STREAMS, group(4, 1), torch.device("cuda", 1)) == expected
    assert select.unsupported(HIDDEN, STREAMS, group(4, 0), GPU) is None
    # Outside the group.
    assert select.unreachable(torch.device("cuda", 1), 2) is None


def test_a_device_without_number_is_the_current_one(machine: Machine) -> None:
    machine.current, machine.apart = 2, frozenset({(2, 0)})
    expected = "peer access: found none from GPU 2 to GPU 0, expected NVLink between them"
    assert select.unreachable(torch.device("cuda"), 4) == expected
    machine.current = 1
    assert select.unreachable(torch.device("cuda"), 4) is None
