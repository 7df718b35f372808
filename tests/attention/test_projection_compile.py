"""The low-batch projection compiled for every architecture: no spills, registers within a program's."""

import re
import subprocess
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from specialized_decode.attention import tuning
from specialized_decode.attention.kernels.projection import projection_kernel

ARCHITECTURES = (90, 100, 103)
RANKS = (1, 2, 4, 8)
# [outputs, columns], groups: fused_wqa_wkv, wq_b, wo_a and wo_b of one rank.
SHAPES = [(1792, 5120, 1)]
SHAPES += [(64 * 512 // ranks, 1280, 1) for ranks in RANKS]
SHAPES += [(8 * 1024 // ranks, 4096, 8 // ranks) for ranks in RANKS]
SHAPES += [(5120, 8192 // ranks, 1) for ranks in RANKS]
SIGNATURE = {"x": "*i32", "weights": "*i32", "scales": "*u8", "y": "*bf16", "rows": "i32", "zero": "i32"}
REGISTERS = 65536


@pytest.mark.parametrize(("n", "k", "groups"), SHAPES)
def test_launch_covers_the_weight(n: int, k: int, groups: int) -> None:
    launch = tuning.projection(n, k)
    assert launch.k_warps * launch.per_warp * launch.chunks * tuning.BLOCK == k
    assert n % (tuning.TILE * launch.tile_warps) == 0 and n // groups % tuning.TILE == 0
    assert 8 <= launch.warps <= 16 and launch.per_warp <= tuning.MOST_BLOCKS


def test_widths_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match=r"found \[1800, 5120\], expected multiples of \[32, 32\]"):
        tuning.projection(1800, 5120)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("n", "k", "groups"), SHAPES)
def test_resources(
    n: int, k: int, groups: int, architecture: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    launch = tuning.projection(n, k)
    constants = {"N": n, "K": k, "GROUPS": groups, "TILE_WARPS": launch.tile_warps, "K_WARPS": launch.k_warps}
    constants |= {"PER_WARP": launch.per_warp, "CHUNKS": launch.chunks}
    names = list(projection_kernel.arg_names)
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name, kind in SIGNATURE.items() if kind[0] == "*"}
    source = GluonASTSource(
        fn=projection_kernel,
        signature={name: SIGNATURE.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=aligned,
    )
    options = {"num_warps": launch.warps, "launch_pdl": True}
    kernel = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    said = subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said)}
    assert found["STACK"] == 0 and found["LOCAL"] == 0, f"spills: {found}"
    assert found["REG"] * 32 * launch.warps <= REGISTERS, f"registers: {found}"
    # All weights of the first round are asked for before the grid dependency, and x behind it.
    ptx = kernel.asm["ptx"]
    before, behind = ptx.split("griddepcontrol.wait", 1)
    assert (
        before.count("ld.global.v4") == launch.per_warp
        and behind.count("mma.sync") == launch.per_warp * launch.chunks * 2
    )
