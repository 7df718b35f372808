"""How the index kernels' launches are cut, which layers they serve, and what they refuse."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specialized_decode.attention import index_tuning as tuning
from specialized_decode.attention import select
from specialized_decode.attention.projection_tuning import projection


@pytest.mark.parametrize("k", [64, 320, 1024, 4096, 5120, 7168])
@pytest.mark.parametrize("n", [16, 32, 528, 544, 1056])
def test_every_column_is_somebodys(n: int, k: int) -> None:
    launch = tuning.index_projection(n, k)
    assert launch.splits * launch.k_warps * launch.per_warp * tuning.BLOCK == k
    assert launch.bytes <= tuning.PROJECTION_BYTES
    assert launch.per_warp <= tuning.PROJECTION_BLOCKS and launch.k_warps <= tuning.MOST_WARPS


@pytest.mark.parametrize("n", [32, 544, 1056])
@pytest.mark.parametrize(("outputs", "k"), [(1792, 5120), (2048, 4096), (1088, 1024)])
def test_programs_beside_anothers(outputs: int, k: int, n: int) -> None:
    """They are as large, so that two fit on a multiprocessor; of the release's layers all run at once."""
    own = projection(outputs, k)
    launch = tuning.beside(n, k, own)
    assert launch is not None
    assert launch.k_warps == own.k_warps == own.warps and launch.bytes <= own.bytes
    assert launch.splits * launch.k_warps * launch.per_warp * tuning.BLOCK == k
    if k == 5120:
        assert (outputs + launch.splits * n) // tuning.TILE <= 2 * tuning.MULTIPROCESSORS


def test_programs_that_cannot_be_beside_anothers() -> None:
    assert tuning.beside(544, 5120, projection(8192, 1280)) is None, "of two tiles"
    assert tuning.beside(544, 8192, projection(5120, 8192)) is None, "in two rounds"


@pytest.mark.parametrize(("n", "k"), [(0, 64), (24, 64), (16, 0), (16, 72), (16, 16 * 7919)])
def test_other_projections_are_refused(n: int, k: int) -> None:
    with pytest.raises(ValueError, match=rf"projection: found \[{n}, {k}\]"):
        tuning.index_projection(n, k)


@pytest.mark.parametrize("rows", range(1, tuning.MAX_ROWS + 1))
def test_programs_of_the_scores(rows: int) -> None:
    """As many as there are tiles, or run at once; the longest request changes nothing beyond that."""
    for width in (1, 64, 65, 4096, 8192, 1 << 20):
        cut = tuning.scores(rows, width)
        programs = tuning.score_programs(rows, width)
        assert 1 <= programs <= -(-width // cut.keys) and (programs + 1) * rows <= cut.resident
        if cut == tuning.SHORT_ROWS:
            assert programs == -(-width // cut.keys)
    assert [tuning.score_programs(rows, width) for width in (64, 65)] == [1, 2]
    assert tuning.scores(rows, 1 << 20) == (tuning.FEW if rows == 1 else tuning.MANY)


@pytest.mark.parametrize("cut", tuning.CUTS)
def test_scores_that_run_at_once(cut: tuning.ScoresCut) -> None:
    """Of 32 heads, whose programs fill the registers."""
    registers = tuning.scores_registers(32, cut, 9)
    assert registers is not None and tuning.scores_registers(64, cut, 9) is None
    assert tuning.scores_registers(32, cut, 10) is None
    assert registers * 32 * cut.warps * cut.programs <= 65536


def test_what_is_tried() -> None:
    assert tuning.TOP_WARPS in tuning.TOPS
    assert tuple(4096 // (32 * warps) for warps in tuning.TOPS) == tuning.SPREADS
    assert tuning.SPREADS[tuning.TOPS.index(tuning.TOP_WARPS)] == tuning.SPREAD


def test_a_chunks_counts_fit_into_a_half() -> None:
    assert tuning.CHUNK < 1 << 15 and tuning.CHUNK % tuning.PART == 0
    assert all(tuning.PART % (32 * warps) == 0 for warps in tuning.TOPS)


def weight(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    scale = torch.empty(0) if dtype == torch.float8_e4m3fn else None
    return SimpleNamespace(weight=torch.empty(shape, dtype=dtype, device="meta"), scale=scale)


def layer(ratio: int = 2, topk: int = 512, blocks: bool = True, **changes: Any) -> Any:
    """Of ratio 0: one without a compressor. blocks: whether the model has candidates."""
    compressor = SimpleNamespace(ratio=ratio, fused_wkv_wgate=weight(512 * ratio, 5120)) if ratio else None
    values = {
        "num_heads": 32,
        "head_dim": 128,
        "candidate_block_size": 8,
        "wq_b": weight(4096, 1280, dtype=torch.float8_e4m3fn),
        "weights_proj": weight(32, 5120),
        "wk": weight(128, 512),
    }
    candidates = torch.empty(3, 2048) if blocks else None
    selection = SimpleNamespace(topk_indices=torch.empty(3, topk), candidate_blocks=candidates)
    return SimpleNamespace(indexer=SimpleNamespace(**{**values, **changes}), compressor=compressor, selection=selection)


@pytest.mark.parametrize("ratio", [0, 1, 2])
def test_layers_that_are_served(ratio: int) -> None:
    assert select.unsupported_indexer(layer(ratio)) is None
    assert select.unsupported_indexer(layer(ratio, blocks=False, candidate_block_size=0)) is None
    assert select.index_unsupported(layer(ratio), torch.device("cpu")) == "device: found cpu, expected cuda"


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (SimpleNamespace(indexer=None, compressor=None), "indexer: found none"),
        (layer(head_dim=64), "indexer: found 32 heads of 64 columns, expected 1 to 64 of 128"),
        (layer(num_heads=65), "indexer: found 65 heads of 128 columns"),
        (layer(topk=4096), "top-k: found 4096, expected 1 to 2048"),
        (layer(candidate_block_size=12), "candidate blocks: found 12 positions each, expected a power of two"),
        (layer(ratio=3), "compressor: found ratio 3, expected 1 or 2"),
        (layer(weights_proj=weight(32, 5120, dtype=torch.float32)), "weights_proj: found torch.float32"),
        (layer(wk=weight(128, 512, dtype=torch.float8_e4m3fn)), "wk: found torch.float8_e4m3fn"),
        (layer(wq_b=weight(4096, 1280)), "indexer's wq_b: found torch.bfloat16, expected float8_e4m3fn with scales"),
        (layer(wq_b=weight(4096, 16, dtype=torch.float8_e4m3fn)), "indexer: projection: found [4096, 16]"),
    ],
)
def test_layers_that_are_not(found: Any, said: str) -> None:
    assert said in str(select.unsupported_indexer(found))
