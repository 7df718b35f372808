"""Every MoE kernel compiles for every architecture, without spills and within the registers that it is planned for."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from specialized_decode.moe import tuning
from specialized_decode.moe.expert_layout import projections, shard_width
from specialized_decode.moe.kernels.experts import down_kernel, up_kernel
from specialized_decode.moe.kernels.front import front_kernel
from specialized_decode.moe.kernels.route import route_kernel
from tests.helpers.compiled import ARCHITECTURES, Variant, assert_fits, compile_variant, resources

HIDDEN, EXPERTS, TOPK = 5120, 384, 6
WIDTHS = (2304, 1152, 576, 288)
# Warps of the GEMMs that a multiprocessor is to hold at once: 128 registers a thread.
WARPS_HELD = 16

FRONT = {
    "x": "*bf16", "x_pairs": "*i32", "gate": "*i32", "partial": "*fp32", "plain": "*fp16", "quads": "*fp16",
    "factors": "*fp32", "members": "*i64", "rows": "i32",
}  # fmt: skip
ROUTE = {
    "partial": "*fp32", "bias": "*fp32", "image_bias": "*fp32", "input_ids": "*i64", "ids": "*i32",
    "weights": "*fp32", "leaders": "*i32", "members": "*i64", "rows": "i32", "scaling": "fp32",
}  # fmt: skip
WEIGHTS = {"weight": "*i32", "scale": "*u16", "scale_2": "*fp32", "shared": "*i32", "shared_scale": "*u8"}
UP = {
    "leaders": "*i32", "members": "*i64", "quads": "*i32", "plain": "*i32", "factors": "*fp32", **WEIGHTS,
    "hidden": "*fp16", "shared_hidden": "*fp16", "rows": "i32", "limit": "fp32",
}  # fmt: skip
DOWN = {
    "leaders": "*i32", "members": "*i64", "hidden": "*i32", "shared_hidden": "*i32", **WEIGHTS, "routed_out": "*bf16",
    "shared_out": "*bf16", "rows": "i32",
}  # fmt: skip


@dataclass(frozen=True)
class Held(Variant):
    """programs: how many a multiprocessor's registers are to hold."""

    programs: int = 1


def variants() -> dict[str, Held]:
    """Every kernel that a launch can take at the release's sizes, each once, under the first launch that takes it."""
    found: dict[str, Held] = {}
    for rows in range(1, tuning.MAX_ROWS + 1):
        launches = {"front": _front()}
        launches |= {f"route, image {image}": _route(image, rows) for image in (0, 129264)}
        launches |= {f"up, width {width}": _up(width, rows) for width in WIDTHS}
        launches |= {f"down, width {width}": _down(width, rows) for width in WIDTHS}
        for name, variant in launches.items():
            if variant not in found.values():
                found[f"{name}, {rows} rows"] = variant
    return found


def _front() -> Held:
    cut = tuning.front(HIDDEN)
    assert cut is not None
    constants = {
        "EXPERTS": EXPERTS, "SPLITS": cut.splits, "K": HIDDEN, "PADDED": 8192, "WARPS": tuning.FRONT_WARPS,
        "BLOCKS": cut.blocks,
    }  # fmt: skip
    return Held(front_kernel, FRONT, constants, tuning.FRONT_WARPS, programs=4)


def _route(image: int, rows: int) -> Held:
    cut = tuning.front(HIDDEN)
    assert cut is not None
    constants = {
        "EXPERTS": EXPERTS, "SPLITS": cut.splits, "FIRST_IMAGE": image, "PADDED": 512, "TOPK": TOPK, "TOPK_PADDED": 8,
        "RECORDED": rows > 1,
    }  # fmt: skip
    return Held(route_kernel, ROUTE, constants, tuning.ROUTE_WARPS)


def _up(width: int, rows: int) -> Held:
    held, w13, cut = shard_width(width), projections(HIDDEN, width)[0], tuning.up(HIDDEN, rows)
    assert cut is not None
    constants = {
        "TOPK": TOPK, "K": HIDDEN, "I": width, "I_HELD": held, "N_HELD": w13.rows, "FIRST_UP": held,
        "SCALE": tuning.activation_scale(10.0), "WARPS": cut.warps, "CHUNK": cut.tiles, "SHARED_CHUNK": cut.blocks,
        "RECORDED": rows > 1,
    }  # fmt: skip
    most = {"maxnreg": tuning.REGISTERS}
    return Held(up_kernel, UP, constants, cut.warps, most, programs=WARPS_HELD // cut.warps)


def _down(width: int, rows: int) -> Held:
    w2, cut = projections(HIDDEN, width)[1], tuning.down(HIDDEN, width, rows)
    constants = {
        "TOPK": TOPK, "H": HIDDEN, "I": width, "I_HELD": shard_width(width), "N_HELD": w2.rows, "K_HELD": w2.columns,
        "SCALE": tuning.activation_scale(10.0), "WARPS": cut.warps, "CHUNK": cut.tiles, "SHARED_CHUNK": cut.blocks,
        "REPEAT": cut.repeat, "RECORDED": rows > 1,
    }  # fmt: skip
    return Held(down_kernel, DOWN, constants, cut.warps, programs=WARPS_HELD // cut.warps)


VARIANTS = variants()
COMPILED: dict[tuple[str, int], Any] = {}


def compiled(name: str, architecture: int) -> Any:
    """Once for all tests."""
    if (name, architecture) not in COMPILED:
        COMPILED[name, architecture] = compile_variant(VARIANTS[name], architecture)
    return COMPILED[name, architecture]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # So that what is checked was compiled by this compiler.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", VARIANTS)
def test_resources(name: str, architecture: int, tmp_path: Path) -> None:
    variant = VARIANTS[name]
    kernel = compiled(name, architecture)
    found = resources(kernel, tmp_path)
    # Shared memory is for sums of the warps alone.
    name = f"{name}, compute capability {architecture}"
    assert_fits(name, found, variant.warps, programs=variant.programs, shared=8192)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", [name for name in VARIANTS if name.startswith(("up", "down"))])
def test_no_weight_goes_through_shared_memory(name: str, architecture: int) -> None:
    """The second GEMM uses none; the first one's lies behind its last multiplication. Weights are read 16 bytes a lane
    and, those that need not wait for routing, ahead of the grid dependency."""
    variant = VARIANTS[name]
    kernel = compiled(name, architecture)
    ptx = kernel.asm["ptx"]
    assert "mma.sync.aligned.m16n8k16" in ptx and "ld.local" not in ptx
    assert re.search(r"ld\.global\S*\.v4", ptx)
    if variant.kernel is down_kernel:
        assert "ld.shared" not in ptx and kernel.metadata.shared == 0
        before = ptx.rsplit("griddepcontrol.wait", 1)[0].split("griddepcontrol.wait", 1)[-1]
        assert len(re.findall(r"ld\.global\S*\.v4", before)) >= variant.constants["CHUNK"]
    else:
        body = ptx[ptx.index("mma.sync") : ptx.rindex("mma.sync")]
        assert body.count("st.shared") <= ptx.count("st.shared") // 2


def test_every_step_waits_and_lets_go() -> None:
    for start in ("front", "route", "up", "down"):
        ptx = compiled(next(name for name in VARIANTS if name.startswith(start)), 90).asm["ptx"]
        assert "griddepcontrol.wait" in ptx and "griddepcontrol.launch_dependents" in ptx
