"""Launches of the attention kernels."""

import torch
from torch import Tensor

from specialized_decode.attention import projection_tuning as tuning
from specialized_decode.attention.kernels.projection import projection_kernel
from specialized_decode.attention.prepared import PreparedFp8

# Rows of one launch: the multiplication's narrow side.
MAX_ROWS = 8


def project_fp8(x: Tensor, weight: PreparedFp8, groups: int = 1, launch: tuning.Projection | None = None) -> Tensor:
    """x: [T, groups * K] bfloat16, T up to 8, through a prepared [N, K] whose outputs are split over the groups ->
    [T, N] bfloat16, accumulated in float32. launch: another than `tuning.projection` chooses. Raises ValueError for
    other shapes."""
    rows, columns = x.shape
    n, k = weight.shape
    if not 0 < rows <= MAX_ROWS or columns != groups * k or x.dtype != torch.bfloat16 or not x.is_contiguous():
        raise ValueError(
            f"projection: found {x.dtype} {list(x.shape)}, strides {x.stride()}, expected contiguous bfloat16 "
            f"[1 to {MAX_ROWS}, {groups * k}]"
        )
    launch = launch or tuning.projection(n, k, groups)
    y = torch.empty(rows, n, dtype=torch.bfloat16, device=x.device)
    projection_kernel[(n // tuning.TILE // launch.program_tiles,)](
        x.view(torch.int32),
        weight.words,
        weight.scales,
        y,
        rows,
        **constants(n, k, groups, launch),
        num_warps=launch.warps,
        launch_pdl=True,
    )
    return y


def constants(n: int, k: int, groups: int, launch: tuning.Projection) -> dict[str, int]:
    """The kernel's compile-time arguments."""
    return {
        "N": n,
        "K": k,
        "GROUPS": groups,
        "TILE_WARPS": launch.tile_warps,
        "TILES": launch.tiles,
        "K_WARPS": launch.k_warps,
        "PER_WARP": launch.per_warp,
        "CHUNKS": launch.chunks,
        "STAGES": launch.stages,
        "AHEAD": launch.ahead,
        "EARLY": launch.early,
    }
