"""Every kernel compiles for every architecture it declares, without spills and within the registers it can have."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from specialized_decode.boundary import tuning
from specialized_decode.boundary.kernels import coefficients, fused, publish
from tests.helpers.compiled import ARCHITECTURES, Variant, assert_fits, compile_variant, resources

HIDDEN, MAX_ROWS = 5120, 384
K = 4 * HIDDEN

BOUNDARY = {
    "pending": "*bf16",
    "rows": "*bf16",
    "weights": "*fp32",
    "shared": "*bf16",
    "residual": "*bf16",
    "post": "*fp32",
    "comb": "*fp32",
    "pre": "*fp32",
    "norm": "*bf16",
    "streams_out": "*bf16",
    "x_out": "*bf16",
    "values_out": "*fp8e4nv",
    "scales_out": "*u8",
    "mailboxes": "*i64",
    "generations": "*i64",
    "report": "i64",
    "index": "i32",
    "rank": "i32",
    "eps": "fp32",
    "deadline_ns": "i64",
}
PUBLISH = {"pending": "*bf16", "mailboxes": "*i64", "generations": "*i64", "index": "i32", "rank": "i32"}
MIXES = {"pre_out": "*fp32", "post_out": "*fp32", "comb_out": "*fp32", "rms_eps": "fp32", "hc_eps": "fp32"}
WIDTHS = {"H": HIDDEN, "MAIN": tuning.parts(HIDDEN).main, "REST": tuning.parts(HIDDEN).rest}
WARPS = tuning.boundary_warps(HIDDEN, 1)
WARPS_OF_MANY = tuning.boundary_warps(HIDDEN, MAX_ROWS)


def launch_of(
    kernel: Any, signature: Mapping[str, str], constants: Mapping[str, Any], warps: int, registers: int | None = None
) -> Variant:
    options = {"num_stages": tuning.PROJECTION_STAGES, "maxnreg": registers, "enable_fp_fusion": False}
    return Variant(kernel, signature, constants, warps, options)


def boundary(
    ranks: int,
    topk: int = 0,
    *,
    published: bool = False,
    settled: bool = False,
    early: bool = True,
    full: bool = True,
    quantize: bool = False,
    hidden: int = HIDDEN,
) -> Variant:
    constants = {
        "RANKS": ranks, "TOPK": topk, "PUBLISHED": published, "SETTLED": settled, "MANY": not early,
        "FULL": full, "QUANTIZE": quantize,
    }  # fmt: skip
    warps = WARPS if early else WARPS_OF_MANY
    plain = ranks == 1 and not topk and full and not quantize
    registers = tuning.boundary_registers(hidden, 1 if early else MAX_ROWS, plain)
    main, rest = tuning.parts(hidden)
    widths = {"H": hidden, "MAIN": main, "REST": rest, "ROWS": MAX_ROWS}
    return launch_of(fused.boundary_kernel, BOUNDARY, widths | constants, warps, registers)


def mixes(k: int, rows: int) -> dict[str, Variant]:
    """The launches of `FusedCoefficients` for a projection of k columns."""
    shared = {"base": "*fp32", "scale": "*fp32", "partial": "*fp32"}
    if rows <= tuning.ONE_LAUNCH_ROWS:
        split = tuning.one_launch_split(k)
        signature = {"streams": "*bf16", "fn": "*fp32", **shared, "arrived": "*i32", **MIXES}
        constants = {"K": k, **finishing(split.splits), "COLUMNS": split.columns}
        return {"coefficients": launch_of(coefficients.coefficients_kernel, signature, constants, 4)}
    split, block = tuning.projection_split(k, rows), tuning.projection_rows(rows)
    signature = {"streams": "*bf16", "pieces": "*bf16", "partial": "*fp32", "rows": "i32"}
    constants = {
        "K": k,
        "SPLITS": split.splits,
        "COLUMNS": split.columns,
        "BLOCK_ROWS": block,
        "BLOCK_K": tuning.PROJECTION_COLUMNS,
    }
    finish = {"partial": "*fp32", "base": "*fp32", "scale": "*fp32", **MIXES}
    return {
        "projection": launch_of(coefficients.projection_kernel, signature, constants, tuning.projection_warps(rows)),
        "finish": launch_of(coefficients.finish_kernel, finish, {"K": k, **finishing(split.splits)}, 1),
    }


def finishing(splits: int) -> dict[str, int]:
    return {"SPLITS": splits, "SPLITS_PADDED": 1 << (splits - 1).bit_length(), "ITERATIONS": 20}


def variants() -> dict[str, Variant]:
    """Every constant's every value, by name."""
    found = {
        "boundary": boundary(1),
        "boundary, settled": boundary(1, settled=True),
        "boundary, many rows": boundary(1, early=False),
        "boundary, many wider rows": boundary(1, early=False, hidden=7168),
        "boundary, many rows, unfinalized": boundary(1, 6, early=False),
        "boundary, many rows, quantized": boundary(1, early=False, quantize=True),
        "boundary, many rows, residual only": boundary(1, early=False, full=False),
        "boundary, many rows, unfinalized, quantized": boundary(1, 6, early=False, quantize=True),
        "boundary, many rows, 8 ranks, unfinalized, quantized": boundary(8, 6, early=False, quantize=True),
        "boundary, settled, unfinalized, quantized": boundary(1, 6, settled=True, quantize=True),
        "boundary, settled, 2 ranks, unfinalized": boundary(2, 6, settled=True),
        "boundary, settled, 8 ranks, published, quantized": boundary(8, settled=True, published=True, quantize=True),
        "boundary, residual only": boundary(1, full=False),
        "boundary, unfinalized, quantized": boundary(1, 6, quantize=True),
        "boundary, unfinalized, residual only": boundary(1, 6, full=False),
        "boundary, 2 ranks, unfinalized": boundary(2, 6),
        "boundary, 4 ranks, quantized": boundary(4, quantize=True),
        "boundary, 4 ranks, published": boundary(4, published=True),
        "boundary, 8 ranks, unfinalized, quantized": boundary(8, 6, quantize=True),
        "boundary, 8 ranks, published, residual only": boundary(8, published=True, full=False),
        "advance": launch_of(publish.advance_kernel, {"generations": "*i64", "count": "i32"}, {}, 1),
        "mean": launch_of(coefficients.stream_mean_kernel, {"streams": "*bf16", "out": "*bf16"}, WIDTHS, WARPS),
    }
    for ranks in (2, 8):
        constants = {**WIDTHS, "ROWS": MAX_ROWS, "RANKS": ranks}
        found[f"publish, {ranks} ranks"] = launch_of(publish.publish_kernel, PUBLISH, constants, WARPS)
    for k, rows in ((K, 1), (K, 16), (K, MAX_ROWS), (HIDDEN, 1)):
        found |= {f"{name}, K {k}, {rows} rows": variant for name, variant in mixes(k, rows).items()}
    return found


VARIANTS = variants()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", VARIANTS)
def test_resources(name: str, architecture: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A cache of its own, so that what is checked was compiled by this compiler.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    variant = VARIANTS[name]
    found = resources(compile_variant(variant, architecture), tmp_path)
    assert_fits(f"{name}, compute capability {architecture}", found, variant.warps)


def test_every_value_occurs() -> None:
    used = [variant.constants for variant in VARIANTS.values() if variant.kernel is fused.boundary_kernel]
    assert {constants["RANKS"] for constants in used} == {1, 2, 4, 8}
    assert {constants["TOPK"] for constants in used} == {0, 6}
    for flag in ("PUBLISHED", "SETTLED", "MANY", "FULL", "QUANTIZE"):
        assert {constants[flag] for constants in used} == {False, True}


def test_kernels_use_pdl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dependency is waited for, and the next launch let go, in the code that the processor runs."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    kernel = compile_variant(VARIANTS["advance"], 90)
    assert "griddepcontrol.wait" in kernel.asm["ptx"] and "griddepcontrol.launch_dependents" in kernel.asm["ptx"]
