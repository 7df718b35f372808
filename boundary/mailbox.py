"""The mailbox: where a rank receives the other ranks' contributions, in memory that they can store into.

[generations, ranks, rows, hidden] of bfloat16 bits. A contribution goes to place (generation mod 3, sender) of every
rank's mailbox; EMPTY bits mean that it has not arrived. The receiver empties a place as it reads it. Generations
count boundaries, on the device, so that graphs can be replayed in any order.
"""

import ctypes
import logging
import os
import select
import threading
import time
import weakref

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

logger = logging.getLogger(__name__)

GENERATIONS = 3
EMPTY = -1
# Long enough for a rank that is busy elsewhere, short enough to notice one that is gone.
DEADLINE_SECONDS = 10.0


# How long a rank whose exit may be behind a CUDA error is given to be seen gone.
EXIT_SECONDS = 2.0


class PeerLost(RuntimeError):
    """A rank's process has ended while this one still needs it."""


class PeerTimeout(PeerLost):
    """A rank's contribution did not come before the deadline."""


class Peers:
    """The other ranks' processes, all on this host as peer memory is. Building it is collective over `group`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        space = os.stat("/proc/self/ns/pid").st_ino
        processes: list[tuple[int, int]] = [(0, 0)] * group.size()
        dist.all_gather_object(processes, (os.getpid(), space), group)
        self.processes: dict[int, int] = {}
        self._ranks: dict[int, int] = {}
        self._poll = select.poll()
        for rank, (process, its_space) in enumerate(processes):
            if rank == group.rank():
                continue
            if its_space != space:
                logger.info("Rank %d lives in another PID namespace: its exit shows as a timeout", rank)
                continue
            watched = os.pidfd_open(process)
            weakref.finalize(self, os.close, watched)
            self.processes[rank] = process
            self._ranks[watched] = rank
            self._poll.register(watched, select.POLLIN)

    def gone(self, seconds: float) -> list[int]:
        """The ranks whose process has ended; waits up to `seconds` for one."""
        return sorted(self._ranks[watched] for watched, _ in self._poll.poll(seconds * 1e3))


class PeerMailbox:
    """One rank's mailbox and the addresses of all ranks'. Building it is collective over `group`."""

    def __init__(
        self, hidden: int, rows: int, group: dist.ProcessGroup, device: torch.device, deadline: float = DEADLINE_SECONDS
    ) -> None:
        self.group, self.deadline_ns = group, int(deadline * 1e9)
        self.rank, self.size = group.rank(), group.size()
        self._memory: Tensor = symm_mem.empty((GENERATIONS, self.size, rows, hidden), dtype=torch.int16, device=device)
        self._memory.fill_(EMPTY)
        handle = symm_mem.rendezvous(self._memory, group)
        self.pointers = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
        self.generations = torch.zeros(1, dtype=torch.int64, device=device)
        # Written by a kernel that gives up: flag, generation, missing rank, row. The host reads it after the error.
        self.report = torch.zeros(4, dtype=torch.int64, pin_memory=True)
        self._report = self.report.numpy()
        self.peers = Peers(group)
        torch.cuda.synchronize(device)
        dist.barrier(group)
        # Says who is missing even where nobody waits through `synchronize`, or the process is ended before it can.
        watch = threading.Thread(target=_watch, args=(weakref.ref(self),), daemon=True, name="boundary mailbox")
        watch.start()

    def __del__(self) -> None:
        """After a CUDA error the memory stays: freeing symmetric memory would end the process before it can say why."""
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._memory))

    def clear(self) -> None:
        """Empties all ranks' mailboxes after a step that published without reducing. Collective; not in a capture."""
        torch.cuda.synchronize()
        dist.barrier(self.group)
        self._memory.fill_(EMPTY)
        torch.cuda.synchronize()
        dist.barrier(self.group)

    def missing(self) -> str | None:
        """What a kernel that gave up has recorded, or None. Readable after the CUDA error that it ends with."""
        flag, generation, sender, row = self._report.tolist()
        if not flag:
            return None
        seconds = self.deadline_ns / 1e9
        return (
            f"rank {self.rank}: boundary {generation}: row {row} of rank {sender} did not come within {seconds:g} s; "
            f"expected rank {sender} alive and running the same step"
        )

    def lost(self, seconds: float = 0.0) -> str | None:
        """Whose process has ended, or None; waits up to `seconds` for one that is ending."""
        gone = self.peers.gone(seconds)
        if not gone:
            return None
        who = ", ".join(f"rank {rank} (process {self.peers.processes[rank]})" for rank in gone)
        return f"rank {self.rank}: found {who} ended, expected all {self.size} ranks alive: boundaries need every rank"

    def raise_if_missing(self) -> None:
        """Raises PeerTimeout if a kernel gave up waiting."""
        said = self.missing()
        if said is not None:
            raise PeerTimeout(said)

    def explain(self, error: RuntimeError) -> None:
        """After a CUDA error: raises what is behind it, if that is a rank. The memory of a rank that has ended may be
        gone with it; then a store to it fails at once, before any deadline."""
        self.raise_if_missing()
        said = self.lost(EXIT_SECONDS)
        if said is not None:
            raise PeerLost(said) from error

    def synchronize(self) -> None:
        """Waits for the current stream's work so far. Raises PeerTimeout as soon as a kernel gives up waiting, and
        PeerLost where work failed and a rank has ended."""
        try:
            done = torch.cuda.Event()
            done.record()
            while not done.query():
                self.raise_if_missing()
                time.sleep(1e-4)
        except PeerLost:
            raise
        except RuntimeError as error:
            self.explain(error)
            raise


def _watch(mailbox: "weakref.ref[PeerMailbox]") -> None:
    """Logs who is missing and who has ended, once each."""
    ended = False
    while (alive := mailbox()) is not None:
        said, lost = alive.missing(), None if ended else alive.lost()
        del alive
        if lost is not None:
            # Not an error by itself: at the end of a service one rank is the first to go.
            ended = True
            logger.warning(lost)
        if said is not None:
            logger.critical(said)
            return
        time.sleep(0.2)
