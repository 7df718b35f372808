"""The sparse MLA kernels in Triton's interpreter, on a CPU; in a process of its own, as `step_interpreted`."""

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specialized_decode.attention import reference
from specialized_decode.attention.mla import Settled
from specialized_decode.boundary import reference as boundary_reference
from tests.helpers.mla_case import MlaCase, Shape
from tests.helpers.step_attention import CONFIG, CPU, LAYERS, World
from tests.helpers.step_gates import Gates
from tests.helpers.step_interpreted import prepare_interpreter

SMALL = {"window": 48, "topk": 16, "states": 64, "q_rank": 32}
CONTEXTS = (1, 2, 0, 127, 128, 129, 130, 511, 512, 513, 514, 1024)
# As `tuning` cuts the launch; or tiles of a split and slices.
TUNED = None
# name -> the layer, its requests' contexts, and how launches are cut
CASES: dict[str, tuple[Shape, tuple[int, ...], tuple[tuple[Any, ...] | None, ...]]] = {
    "first token": (Shape(heads=16), (1,), ((1, 1),)),
    "ragged": (Shape(heads=16), CONTEXTS, ((10, 1),)),
    "ragged, ratio 2": (Shape(heads=8, ratio=2, states=32), CONTEXTS, ((5, 1),)),
    "long": (Shape(heads=16, ratio=2, states=32), (8192,), (TUNED, (3, 2), (1, 8), (3, 1))),
    "few drafts": (Shape(heads=8, count=3), (130,), ((2, 1), (1, 1))),
    "past the candidates": (Shape(heads=8), (24576,), ((4, 2),)),
    "padding alone": (Shape(heads=8), (0, 0), ((1, 1), (1, 2))),
    "window only": (Shape(heads=16, ratio=0), (1, 500, 0, 128), ((1, 2), (2, 1), (1, 1), (1, 8))),
    "drafts": (Shape(heads=16, count=6), (7, 0), ((10, 1),)),
    "4 heads, small widths": (Shape(heads=4, **SMALL), (1, 47, 48, 49, 0, 96), ((1, 2), (1, 4))),
    "24 heads": (Shape(heads=24), (300,), ((5, 2),)),
    "32 heads": (Shape(heads=32), (700,), ((3, 4), (1, 2))),
    "64 heads": (Shape(heads=64, ratio=2), (700,), ((10, 2), (5, 4))),
}
# Cases whose launches insert the step's records themselves too, and how those are cut.
INSERTED: dict[str, tuple[Any, ...]] = {
    "first token": (1, 1),
    "few drafts": (1, 1),
    "window only": (2, 1),
    "4 heads, small widths": (1, 1),
    "32 heads": (10, 2),
    "64 heads": (1, 2),
}
# Tokens before the first of the steps; requests of a step, one padding, in no order.
LENGTHS, CHOSEN, STEPS = [0, 1, 47, 48, 110], [3, 0, -1, 4, 2, 1], 2
UNSETTLED = "4 heads, small widths"
NO_SINK = "padding alone"


def make(name: str) -> MlaCase:
    shape, contexts, _ = CASES[name]
    case = MlaCase(shape, contexts, seed=len(name))
    if name == NO_SINK:
        case.attn.sinks.fill_(float("-inf"))
    if name.startswith("ragged"):
        # A row that selects nothing, and one whose selection has holes.
        case.selection[5] = -1
        case.selection[11, 3:90:7] = -1
    return case


def run_interpreted(path: str) -> None:
    """Leaves every case's outputs in a file, by kernel and case."""
    assert os.environ["TRITON_INTERPRET"] == "1"
    torch.set_num_threads(1)
    prepare_interpreter(_assembly)
    interleave_programs()
    torch.use_deterministic_algorithms(True)  # Fresh tensors are filled with NaN.
    found = {name: _outputs(name) for name in CASES}
    torch.save({**found, "steps, reused": _reused(), "steps": _steps()}, Path(path))


def _outputs(name: str) -> dict[str, Tensor]:
    from specialized_decode.attention import mla_tuning as tuning
    from specialized_decode.attention.fused_mla import FusedSparseMla, FusedTables

    case = make(name)
    shape = case.shape
    fused = FusedSparseMla(shape.heads, shape.window, shape.topk, case.rows, case.device)
    window, selected = case.tables(FusedTables())
    found = {"window": window}
    if selected is not None:
        found["selected"] = selected
    tiles = tuning.key_tiles(shape.window, shape.topk if selected is not None else 0)
    for cut in CASES[name][2]:
        launch = None if cut is None else tuning.mla_launch(case.rows, shape.heads, tiles, *cut)
        found[f"out {cut}"] = fused(case.attn, case.q, case.positions, window, selected, Settled.ALL, launch)
        if launch is not None and launch.spread:
            # One split adds up all.
            alone = launch._replace(spread=False)
            found[f"alone {cut}"] = fused(case.attn, case.q, case.positions, window, selected, Settled.ALL, alone)
    if name == UNSETTLED:
        for settled in (Settled.NOTHING, Settled.WINDOW):
            found[settled.name] = fused(case.attn, case.q, case.positions, window, selected, settled, launch)
    # Other tiles, other threads, other partial results.
    if name == "long":
        wide = tuning.key_tiles(shape.window, shape.topk, 128)
        launch = tuning.mla_launch(1, shape.heads, wide, 1, 2, keys=128)
        found["out wide"] = fused(case.attn, case.q, case.positions, window, selected, Settled.ALL, launch)
    found["q"] = fused.norm_insert(case.attn, case.projected, case.positions, case.window)
    found["cache"] = case.window_cache.contiguous()
    if name in INSERTED:
        launch = tuning.mla_launch(case.rows, shape.heads, tiles, *INSERTED[name])
        found["behind an insert"] = fused(case.attn, case.q, case.positions, window, selected, Settled.ALL, launch)
        other = make(name)
        latents = other.projected[:, shape.q_rank :]
        tables = window, selected, Settled.ALL, launch, latents, other.window
        found["with the insert"] = fused(other.attn, other.q, other.positions, *tables)
        found["cache with the insert"] = other.window_cache.contiguous()
    found["arrived"] = fused._arrived
    return found


def world() -> World:
    """Layers of every kind, whose requests have been prefilled by the plain ones."""
    made = World(LENGTHS)
    made.prefill()
    return made


class PlainProjection:
    """A low-batch projection in torch: Gluon has no interpreter. Beside it, sparse MLA inserts where nobody selects."""

    nbytes, launch = 0, None

    def __init__(self, linear: Any) -> None:
        self.linear, self.weight = linear, boundary_reference.prepare(linear.weight, linear.scale)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        groups = x.shape[1] // self.weight.shape[1]
        y = reference.grouped_projection(x, self.weight, groups)
        return y if out is None else out.copy_(y)

    def normed(self, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        return self(reference.rms_norm(x, norm, eps))

    def warm(self, rows: int = 0) -> None:
        """Nothing to compile."""


class PlainJoined:
    """Two of them of one input."""

    def __init__(self, first: PlainProjection, second: PlainProjection) -> None:
        self.both = first, second

    def __call__(self, x: Tensor, settled: bool = False) -> tuple[Tensor, Tensor]:
        first, second = self.both
        return first(x), second(x)

    def warm(self, rows: int = 0) -> None:
        """Nothing to compile."""


def plain_projections(patch: pytest.MonkeyPatch) -> None:
    """Selecting layers multiply in torch, but for the index projection, which has a launch of its own then."""
    from specialized_decode.attention import fused_index, index_tuning

    patch.setattr(fused_index, "FusedLinear", PlainProjection)
    patch.setattr(fused_index, "JoinedLinear", PlainJoined)
    patch.setattr(index_tuning, "beside", lambda *_: None)


def _steps() -> dict[str, Tensor]:
    """Steps of `world()` whose attention runs on the kernels: outputs by step and layer, and what they leave behind."""
    from specialized_decode.attention import AttentionStep, CandidateOverlap, SparseIndexTables, SparseMlaDecode
    from specialized_decode.attention import mla_tuning as tuning
    from specialized_decode.attention.fused_mla import FusedSparseMla, FusedTables
    from specialized_decode.attention.projections import FusedProjections
    from specialized_decode.attention.step import AuxStreams
    from specialized_decode.backbone.graphs import EmulatedDevice, EmulatedStream

    ours, device, gates = world(), EmulatedDevice(), Gates(len(CHOSEN))
    compressor, indexer, candidates = (EmulatedStream(name, device) for name in ("compressor", "indexer", "candidates"))
    aux, overlap = AuxStreams(compressor, indexer), CandidateOverlap(candidates, CONFIG.candidate_block_size)
    tables = SparseIndexTables(FusedTables())
    # Few programs: slices are tried above.
    tuning.sparse_mla = lambda rows, heads, *keys: tuning.mla_launch(rows, heads, tuning.key_tiles(*keys), 1, 1)
    fused = FusedSparseMla(CONFIG.num_attention_heads, CONFIG.sliding_window, CONFIG.index_topk, gates.rows, CPU)
    steps = {}
    for number, layer in ours.layers.items():
        source = layer.indexer is not None and layer.indexer.candidate_source
        consumer = layer.indexer is not None and layer.indexer.candidate_consumer
        four = layer.fused_wqa_wkv, layer.wq_b, layer.wo_a, layer.wo_b
        step = AttentionStep(
            layer,
            tables,
            SparseMlaDecode(tables, gates.rows),
            None,
            mxfp8_input=False,
            source=overlap if source else None,
            consumer=overlap if consumer else None,
            aux=aux,
            fused=fused,
            projections=FusedProjections(*(PlainProjection(linear) for linear in four)),
        )
        steps[number] = step
    found: dict[str, Tensor] = {}
    for at in range(STEPS):
        tables.reset()
        overlap.reset()
        outputs = ours.decode(
            CHOSEN, [1] * gates.rows, lambda number, positions, x: steps[number].run(x, None, positions, gates), seed=at
        )
        overlap.stream.join()
        found |= {f"{at} {number}": outputs[number] for number in LAYERS}
    # One window's, and one a source of a selection.
    assert tables.built == 1 + sum(layer.indexer is not None for layer in ours.layers.values())
    return {**found, **ours.state()}


def _reused() -> dict[str, Tensor]:
    """Two layers' calls over one table of each kind, then a step of other blocks and other selections over the same
    tensors, as a replay sees them."""
    from specialized_decode.attention import SparseIndexTables
    from specialized_decode.attention import mla_tuning as tuning
    from specialized_decode.attention.fused_mla import FusedSparseMla, FusedTables

    case, other = make(UNSETTLED), replayed()
    fused = FusedSparseMla(case.shape.heads, case.shape.window, case.shape.topk, case.rows, CPU)
    tables, found = SparseIndexTables(FusedTables()), {}
    for step in ("first", "second"):
        tables.reset()
        for layer in range(2):
            window = tables.window(case.attn, case.window, case.positions)
            assert case.compressed is not None
            selected = tables.selected(case.attn, case.compressed, case.window)
            launch = tuning.mla_launch(case.rows, case.shape.heads, 2, 1, 1)
            settled = Settled.ALL if layer else Settled.NOTHING
            found[f"{step} {layer}"] = fused(case.attn, case.q, case.positions, window, selected, settled, launch)
        assert tables.built == 2
        case.load(other)
    return found


def replayed() -> MlaCase:
    """A batch of the same shape as `UNSETTLED`'s: other contexts, blocks, selections and padding."""
    shape, contexts, _ = CASES[UNSETTLED]
    return MlaCase(shape, contexts[::-1], seed=99)


class Programs:
    """A kernel in the interpreter, one of whose programs may wait for what others do: the next ones run meanwhile."""

    # What runs now.
    current: "Programs"

    def __init__(self, fn: Callable[..., Any], builder: Any) -> None:
        # The interpreter looks into the function.
        functools.update_wrapper(self, fn)
        self.__globals__, self.__signature__ = fn.__globals__, inspect.signature(fn)
        self.fn, self.builder = fn, builder
        self.begun: set[tuple[int, int, int]] = set()
        self.arguments: dict[str, Any] = {}

    def __call__(self, **arguments: Any) -> None:
        own = self.builder.grid_idx
        if own not in self.begun:
            self.begun.add(own)
            Programs.current, self.arguments = self, arguments
            self.fn(**arguments)

    def run_next(self) -> None:
        """The next program along the grid's first side. Raises ValueError where none is left: nobody will do what this
        one waits for."""
        x, y, z = self.builder.grid_idx
        other = x + 1
        while (other, y, z) in self.begun:
            other += 1
        self.builder.set_grid_idx(other, y, z)
        self(**self.arguments)
        self.builder.set_grid_idx(x, y, z)


def interleave_programs() -> None:
    """Has the interpreter run kernels as `Programs`."""
    import triton.runtime.interpreter as interpreter

    init = interpreter.GridExecutor.__init__
    if init.__name__ == "wrapped":
        return

    def wrapped(executor: Any, fn: Callable[..., Any], *arguments: Any) -> None:
        init(executor, fn, *arguments)
        executor.fn = Programs(fn, interpreter.interpreter_builder)

    interpreter.GridExecutor.__init__ = wrapped


def _assembly(asm: str, constraints: str, arguments: Any, dtype: Any, **_: object) -> Any:
    """`dequantized` and `_all_arrived` of the kernels."""
    import triton.language as tl

    if "ld.acquire.gpu" in asm:
        counter, now = arguments
        while int(tl.load(counter)) % 4096:
            Programs.current.run_next()
        return now * 0
    assert "prmt.b32 low, $4" in asm, asm
    word, scale = arguments
    unit = (scale & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True).to(tl.float32)
    return tuple(
        (((word >> 8 * i) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32) * unit).to(tl.bfloat16)
        for i in range(4)
    )
