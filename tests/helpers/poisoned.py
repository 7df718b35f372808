"""Memory that nobody wrote shows: fresh CUDA tensors hold NaN, or their type's largest integer."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def poisoned() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1, device="cuda").isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)
