"""Every kernel of attention in every cut of a step of 1 and of 8 rows, and sparse MLA of more rows, for
compute-sanitizer, which test_gpu_sanitizer.py runs. Eight rows are of a request each, or drafts, which read what the
step itself stores."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).absolute().parent.parent.parent))

import torch
from torch import Tensor

from specialized_decode.attention.fused import FusedLinear, project_fp8
from specialized_decode.attention.fused_index import FusedIndexer, fused_bins
from specialized_decode.attention.fused_mla import WAYS, FusedSparseMla, FusedTables
from specialized_decode.attention.mla import Settled
from specialized_decode.attention.prepared import BLOCK, TILE, PreparedFp8
from specialized_decode.attention.projection_tuning import projection, waiting
from tests.attention.shapes import RANKS, SHAPES
from tests.helpers.index_case import IndexCase, bins_of, closed_groups, tied_scores
from tests.helpers.index_case import Shape as IndexShape
from tests.helpers.mla_case import MlaCase, Shape
from tests.helpers.step_linear import fp8_linear

# Of all kernels together; counted where nothing is launched, too.
LAUNCHES = 414
# Contexts and rows of a request. One row: the first token, one past the window, one past the top-k, padding. Eight: of
# a request each, and of four, which begin and end within a group of two and at its edges.
ONE = (((1,), 1), ((130,), 1), ((513,), 1), ((1026,), 1), ((0,), 1))
EIGHT = (1, 130, 513, 0, 1026, 131, 2, 700), 1
BATCHES = (*ONE, EIGHT, ((513, 512, 0, 2), 2))
# The projections' rows by how many ranks share a weight: whole and halved ones take the longest. More than eight are
# more than a program has.
ROWS, Q_RANK = {1: (8,), 2: (8,), 4: (1, 8, 13), 8: (1, 8)}, 1280
# Of the indexer's launches too.
MORE = tuple(EIGHT[0][row % 8] for row in range(13)), 1
# Sparse MLA's batches by heads. Of 16, 27 rows, whose programs take several tiles; of 32 and 64, rows that insert.
MANY = tuple(EIGHT[0][row % 8] for row in range(27)), 1
MLA = {
    8: BATCHES,
    16: (*BATCHES, MANY),
    32: (((1026,), 1), ((513, 0), 2), EIGHT),
    64: (((1026,), 1), ((513,), 2), EIGHT),
}
# How many blocks a source of candidates chooses: all that a row holds, and a few.
CANDIDATES = (2048, 9)
INDEXED = {"ratio 1": IndexShape(), "ratio 2": IndexShape(ratio=2, states=32), "consumer": IndexShape(compressor=False)}


@contextmanager
def recorded(launch: Callable[..., Any] | None = None) -> Iterator[Counter[str]]:
    """Counts launches of Triton's kernels by name. launch: in place of the launch, (kernel, arguments)."""
    from triton.runtime.jit import JITFunction

    names: Counter[str] = Counter()
    run = JITFunction.run

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        names[self.fn.__name__] += 1
        return (launch or run)(self, *args, **kwargs)

    JITFunction.run = counted
    try:
        yield names
    finally:
        JITFunction.run = run


def projections(device: torch.device) -> list[Tensor]:
    """fused_wqa_wkv, and of each number of ranks wq_b, wo_a and wo_b, and wq_b as it norms. An indexer's wq_b has eight
    ranks' shape."""
    found = []
    for (n, k, groups), ranks in zip(SHAPES, (8, *RANKS * 3), strict=True):
        words = torch.ones(n // TILE, k // BLOCK, 32, 4, dtype=torch.int32, device=device)
        weight = PreparedFp8(words, torch.full((n // 32, k // 32), 120, dtype=torch.uint8, device=device))
        for rows in ROWS[ranks]:
            x = torch.ones(rows, groups * k, dtype=torch.bfloat16, device=device)
            found.append(project_fp8(x, weight, groups))
            if k == Q_RANK:
                # As `fused_projections` launches it.
                wide = torch.ones(rows, k + 512, dtype=torch.bfloat16, device=device)[:, :k]
                found.append(project_fp8(wide, weight, launch=waiting(projection(n, k)), norm=x[0], eps=1e-20))
    return found


def sparse_mla(device: torch.device) -> list[Tensor]:
    """Window alone and with a selection, settled or not, with the records stored ahead or by the launch itself."""
    found, tables = [], FusedTables()
    for heads, batches in MLA.items():
        for contexts, count in batches:
            case = MlaCase(Shape(heads=heads, count=count), contexts, len(contexts), device)
            fused = FusedSparseMla(heads, 128, 512, case.rows, device)
            window, selected = case.tables(tables)
            found.append(fused.norm_insert(case.attn, case.projected, case.positions, case.window)[case.live])
            latents = case.projected[:, 1280:]
            for slots, settled in WAYS:
                given = case.attn, case.q, case.positions, window, selected if slots else None, settled
                found.append(fused(*given))
                if settled == Settled.ALL and fused.inserts(case.rows, slots):
                    found.append(fused(*given, None, latents, case.window))
    return found


def indexers(device: torch.device) -> list[Tensor]:
    """A layer with a compressor of either ratio, and one without, whose scores candidates restrict; projections of the
    input and of queries in one launch each, and apart."""
    found = []
    for name, shape in INDEXED.items():
        for contexts, count in (*BATCHES, MORE):
            case = IndexCase(replace(shape, count=count), contexts, len(contexts), device)
            own: Any = SimpleNamespace(
                fused_wqa_wkv=FusedLinear(fp8_linear(1, 64, 5120, 5120**-0.5, device)),
                wq_b=FusedLinear(fp8_linear(2, 64, 1280, 1280**-0.5, device)),
            )
            fused, flags = FusedIndexer(case.attn, fused_bins(device), own), None
            together, inputs, q = fused.project_all(case.x), fused.project(case.x), fused.wq_b(case.qr)
            assert together is not None
            # Behind launches that are done.
            queries = *fused.queries(case.qr), *fused.queries(case.qr, settled=True)
            # Padding rows hold no numbers, nor do their projections.
            rows = together[0], together[1].partial.transpose(0, 1), *queries
            found += [tensor[case.live] for tensor in rows]
            if name == "consumer":
                flags = torch.rand(case.rows, case.columns, device=device) < 0.5
            if shape.compressor:
                fused.compress(case.attn, inputs, case.positions, case.caches)
            scores = fused.scores(case.attn, q, inputs, case.positions, case.caches, flags)
            found.append(fused.top(case.attn, scores, case.positions, case.caches))
            for count in CANDIDATES if name == "ratio 1" else ():
                blocks = torch.empty(case.rows, count, dtype=torch.int32, device=device)
                found += [fused.choose(case.attn, scores, case.positions, case.caches, blocks)[0], blocks]
    return found


def selections(device: torch.device) -> list[Tensor]:
    """Scores that are alike, of which more are listed than are compared with each other; no numbers; infinities."""
    case = IndexCase(IndexShape(), (1100, 513, 0), 5, device)
    fused, found = FusedIndexer(case.attn, fused_bins(device)), []
    for scores in tied_scores(case).values():
        fused.bins.copy_(bins_of(scores, closed_groups(case), fused.bins))
        found.append(fused.top(case.attn, scores, case.positions, case.caches))
    return found


def launch_all(device: torch.device) -> list[Tensor]:
    """What the launches leave: numbers, or slots."""
    return [*projections(device), *sparse_mla(device), *indexers(device), *selections(device)]


def main() -> None:
    with recorded() as names:
        found = launch_all(torch.device("cuda"))
    torch.cuda.synchronize()
    assert all(tensor.isfinite().all() for tensor in found)
    print(f"launched {names.total()} times")


if __name__ == "__main__":
    main()
