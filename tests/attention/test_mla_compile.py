"""The sparse MLA kernels compile for every architecture, without spills, and read what they can ahead of the wait."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from specialized_decode.attention import mla_tuning as tuning
from specialized_decode.attention.fused_mla import MAX_INSERTED
from specialized_decode.attention.kernels.index_tables import slots_kernel
from specialized_decode.attention.kernels.norm_insert import norm_insert_kernel
from specialized_decode.attention.kernels.sparse_mla import sparse_mla_kernel
from specialized_decode.attention.mla import Settled
from tests.helpers.compiled import ARCHITECTURES, SHARED_BYTES, Variant, assert_fits, compile_variant, resources

WINDOW, TOPK, Q_RANK = 128, 512, 1280
# Multiples of 16 at a launch.
ALIGNED = {"stride", "window_stride", "latent_stride"}

MLA = {
    "q": "*bf16",
    "positions": "*i64",
    "cos_sin": "*fp32",
    "sinks": "*fp32",
    "window_cache": "*u8",
    "window_stride": "i32",
    "window_slots": "*i64",
    "cache": "*u8",
    "stride": "i32",
    "selected_slots": "*i64",
    "partial": "*fp32",
    "statistics": "*fp32",
    "arrived": "*i32",
    "out": "*bf16",
    "scale": "fp32",
    "heads": "i32",
    "window_log2": "i32",
    "log2": "i32",
    "zero": "i32",
    "latents": "*bf16",
    "latent_stride": "i32",
    "kv_norm": "*bf16",
    "eps": "fp32",
    "token_to_req": "*i32",
    "slot_mapping": "*i64",
}
INSERT = {
    "projected": "*bf16",
    "q_norm": "*bf16",
    "kv_norm": "*bf16",
    "eps": "fp32",
    "positions": "*i64",
    "cos_sin": "*fp32",
    "slot_mapping": "*i64",
    "cache": "*u8",
    "stride": "i32",
    "log2": "i32",
    "q_out": "*bf16",
}
SLOTS = {
    "source": "*i32",
    "source_stride": "i32",
    "owner": "*i64",
    "token_to_req": "*i32",
    "block_table": "*i32",
    "table_stride": "i32",
    "log2": "i32",
    "out": "*i64",
}


def launch_of(
    kernel: Any, signature: Mapping[str, str], constants: Mapping[str, Any], warps: int, **options: Any
) -> Variant:
    return Variant(kernel, signature, constants, warps, options, ALIGNED)


def mla(
    rows: int,
    heads: int,
    topk: int = TOPK,
    settled: Settled = Settled.ALL,
    insert: bool = False,
    cut: tuning.SparseMla | None = None,
) -> Variant:
    """As `FusedSparseMla` launches it."""
    cut = cut or tuning.sparse_mla(rows, heads, WINDOW, topk)
    constants = {
        "GROUP": cut.group, "WINDOW": WINDOW, "TOPK": topk, "KEYS": cut.keys, "TILES": cut.tiles, "SPLITS": cut.splits,
        "SLICES": cut.slices, "SETTLED": int(settled), "EARLY": cut.early,
        "SPREAD": cut.spread, "INSERT": MAX_INSERTED if insert else 0,
    }  # fmt: skip
    unfused = {"enable_fp_fusion": not insert}
    return launch_of(sparse_mla_kernel, MLA, constants, cut.warps, num_stages=1, **unfused)


def variants() -> dict[str, Variant]:
    norms = {"Q": Q_RANK, "Q_PADDED": 2048}
    found = {
        "norm and insert": launch_of(norm_insert_kernel, INSERT, norms, 4, enable_fp_fusion=False),
        "unsettled": mla(1, 16, settled=Settled.NOTHING),
        "unsettled, many rows": mla(384, 16, settled=Settled.NOTHING),
    }
    for window, n in ((True, WINDOW), (False, TOPK)):
        constants = {"N": n, "WINDOW": window, "BLOCK": tuning.TABLE_BLOCK}
        signature = {**SLOTS, "source": "*i64"} if window else SLOTS
        found["window" if window else "selection"] = launch_of(slots_kernel, signature, constants, 4)
    # Every cut that a step launches at TP4's and TP8's widths and at TP2's and TP1's, which share theirs. Where a layer
    # selects, the selection is unsettled in a low-batch step, whose rows may be inserted, and all in other steps.
    every = range(1, tuning.MLA_MAX_ROWS + 1)
    wanted = [(rows, heads, topk, Settled.ALL) for heads in (16, 32, 64) for topk in (TOPK, 0) for rows in every]
    wanted += [(rows, heads, TOPK, Settled.WINDOW) for heads in (16, 32, 64) for rows in every[:MAX_INSERTED]]
    wanted += [(rows, heads, TOPK, Settled.NOTHING) for heads in (32, 64) for rows in every[MAX_INSERTED:]]
    seen = set()
    for rows, heads, topk, settled in wanted:
        inserts = rows <= MAX_INSERTED and tuning.sparse_mla(rows, heads, WINDOW, topk).inserts
        way = {Settled.ALL: f"top-k {topk}", Settled.WINDOW: "selecting", Settled.NOTHING: "unsettled"}[settled]
        for insert in (False, True) if inserts and settled == Settled.ALL else (False,):
            variant = mla(rows, heads, topk, settled, insert)
            if (key := tuple(sorted(variant.constants.items()))) not in seen:
                seen.add(key)
                found[f"{heads} heads, {rows} rows, {way}" + ", insert" * insert] = variant
    # Other threads and wider tiles, which a benchmark tries.
    for cut in tuning.candidates(8, 16, WINDOW, TOPK):
        if cut.slices in (1, 2) and cut.warps == 8:
            found[f"candidate {cut}"] = mla(8, 16, insert=cut.inserts, cut=cut)
    return found


VARIANTS = variants()


def architectures(name: str) -> tuple[int, ...]:
    """Candidates are tried by Hopper's benchmark alone, and what is not settled at TP2's and TP1's widths is compiled
    for it alone, but for one row. Of the last one, whose code is that of its like, each kernel is compiled once for
    either number of rows and heads."""
    wide = name.startswith(("32 heads", "64 heads")) and " 1 rows" not in name
    if name.startswith("candidate") or (wide and name.endswith(("selecting", "unsettled"))):
        return (90,)
    few = not name[0].isdigit() or name.startswith(("16 heads, 1 rows, top-k 512", "32 heads, 67 rows, top-k 512"))
    return ARCHITECTURES if few else ARCHITECTURES[:-1]


LAUNCHES = [(name, one) for name in VARIANTS for one in architectures(name)]


@pytest.mark.parametrize(("name", "architecture"), LAUNCHES)
def test_resources(name: str, architecture: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A cache of its own, so that what is checked was compiled by this compiler.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    variant = VARIANTS[name]
    kernel = compile_variant(variant, architecture)
    assert_fits(f"{name}, compute capability {architecture}", resources(kernel, tmp_path), variant.warps)
    ptx = kernel.asm["ptx"]
    assert "griddepcontrol.wait" in ptx
    assert ("griddepcontrol.launch_dependents" in ptx) == variant.constants.get("EARLY", True)


def test_residency(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two programs of one tile fit on a multiprocessor, as `mla_tuning` counts on."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    for heads in (16, 32):
        kernel = compile_variant(mla(1, heads), 90)
        assert 2 * (kernel.metadata.shared + 1024) <= SHARED_BYTES, f"{heads} heads: {kernel.metadata.shared} bytes"


def test_records_are_read_ahead_of_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a tile's records, 16 bytes a load, before the first is converted; behind the wait the queries alone."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    ptx = compile_variant(mla(1, 16), 90).asm["ptx"]
    before, behind = ptx.split("griddepcontrol.wait", 1)
    first = before.index("mul.rn.bf16x2")
    # 64 keys of 36 words of four, a part of 32 padded, over 128 threads; the turn's angles are two more.
    assert before[:first].count("ld.global.v4") >= 64 * 160 // 4 // 128
    assert "ld.global" not in before[first:] and "st.shared" in before[first:]
    assert "ld.global.v4" in behind and "wgmma" in behind and "wgmma" not in before


def test_the_step_s_own_records_are_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Latents are read and records stored ahead of the wait; behind it come queries, and no record but the values'."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    before, behind = compile_variant(mla(1, 16, insert=True), 90).asm["ptx"].split("griddepcontrol.wait", 1)
    store = before.index("st.global")
    # The tile's old records are on their way first, and the new one's are read after they are stored.
    assert before[:store].count("ld.global.v4") >= 64 * 160 // 4 // 128
    assert before[store:].count("ld.global.v4") >= 64 * 160 // 4 // 128
    assert "cvt.rn.satfinite.e4m3x2" in before and "cvt.rn.satfinite.e4m3x2" not in behind


def test_splits_that_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They read what others left behind an acquiring load, past the first-level cache, and the last arriver's way of
    adding up is not there."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    cut = tuning.sparse_mla(8, 16, WINDOW, TOPK)
    before, behind = compile_variant(mla(8, 16, cut=cut), 90).asm["ptx"].split("ld.acquire.gpu.global", 1)
    assert "atom.global.gpu.acq_rel.add" in before and "ld.global.cg" not in before
    assert "ld.acquire.gpu.global" not in behind and behind.count("st.global") <= 2
    # Sizes of the splits, and averages of a share: 32 columns of 16 heads.
    assert behind.count("ld.global.cg") >= 2 * cut.splits


def test_unsettled_records_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    before, behind = compile_variant(mla(1, 16, settled=Settled.NOTHING), 90).asm["ptx"].split("griddepcontrol.wait", 1)
    assert "mul.rn.bf16x2" not in before and "mul.rn.bf16x2" in behind


def test_a_selection_of_the_launch_ahead_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries are read first of all; then only a program whose first tile is the window's goes on without a wait."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    ptx = compile_variant(mla(1, 16, settled=Settled.WINDOW), 90).asm["ptx"]
    queries, records, behind = ptx.split("griddepcontrol.wait")
    assert "mul.rn.bf16x2" not in queries and "mul.rn.bf16x2" in records
    assert "wgmma" in behind and "ld.global.v4" not in behind[: behind.index("wgmma")]
    # The branch around the first wait.
    assert "bra" in queries[queries.rindex("setp") :]
