"""The gates' row counts, one table per GPU family. Pure data and pure functions.

A number stands here with its measurement, or with what is missing. Until a family's kernels are measured, its row
carries the limits that the reference ops are tested at.
"""

from dataclasses import dataclass, replace

import torch

# The most rows of a step: the fused boundary's largest launch.
FUSED_MHC_MAX_ROWS = 384


@dataclass(frozen=True)
class GateRows:
    """Row counts up to which a gate is open.

    mhc_overlap: coefficients and aux means on the side stream; low_batch: low-batch GEMMs; overlap: candidate
    expansion beside the layers; engram_prefetch: Engram WKV ahead of the layers.
    """

    mhc_overlap: int
    low_batch: int
    overlap: int
    engram_prefetch: int


# What the reference ops are tested at: their times say nothing about kernels.
_UNMEASURED = GateRows(mhc_overlap=48, low_batch=8, overlap=48, engram_prefetch=48)
# Hopper's, on an H200 (docs/benchmarks.md). mhc_overlap: the coefficients cost a step of 80 sublayers less beside them
# than before them at 1, 8 and 48 rows (-34, 63, 179 against 385, 554, 686 us), more at 384 (1289 against 1082); no row
# count between was tried. low_batch: at 1 to 8 rows a layer's attention takes 0.24 to 0.37 of vLLM's time and its MoE
# 0.35 to 0.63; the MoE kernels end there, attention's at 16, and of 9 to 16 rows nothing is measured. The other two
# have no kernels behind them: those of a selection choose candidates in their own launch, whatever `overlap` says.
_HOPPER = replace(_UNMEASURED, mhc_overlap=48, low_batch=8)
GATES = {"cpu": _UNMEASURED, "hopper": _HOPPER, "blackwell": _UNMEASURED}


def gpu_family(device: torch.device) -> str:
    """cpu, hopper or blackwell. Raises ValueError for a GPU of another family."""
    if device.type == "cpu":
        return "cpu"
    major, minor = torch.cuda.get_device_capability(device)
    families = {9: "hopper", 10: "blackwell"}
    if major not in families:
        name = torch.cuda.get_device_name(device)
        raise ValueError(
            f"GPU: found {name} (compute capability {major}.{minor}), expected Hopper (9.x) or Blackwell (10.x)"
        )
    return families[major]
