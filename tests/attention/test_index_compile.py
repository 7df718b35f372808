"""The index kernels compile for every architecture, without spills, and read weights ahead of the wait."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from specialized_decode.attention import index_tuning as tuning
from specialized_decode.attention.fused_index import projection_constants
from specialized_decode.attention.kernels.index_inputs import compress_kernel
from specialized_decode.attention.kernels.index_projection import index_projection_kernel
from specialized_decode.attention.kernels.index_scores import index_scores_kernel
from specialized_decode.attention.kernels.index_step import compress_scores_kernel
from specialized_decode.attention.kernels.top_positions import top_positions_kernel
from tests.helpers.compiled import (
    ARCHITECTURES,
    REGISTERS,
    Variant,
    assert_fits,
    compile_variant,
    program_registers,
    resources,
)

HIDDEN, HEADS, TOPK = 5120, 32, 512

PROJECTION = {"x": "*i32", "weight": "*i32", "heads": "*i32", "partial": "*fp32", "rows": "i32"}
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
COMPRESS_SCORES = {
    **COMPRESS,
    **{name: SCORES[name] for name in ("q", "at", "owner", "block_table", "table_stride")},
    **{name: SCORES[name] for name in ("scores", "scores_stride", "width", "bins", "scale")},
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
}
# Numbers that are multiples of 16 at a launch.
ALIGNED = {"ring_stride", "stride", "index_stride", "scores_stride", "out_stride"}


KEY_MAKERS = [f"compressor and scores, ratio {{}}, flags False, full False, {tuple(cut)}" for cut in tuning.INSIDE_CUTS]


def launch_of(kernel: Any, signature: dict[str, str], constants: dict[str, Any], warps: int, **options: Any) -> Variant:
    return Variant(kernel, signature, constants, warps, options, ALIGNED)


def projection_name(ratio: int, cut: tuning.ProjectionCut = tuning.PROJECTION) -> str:
    return f"projection, ratio {ratio}, {tuple(map(int, cut))}"


def variants() -> dict[str, Variant]:
    """As `FusedIndexer` launches them: sources of both ratios, and a consumer, which has no compressor."""
    found = {}
    for ratio in (2, 1, 0):
        n = 512 * ratio + HEADS
        for cut in tuning.PROJECTION_CUTS:
            launch = tuning.index_projection(n, HIDDEN, cut)
            constants = projection_constants(512 * ratio, HEADS, launch)
            variant = launch_of(index_projection_kernel, PROJECTION, constants, launch.k_warps)
            found[projection_name(ratio, cut)] = variant
        launch = tuning.index_projection(n, HIDDEN)
        unfused: dict[str, Any] = {"enable_fp_fusion": False}
        common = {"N": n, "SPLITS": launch.splits}
        if ratio:
            parts = tuning.key_parts(tuning.COMPRESS_WARPS)
            constants = {**common, "RATIO": ratio, "PARTS": parts, "EARLY": tuning.COMPRESS_EARLY}
            variant = launch_of(compress_kernel, COMPRESS, constants, tuning.COMPRESS_WARPS, **unfused)
            found[f"compressor, ratio {ratio}"] = variant
        kinds = {2: ((False, False),), 1: ((False, False), (False, True)), 0: ((True, False),)}
        for (flags, full), cut in product(kinds[ratio], tuning.CUTS + tuning.INSIDE_CUTS):
            # The compiler's limit is the architecture's: see `compiled`.
            limited = {**unfused, "maxnreg": cut}
            constants = {
                **common,
                "HEADS": HEADS,
                "PADDED": 32,
                "RATIO": max(ratio, 1),
                "KEYS": cut.keys,
                "HELD": cut.held,
                "FULL": full,
                "SPREAD": tuning.SPREAD,
            }
            name = f"ratio {ratio}, flags {flags}, full {full}, {tuple(cut)}"
            with_flags = {**constants, "FLAGS": flags}
            if cut in tuning.CUTS:
                found[f"scores, {name}"] = launch_of(index_scores_kernel, SCORES, with_flags, cut.warps, **limited)
            elif ratio:
                constants |= {"PARTS": tuning.key_parts(cut.warps), "EARLY": cut.early}
                variant = launch_of(compress_scores_kernel, COMPRESS_SCORES, constants, cut.warps, **limited)
                found[f"compressor and scores, {name}"] = variant
    for ratio, (warps, spread) in product((2, 1), zip(tuning.TOPS, tuning.SPREADS, strict=True)):
        constants = {
            "RATIO": ratio, "TOPK": TOPK, "TOPK_PADDED": TOPK, "STRIPE": 32 * warps,
            "STRIPES": tuning.CHUNK // (32 * warps), "PART": tuning.PART // (32 * warps), "ROOM": TOPK,
            "FEW": tuning.FEW_TIES, "SHORT": tuning.SHORT, "TILE": tuning.TIES, "RIVALS": tuning.RIVALS,
            "LONG": tuning.LONG, "SPREAD": spread,
        }  # fmt: skip
        name = f"best, ratio {ratio}, {warps} warps, bins over {spread}"
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


CHOSEN = tuple(
    str(tuple(map(int, cut)))
    for cut in (tuning.PROJECTION, tuning.FEW, tuning.MANY, tuning.INSIDE_FEW, tuning.INSIDE_MANY)
)


def architectures(name: str) -> tuple[int, ...]:
    """What only Hopper's benchmark tries is compiled for Hopper alone; for the last, whose code is that of its like, a
    source of ratio 2."""
    if not name.endswith(CHOSEN) and not name.startswith(("compressor, ", f"best, ratio 2, {tuning.TOP_WARPS} ")):
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


@pytest.mark.parametrize("ratio", [2, 1])
def test_compressor_fits_beside_a_projection(ratio: int, tmp_path: Path) -> None:
    """So it starts, and reads its weights, while the launch that it waits for still runs."""
    registers = 0
    for name in (projection_name(ratio), f"compressor, ratio {ratio}"):
        variant = VARIANTS[name]
        registers += program_registers(resources(compiled(variant, 90), tmp_path), variant.warps)
    assert registers <= REGISTERS


@pytest.mark.parametrize("ratio", [2, 1])
def test_weights_are_read_ahead_of_the_wait(ratio: int) -> None:
    """All of them, 16 bytes a load."""
    for cut in tuning.PROJECTION_CUTS:
        variant = VARIANTS[projection_name(ratio, cut)]
        launch = tuning.index_projection(512 * ratio + HEADS, HIDDEN, cut)
        before, behind = compiled(variant, 90).asm["ptx"].split("griddepcontrol.wait", 1)
        assert before.count("cp.async.cg.shared.global") == 2 * launch.tiles * launch.per_warp
        assert "ld.global.v4" not in before and behind.count("ld.global.v4") == launch.per_warp
        assert behind.count("mma.sync") == 2 * launch.tiles * launch.per_warp and "mma" not in before
        start = "griddepcontrol.launch_dependents"
        assert (start in before, start in behind) == (launch.early, not launch.early)
    for name in (f"compressor, ratio {ratio}", *(maker.format(ratio) for maker in KEY_MAKERS)):
        # Ahead of one of the waits, of which each kind of program has its own.
        variant, counts = VARIANTS[name], []
        early = variant.constants["EARLY"]
        for parts in (early, 0):
            changed = replace(variant, constants={**variant.constants, "EARLY": parts})
            waits = compiled(changed, 90).asm["ptx"].split("griddepcontrol.wait")[:-1]
            counts.append([ahead.count("ld.global.v4") for ahead in waits])
        more = max(held - none for held, none in zip(*counts, strict=True))
        assert more == early * 128 // variant.constants["PARTS"] * 512 * 2 // 16 // (32 * variant.warps), name
