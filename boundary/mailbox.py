"""The mailbox: where a rank receives the other ranks' contributions, in memory that they can store into.

[generations, ranks, rows, hidden] of bfloat16 bits. A contribution goes to place (generation mod 3, sender) of every
rank's mailbox; EMPTY bits mean that it has not arrived. The receiver empties a place as it reads it. Generations
count boundaries, on the device, so that graphs can be replayed in any order.
"""

import logging
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


class PeerTimeout(RuntimeError):
    """A rank's contribution did not come before the deadline."""


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
        torch.cuda.synchronize(device)
        dist.barrier(group)
        # Says who is missing even where nobody waits through `synchronize`, or the process is ended before it can.
        watch = threading.Thread(target=_watch, args=(weakref.ref(self),), daemon=True, name="boundary mailbox")
        watch.start()

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

    def raise_if_missing(self) -> None:
        """Raises PeerTimeout if a kernel gave up waiting."""
        said = self.missing()
        if said is not None:
            raise PeerTimeout(said)

    def synchronize(self) -> None:
        """Waits for the current stream's work so far. Raises PeerTimeout as soon as a kernel gives up waiting."""
        done = torch.cuda.Event()
        done.record()
        try:
            while not done.query():
                self.raise_if_missing()
                time.sleep(1e-4)
        except RuntimeError:
            self.raise_if_missing()
            raise


def _watch(mailbox: "weakref.ref[PeerMailbox]") -> None:
    """Logs who is missing, once."""
    while (alive := mailbox()) is not None:
        said = alive.missing()
        del alive
        if said is not None:
            logger.critical(said)
            return
        time.sleep(0.2)
