"""The low-batch projection compiled for every architecture: no spills, and room for the next launch beside it."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from specialized_decode.attention import projection_tuning as tuning
from specialized_decode.attention.fused import constants
from specialized_decode.attention.kernels.projection import projection_kernel
from tests.attention.shapes import RANKS, SHAPES
from tests.helpers.compiled import (
    ARCHITECTURES,
    REGISTERS,
    SHARED_BYTES,
    TOOLS,
    Variant,
    assert_fits,
    compile_variant,
    machine_code,
    program_registers,
    resources,
)

SIGNATURE = {
    "x": "*i32",
    "weights": "*i32",
    "scales": "*u8",
    "y": "*bf16",
    "rows": "i32",
    "norm": "*i32",
    "eps": "fp32",
}


@pytest.mark.parametrize(("n", "k", "groups"), SHAPES)
def test_launches_cover_the_weight(n: int, k: int, groups: int) -> None:
    assert tuning.candidates(n, k, groups)[0] == tuning.projection(n, k, groups)
    for launch in tuning.candidates(n, k, groups):
        assert launch.k_warps * launch.per_warp * launch.chunks * tuning.BLOCK == k
        assert n // groups % (tuning.TILE * launch.program_tiles) == 0
        programs = n // tuning.TILE // launch.program_tiles
        most = tuning.MOST_BYTES if 2 * programs > tuning.MULTIPROCESSORS else tuning.MOST_BYTES_ALONE
        assert 4 <= launch.warps <= tuning.MOST_WARPS and launch.bytes <= most
        assert not (launch.early and launch.late)
        assert 1 <= launch.stages <= launch.per_warp and 1 <= launch.ahead <= launch.per_warp
        # Ahead of a wait alone may weights wait for others.
        assert launch.depth == 0 or (launch.early and launch.chunks == 1 and launch.depth < launch.stages)


def test_launches_at_four_ranks() -> None:
    turned, early = (1, 1, 16, 10, 1, 2, 10, False, False, 0, True), (True, False, 1, False)
    assert tuning.projection(1792, 5120) == turned
    assert tuning.projection(8192, 1280) == (1, 2, 8, 5, 1, 5, 5, *early)
    assert tuning.projection(2048, 4096, 2) == (1, 1, 16, 8, 1, 5, 8, *early)
    assert tuning.projection(5120, 2048) == (1, 1, 16, 4, 1, 4, 4, *early)
    assert tuning.projection(5120, 8192) == (1, 1, 16, 8, 2, 2, 5, True, False, 0, False)
    assert tuning.waiting(tuning.projection(8192, 1280)) == (1, 2, 8, 5, 1, 2, 5, False, False, 0, False)


def test_widths_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match=r"found \[1800, 5120\], expected multiples of \[32, 32\]"):
        tuning.projection(1800, 5120)
    with pytest.raises(ValueError, match=r"found \[96, 64\], expected multiples of \[64, 32\]"):
        tuning.projection(96, 64, 2)
    with pytest.raises(ValueError, match=r"found \[32, 8224\], expected 32 times a product of small primes"):
        tuning.projection(32, 8224)


def compiled(
    n: int, k: int, groups: int, launch: tuning.Projection, architecture: int, stride: int | None = None
) -> Any:
    """The kernel of a launch. stride: of an input that it norms."""
    values = constants(n, k, groups, launch, stride, stride is not None)
    options = {"maxnreg": tuning.registers(launch)}
    return compile_variant(Variant(projection_kernel, SIGNATURE, values, launch.warps, options), architecture)


def assert_room(name: str, kernel: Any, launch: tuning.Projection, folder: Path) -> None:
    """No spills, and room for the next launch beside it."""
    found = resources(kernel, folder)
    assert_fits(name, found, launch.warps, registers=tuning.MOST_REGISTERS, shared=tuning.MOST_BYTES)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("n", "k", "groups"), SHAPES)
def test_resources(
    n: int, k: int, groups: int, architecture: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    launch = tuning.projection(n, k, groups)
    kernel = compiled(n, k, groups, launch, architecture)
    assert_room(f"{n}x{k}, compute capability {architecture}", kernel, launch, tmp_path)
    blocks = launch.per_warp * launch.tiles
    # All weights of the first round are asked for before the grid dependency, and x behind it.
    before, behind = kernel.asm["ptx"].split("griddepcontrol.wait", 1)
    assert before.count("cp.async.cg.shared.global") == blocks
    start = "griddepcontrol.launch_dependents"
    assert (start in before, start in behind) == (launch.early, not launch.early)
    # Of all weights but those that may be on their way at once, each waits for one that came before.
    assert before.count("cp.async.wait_group") == (launch.stages - launch.depth if launch.depth else 0)
    if launch.early:
        assert before.index(start) < before.index("cp.async.cg.shared.global")
    assert "ld.global.v4" not in before
    assert behind.count("ld.global.v4") == launch.per_warp * launch.chunks
    assert behind.count("ld.shared.v4") >= blocks * launch.chunks
    assert behind.count("mma.sync") == blocks * launch.chunks * 2
    if architecture != 103:  # Which nvdisasm does not know.
        order_of_machine_code(machine_code(kernel, tmp_path), launch.ahead)


WIDE = [launch for launch in tuning.candidates(1792, 5120) if launch.late or launch.tiles == 2]


@pytest.mark.parametrize("launch", WIDE, ids=str)
def test_launches_that_a_benchmark_tries(
    launch: tuning.Projection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fused_wqa_wkv: no spills; alone on a multiprocessor or with room beside it; the next launch starts in time."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    kernel = compiled(1792, 5120, 1, launch, 90)
    wide, found = launch.tiles > 1, resources(kernel, tmp_path)
    most = tuning.MOST_BYTES_ALONE if wide else tuning.MOST_BYTES
    assert_fits(str(launch), found, launch.warps, registers=(1 + wide) * tuning.MOST_REGISTERS, shared=most)
    ptx, start = kernel.asm["ptx"], "griddepcontrol.launch_dependents"
    assert ptx.count(start) == 1
    before, behind = ptx.split(start)
    loads = before.count("ld.global.v4"), behind.count("ld.global.v4")
    assert sum(loads) == launch.per_warp
    if launch.late:
        assert loads == (launch.per_warp, 0) and "griddepcontrol.wait" in before
    elif launch.early:
        assert "cp.async" not in before and "griddepcontrol.wait" in behind
    else:
        assert loads == (0, launch.per_warp) and "griddepcontrol.wait" in before


# For the last architecture, whose code is that of its like, at four ranks alone.
QUERIES = [(ranks, one) for ranks in RANKS for one in ARCHITECTURES[: 3 if ranks == 4 else 2]]


@pytest.mark.parametrize(("ranks", "architecture"), QUERIES)
@pytest.mark.parametrize("settled", [False, True])
def test_queries_in_one_launch(
    ranks: int, settled: bool, architecture: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The indexer's, which every rank has whole, and a layer's: at four ranks and more all programs run at once.
    Settled, they read past the first-level cache and wait in the end."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    first, second = 4096, 64 * 512 // ranks
    launch = tuning.joined(first, second, 1280)
    assert first % (tuning.TILE * launch.program_tiles) == 0 and launch.early
    values = constants(first + second, 1280, 1, launch, first=first, settled=settled)
    kernel = compile_variant(Variant(projection_kernel, SIGNATURE, values, launch.warps), architecture)
    found = resources(kernel, tmp_path)
    assert_fits("queries", found, launch.warps, registers=tuning.MOST_REGISTERS, shared=tuning.MOST_BYTES)
    if ranks >= 4:
        programs = (first + second) // tuning.TILE // launch.program_tiles
        assert programs <= tuning.MULTIPROCESSORS * (REGISTERS // program_registers(found, launch.warps))
        assert programs <= tuning.MULTIPROCESSORS * (SHARED_BYTES // (found["SHARED"] + 1024))
    before, behind = kernel.asm["ptx"].split("griddepcontrol.wait", 1)
    loads = [part.count("ld.global.cg.v4" if settled else "ld.global.v4") for part in (before, behind)]
    assert loads == ([launch.per_warp, 0] if settled else [0, launch.per_warp])
    assert ("st.global" in before, "st.global" in behind) == (settled, not settled)


@pytest.mark.parametrize(("first", "second", "k"), [(64, 48, 64), (48, 64, 64), (64, 64, 72)])
def test_queries_that_do_not_divide(first: int, second: int, k: int) -> None:
    with pytest.raises(ValueError, match="expected multiples of"):
        tuning.joined(first, second, k)


def test_the_launch_behind_wq_b_waits_for_what_is_ahead_of_it() -> None:
    """Sparse MLA reads ahead of its own wait what was written a launch before `wq_b`: see `fused_projections`."""
    launch = tuning.projection(8192, 1280)
    assert launch.early, "by itself it would let the next launch start at once"
    kernel = compiled(8192, 1280, 1, tuning.waiting(launch), 90)
    before, behind = kernel.asm["ptx"].split("griddepcontrol.wait", 1)
    start = "griddepcontrol.launch_dependents"
    assert start not in before and start in behind


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("heads", [8, 16, 32, 64])
def test_a_projection_that_norms(
    heads: int, architecture: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`wq_b`: no spills, and the norm's weight is there before the input is."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    n, k = heads * 512, 1280
    launch = tuning.waiting(tuning.projection(n, k))
    kernel = compiled(n, k, 1, launch, architecture, stride=1792)
    assert_room(f"{n}x{k}, compute capability {architecture}", kernel, launch, tmp_path)
    before, behind = kernel.asm["ptx"].split("griddepcontrol.wait", 1)
    assert before.count("ld.global.v4") == behind.count("ld.global.v4") == launch.per_warp * launch.chunks
    blocks = launch.per_warp * launch.chunks
    assert behind.count("mma.sync") == 2 * blocks * (launch.tiles + 1)


# Outputs, columns, groups and launch; and what else there is to know of a launch.
Wide = tuple[tuple[int, int, int, tuning.Projection], dict[str, Any]]
MANY: dict[str, Wide] = {f"{n}x{k}x{g}": ((n, k, g, tuning.projection(n, k, g)), {}) for n, k, g in SHAPES}
MANY["normed"] = (8192, 1280, 1, tuning.waiting(tuning.projection(8192, 1280))), {"stride": 1792, "norm": True}
MANY["queries"] = (12288, 1280, 1, tuning.joined(4096, 8192, 1280)), {"first": 4096, "settled": True}


@pytest.mark.parametrize("name", MANY)
def test_programs_of_more_than_eight_rows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are as large as those of eight, and read and multiply as much."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    own, more = MANY[name]
    counts, launch = [], own[3]
    for rows in (tuning.ROWS, tuning.MAX_ROWS):
        values, options = constants(*own, rows=rows, **more), {"maxnreg": tuning.registers(launch)}
        kernel = compile_variant(Variant(projection_kernel, SIGNATURE, values, launch.warps, options), 90)
        found = resources(kernel, tmp_path)
        assert_fits(name, found, launch.warps, registers=tuning.MOST_REGISTERS, shared=tuning.MOST_BYTES)
        code = ("cp.async.cg.shared.global", "ld.global", "mma.sync", "st.global", "griddepcontrol.wait")
        counts.append([found["SHARED"], *(kernel.asm["ptx"].count(part) for part in code)])
        assert ("%ctaid.y" in kernel.asm["ptx"]) == (rows > tuning.ROWS)
    assert counts[0] == counts[1]


def order_of_machine_code(cubin: Path, ahead: int) -> None:
    """It keeps that order, and asks for x before it waits for weights."""
    code = subprocess.run([TOOLS / "nvdisasm", "-c", cubin], capture_output=True, text=True, check=True).stdout
    before, behind = code.split("ACQBULK", 1)
    assert "LDGSTS" in before and "LDG.E.128" not in before
    assert behind[: behind.index("DEPBAR.LE")].count("LDG.E.128") == ahead
