"""Every MoE kernel compiles for every architecture, without spills and within the registers that it is planned for."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

from specialized_decode.moe import tuning
from specialized_decode.moe.expert_layout import projections, shard_width
from specialized_decode.moe.kernels.experts import down_kernel, up_kernel
from specialized_decode.moe.kernels.front import front_kernel
from specialized_decode.moe.kernels.route import route_kernel

ARCHITECTURES = (90, 100, 103)
HIDDEN, EXPERTS, TOPK = 5120, 384, 6
WIDTHS = (2304, 1152, 576, 288)
REGISTERS = 65536

FRONT = {
    "x": "*bf16", "x_pairs": "*i32", "gate": "*i32", "partial": "*fp32", "plain": "*fp16", "quads": "*fp16",
    "factors": "*fp32", "rows": "i32",
}  # fmt: skip
ROUTE = {
    "partial": "*fp32", "bias": "*fp32", "image_bias": "*fp32", "input_ids": "*i64", "ids": "*i32",
    "weights": "*fp32", "record": "*i32", "arrived": "*i32", "rows": "i32", "scaling": "fp32",
}  # fmt: skip
WEIGHTS = {"weight": "*i32", "scale": "*u16", "scale_2": "*fp32", "shared": "*i32", "shared_scale": "*u8"}
UP = {
    "record": "*i32", "quads": "*i32", "plain": "*i32", "factors": "*fp32", **WEIGHTS, "hidden": "*fp16",
    "shared_hidden": "*fp16", "rows": "i32", "limit": "fp32",
}  # fmt: skip
DOWN = {
    "record": "*i32", "hidden": "*i32", "shared_hidden": "*i32", **WEIGHTS, "routed_out": "*bf16",
    "shared_out": "*bf16", "rows": "i32",
}  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """programs: how many a multiprocessor's registers are to hold."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    warps: int
    programs: int


def variants() -> dict[str, Variant]:
    cut = tuning.front(HIDDEN)
    assert cut is not None
    common = {"EXPERTS": EXPERTS, "SPLITS": cut.splits}
    columns = {"K": HIDDEN, "PADDED": 8192, "WARPS": tuning.WARPS, "BLOCKS": cut.blocks}
    found = {"front": Variant(front_kernel, FRONT, {**common, **columns}, tuning.WARPS, 4)}
    for rows in (1, 2, 5, 8):
        pairs = 1 << (rows * TOPK - 1).bit_length()
        for image in (0, 129264):
            constants = {**common, "FIRST_IMAGE": image, "PADDED": 512, "TOPK": TOPK, "TOPK_PADDED": 8, "PAIRS": pairs}
            warps = tuning.route_warps(rows, TOPK)
            found[f"route, {rows} rows, image {image}"] = Variant(route_kernel, ROUTE, constants, warps, 1)
    for width in WIDTHS:
        found[f"up, width {width}"], found[f"down, width {width}"] = _up(width), _down(width)
    return found


def _up(width: int) -> Variant:
    held, w13 = shard_width(width), projections(HIDDEN, width)[0]
    constants = {
        "TOPK": TOPK, "K": HIDDEN, "I": width, "I_HELD": held, "N_HELD": w13.rows, "FIRST_UP": held,
        "SCALE": tuning.activation_scale(10.0), "WARPS": tuning.WARPS, "CHUNK": tuning.up_chunk(HIDDEN),
    }  # fmt: skip
    return Variant(up_kernel, UP, constants, tuning.WARPS, 4)


def _down(width: int) -> Variant:
    w2, cut = projections(HIDDEN, width)[1], tuning.down(width)
    constants = {
        "H": HIDDEN, "I": width, "I_HELD": shard_width(width), "N_HELD": w2.rows, "K_HELD": w2.columns,
        "SCALE": tuning.activation_scale(10.0), "WARPS": tuning.WARPS, "CHUNK": cut.tiles,
        "SHARED_CHUNK": cut.blocks,
    }  # fmt: skip
    return Variant(down_kernel, DOWN, constants, tuning.WARPS, 3)


VARIANTS = variants()


def compiled(variant: Variant, architecture: int) -> Any:
    names = list(variant.kernel.arg_names)
    assert {*variant.signature, *variant.constants} == set(names)
    kinds = variant.signature.items()
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name, kind in kinds if kind[0] == "*"}
    source = GluonASTSource if isinstance(variant.kernel, GluonJITFunction) else ASTSource
    return triton.compile(
        source(
            fn=variant.kernel,
            signature={name: variant.signature.get(name, "constexpr") for name in names},
            constexprs={(names.index(name),): value for name, value in variant.constants.items()},
            attrs=aligned,
        ),
        target=GPUTarget("cuda", architecture, 32),
        options={"num_warps": variant.warps, "launch_pdl": True},
    )


def resources(kernel: Any, folder: Path) -> dict[str, int]:
    """What cuobjdump says that a thread takes."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    said = subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True).stdout
    found = {kind: int(value) for kind, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said)}
    assert found.keys() == {"REG", "STACK", "LOCAL"}, said
    return found


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # So that what is checked was compiled by this compiler.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", VARIANTS)
def test_resources(name: str, architecture: int, tmp_path: Path) -> None:
    variant = VARIANTS[name]
    kernel = compiled(variant, architecture)
    found = resources(kernel, tmp_path)
    table = f"{name}, compute capability {architecture}: {found}"
    assert found["STACK"] == 0 and found["LOCAL"] == 0, f"spills: {table}"
    # Registers are given to a warp in units of eight a thread.
    assert -(-found["REG"] // 8) * 8 * 32 * variant.warps * variant.programs <= REGISTERS, f"registers: {table}"
    # Sums of the warps alone, and a record's ids.
    assert kernel.metadata.shared <= 8192, f"shared memory: {kernel.metadata.shared} of {table}"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("width", WIDTHS)
def test_no_weight_goes_through_shared_memory(width: int, architecture: int) -> None:
    """The second GEMM uses none; the first one's lies behind its last multiplication. Weights are read 16 bytes a lane
    and, those that need not wait for routing, ahead of the grid dependency."""
    for name in ("up", "down"):
        kernel = compiled(VARIANTS[f"{name}, width {width}"], architecture)
        ptx = kernel.asm["ptx"]
        assert "ld.global.v4" in ptx and "mma.sync.aligned.m16n8k16" in ptx and "ld.local" not in ptx
        if name == "down":
            assert "ld.shared" not in ptx and kernel.metadata.shared == 0
            tiles = tuning.down(width).tiles
            before = ptx.rsplit("griddepcontrol.wait", 1)[0].split("griddepcontrol.wait", 1)[-1]
            assert before.count("ld.global.v4") >= tiles
        else:
            body = ptx[ptx.index("mma.sync") : ptx.rindex("mma.sync")]
            assert body.count("st.shared") <= ptx.count("st.shared") // 2


def test_every_step_waits_and_lets_go() -> None:
    for name in ("front", "route, 1 rows, image 0", "up, width 576", "down, width 576"):
        ptx = compiled(VARIANTS[name], 90).asm["ptx"]
        assert "griddepcontrol.wait" in ptx and "griddepcontrol.launch_dependents" in ptx
