"""The sparse MLA kernels compile for every architecture, without spills, and read what they can ahead of the wait."""

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specialized_decode.attention import mla_tuning as tuning
from specialized_decode.attention.fused_mla import MAX_INSERTED
from specialized_decode.attention.kernels.index_tables import slots_kernel
from specialized_decode.attention.kernels.norm_insert import norm_insert_kernel
from specialized_decode.attention.kernels.sparse_mla import sparse_mla_kernel

ARCHITECTURES = (90, 100, 103)
WINDOW, TOPK, Q_RANK = 128, 512, 1280
REGISTERS, SHARED_BYTES = 65536, 227 * 1024

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


@dataclass(frozen=True)
class Variant:
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    options: Mapping[str, Any]


def mla(
    rows: int,
    heads: int,
    topk: int = TOPK,
    settled: bool = True,
    insert: bool = False,
    cut: tuning.SparseMla | None = None,
) -> Variant:
    """As `FusedSparseMla` launches it."""
    cut = cut or tuning.sparse_mla(rows, heads, WINDOW, topk)
    constants = {
        "GROUP": cut.group, "WINDOW": WINDOW, "TOPK": topk, "KEYS": cut.keys, "TILES": cut.tiles, "SPLITS": cut.splits,
        "SLICES": cut.slices, "SETTLED": settled, "EARLY": cut.early,
        "SPREAD": cut.spread, "MARKED": cut.marked, "INSERT": MAX_INSERTED if insert else 0,
    }  # fmt: skip
    signature = {**MLA, "partial": "*fp16"} if cut.half else MLA
    options = {"num_warps": cut.warps, "num_stages": 1, "enable_fp_fusion": not insert}
    return Variant(sparse_mla_kernel, signature, constants, options)


def variants() -> dict[str, Variant]:
    norms = {"Q": Q_RANK, "Q_PADDED": 2048}
    found = {
        "norm and insert": Variant(norm_insert_kernel, INSERT, norms, {"num_warps": 4, "enable_fp_fusion": False}),
        "unsettled": mla(1, 16, settled=False),
        "unsettled, many rows": mla(384, 16, settled=False),
    }
    for window, n in ((True, WINDOW), (False, TOPK)):
        constants = {"N": n, "WINDOW": window, "BLOCK": tuning.TABLE_BLOCK}
        signature = {**SLOTS, "source": "*i64"} if window else SLOTS
        found["window" if window else "selection"] = Variant(slots_kernel, signature, constants, {"num_warps": 4})
    # Every cut of TP4's and TP8's widths; of TP2's and TP1's, which share theirs, ends and middle.
    wanted = [(rows, 16, topk) for topk in (TOPK, 0) for rows in range(1, tuning.MLA_MAX_ROWS + 1)]
    wanted += [(rows, heads, TOPK) for heads in (32, 64) for rows in (1, 4, 8, 48, 384)]
    seen = set()
    for rows, heads, topk in wanted:
        few = rows <= MAX_INSERTED and tuning.sparse_mla(rows, heads, WINDOW, topk).inserts
        for insert in (False, True) if few else (False,):
            variant = mla(rows, heads, topk, insert=insert)
            if (key := tuple(sorted(variant.constants.items()))) not in seen:
                seen.add(key)
                found[f"{heads} heads, {rows} rows, top-k {topk}" + ", insert" * insert] = variant
    # Other threads, wider tiles, halves and splits that wait for each other, which a benchmark tries.
    for cut in tuning.candidates(8, 16, WINDOW, TOPK):
        if cut.slices in (1, 2) and (cut.half or cut.warps == 8 or cut.marked) and (cut.marked or not cut.spread):
            found[f"candidate {cut}"] = mla(8, 16, insert=cut.inserts, cut=cut)
    for rows, heads, topk in ((1, 16, TOPK), (8, 16, TOPK), (8, 16, 0), (1, 32, TOPK), (1, 64, TOPK)):
        for marked in (False, True):
            cut = tuning.sparse_mla(rows, heads, WINDOW, topk)._replace(spread=True, marked=marked)
            name = f"{heads} heads, {rows} rows, top-k {topk}, spread" + ", marked" * marked
            found[name] = mla(rows, heads, topk, insert=cut.inserts, cut=cut)
    return found


VARIANTS = variants()


def compiled(variant: Variant, architecture: int) -> Any:
    names = list(variant.kernel.arg_names)
    signature = {**variant.signature, **dict.fromkeys(variant.constants, "constexpr")}
    assert set(signature) == set(names), f"found arguments {sorted(names)}, expected {sorted(signature)}"
    # As at a launch, whose tensors and strides are aligned.
    aligned = [
        name
        for name, kind in variant.signature.items()
        if kind[0] == "*" or (name in ("stride", "window_stride", "latent_stride") and kind == "i32")
    ]
    source = ASTSource(
        fn=variant.kernel,
        signature={name: signature[name] for name in names},
        constexprs={(names.index(name),): value for name, value in variant.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {**variant.options, "launch_pdl": True}
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", VARIANTS)
def test_resources(name: str, architecture: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A cache of its own, so that what is checked was compiled by this compiler.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    variant = VARIANTS[name]
    if name.startswith("candidate") and architecture != 90:
        pytest.skip("Hopper's benchmark tries it")
    kernel = compiled(variant, architecture)
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    said = subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True).stdout
    found = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said)}
    assert found.keys() == {"REG", "STACK", "LOCAL"}, said
    threads = 32 * variant.options["num_warps"]
    table = f"{name}, compute capability {architecture}, {threads} threads: {found}, shared {kernel.metadata.shared}"
    print(table)
    assert found["STACK"] == 0 and found["LOCAL"] == 0, f"spills: {table}"
    # Registers are given to a warp in units of eight a thread.
    assert -(-found["REG"] // 8) * 8 * threads <= REGISTERS, f"registers: {table}"
    assert kernel.metadata.shared < SHARED_BYTES, f"shared memory: {table}"
    ptx = kernel.asm["ptx"]
    assert "griddepcontrol.wait" in ptx
    assert ("griddepcontrol.launch_dependents" in ptx) == variant.constants.get("EARLY", True)


def test_residency(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two programs of one tile fit on a multiprocessor, as `mla_tuning` counts on."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    for heads in (16, 32):
        kernel = compiled(mla(1, heads), 90)
        assert 2 * (kernel.metadata.shared + 1024) <= SHARED_BYTES, f"{heads} heads: {kernel.metadata.shared} bytes"


def test_records_are_read_ahead_of_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a tile's records, 16 bytes a load, before the first is converted; behind the wait the queries alone."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    ptx = compiled(mla(1, 16), 90).asm["ptx"]
    before, behind = ptx.split("griddepcontrol.wait", 1)
    first = before.index("mul.rn.bf16x2")
    # 64 keys of 36 words of four, a part of 32 padded, over 128 threads; the turn's angles are two more.
    assert before[:first].count("ld.global.v4") >= 64 * 160 // 4 // 128
    assert "ld.global" not in before[first:] and "st.shared" in before[first:]
    assert "ld.global.v4" in behind and "wgmma" in behind and "wgmma" not in before


def test_the_step_s_own_records_are_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Latents are read and records stored ahead of the wait; behind it come queries, and no record but the values'."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    before, behind = compiled(mla(1, 16, insert=True), 90).asm["ptx"].split("griddepcontrol.wait", 1)
    store = before.index("st.global")
    # The tile's old records are on their way first, and the new one's are read after they are stored.
    assert before[:store].count("ld.global.v4") >= 64 * 160 // 4 // 128
    assert before[store:].count("ld.global.v4") >= 64 * 160 // 4 // 128
    assert "cvt.rn.satfinite.e4m3x2" in before and "cvt.rn.satfinite.e4m3x2" not in behind


def test_splits_that_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They read what others left behind an acquiring load, past the first-level cache, and the last arriver's way of
    adding up is not there."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    cut = tuning.sparse_mla(8, 16, WINDOW, TOPK)._replace(spread=True)
    before, behind = compiled(mla(8, 16, cut=cut), 90).asm["ptx"].split("ld.acquire.gpu.global", 1)
    assert "atom.global.gpu.acq_rel.add" in before and "ld.global.cg" not in before
    assert "ld.acquire.gpu.global" not in behind and behind.count("st.global") <= 2
    # Sizes of the splits, and averages of a share: 32 columns of 16 heads.
    assert behind.count("ld.global.cg") >= 2 * cut.splits


def test_splits_that_wait_without_a_counter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a split leaves is stored before it looks for the others' words, and those are marked as missing again
    behind the last look."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    cut = tuning.sparse_mla(8, 16, WINDOW, TOPK)._replace(spread=True, marked=True)
    ptx = compiled(mla(8, 16, cut=cut), 90).asm["ptx"]
    assert "atom.global" not in ptx and "red.global" not in ptx and "ld.acquire" not in ptx
    first, last = ptx.index("ld.volatile.global"), ptx.rindex("ld.volatile.global")
    # Averages of 64 columns and the rotated ones, and sizes; a copy of the words, and the outputs.
    assert ptx[:first].count("st.global") >= 3 and "st.global" not in ptx[first:last]
    assert ptx[last:].count("st.global") >= 2 * cut.splits + 1
    # A look ahead of the loop, and one in it.
    assert ptx.count("ld.volatile.global") >= 4 * cut.splits


def test_unsettled_records_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    before, behind = compiled(mla(1, 16, settled=False), 90).asm["ptx"].split("griddepcontrol.wait", 1)
    assert "mul.rn.bf16x2" not in before and "mul.rn.bf16x2" in behind
