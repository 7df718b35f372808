"""Warm-up: everything a step can need runs once before the first capture."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from specialized_decode.runtime.executor import SpecializedDecode

logger = logging.getLogger(__name__)


def warm_up(executor: SpecializedDecode) -> None:
    """Initializes the GEMM library's handles and workspaces on every stream a step forks to.

    A library that allocates its workspace on first use on a stream would allocate it inside a capture. On a CPU there
    is nothing to initialize.
    """
    if executor.device.type != "cuda":
        return
    square = torch.ones(16, 16, dtype=torch.bfloat16, device=executor.device)
    streams = executor.side_streams()
    for stream in streams:
        with stream.fork():
            torch.mm(square, square)
            torch.mm(square, square, out_dtype=torch.float32)
            torch.mm(square.float(), square.float())
        stream.join()
    torch.cuda.synchronize(executor.device)
    logger.info("Warmed up %d side streams", len(streams))
