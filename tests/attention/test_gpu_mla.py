"""Sparse MLA on a GPU: values against float64, other cuts of a launch, graph replays over other batches."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specialized_decode.attention import SparseIndexTables, reference
from specialized_decode.attention import mla_tuning as tuning
from specialized_decode.attention.fused_mla import WAYS, FusedSparseMla, FusedTables
from specialized_decode.attention.mla import Settled
from tests.helpers.mla_case import MlaCase, Shape, assert_as_good
from tests.helpers.poisoned import poisoned
from tests.helpers.step_mhc import same_bits

DEVICE = torch.device("cuda")
MAX_ROWS = 384
# Beyond those whose records a launch stores itself.
WARMED_ROWS = 16
RAGGED = (1, 2, 0, 127, 128, 129, 130, 511, 512, 513, 514, 1024, 8192)
HEADS = (8, 16, 32, 64)
Make = Callable[[Shape], FusedSparseMla]


@pytest.fixture(scope="module")
def kernels() -> Make:
    """One object a width for all tests: its scratch carries over from call to call."""
    made: dict[tuple[int, int, int], FusedSparseMla] = {}

    def make(shape: Shape) -> FusedSparseMla:
        key = shape.heads, shape.window, shape.topk
        if key not in made:
            made[key] = FusedSparseMla(*key, MAX_ROWS, DEVICE)
        return made[key]

    return make


def run(
    fused: FusedSparseMla,
    case: MlaCase,
    settled: Settled = Settled.ALL,
    launch: tuning.SparseMla | None = None,
) -> Tensor:
    """From tables to outputs."""
    with poisoned():
        window, selected = case.tables(FusedTables())
        return fused(case.attn, case.q, case.positions, window, selected, settled, launch)


def contexts(rows: int) -> tuple[int, ...]:
    return tuple(RAGGED[(3 * row + rows) % len(RAGGED)] for row in range(rows))


@pytest.mark.parametrize("rows", [*range(1, 17), 26, 27, 33, 48, 66, 67, 132, 133])
def test_rows(kernels: Make, rows: int) -> None:
    case = MlaCase(Shape(), contexts(rows), rows, DEVICE)
    assert_as_good(run(kernels(case.shape), case), case)


@pytest.mark.parametrize("ratio", [0, 2])
@pytest.mark.parametrize("rows", [1, 13])
@pytest.mark.parametrize("heads", HEADS)
def test_heads(kernels: Make, heads: int, rows: int, ratio: int) -> None:
    shape = Shape(heads=heads, ratio=ratio, states=32 if ratio == 2 else 64)
    case = MlaCase(shape, contexts(rows), rows + heads, DEVICE)
    assert_as_good(run(kernels(shape), case), case)


@pytest.mark.parametrize("context", [*RAGGED, 24576])
@pytest.mark.parametrize("heads", [8, 16])
def test_contexts(kernels: Make, heads: int, context: int) -> None:
    """One row; the same with all slots, or those of the selection, read behind the wait."""
    case = MlaCase(Shape(heads=heads), (context,), context, DEVICE)
    out = run(kernels(case.shape), case)
    assert_as_good(out, case)
    for settled in (Settled.NOTHING, Settled.WINDOW):
        assert same_bits(run(kernels(case.shape), case, settled=settled), out)


def test_most_rows(kernels: Make) -> None:
    """A kernel may be right in the first wave of programs alone."""
    short = tuple(c if c < 1024 else 700 for c in contexts(384))
    case = MlaCase(Shape(), short, 384, DEVICE)
    assert_as_good(run(kernels(case.shape), case), case)


def test_drafts(kernels: Make) -> None:
    case = MlaCase(Shape(count=6), (700, 6, 0, 131, 8192), 6, DEVICE)
    assert_as_good(run(kernels(case.shape), case), case)


def test_small_widths(kernels: Make) -> None:
    case = MlaCase(Shape(heads=4, window=48, topk=16), (1, 47, 48, 49, 0, 96), 4, DEVICE)
    assert_as_good(run(kernels(case.shape), case), case)


INSERTING = [
    (heads, rows, ratio)
    for heads in HEADS
    for rows in (1, 2, 3, 5, 8)
    for ratio in (0, 1)
    if tuning.sparse_mla(rows, heads, 128, 512 if ratio else 0).inserts
]


@pytest.mark.parametrize(("heads", "rows", "ratio"), INSERTING)
def test_attention_that_inserts(kernels: Make, heads: int, rows: int, ratio: int) -> None:
    """The chosen cut and, of 16 heads, some of the others: the same records as a launch of their own stores, and as
    good."""
    some, topk = (700, 129, 0, 1, 8192, 130, 513, 2)[:rows], 512 if ratio else 0
    case = MlaCase(Shape(heads=heads, ratio=ratio), some, rows, DEVICE)
    cuts = [tuning.sparse_mla(rows, heads, 128, topk)]
    if heads == 16:
        # Each is compiled for itself.
        cuts += [cut for cut in tuning.candidates(rows, 16, 128, topk) if cut.inserts][::9]
        cuts += some_that_wait(rows, topk)
    inserted(kernels(case.shape), case, [*dict.fromkeys(cuts)])


@pytest.mark.parametrize(
    ("heads", "count", "contexts"),
    [
        (16, 4, (700,)),
        (16, 4, (130,)),
        (16, 4, (3,)),
        (16, 4, (8192, 0)),
        (8, 8, (130,)),
        (32, 5, (130,)),
        (64, 3, (130,)),
    ],
)
def test_attention_that_inserts_drafts(kernels: Make, heads: int, count: int, contexts: tuple[int, ...]) -> None:
    """Rows of one request read each other's records."""
    case = MlaCase(Shape(heads=heads, count=count), contexts, 5, DEVICE)
    cut = tuning.sparse_mla(case.rows, heads, 128, 512)
    assert cut.inserts
    inserted(kernels(case.shape), case, [cut])


def some_that_wait(rows: int, topk: int) -> list[tuning.SparseMla]:
    """Launches whose splits wait for each other; few, since each is compiled for itself."""
    wait = [cut for cut in tuning.candidates(rows, 16, 128, topk) if cut.spread and cut.inserts and cut.warps == 4]
    return wait if rows in (1, 8) else wait[:2]


@pytest.mark.parametrize("heads", [8, 16, 32, 64])
@pytest.mark.parametrize("ratio", [0, 1])
def test_splits_that_wait_for_each_other(kernels: Make, heads: int, ratio: int) -> None:
    """Again and again over the same scratch, in turn with a launch whose last split adds up: the same each time."""
    case = MlaCase(Shape(heads=heads, ratio=ratio), (700, 0, 8192), 11, DEVICE)
    fused, tiles = kernels(case.shape), tuning.key_tiles(128, 512 if ratio else 0)
    for slices in (2, 4) if heads > 16 else (1, 2, 8):
        cut = tuning.mla_launch(3, heads, tiles, 1, slices)
        if not cut.spread:
            continue
        alone = cut._replace(spread=False)
        out, other = run(fused, case, launch=cut), run(fused, case, launch=alone)
        assert_as_good(out, case)
        assert_as_good(other, case)
        for _ in range(20):
            assert same_bits(run(fused, case, launch=cut), out)
            assert same_bits(run(fused, case, launch=alone), other)
        assert_scratch_is_clean(fused)


def assert_scratch_is_clean(fused: FusedSparseMla) -> None:
    """Counters are between launches."""
    assert not (fused._arrived % 4096).any()


def test_a_graph_of_splits_that_wait(kernels: Make) -> None:
    """A chain in which each launch starts while the one before it runs, beside launches of another stream that take
    part of the GPU; replayed: all finish, with the same bits."""
    case = MlaCase(Shape(), (8192,) * 8, 12, DEVICE)
    fused, (window, selected) = kernels(case.shape), case.tables(FusedTables())
    cuts = [cut for cut in tuning.candidates(8, 16, 128, 512) if cut.spread and cut.warps == 4]
    other, a = torch.cuda.Stream(), torch.randn(4096, 4096, device=DEVICE).bfloat16()

    def chain() -> list[Tensor]:
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            for _ in range(20):
                torch.mm(a, a)
        found = [
            fused(case.attn, case.q, case.positions, window, selected, Settled.ALL, cut)
            for _ in range(20)
            for cut in cuts
        ]
        torch.cuda.current_stream().wait_stream(other)
        return found

    expected = [out.clone() for out in chain()[: len(cuts)]]
    torch.cuda.synchronize()
    for out in expected:
        assert_as_good(out, case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain()
    for _ in range(10):
        for out in found:
            out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        for number, out in enumerate(found):
            assert same_bits(out, expected[number % len(cuts)])
        assert_scratch_is_clean(fused)


def inserted(fused: FusedSparseMla, case: MlaCase, cuts: list[tuning.SparseMla]) -> None:
    """Runs each cut with the insert inside, from a cache without the step's records."""
    window, selected = case.tables(FusedTables())
    before = case.window_cache.clone()
    fused.norm_insert(case.attn, case.projected, case.positions, case.window)
    after = case.window_cache.clone()
    for cut in cuts:
        if not cut.inserts:
            continue
        case.window_cache.copy_(before)
        latents = case.projected[:, case.shape.q_rank :]
        with poisoned():
            out = fused(case.attn, case.q, case.positions, window, selected, Settled.ALL, cut, latents, case.window)
        assert same_bits(case.window_cache, after), f"{cut}: other records"
        assert_as_good(out, case)


@pytest.mark.parametrize("cut", [(1, 1), (2, 2), (3, 4), (4, 8), (10, 1)])
def test_cuts(kernels: Make, cut: tuple[int, int]) -> None:
    case = MlaCase(Shape(), (513, 0, 8192), 7, DEVICE)
    launch = tuning.mla_launch(3, 16, tuning.key_tiles(128, 512), *cut)
    assert_as_good(run(kernels(case.shape), case, launch=launch), case)


@pytest.mark.parametrize("sink", [float("-inf"), 0.0, 40.0])
def test_empty_selections_and_sinks(kernels: Make, sink: float) -> None:
    case = MlaCase(Shape(), (1, 0, 700, 8192), 3, DEVICE)
    case.selection.fill_(-1)
    case.selection[3, 5:400:7] = 11
    case.attn.sinks.fill_(sink)
    assert_as_good(run(kernels(case.shape), case), case)


@pytest.mark.parametrize("rows", [1, 8, 48])
def test_tables_are_the_references(rows: int) -> None:
    case = MlaCase(Shape(ratio=2, states=32), contexts(rows), rows, DEVICE)
    with poisoned():
        ours = case.tables(FusedTables())
    theirs = case.tables()
    assert ours[1] is not None and theirs[1] is not None
    assert same_bits(ours[0], theirs[0]) and same_bits(ours[1], theirs[1])


@pytest.mark.parametrize("rows", [1, 3, 16, 384])
def test_norms_and_insert(kernels: Make, rows: int) -> None:
    """The reference's, but for a last bit, which another order of a sum may turn."""
    case = MlaCase(Shape(), tuple(c if c < 1024 else 700 for c in contexts(rows)), rows, DEVICE)
    rank, live = case.shape.q_rank, case.live
    before = case.window_cache.contiguous()
    with poisoned():
        found = kernels(case.shape).norm_insert(case.attn, case.projected, case.positions, case.window)
    ours = case.window_cache.contiguous()
    queries, latents = case.projected.split([rank, 512], 1)
    expected = reference.rms_norm(queries, case.attn.q_norm, case.attn.eps)
    torch.testing.assert_close(found[live].float(), expected[live].float(), rtol=2.0**-7, atol=1e-6)
    case.window_cache.copy_(before)
    latents = reference.rms_norm(latents, case.attn.kv_norm, case.attn.eps)
    cos_sin = case.attn.cos_sin[case.positions]
    reference.insert_kv(case.window_cache, case.window.slot_mapping, latents, cos_sin)
    theirs = case.window_cache.contiguous()
    written = int(live.sum())
    assert (ours != theirs).sum() <= 6 * written, f"{int((ours != theirs).sum())} bytes differ"
    slots = case.window.slot_mapping[live].unsqueeze(0)
    stored = reference.read_kv(case.window_cache, slots)
    case.window_cache.copy_(ours)
    torch.testing.assert_close(reference.read_kv(case.window_cache, slots), stored, rtol=2.0**-3, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 5, 13])
def test_chain_of_launches(kernels: Make, rows: int) -> None:
    """Insert, another launch that lets the next one go, attention, over rotating layers in one graph: attention reads
    ahead of the launch before it, and sees what the insert wrote. Replays over other batches: nothing is kept."""
    shape = Shape()
    some = [MlaCase(shape, contexts(rows), seed, DEVICE) for seed in range(4)]
    other = [MlaCase(shape, contexts(rows), 100 + seed, DEVICE) for seed in range(4)]
    fused, weight = kernels(shape), torch.randn(1280, 16 * 512, device=DEVICE).bfloat16() * 1280**-0.5

    def step(cases: list[MlaCase]) -> list[Tensor]:
        outputs = []
        for case in cases:
            tables = SparseIndexTables(FusedTables())
            window = tables.window(case.attn, case.window, case.positions)
            assert case.compressed is not None
            selected = tables.selected(case.attn, case.compressed, case.window)
            case.q.copy_((case.projected[:, :1280] @ weight).unflatten(1, (16, 512)))
            fused.norm_insert(case.attn, case.projected, case.positions, case.window)
            FusedTables().window(case.window, case.positions, shape.window)
            outputs.append(fused(case.attn, case.q, case.positions, window, selected, Settled.ALL))
        return outputs

    step(some)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(some)
    for batch in (None, other):
        for mine, theirs in zip(some, batch or [], strict=False):
            mine.load(theirs)
            mine.projected.copy_(theirs.projected)
        first = None
        for _ in range(3):
            for out in found:
                out.fill_(torch.nan)
            graph.replay()
            torch.cuda.synchronize()
            for out, case in zip(found, some, strict=True):
                assert_as_good(out, case)
            assert first is None or all(same_bits(ours, theirs) for ours, theirs in zip(found, first, strict=True))
            first = [out.clone() for out in found]


def test_warm_up_compiles_all(kernels: Make) -> None:
    """No launch of a step compiles after it."""
    shape = Shape(heads=4, window=48, topk=16, q_rank=64)
    case = MlaCase(shape, (40, 3, 0), 1, DEVICE)
    fused = FusedSparseMla(4, 48, 16, WARMED_ROWS, DEVICE)
    fused.warm(case.attn)
    from specialized_decode.attention.kernels.sparse_mla import sparse_mla_kernel

    caches = sparse_mla_kernel.device_caches[torch.cuda.current_device()][0]
    before = len(caches)
    for rows in range(1, WARMED_ROWS + 1):
        case = MlaCase(shape, (40,) * rows, 1, DEVICE)
        window, selected = case.tables(FusedTables())
        assert selected is not None
        fused.norm_insert(case.attn, case.projected, case.positions, case.window)
        latents = case.projected[:, 64:]
        for slots, settled in WAYS:
            fused(case.attn, case.q, case.positions, window, selected if slots else None, settled)
            if settled == Settled.ALL and fused.inserts(rows, slots):
                given = selected if slots else None, settled, None, latents, case.window
                fused(case.attn, case.q, case.positions, window, *given)
    assert len(caches) == before


def test_other_inputs_are_refused(kernels: Make) -> None:
    case = MlaCase(Shape(), (5, 7), 1, DEVICE)
    fused = kernels(case.shape)
    window, selected = case.tables(FusedTables())
    with pytest.raises(ValueError, match=r"sparse MLA: found 0 rows, expected 1 to 384"):
        fused(case.attn, case.q[:0], case.positions, window, selected, Settled.ALL)
    with pytest.raises(ValueError, match=r"sparse MLA: q: found torch.float32"):
        fused(case.attn, case.q.float(), case.positions, window, selected, Settled.ALL)
    with pytest.raises(ValueError, match=r"sparse MLA: window: found torch.int32"):
        fused(case.attn, case.q, case.positions, window.int(), selected, Settled.ALL)
