"""What compute-sanitizer is given on a GPU: every kernel, in every cut of a step of 1 and of 8 rows, and sparse MLA of
more rows and of those that insert."""

import ast
from collections import defaultdict
from itertools import product
from pathlib import Path
from typing import Any

import torch

from specialized_decode.attention import kernels, mla_tuning
from specialized_decode.attention.fused_mla import MAX_INSERTED, WAYS
from specialized_decode.attention.mla import Settled
from specialized_decode.attention.projection_tuning import projection
from tests.attention import sanitized
from tests.attention.shapes import SHAPES

# Rows and heads of sparse MLA: at 32 and at 64 heads few rows insert; of 27 a program takes several tiles.
STEPS = (*product((1, 8), (8, 16, 32, 64)), (4, 32), (2, 64), (27, 16))
CUT = ("GROUP", "TILES", "SPLITS", "SLICES", "TOPK", "SETTLED", "INSERT")


def launched() -> dict[str, list[dict[str, Any]]]:
    """The compile-time arguments of each launch by kernel; nothing is launched."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)

    def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        found[kernel.fn.__name__].append(kwargs | {"grid": grid})

    with sanitized.recorded(launch) as names:
        sanitized.launch_all(torch.device("cpu"))
    assert names == {name: len(calls) for name, calls in found.items()}
    return found


def kernel_names() -> set[str]:
    """Functions of attention/kernels that are launched: those with a Triton decorator whose name says so."""
    (folder,) = kernels.__path__
    functions = [
        node
        for path in Path(folder).glob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    ]
    return {
        one.name for one in functions if one.name.endswith("_kernel") and "jit" in ast.unparse(one.decorator_list[0])
    }


def test_every_kernel_in_every_cut() -> None:
    found = launched()
    assert set(found) == kernel_names()
    assert sum(len(calls) for calls in found.values()) == sanitized.LAUNCHES
    attention = {(call["grid"], *(call[name] for name in CUT)) for call in found["sparse_mla_kernel"]}
    for (rows, heads), topk in product(STEPS, (0, 512)):
        cut = mla_tuning.sparse_mla(rows, heads, 128, topk)
        launch = (cut.splits, cut.groups * cut.slices, rows), cut.group, cut.tiles, cut.splits, cut.slices, topk
        ways = {settled for selects, settled in WAYS if selects == (topk > 0)}
        inserted = {(*launch, Settled.ALL, MAX_INSERTED)} if cut.inserts and rows <= MAX_INSERTED else set()
        assert {*((*launch, settled, 0) for settled in ways), *inserted} <= attention, f"{rows} rows, {heads} heads"
    for name in ("projection_kernel", "index_projection_kernel", "input_projections_kernel"):
        assert {call["WIDE"] for call in found[name]} == {False, True}, name
    launches = ("N", "K", "GROUPS", "NORM", "FIRST", "SETTLED", "EARLY")
    projected = {tuple(call[name] for name in launches) for call in found["projection_kernel"]}
    assert projected == (
        {(*shape, False, shape[0], False, projection(*shape).early) for shape in SHAPES}
        # What norms lets the next launch start behind its wait alone.
        | {(*shape, True, shape[0], False, False) for shape in SHAPES if shape[1] == 1280}
        | {(4096 + 64, 1280, 1, False, 4096, settled, True) for settled in (False, True)}
    )
