"""A whole AttentionStep of every kind of layer against the plain layer: the same bits, caches and selections."""

import copy
import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from specialized_decode.attention import (
    AttentionStep,
    CandidateOverlap,
    SparseIndexTables,
    SparseMlaDecode,
    projection_tuning,
)
from specialized_decode.attention import reference as attention_reference
from specialized_decode.attention.prepared import prepare_fp8, unprepare_fp8
from specialized_decode.attention.projections import FusedProjections
from specialized_decode.attention.step import AuxStreams
from specialized_decode.backbone.graphs import CaptureError, EmulatedDevice, EmulatedStream, Graph, capture
from specialized_decode.backbone.host import SingleRank
from specialized_decode.backbone.linear import Linear
from specialized_decode.boundary import BoundaryAllReduce, PublishingMxfp8Linear
from specialized_decode.boundary import reference as boundary_reference
from tests.helpers.step_attention import CONFIG, CPU, KINDS, LAYERS, World, layer_inputs
from tests.helpers.step_gates import ForgetfulStream, Gates
from tests.helpers.step_mhc import same_bits

# Before the first step: nothing, one token, the window's edges (48), pages' edges (32, 64, their halves), positions
# past the top-k of 16, candidate blocks past the 6 of 4 positions.
LENGTHS = [0, 1, 46, 47, 48, 49, 31, 32, 33, 63, 64, 65, 15, 16, 17, 110]


SELECTIONS = ("selected positions", "candidate blocks")


@pytest.fixture(scope="module")
def prefilled() -> World:
    """To be copied, not run."""
    return _prefilled(LENGTHS)


@pytest.fixture(scope="module")
def many_requests() -> World:
    """To be copied, not run."""
    return _prefilled([*LENGTHS, *[2, 3, 5, 8, 24, 30] * 6][:49])


def _prefilled(lengths: list[int]) -> World:
    world = World(lengths)
    world.prefill()
    return world


class _OnPrepared:
    """What the projection kernel computes, in torch, from the copy that the kernel reads: Gluon has no interpreter."""

    def __init__(self, linear: Linear, groups: int = 1) -> None:
        assert linear.scale is not None
        self.weight, self.groups, self.calls = prepare_fp8(linear.weight, linear.scale), groups, list[int]()
        self.nbytes = self.weight.words.nbytes

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        self.calls.append(x.shape[0])
        assert x.is_contiguous() and x.shape[0] <= projection_tuning.MAX_ROWS
        full = boundary_reference.dequantize(unprepare_fp8(self.weight), self.weight.scales)
        y = attention_reference.grouped_projection(x, full, self.groups)
        return y if out is None else out.copy_(y)

    def normed(self, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        return self(attention_reference.rms_norm(x, norm, eps))

    def warm(self, rows: int = 0) -> None:
        """Nothing to compile."""


class _Steps:
    """An executor's attention over a world's layers."""

    def __init__(
        self,
        world: World,
        publish: bool = True,
        warmed: bool = True,
        stream_types: dict[str, type[EmulatedStream]] | None = None,
        on_prepared: bool = False,
    ) -> None:
        self.device, self.world = EmulatedDevice(), world
        self._types = stream_types or {}
        self.aux = AuxStreams(self._stream("compressor"), self._stream("indexer"))
        self.overlap = CandidateOverlap(self._stream("candidates"), CONFIG.candidate_block_size)
        if warmed:
            self.overlap.warmed.update(range(1, 400))
        self.tables = SparseIndexTables()
        self.all_reduce = BoundaryAllReduce(CONFIG.hidden_size, 384, SingleRank(), CPU)
        publisher = PublishingMxfp8Linear(self.all_reduce) if publish else None
        mla = SparseMlaDecode(self.tables, 384)
        self.steps, self.projections = {}, dict[int, FusedProjections]()
        for number, layer in world.layers.items():
            indexer = layer.indexer
            if on_prepared:
                self.projections[number] = FusedProjections(
                    _OnPrepared(layer.fused_wqa_wkv),
                    _OnPrepared(layer.wq_b),
                    _OnPrepared(layer.wo_a, layer.o_groups),
                    _OnPrepared(layer.wo_b),
                )
            self.steps[number] = AttentionStep(
                layer,
                self.tables,
                mla,
                publisher,
                mxfp8_input=False,
                source=self.overlap if indexer is not None and indexer.candidate_source else None,
                consumer=self.overlap if indexer is not None and indexer.candidate_consumer else None,
                aux=self.aux,
                projections=self.projections.get(number),
            )

    def _stream(self, name: str) -> EmulatedStream:
        stream = self._types.get(name, EmulatedStream)(name, self.device)
        self.device.streams.append(stream)
        return stream

    def reset(self) -> None:
        self.tables.reset()
        self.all_reduce.reset()
        self.overlap.reset()

    def layer(self, gates: Gates) -> Callable[[int, Tensor, Tensor], Tensor]:
        """One layer, then what its boundary does: takes a published output out of the slot."""

        def run(number: int, positions: Tensor, x: Tensor) -> Tensor:
            output = self.steps[number].run(x, None, positions, gates)
            return self.all_reduce.reduce(output).to(torch.bfloat16)

        return run

    def decode(self, chosen: list[int], counts: list[int], gates: Gates, seed: int) -> dict[int, Tensor]:
        self.reset()
        outputs = self.world.decode(chosen, counts, self.layer(gates), seed)
        self.join()
        return outputs

    def join(self) -> None:
        self.aux.join()
        self.overlap.stream.join()


def _assert_same(
    found: dict[int, Tensor], expected: dict[int, Tensor], ours: World, plain: World, kept: list[int]
) -> None:
    """Outputs and everything in memory, but for what padding rows selected: only the rows `kept` of that."""
    for number in LAYERS:
        assert same_bits(found[number], expected[number]), f"layer {number}, {KINDS[number]}"
    state = plain.state()
    for name, tensor in ours.state().items():
        rows = kept if name in SELECTIONS else slice(None)
        assert same_bits(tensor[rows], state[name][rows]), name


def _kept(chosen: list[int], counts: list[int]) -> list[int]:
    """The rows that are no padding."""
    return np.flatnonzero(np.repeat(chosen, counts) >= 0).tolist()


@pytest.mark.parametrize("rows", range(1, 17))
def test_the_bits_of_the_plain_layers(prefilled: World, rows: int) -> None:
    _check_bits(prefilled, rows)


@pytest.mark.parametrize("rows", [47, 48, 49])
def test_the_bits_of_the_plain_layers_in_many_rows(many_requests: World, rows: int) -> None:
    _check_bits(many_requests, rows)


def _check_bits(world: World, rows: int) -> None:
    """Three steps in a row, whose caches the later ones read; every fourth row is padding, requests in no order."""
    plain, ours = copy.deepcopy(world), copy.deepcopy(world)
    order = np.random.default_rng(rows).permutation(len(world.lengths)).tolist()
    chosen, counts = [-1 if row % 4 == 3 else order[row] for row in range(rows)], [1] * rows
    steps, kept = _Steps(ours), _kept(chosen, counts)
    for seed in (1, 2, 3):
        expected = plain.decode(chosen, counts, plain.plain, seed)
        _assert_same(steps.decode(chosen, counts, Gates(rows), seed), expected, ours, plain, kept)
    padding = [row for row, at in enumerate(chosen) if at < 0]
    for number in LAYERS:
        assert not expected[number][padding].any(), "padding rows come out as zeros"
        assert expected[number][kept].isfinite().all() and expected[number][kept].any()


@pytest.mark.parametrize(
    ("overlap_inputs", "low_batch", "publish", "candidates"),
    list(itertools.product((True, False), (True, False), (True, False), ("forked", "gate shut", "not warmed"))),
)
def test_no_gate_changes_the_bits(
    prefilled: World, overlap_inputs: bool, low_batch: bool, publish: bool, candidates: str
) -> None:
    plain, ours, chosen = copy.deepcopy(prefilled), copy.deepcopy(prefilled), [15, -1, 5, 2, 11, 0, 1, -1]
    steps = _Steps(ours, publish, warmed=candidates != "not warmed")
    gates = Gates(8, low_batch=low_batch, overlap_inputs=overlap_inputs, overlap_candidates=candidates != "gate shut")
    for seed in (4, 5):  # the second one reads what the first one wrote
        expected = plain.decode(chosen, [1] * 8, plain.plain, seed)
        _assert_same(steps.decode(chosen, [1] * 8, gates, seed), expected, ours, plain, [0, 2, 3, 4, 5, 6])


@pytest.mark.parametrize(
    ("chosen", "counts"),
    [
        ([15, 0, 4], [6, 6, 6]),
        ([4, -1, 15, 3], [6, 6, 2, 1]),
        ([15, 4, 9, -1, 6], [0, 5, 0, 0, 6]),
        ([12], [47]),
    ],
    ids=["drafts", "padding of drafts", "requests of no rows", "one request of 47 rows"],
)
def test_requests_of_several_rows(prefilled: World, chosen: list[int], counts: list[int]) -> None:
    plain, ours = copy.deepcopy(prefilled), copy.deepcopy(prefilled)
    steps = _Steps(ours)
    for seed in (6, 7):
        expected = plain.decode(chosen, counts, plain.plain, seed)
        _assert_same(
            steps.decode(chosen, counts, Gates(sum(counts)), seed), expected, ours, plain, _kept(chosen, counts)
        )


def test_a_step_of_padding_only(prefilled: World) -> None:
    ours = copy.deepcopy(prefilled)
    before = {name: tensor.clone() for name, tensor in ours.state().items()}
    for output in _Steps(ours).decode([-1, -1], [1, 1], Gates(2), 8).values():
        assert not output.any()
    for name, tensor in ours.state().items():
        if name not in SELECTIONS:
            assert same_bits(tensor, before[name]), f"padding wrote to the {name}"


def test_padding_rows_select_what_they_do_in_the_plain_layers(prefilled: World) -> None:
    """Scores of NaN are no selection."""
    plain, ours, chosen = copy.deepcopy(prefilled), copy.deepcopy(prefilled), [4, -1, 15]
    plain.decode(chosen, [1] * 3, plain.plain, 8)
    _Steps(ours).decode(chosen, [1] * 3, Gates(3), 8)
    for name in SELECTIONS:
        assert same_bits(ours.state()[name][:3], plain.state()[name][:3]), name


def test_the_candidates_restrict_the_consumer(prefilled: World) -> None:
    """At a context of 111 the consumer's selection lies in the source's 24 positions; unrestricted, it does not."""
    ours = copy.deepcopy(prefilled)
    steps = _Steps(ours)
    steps.decode([15], [1], Gates(1), 9)
    assert ours.selection.candidate_blocks is not None
    blocks = set(ours.selection.candidate_blocks[0].tolist())
    assert len(blocks) == 6 and 110 // 4 in blocks
    restricted = ours.selection.topk_indices[0].tolist()
    assert all(position // 4 in blocks for position in restricted) and len(set(restricted)) == 16
    free = copy.deepcopy(prefilled)
    steps = _Steps(free)
    steps.steps[8].consumer = None
    steps.decode([15], [1], Gates(1), 9)
    assert any(position // 4 not in blocks for position in free.selection.topk_indices[0].tolist())


def test_the_output_is_published_in_low_batch_steps_only(prefilled: World) -> None:
    for publish, low_batch in itertools.product((True, False), (True, False)):
        ours = copy.deepcopy(prefilled)
        steps = _Steps(ours, publish)
        slot = steps.all_reduce.publish_target(2)
        steps.reset()
        batch, x = ours.batch([4, 5], [1, 1]), layer_inputs([4, 5], [1, 1], 10)
        with ours.context.running(batch.metadata):
            output = steps.steps[0].run(x[0], None, batch.positions, Gates(2, low_batch=low_batch))
        assert (output.data_ptr() == slot.data_ptr()) == (publish and low_batch)


def test_tables_are_built_once_a_step(prefilled: World) -> None:
    """One for all windows and one for each of the three index sources, whose readers share it."""
    steps = _Steps(copy.deepcopy(prefilled))
    for seed in (13, 14):
        steps.decode([4, 15], [1, 1], Gates(2), seed)
        assert steps.tables.built == 4


def test_a_source_that_selects_anew_in_a_step_replaces_its_table(prefilled: World) -> None:
    """Its readers get the slots of the selection that is there, whoever looked them up before."""
    ours = copy.deepcopy(prefilled)
    steps = _Steps(ours)
    steps.reset()
    batch, tables = ours.batch([4, 15], [1, 1]), []
    with ours.context.running(batch.metadata):
        for seed in (15, 16):
            steps.layer(Gates(2))(2, batch.positions, layer_inputs([4, 15], [1, 1], seed)[2])
            reader = ours.layers[3]
            caches = reader.metadata()
            assert caches.compressed is not None
            tables.append(steps.tables.selected(reader, caches.compressed, caches.window))
            chosen = ours.selection.topk_indices[:2].numpy()
            blocks = caches.compressed.block_table.numpy()
            for row, column in np.ndindex(2, CONFIG.index_topk):
                state = int(chosen[row, column])
                slot = int(blocks[row, state // 32]) * 32 + state % 32
                assert int(tables[-1][row, column]) == (slot if state >= 0 else -1)
    assert not torch.equal(*tables)


# --- projections of low-batch steps -----------------------------------------------------------------------------


@pytest.mark.parametrize("publish", [True, False])
@pytest.mark.parametrize(("rows", "low_batch"), [(1, True), (8, True), (9, True), (16, True), (17, True), (5, False)])
def test_projections_on_prepared_weights(prefilled: World, rows: int, low_batch: bool, publish: bool) -> None:
    """The same bits as the plain layers', each projection once a layer where a low-batch step has at most 16 rows."""
    plain, ours = copy.deepcopy(prefilled), copy.deepcopy(prefilled)
    steps, chosen = _Steps(ours, publish, on_prepared=True), [*range(15, 15 - rows + 1, -1), -1]
    for seed in (17, 18):
        expected = plain.decode(chosen, [1] * rows, plain.plain, seed)
        found = steps.decode(chosen, [1] * rows, Gates(rows, low_batch=low_batch), seed)
        _assert_same(found, expected, ours, plain, _kept(chosen, [1] * rows))
    used = low_batch and rows <= 16
    for number, projections in steps.projections.items():
        for projection in projections:
            assert isinstance(projection, _OnPrepared)
            assert projection.calls == [rows] * (2 if used else 0), f"layer {number}"


def test_a_projection_stores_into_the_boundarys_slot(prefilled: World) -> None:
    """It is handed the slot itself, and where it serves none is handed out otherwise."""
    steps = _Steps(copy.deepcopy(prefilled), on_prepared=True)
    slot = steps.all_reduce.publish_target(2)
    for rows, stored in ((2, True), (16, True), (17, False)):
        steps.reset()
        chosen = [*range(4, 16), 0, 1, 2, 3, -1][:rows]
        batch, x = steps.world.batch(chosen, [1] * rows), layer_inputs(chosen, [1] * rows, 19)
        with steps.world.context.running(batch.metadata):
            output = steps.steps[0].run(x[0], None, batch.positions, Gates(rows))
        assert (output.data_ptr() == slot.data_ptr()) == stored


def test_only_grouped_weights_are_kept_twice(prefilled: World) -> None:
    """Beside a kernel's copy, larger steps need the reference's of `wo_a` alone."""
    step = _Steps(copy.deepcopy(prefilled), on_prepared=True).steps[2]
    kept = [linear.prepared is not None for linear in (step.fused_wqa_wkv, step.wq_b, step.wo_a, step.wo_b)]
    assert kept == [False, False, True, False]
    assert step.projections is not None
    sizes = [n * k for n, k in ((544, 64), (2048, 32), (64, 1024), (64, 64))]
    assert step.projections.nbytes == sum(sizes)


# --- schedule ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap_inputs", [True, False])
def test_what_is_read_has_been_joined(prefilled: World, monkeypatch: pytest.MonkeyPatch, overlap_inputs: bool) -> None:
    """Caches are bytes, whose order an emulated capture does not follow: so look at the streams at each reader."""
    steps = _Steps(copy.deepcopy(prefilled))
    seen: list[str] = []

    def watch(name: str) -> None:
        op = getattr(attention_reference, name)

        def run(*args: object) -> object:
            waiting = [stream.name for stream in steps.device.streams if stream.pending]
            seen.append(f"{name} on {steps.device.current} with {waiting}")
            return op(*args)

        monkeypatch.setattr(attention_reference, name, run)

    for name in ("compress", "insert_index_keys", "index_queries", "index_scores", "sparse_mla", "read_kv"):
        watch(name)
    ours, gates = steps.world, Gates(2, overlap_inputs=overlap_inputs)
    batch, x = ours.batch([4, 5], [1, 1]), layer_inputs([4, 5], [1, 1], 11)
    with ours.context.running(batch.metadata):
        steps.steps[2].run(x[2], None, batch.positions, gates)
    if overlap_inputs:
        assert seen == [
            "compress on compressor with ['compressor']",
            "insert_index_keys on compressor with ['compressor']",
            "index_queries on indexer with ['compressor', 'indexer']",
            "index_scores on indexer with ['indexer']",
            "read_kv on main with []",
            "read_kv on main with []",
            "sparse_mla on main with []",
        ]
    else:
        assert {line.split(" on ")[1] for line in seen} == {"main with []"}
    assert not any(stream.pending for stream in steps.device.streams)


def _captured(steps: _Steps, gates: Gates) -> tuple[Graph, dict[int, Tensor], dict[int, Tensor], Callable[..., None]]:
    """Captures a step of padding rows; returns the graph, its inputs, its outputs, and what loads another batch."""
    rows, world = gates.rows, steps.world
    batch = world.batch([-1] * rows, [1] * rows, static=True)
    inputs, outputs = layer_inputs([-1] * rows, [1] * rows, 0), dict[int, Tensor]()

    def run() -> None:
        steps.reset()
        for number in LAYERS:
            outputs[number] = steps.layer(gates)(number, batch.positions, inputs[number])
        steps.join()

    with world.context.running(batch.metadata):
        graph = capture(steps.device, run)

    def load(chosen: list[int], seed: int) -> None:
        batch.load(world.batch(chosen, [1] * rows, static=True))
        for number, x in layer_inputs(chosen, [1] * rows, seed).items():
            inputs[number].copy_(x)

    return graph, inputs, outputs, load


@pytest.mark.parametrize("overlap", [True, False])
def test_replays_of_other_batches(prefilled: World, overlap: bool) -> None:
    """One capture; every replay has other requests, blocks, contexts and padding."""
    plain, ours = copy.deepcopy(prefilled), copy.deepcopy(prefilled)
    steps = _Steps(ours)
    graph, _, outputs, load = _captured(steps, Gates(5, overlap_inputs=overlap, overlap_candidates=overlap))
    built = steps.tables.built
    for seed, chosen in enumerate([[15, 4, -1, 0, 9], [9, 15, 3, -1, -1], [-1] * 5, [2, 15, 9, 4, 13]]):
        load(chosen, 20 + seed)
        graph.replay()
        ours.advance(chosen, [1] * 5)
        expected = plain.decode(chosen, [1] * 5, plain.plain, 20 + seed, static=True)
        _assert_same(outputs, expected, ours, plain, _kept(chosen, [1] * 5))
    assert steps.tables.built == built, "a replay runs no host code"


@pytest.mark.parametrize(
    ("stream", "reader"), [("indexer", "main"), ("candidates", "indexer")], ids=["indexer", "candidates"]
)
def test_a_join_that_does_not_wait_is_caught(prefilled: World, stream: str, reader: str) -> None:
    steps = _Steps(copy.deepcopy(prefilled), stream_types={stream: ForgetfulStream})
    with pytest.raises(CaptureError, match=f"on {reader} reads what {stream} wrote, without a join between them"):
        _captured(steps, Gates(3))


def test_nothing_is_left_to_join(prefilled: World) -> None:
    """Every layer joins its own streams; the candidates' wait for their consumer alone."""
    ours = copy.deepcopy(prefilled)
    steps = _Steps(ours)
    steps.reset()
    run, pending = steps.layer(Gates(2)), {}
    batch, x = ours.batch([4, 5], [1, 1]), layer_inputs([4, 5], [1, 1], 12)
    for number in LAYERS:
        with ours.context.running(batch.metadata):
            run(number, batch.positions, x[number])
        pending[number] = [stream.name for stream in steps.device.streams if stream.pending]
    assert pending == {0: [], 2: [], 3: [], 6: ["candidates"], 7: ["candidates"], 8: []}
