"""Which boundary ops serve a device: the kernels where they fit, else the reference."""

import torch

from specialized_decode.boundary.types import TpGroup

# What the kernels are written for.
MIN_HIDDEN, MAX_HIDDEN = 64, 8192
MAX_RANKS = 8
STREAMS = 4


def unsupported(hidden: int, streams: int, group: TpGroup, device: torch.device) -> str | None:
    """Why the boundary kernels do not serve these widths on this device, or None."""
    if device.type != "cuda":
        return f"device: found {device.type}, expected cuda"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 9:
        return f"GPU: found compute capability {major}.{minor}, expected 9.0 or later"
    if streams != STREAMS:
        return f"hc_mult: found {streams}, expected {STREAMS}"
    if not MIN_HIDDEN <= hidden <= MAX_HIDDEN or hidden % 32:
        return f"hidden size: found {hidden}, expected a multiple of 32 from {MIN_HIDDEN} to {MAX_HIDDEN}"
    if group.size > MAX_RANKS:
        return f"tensor parallelism: found {group.size} ranks, expected at most {MAX_RANKS}"
    return unreachable(device, group.size) if group.size > 1 else None


def unreachable(device: torch.device, size: int) -> str | None:
    """Why `size` ranks on this host's GPUs cannot store into each other's memory, or None."""
    count = torch.cuda.device_count()
    if count < size:
        return f"peer access: found {count} GPUs visible to this rank, expected the {size} of the group"
    own = torch.cuda.current_device() if device.index is None else device.index
    for peer in range(size):
        if peer != own and not torch.cuda.can_device_access_peer(own, peer):
            return f"peer access: found none from GPU {own} to GPU {peer}, expected NVLink between them"
    return None
