"""PublishingMxfp8Linear: an output projection that stores its result into the boundary's mailbox itself."""

import functools
import importlib.metadata
import warnings

import torch
from torch import Tensor

from specialized_decode.boundary import reference
from specialized_decode.boundary.all_reduce import BoundaryAllReduce
from specialized_decode.boundary.types import StoringProjection

# The FlashInfer versions that each feature of the Blackwell path was checked against. None has been, so far.
CHECKED_FLASHINFER: dict[str, tuple[str, ...]] = {"mxfp8_gemm": (), "sparse_mla": ()}


def uses_checked_flashinfer(feature: str) -> bool:
    """Whether the installed FlashInfer is one that `feature` was checked against; warns once where it is not."""
    installed = _installed_flashinfer()
    if installed is not None and installed in CHECKED_FLASHINFER[feature]:
        return True
    _warn_unchecked(feature, installed)
    return False


def _installed_flashinfer() -> str | None:
    try:
        return importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def _warn_unchecked(feature: str, installed: str | None) -> None:
    expected = ", ".join(CHECKED_FLASHINFER[feature]) or "no version yet"
    found = f"version {installed}" if installed else "none"
    warnings.warn(f"FlashInfer: found {found}, checked for {feature}: {expected}; the stock path runs", stacklevel=3)


class PublishingMxfp8Linear:
    """Computes a projection into the boundary's slot, so that the boundary finds it already sent."""

    def __init__(self, all_reduce: BoundaryAllReduce) -> None:
        self.all_reduce = all_reduce

    @classmethod
    def build(cls, all_reduce: BoundaryAllReduce, device: torch.device) -> "PublishingMxfp8Linear | None":
        """None on Blackwell where FlashInfer's GEMMs are unchecked: the projection stays on the stock path there."""
        blackwell = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 10
        return None if blackwell and not uses_checked_flashinfer("mxfp8_gemm") else cls(all_reduce)

    def __call__(self, x: Tensor, weight: Tensor | StoringProjection) -> Tensor:
        """x: [T, K] bfloat16, weight: a prepared [N, K], or the kernel that holds it -> the published slot [T, N], N
        the boundary's width."""
        target = self.all_reduce.publish_target(x.shape[0])
        if isinstance(weight, Tensor):
            target.copy_(reference.project(x, weight))
        else:
            weight(x, target)
        self.all_reduce.mark_published(target)
        return target
