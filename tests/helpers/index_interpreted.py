"""The index kernels in Triton's interpreter, on a CPU; in a process of its own, as `step_interpreted`."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.index_case import (
    IndexCase,
    Shape,
    assert_chosen,
    assert_compressed,
    assert_in_place,
    assert_projected,
    assert_scored,
    assert_selected,
    bins_of,
    closed_groups,
    tied_scores,
)
from tests.helpers.mla_interpreted import PlainProjection, plain_projections
from tests.helpers.step_interpreted import prepare_interpreter

SMALL: dict[str, Any] = {"hidden": 64, "heads": 4, "q_rank": 32, "topk": 16}
# The layer and its requests' contexts.
CASES: dict[str, tuple[Shape, tuple[int, ...]]] = {
    "first token": (Shape(), (1,)),
    "first token, ratio 2": (Shape(ratio=2, states=32), (1,)),
    "second token, ratio 2": (Shape(ratio=2, states=32), (2,)),
    "around the window": (Shape(hidden=320), (127, 128, 129, 130, 0, 2)),
    "around the top-k": (Shape(hidden=320), (511, 512, 513, 514, 0, 1024)),
    "around the top-k, ratio 2": (Shape(ratio=2, hidden=320, states=32), (1022, 1023, 1024, 1025, 1026, 1027, 1028)),
    "long": (Shape(hidden=320), (8192, 3)),
    "past the candidates": (Shape(hidden=320, compressor=False), (24576,)),
    "padding alone": (Shape(hidden=320), (0, 0)),
    "drafts": (Shape(hidden=320, count=6), (700,)),
    "drafts, ratio 2": (Shape(ratio=2, hidden=320, count=3, states=32), (703, 2)),
    "sixteen rows": (Shape(hidden=64), (1, 513, 0, 2, 129, 3, 0, 70, 5, 600, 8, 1, 130, 4, 2, 33)),
    "drafts of sixteen rows, ratio 2": (Shape(ratio=2, states=32, count=4, **SMALL), (50, 0, 131, 7)),
    "small widths": (Shape(ratio=2, states=32, **SMALL), (1, 47, 48, 49, 0, 96)),
    "wide maximum": (Shape(hidden=320, longest=4000), (600, 7)),
    "as many blocks as candidates": (Shape(hidden=320, blocks=80, longest=700), (1, 8, 9, 633, 640, 0)),
    "more blocks than candidates": (Shape(hidden=320, blocks=80), (641, 648, 649, 4096, 0, 5)),
    "blocks, ratio 2": (Shape(ratio=2, states=32, blocks=5, size=4, **SMALL), (1, 2, 40, 41, 42, 0, 96)),
}
WITH_FLAGS = ("around the window", "around the top-k", "past the candidates", "padding alone", "small widths")


def run_interpreted(path: str) -> None:
    """Checks every case's launches and leaves what went wrong in a file, by case."""
    assert os.environ["TRITON_INTERPRET"] == "1"
    torch.set_num_threads(1)
    prepare_interpreter(_no_assembly)
    torch.use_deterministic_algorithms(True)  # Fresh tensors are filled with NaN.
    from specialized_decode.attention import index_tuning

    # A row's programs take several tiles each.
    index_tuning.MULTIPROCESSORS = 8
    patch = pytest.MonkeyPatch()
    emulate_projection(patch)
    # What it multiplies queries with is checked elsewhere.
    plain_projections(patch)
    failures: dict[str, str] = {}
    for name in CASES:
        try:
            _check(name)
        except AssertionError as error:
            failures[name] = str(error) or repr(error)
    torch.save({"failures": failures, "ties": _ties(), "steps": _steps()}, Path(path))


def emulate_projection(patch: pytest.MonkeyPatch) -> None:
    """The index projection in a process that interprets the other kernels: Gluon has no interpreter."""
    from specialized_decode.attention import fused_index
    from specialized_decode.attention.kernels import index_projection, projection
    from specialized_decode.boundary.kernels import fragments
    from tests.helpers.emulated_kernels import emulate

    emulate(patch, fused_index, (index_projection, projection, fragments))


def _no_assembly(asm: str, *_: object, **__: object) -> Any:
    raise AssertionError(f"no index kernel holds assembly, found {asm}")


def make(name: str) -> IndexCase:
    shape, contexts = CASES[name]
    return IndexCase(shape, contexts, len(name))


def _check(name: str) -> None:
    from specialized_decode.attention.fused_index import FusedIndexer, fused_bins

    case = make(name)
    fused = FusedIndexer(case.attn, fused_bins(case.device))
    inputs = fused.project(case.x)
    summed = assert_projected(case, inputs.partial)
    if case.shape.compressor:
        before = case.cache_bytes()
        fused.compress(case.attn, inputs, case.positions, case.caches)
        assert_compressed(case, before, summed[:, : inputs.heads])
    heads = summed[:, inputs.heads :]
    scores = fused.scores(case.attn, case.q, inputs, case.positions, case.caches)
    masked = assert_scored(case, scores, heads)
    blocks = case.attn.selection.candidate_blocks
    if blocks is None:
        slots = fused.top(case.attn, scores, case.positions, case.caches)
    else:
        slots, flags = fused.choose(case.attn, scores, case.positions, case.caches, blocks[: case.rows])
        assert_chosen(case, masked, flags)
    assert_selected(case, masked, slots)
    assert not fused.bins.any(), "bins are not zero again"
    if name in WITH_FLAGS:
        flags = torch.rand(masked.shape, generator=case.generator) < 0.3
        scores = fused.scores(case.attn, case.q, inputs, case.positions, case.caches, flags)
        masked = assert_scored(case, scores, heads, flags)
        assert_selected(case, masked, fused.top(case.attn, scores, case.positions, case.caches))


def _ties() -> list[str]:
    """Selections and candidates of scores that repeat: all equal, of few values, of both zeros, and with numbers that
    are none."""
    from specialized_decode.attention.fused_index import FusedIndexer, fused_bins

    case = IndexCase(Shape(hidden=320, longest=6000, blocks=200), (40, 512, 2500, 6000), 5)
    blocks = case.attn.selection.candidate_blocks[: case.rows]
    fused = FusedIndexer(case.attn, fused_bins(case.device))
    failures = []
    for name, scores in tied_scores(case).items():
        fused.bins.copy_(bins_of(scores, closed_groups(case), fused.bins))
        try:
            slots, flags = fused.choose(case.attn, scores, case.positions, case.caches, blocks)
            assert_selected(case, scores, slots)
            assert_chosen(case, scores, flags)
        except AssertionError as error:
            failures.append(f"{name}: {error}")
    for times in (0, 3):
        scores = tied_scores(case)["few"]
        fused.bins.copy_(times * bins_of(scores, closed_groups(case), fused.bins))
        slots = fused.top(case.attn, scores, case.positions, case.caches)
        try:
            assert_in_place(case, slots)
        except AssertionError as error:
            failures.append(f"scores counted {times} times: {error}")
    return failures


def _steps() -> dict[str, Tensor]:
    """Two steps of `mla_interpreted.world` whose attention runs on the kernels, index kernels too."""
    from specialized_decode.attention import (
        AttentionStep,
        CandidateOverlap,
        SparseIndexTables,
        SparseMlaDecode,
    )
    from specialized_decode.attention import mla_tuning as tuning
    from specialized_decode.attention.fused_index import FusedIndexer, fused_bins
    from specialized_decode.attention.fused_mla import FusedSparseMla, FusedTables
    from specialized_decode.attention.projections import FusedProjections
    from specialized_decode.attention.step import AuxStreams
    from specialized_decode.backbone.graphs import EmulatedDevice, EmulatedStream
    from tests.helpers import mla_interpreted
    from tests.helpers.step_attention import CONFIG, CPU, LAYERS
    from tests.helpers.step_gates import Gates

    prepare_assembly(mla_interpreted._assembly)
    mla_interpreted.interleave_programs()
    chosen = mla_interpreted.CHOSEN
    ours, device, gates = mla_interpreted.world(), EmulatedDevice(), Gates(len(chosen))
    compressor, indexer, candidates = (EmulatedStream(name, device) for name in ("compressor", "indexer", "candidates"))
    aux, overlap = AuxStreams(compressor, indexer), CandidateOverlap(candidates, CONFIG.candidate_block_size)
    overlap.warm(len(chosen))
    # Few programs: slices are tried elsewhere.
    tuning.sparse_mla = lambda rows, heads, *keys: tuning.mla_launch(rows, heads, tuning.key_tiles(*keys), 1, 1)
    tables, bins = SparseIndexTables(FusedTables()), fused_bins(CPU)
    fused = FusedSparseMla(CONFIG.num_attention_heads, CONFIG.sliding_window, CONFIG.index_topk, gates.rows, CPU)
    steps = {}
    for number, layer in ours.layers.items():
        chooser = layer.indexer
        four = layer.fused_wqa_wkv, layer.wq_b, layer.wo_a, layer.wo_b
        own = FusedProjections(*(PlainProjection(linear) for linear in four))
        steps[number] = AttentionStep(
            layer,
            tables,
            SparseMlaDecode(tables, gates.rows),
            None,
            mxfp8_input=False,
            source=overlap if chooser is not None and chooser.candidate_source else None,
            consumer=overlap if chooser is not None and chooser.candidate_consumer else None,
            aux=aux,
            fused=fused,
            projections=own,
            index=FusedIndexer(layer, bins, own) if chooser is not None else None,
        )
    found: dict[str, Tensor] = {}
    for at in range(mla_interpreted.STEPS):
        tables.reset()
        overlap.reset()
        outputs = ours.decode(
            chosen, [1] * gates.rows, lambda number, positions, x: steps[number].run(x, None, positions, gates), seed=at
        )
        overlap.stream.join()
        found |= {f"{at} {number}": outputs[number] for number in LAYERS}
        found[f"{at} selected"] = ours.selection.topk_indices[: gates.rows].clone()
        assert ours.selection.candidate_blocks is not None
        found[f"{at} candidates"] = ours.selection.candidate_blocks[: gates.rows].clone()
    assert tables.built == 1 + sum(layer.indexer is not None for layer in ours.layers.values())
    return {**found, **ours.state()}


def prepare_assembly(assembly: Any) -> None:
    """Another one than `prepare_interpreter` was given."""
    import triton.language as tl

    tl.inline_asm_elementwise = assembly
