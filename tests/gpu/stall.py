"""A rank that stands still in the middle of a decode step: the executor's steps wait while the host sets a flag."""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from specialized_decode.boundary.kernels.fused import now_ns

# Longer than an engine may take to end, and no GPU spins for ever.
LONGEST_NS = 60_000_000_000


@triton.jit
def wait_while_set(flag, longest_ns):
    """Spins while the int64 at address `flag` is not 0, at most so long."""
    host = flag.to(tl.pointer_type(tl.int64))
    value = tl.load(host, volatile=True)
    start = now_ns()
    while value != 0:
        value = tl.load(host, volatile=True)
        value = tl.where(now_ns() - start > longest_ns, tl.zeros_like(value), value)


class Stall:
    """The flag, in memory that the GPU reads from the host, and the wait for it."""

    def __init__(self) -> None:
        self.flag = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        # Compiled now: steps are captured.
        self.wait()
        torch.cuda.synchronize()

    def wait(self) -> None:
        wait_while_set[(1,)](self.flag.data_ptr(), LONGEST_NS, num_warps=1)

    def begin(self) -> None:
        """Whoever comes to the wait stays there, until the process ends or LONGEST_NS have gone by."""
        self.flag.numpy()[0] = 1


def stall_steps(make: Any = Stall) -> None:
    """Makes the executor's steps of this process begin with a wait, from now on. Each executor has its Stall, which
    `make` makes, as `tests_stall`."""
    from specialized_decode.runtime.executor import SpecializedDecode

    build, run = SpecializedDecode.__init__, SpecializedDecode.run

    @functools.wraps(build)
    def built(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        self.tests_stall = make()

    @functools.wraps(run)
    def waiting(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.tests_stall.wait()
        return run(self, *args, **kwargs)

    SpecializedDecode.__init__ = built  # type: ignore[method-assign]
    SpecializedDecode.run = waiting  # type: ignore[method-assign]
