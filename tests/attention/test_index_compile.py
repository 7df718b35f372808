"""The index kernels compile for every architecture, without spills, and read weights ahead of the wait."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from specialized_decode.attention import index_tuning as tuning
from specialized_decode.attention.fused_index import all_constants, projection_constants
from specialized_decode.attention.kernels.index_inputs import compress_kernel
from specialized_decode.attention.kernels.index_projection import index_projection_kernel, input_projections_kernel
from specialized_decode.attention.kernels.index_scores import index_scores_kernel
from specialized_decode.attention.kernels.top_positions import top_positions_kernel
from specialized_decode.attention.projection_tuning import projection
from tests.helpers.compiled import (
    ARCHITECTURES,
    REGISTERS,
    SHARED_BYTES,
    Variant,
    assert_fits,
    compile_variant,
    program_registers,
    resources,
)

HIDDEN, HEADS, TOPK = 5120, 32, 512
# Of fused_wqa_wkv.
OUTPUTS = 1792

PROJECTION = {"x": "*i32", "weight": "*i32", "heads": "*i32", "partial": "*fp32", "rows": "i32"}
INPUTS = {**PROJECTION, "weights": "*i32", "scales": "*u8", "y": "*bf16"}
COMPRESS = {
    "partial": "*fp32",
    "rows": "i32",
    "norm": "*bf16",
    "eps": "fp32",
    "positions": "*i64",
    "cos_sin": "*fp32",
    "token_to_req": "*i32",
    "ring": "*i64",
    "starts": "*i32",
    "rings": "*fp32",
    "ring_stride": "i32",
    "states": "i32",
    "slots": "*i64",
    "cache": "*u8",
    "stride": "i32",
    "log2": "i32",
    "wk": "*bf16",
    "k_norm": "*bf16",
    "k_eps": "fp32",
    "index_slots": "*i64",
    "index_cache": "*u8",
    "index_stride": "i32",
    "index_log2": "i32",
}
SCORES = {
    "q": "*bf16",
    "weights": "*fp32",
    "rows": "i32",
    "at": "i32",
    "positions": "*i64",
    "cos_sin": "*fp32",
    "owner": "*i64",
    "token_to_req": "*i32",
    "block_table": "*i32",
    "table_stride": "i32",
    "cache": "*u8",
    "stride": "i32",
    "log2": "i32",
    "flags": "*u8",
    "flags_stride": "i32",
    "scores": "*fp32",
    "scores_stride": "i32",
    "width": "i32",
    "bins": "*i32",
    "scale": "fp32",
}
TOP = {
    "scores": "*fp32",
    "scores_stride": "i32",
    "width": "i32",
    "positions": "*i64",
    "owner": "*i64",
    "bins": "*i32",
    "entries": "*i64",
    "token_to_req": "*i32",
    "block_table": "*i32",
    "table_stride": "i32",
    "log2": "i32",
    "out": "*i32",
    "out_stride": "i32",
    "slots": "*i64",
    "keys": "*i32",
    "keys_stride": "i32",
    "blocks": "*i32",
    "blocks_stride": "i32",
    "flags": "*u8",
    "flags_stride": "i32",
}
# Numbers that are multiples of 16 at a launch.
ALIGNED = {"ring_stride", "stride", "index_stride", "scores_stride", "out_stride", "flags_stride"}


def launch_of(kernel: Any, signature: dict[str, str], constants: dict[str, Any], warps: int, **options: Any) -> Variant:
    return Variant(kernel, signature, constants, warps, options, ALIGNED)


def variants() -> dict[str, Variant]:
    """As `FusedIndexer` launches them: sources of both ratios, and a consumer, which has no compressor."""
    found = {}
    wqa_wkv = projection(OUTPUTS, HIDDEN)
    for ratio in (2, 1, 0):
        n, first = 512 * ratio + HEADS, 512 * ratio
        launch, beside = tuning.index_projection(n, HIDDEN), tuning.beside(n, HIDDEN, wqa_wkv)
        assert beside is not None
        constants: dict[str, Any] = projection_constants(first, HEADS, launch)
        found[f"projection, ratio {ratio}"] = launch_of(index_projection_kernel, PROJECTION, constants, launch.k_warps)
        constants = all_constants(OUTPUTS, wqa_wkv, first, HEADS, beside)
        found[f"inputs, ratio {ratio}"] = launch_of(input_projections_kernel, INPUTS, constants, beside.k_warps)
        if ratio == 2:
            constants = all_constants(OUTPUTS, wqa_wkv, first, HEADS, beside, tuning.MAX_ROWS)
            found["inputs, many rows"] = launch_of(input_projections_kernel, INPUTS, constants, beside.k_warps)
            constants = projection_constants(first, HEADS, launch, tuning.MAX_ROWS)
            found["projection, many rows"] = launch_of(index_projection_kernel, PROJECTION, constants, launch.k_warps)
        unfused: dict[str, Any] = {"enable_fp_fusion": False}
        for splits in {launch.splits, beside.splits}:
            constants = {"N": n, "SPLITS": splits, "RATIO": ratio, "PARTS": tuning.key_parts(tuning.COMPRESS_WARPS)}
            constants |= {"EARLY": tuning.COMPRESS_EARLY}
            variant = launch_of(compress_kernel, COMPRESS, constants, tuning.COMPRESS_WARPS, **unfused)
            if ratio:
                found[f"compressor, ratio {ratio}, {splits} splits"] = variant
        flags = ratio == 0
        for cut in tuning.CUTS:
            constants = {
                "HEADS": HEADS, "PADDED": 32, "N": n, "SPLITS": beside.splits, "RATIO": max(ratio, 1), "KEYS": cut.keys,
                "HELD": cut.held, "FLAGS": flags, "SPREAD": tuning.SPREAD,
            }  # fmt: skip
            name = f"scores, ratio {ratio}, flags {flags}, {tuple(cut)}"
            # The compiler's limit is the architecture's: see `compiled`.
            found[name] = launch_of(index_scores_kernel, SCORES, constants, cut.warps, **unfused, maxnreg=cut)
    # A candidate source of the release is of ratio 1.
    for (ratio, count), (warps, spread) in product(
        ((2, 0), (1, 0), (1, 2048)), zip(tuning.TOPS, tuning.SPREADS, strict=True)
    ):
        if count and warps != tuning.TOP_WARPS:
            continue
        constants = {
            "RATIO": ratio, "TOPK": TOPK, "TOPK_PADDED": TOPK, "STRIPE": 32 * warps,
            "STRIPES": tuning.CHUNK // (32 * warps), "PART": tuning.PART // (32 * warps), "ROOM": TOPK,
            "FEW": tuning.FEW_TIES, "SHORT": tuning.SHORT, "TILE": tuning.TIES, "RIVALS": tuning.RIVALS,
            "LONG": tuning.LONG, "SPREAD": spread, "SIZE": 8 if count else 1, "COUNT": count,
            "BLOCKS": tuning.CANDIDATES,
        }  # fmt: skip
        name = f"best, ratio {ratio}, {warps} warps, bins over {spread}, {count} candidates"
        found[name] = launch_of(top_positions_kernel, TOP, constants, warps, maxnreg=tuning.top_registers(warps))
    return found


VARIANTS = variants()


def compiled(variant: Variant, architecture: int) -> Any:
    cut = variant.options.get("maxnreg")
    if isinstance(cut, tuning.ScoresCut):
        registers = tuning.scores_registers(HEADS, cut, architecture // 10)
        variant = replace(variant, options={**variant.options, "maxnreg": registers})
    return compile_variant(variant, architecture)


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own, so that what is checked was compiled by this compiler."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


def architectures(name: str) -> tuple[int, ...]:
    """What only Hopper's benchmark tries is compiled for Hopper alone; for the last, whose code is that of its like, a
    source of ratio 2."""
    if name.endswith(" 2048 candidates"):
        return ARCHITECTURES
    if name.startswith("best") and not name.startswith(f"best, ratio 2, {tuning.TOP_WARPS} "):
        return (90,)
    if name.endswith("many rows"):
        return (90,)
    return ARCHITECTURES if "ratio 2" in name else ARCHITECTURES[:-1]


LAUNCHES = [(name, one) for name in VARIANTS for one in architectures(name)]


def test_every_kernel_is_compiled_for_all() -> None:
    kernels = {VARIANTS[name].kernel for name in VARIANTS}
    assert len(kernels) == 5
    for one in ARCHITECTURES:
        assert {VARIANTS[name].kernel for name, architecture in LAUNCHES if architecture == one} == kernels


@pytest.mark.parametrize(("name", "architecture"), LAUNCHES)
def test_resources(name: str, architecture: int, tmp_path: Path) -> None:
    variant = VARIANTS[name]
    kernel = compiled(variant, architecture)
    assert_fits(f"{name}, compute capability {architecture}", resources(kernel, tmp_path), variant.warps)
    ptx = kernel.asm["ptx"]
    assert "griddepcontrol.wait" in ptx and "griddepcontrol.launch_dependents" in ptx


@pytest.mark.parametrize("ratio", [2, 1, 0])
def test_programs_of_the_input_fit_in_pairs(ratio: int, tmp_path: Path) -> None:
    """All of a launch run at once, two on a multiprocessor."""
    variant = VARIANTS[f"inputs, ratio {ratio}"]
    found = resources(compiled(variant, 90), tmp_path)
    assert 2 * program_registers(found, variant.warps) <= REGISTERS
    assert 2 * (found["SHARED"] + 1024) <= SHARED_BYTES


@pytest.mark.parametrize("ratio", [2, 1])
def test_weights_are_read_ahead_of_the_wait(ratio: int) -> None:
    """All of them, 16 bytes a load; the next launch starts when the input has been asked for."""
    launch = tuning.index_projection(512 * ratio + HEADS, HIDDEN)
    before, behind = compiled(VARIANTS[f"projection, ratio {ratio}"], 90).asm["ptx"].split("griddepcontrol.wait", 1)
    assert before.count("cp.async.cg.shared.global") == 2 * launch.per_warp
    assert "ld.global.v4" not in before and behind.count("ld.global.v4") == launch.per_warp
    assert behind.count("mma.sync") == 2 * launch.per_warp and "mma" not in before
    assert "griddepcontrol.launch_dependents" not in before
    wqa_wkv = projection(OUTPUTS, HIDDEN)
    ptx = compiled(VARIANTS[f"inputs, ratio {ratio}"], 90).asm["ptx"]
    # Either kind of program.
    for part in ptx.split("griddepcontrol.wait")[1:]:
        assert part.count("griddepcontrol.launch_dependents") == 1
        own, _ = part.split("griddepcontrol.launch_dependents")
        assert "mma" not in own and "cp.async" not in own
    assert ptx.count("cp.async.cg.shared.global") == 2 * wqa_wkv.per_warp
    # Ahead of one of the waits, of which each kind of program has its own.
    variant, counts = VARIANTS[f"compressor, ratio {ratio}, {launch.splits} splits"], []
    early = variant.constants["EARLY"]
    for parts in (early, 0):
        changed = replace(variant, constants={**variant.constants, "EARLY": parts})
        waits = compiled(changed, 90).asm["ptx"].split("griddepcontrol.wait")[:-1]
        counts.append([ahead.count("ld.global.v4") for ahead in waits])
    more = max(held - none for held, none in zip(*counts, strict=True))
    assert more == early * 128 // variant.constants["PARTS"] * 512 * 2 // 16 // (32 * variant.warps)
