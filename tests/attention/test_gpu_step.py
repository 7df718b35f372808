"""A whole AttentionStep on the kernels against one on the reference ops, on a GPU, at V4.1-Flash's widths over 4 ranks,
and in a few cases over 1, 2 and 8.

Both start from the same caches. A layer that selects may select otherwise where scores are close, since queries round
otherwise; so bounds are of whole rows, and wider there and where such a selection is read.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from specialized_decode.attention import (
    AttentionStep,
    CandidateOverlap,
    SparseIndexTables,
    SparseMlaDecode,
    reference,
)
from specialized_decode.attention.fused import fused_projections
from specialized_decode.attention.fused_index import FusedIndexer, fused_bins
from specialized_decode.attention.fused_mla import FusedSparseMla, FusedTables
from specialized_decode.attention.step import AuxStreams
from specialized_decode.backbone.config import ModelConfig
from specialized_decode.backbone.host import SingleRank
from specialized_decode.boundary import BoundaryAllReduce, CudaSideStream, PublishingMxfp8Linear
from tests.helpers.small_config import small_config
from tests.helpers.step_attention import KINDS, LAYERS, World, layer_inputs
from tests.helpers.step_gates import Gates
from tests.helpers.step_mhc import same_bits

DEVICE = torch.device("cuda")
HIDDEN = 5120
# With a step's own token. Past 16,384 positions of ratio 1 the candidates restrict their consumer.
CONTEXTS = (1, 2, 127, 128, 129, 130, 511, 512, 513, 514, 1024, 8192, 24576, 33, 700, 3)
MOST = 24640
# Of other numbers of ranks: short, since every token of them is computed by each.
SHORT, MOST_SHORT = (1, 1090, 127, 128, 129, 130, 511, 512, 513, 514, 33, 2, 257, 1024, 3, 700), 1152
# What a row may be off, relative to its size.
BOUND, SELECTING_BOUND = 0.02, 0.08
SELECTS = (2, 6, 8)
READS = (3, 7)


def config_of(ranks: int) -> ModelConfig:
    """One rank's share."""
    return small_config(
        hidden_size=HIDDEN,
        num_attention_heads=64 // ranks,
        q_lora_rank=1280,
        o_lora_rank=1024,
        o_groups=8 // ranks,
        sliding_window=128,
        index_n_heads=32,
        index_topk=512,
        candidate_topk_blocks=2048,
        candidate_block_size=8,
    )


class Steps:
    """An executor's attention over a world's layers, on kernels or on reference ops."""

    def __init__(self, world: World, kernels: bool) -> None:
        config = world.config
        self.world = world
        self.aux = AuxStreams(CudaSideStream(DEVICE), CudaSideStream(DEVICE))
        self.overlap = CandidateOverlap(CudaSideStream(DEVICE), config.candidate_block_size)
        self.overlap.warmed.update(range(1, 400))
        self.tables = SparseIndexTables(FusedTables() if kernels else None)
        self.all_reduce = BoundaryAllReduce(config.hidden_size, 384, SingleRank(), DEVICE)
        shape = config.num_attention_heads, config.sliding_window, config.index_topk
        fused = FusedSparseMla(*shape, 32, DEVICE) if kernels else None
        bins = fused_bins(DEVICE)
        self.steps = {}
        for number, layer in world.layers.items():
            indexer, own = layer.indexer, fused_projections(layer) if kernels else None
            self.steps[number] = AttentionStep(
                layer,
                self.tables,
                SparseMlaDecode(self.tables, 384),
                PublishingMxfp8Linear(self.all_reduce),
                mxfp8_input=False,
                source=self.overlap if indexer is not None and indexer.candidate_source else None,
                consumer=self.overlap if indexer is not None and indexer.candidate_consumer else None,
                aux=self.aux,
                fused=fused,
                projections=own,
                index=FusedIndexer(layer, bins, own) if own is not None and indexer is not None else None,
            )

    def run(self, inputs: dict[int, Tensor], positions: Tensor, gates: Gates, outputs: dict[int, Tensor]) -> None:
        """All layers of one step. Inside a forward context."""
        self.tables.reset()
        self.all_reduce.reset()
        self.overlap.reset()
        for number in LAYERS:
            output = self.steps[number].run(inputs[number], None, positions, gates)
            outputs[number].copy_(self.all_reduce.reduce(output))
        self.aux.join()
        self.overlap.stream.join()


@dataclass
class Captured:
    """A graph of one step, what it reads and what it leaves."""

    graph: torch.cuda.CUDAGraph
    outputs: dict[int, Tensor]
    load: Callable[[list[int], int], None]

    def replayed(self, chosen: list[int], seed: int) -> dict[int, Tensor]:
        """Outputs of another batch; poisoned before."""
        self.load(chosen, seed)
        for output in self.outputs.values():
            output.fill_(torch.nan)
        self.graph.replay()
        torch.cuda.synchronize()
        return {number: output.clone() for number, output in self.outputs.items()}


class Both:
    """One world, and captured steps of both kinds by their rows."""

    def __init__(self, ranks: int, contexts: tuple[int, ...], most: int) -> None:
        """contexts: the requests', with a step's own token, up to `most`."""
        self.world = World([context - 1 for context in contexts], config_of(ranks), most, DEVICE)
        self.world.prefill()
        self.steps = {kernels: Steps(self.world, kernels) for kernels in (False, True)}
        self.before = {name: tensor.clone() for name, tensor in self.world.state().items()}
        self.captured: dict[tuple[int, bool, bool, bool], Captured] = {}

    def restore(self) -> None:
        for name, tensor in self.world.state().items():
            tensor.copy_(self.before[name])

    def capture(self, rows: int, kernels: bool, overlap: bool, low_batch: bool = True) -> Captured:
        key = rows, kernels, overlap, low_batch
        if key not in self.captured:
            self.captured[key] = self._capture(rows, self.steps[kernels], Gates(rows, True, low_batch, overlap))
        return self.captured[key]

    def _capture(self, rows: int, steps: Steps, gates: Gates) -> Captured:
        world, padding, counts = self.world, [-1] * rows, [1] * rows
        batch = world.batch(padding, counts, static=True)
        inputs = layer_inputs(padding, counts, 0, HIDDEN, DEVICE)
        outputs = {number: torch.empty_like(x) for number, x in inputs.items()}
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with world.context.running(batch.metadata):
            # What is compiled and loaded, on every stream, is there before the capture.
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                steps.run(inputs, batch.positions, gates, outputs)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                steps.run(inputs, batch.positions, gates, outputs)

        def load(chosen: list[int], seed: int) -> None:
            batch.load(world.batch(chosen, counts, static=True))
            for number, x in layer_inputs(chosen, counts, seed, HIDDEN, DEVICE).items():
                inputs[number].copy_(x)

        return Captured(graph, outputs, load)


@pytest.fixture(scope="module")
def both() -> Both:
    return Both(4, CONTEXTS, MOST)


@pytest.fixture(scope="module")
def other(request: pytest.FixtureRequest) -> Both:
    """Over another number of ranks."""
    return Both(request.param, SHORT, MOST_SHORT)


def compare(both: Both, chosen: list[int], seed: int, overlap: bool = True, low_batch: bool = True) -> None:
    """One batch from the same caches on both; each row of each layer, and the window's records."""
    rows, live = len(chosen), torch.tensor([at >= 0 for at in chosen], device=DEVICE)
    both.restore()
    expected = both.capture(rows, False, overlap, low_batch).replayed(chosen, seed)
    records = {number: written(both.world, number, chosen) for number in LAYERS}
    both.restore()
    found = both.capture(rows, True, overlap, low_batch).replayed(chosen, seed)
    for number in LAYERS:
        ours, theirs, kind = found[number].double(), expected[number].double(), f"layer {number}, {KINDS[number]}"
        assert ours.isfinite().all() and not ours[~live].any(), f"{kind}: padding rows are zero"
        error = (ours - theirs).norm(dim=1)[live] / theirs.norm(dim=1)[live]
        bound = SELECTING_BOUND if number in (*SELECTS, *READS) else BOUND
        assert (error < bound).all(), f"{kind}: rows {chosen} are {error.tolist()} off, expected below {bound}"
        torch.testing.assert_close(written(both.world, number, chosen), records[number], rtol=2.0**-3, atol=1e-3)


def written(world: World, number: int, chosen: list[int]) -> Tensor:
    """The records of this step's tokens in a layer's window cache."""
    batch = world.batch(chosen, [1] * len(chosen), static=True)
    layer = world.layers[number]
    with world.context.running(batch.metadata):
        slots = layer.metadata().window.slot_mapping
    assert layer.window_cache is not None
    return reference.read_kv(layer.window_cache, slots[slots >= 0].unsqueeze(0))


@pytest.mark.parametrize("context", CONTEXTS)
def test_one_row(both: Both, context: int) -> None:
    compare(both, [CONTEXTS.index(context)], context)


@pytest.mark.parametrize("rows", range(1, 17))
def test_rows(both: Both, rows: int) -> None:
    """Ragged, every fourth row padding; more than 8 are more than a projection's program has."""
    compare(both, ragged(CONTEXTS, rows), rows)


@pytest.mark.parametrize("rows", [5, 9, 16])
def test_steps_that_are_not_low_batch(both: Both, rows: int) -> None:
    """Sparse MLA on kernels, on what the host's projections give."""
    compare(both, ragged(CONTEXTS, rows), rows, low_batch=False)


def ragged(contexts: tuple[int, ...], rows: int) -> list[int]:
    order = [(5 * row + rows) % len(contexts) for row in range(rows)]
    return [-1 if row % 4 == 3 else at for row, at in enumerate(order)]


# Of 1 row; of as many as insert; of as many as a projection's program has, and of one more.
OTHERS = [(ranks, rows) for ranks, inserts in ((1, 3), (2, 5), (8, 4)) for rows in (1, inserts, 8, 9)]


@pytest.mark.parametrize(("other", "rows"), OTHERS, indirect=["other"])
def test_other_ranks(other: Both, rows: int) -> None:
    """As `test_rows`; all of a step but the input's projections and the indexer is of other widths."""
    compare(other, ragged(SHORT, rows), rows)


@pytest.mark.parametrize("rows", [1, 8, 9])
def test_nothing_beside(both: Both, rows: int) -> None:
    """With side projections on the critical path."""
    compare(both, [12, 11, 0, 5, -1, 10, 3, 9, 4][:rows], 50 + rows, overlap=False)


def test_padding_only(both: Both) -> None:
    both.restore()
    for output in both.capture(4, True, True).replayed([-1] * 4, 3).values():
        assert not output.any()
    for name in ("window caches", "compressed caches"):
        assert same_bits(both.world.state()[name], both.before[name]), f"padding wrote to the {name}"


@pytest.mark.parametrize("rows", [1, 5, 8, 9, 16])
def test_replays_repeat(both: Both, rows: int) -> None:
    """Launches overlap, and read ahead of what is written before them: every replay from the same caches gives the
    same bits, and so does the step run one launch after the other."""
    chosen = [12, 11, 10, 9, -1, 5, 3, 1, 0, 2, 4, 6, -1, 7, 8, 13][:rows]
    captured = both.capture(rows, True, True)
    first = None
    for seed in (60, 61, 60, 61, 60):
        both.restore()
        found = captured.replayed(chosen, seed)
        if seed == 60:
            assert first is None or all(same_bits(found[number], first[number]) for number in LAYERS)
            first = found
    both.restore()
    eager = stepwise(both, chosen, 60)
    assert first is not None
    for number in LAYERS:
        assert same_bits(eager[number], first[number]), f"layer {number}, {KINDS[number]}"


def stepwise(both: Both, chosen: list[int], seed: int) -> dict[int, Tensor]:
    """The kernels' step with the device idle between any two launches."""
    counts, steps = [1] * len(chosen), both.steps[True]
    batch = both.world.batch(chosen, counts, static=True)
    inputs = layer_inputs(chosen, counts, seed, HIDDEN, DEVICE)
    outputs = {number: torch.full_like(x, torch.nan) for number, x in inputs.items()}
    for step in steps.steps.values():
        # Where the next boundary's side stream would be joined: between attention and the last projection.
        step.before_last = torch.cuda.synchronize
    gates = Gates(len(chosen), True, True, False)
    with both.world.context.running(batch.metadata), Serial():
        steps.run(inputs, batch.positions, gates, outputs)
    for step in steps.steps.values():
        step.before_last = lambda: None
    torch.cuda.synchronize()
    return outputs


class Serial:
    """Waits for the device after every kernel of ours."""

    def __enter__(self) -> None:
        import triton

        def wait(_: object) -> None:
            torch.cuda.synchronize()

        self._hook = wait
        triton.knobs.runtime.launch_exit_hook.add(wait)

    def __exit__(self, *_: object) -> None:
        import triton

        triton.knobs.runtime.launch_exit_hook.remove(self._hook)
