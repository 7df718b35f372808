"""How sparse MLA launches are cut, which layers the kernels serve, and what they refuse."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specialized_decode.attention import mla_tuning as tuning
from specialized_decode.attention import select


@pytest.mark.parametrize("topk", [0, 16, 512])
@pytest.mark.parametrize("window", [48, 128])
@pytest.mark.parametrize("heads", [1, 4, 8, 16, 24, 32, 64])
def test_every_key_head_and_column_has_its_program(heads: int, window: int, topk: int) -> None:
    tiles = tuning.key_tiles(window, topk)
    assert tiles * tuning.MLA_KEYS >= window + topk
    for rows in range(1, tuning.MLA_MAX_ROWS + 1):
        cut = tuning.sparse_mla(rows, heads, window, topk)
        assert (cut.splits - 1) * cut.tiles < tiles <= cut.splits * cut.tiles, "no split is empty"
        assert cut.group >= 16 and cut.groups * cut.group >= heads > (cut.groups - 1) * cut.group
        assert 512 % cut.slices == 0 and cut.partial == (
            0 if cut.splits == 1 else cut.programs * cut.group * columns(cut)
        )
        assert cut.early == (rows * cut.programs <= tuning.MLA_RESIDENT[cut.warps])
        assert cut.spread <= (cut.early and cut.splits > 1), "its programs wait for each other"
        assert cut.group == 16 or cut.slices > 1 or cut.tiles == 1, "the sums do not fit into the registers"


def columns(cut: tuning.SparseMla) -> int:
    return 512 // cut.slices


def test_few_rows_fill_the_gpu_and_many_do_not_split() -> None:
    assert tuning.sparse_mla(1, 16, 128, 512).programs == 80
    assert tuning.sparse_mla(8, 16, 128, 512).programs * 8 == 160
    assert tuning.sparse_mla(384, 16, 128, 512).programs == 1


def test_launches_that_insert() -> None:
    """Those of a low-batch step at four and eight ranks; at two, those whose sums leave room for it."""
    assert all(
        tuning.sparse_mla(rows, heads, 128, n).inserts for rows in range(1, 9) for heads in (8, 16) for n in (0, 512)
    )
    assert [tuning.sparse_mla(rows, 32, 128, 512).inserts for rows in (1, 4, 8)] == [False, True, False]


@pytest.mark.parametrize("rows", [1, 8, 48])
def test_candidates(rows: int) -> None:
    found = tuning.candidates(rows, 16, 128, 512)
    assert found[0] == tuning.sparse_mla(rows, 16, 128, 512) and len(found) == len({*found}) > 10
    for cut in found:
        tiles = tuning.key_tiles(128, 512, cut.keys)
        assert (cut.splits - 1) * cut.tiles < tiles <= cut.splits * cut.tiles


def test_splits_wait_for_each_other_only_where_all_run_at_once() -> None:
    for rows in range(1, 385):
        for slices in (1, 2, 4, 8):
            for tiles in (1, 2, 5, 10):
                cut = tuning.mla_launch(rows, 16, 10, tiles, slices)
                assert cut.spread == (rows * cut.programs <= tuning.MLA_RESIDENT[cut.warps] and cut.splits > 1)
    assert any(cut.spread for cut in tuning.candidates(8, 16, 128, 512))
    few = (tuning.candidates(rows, 16, 128, 512) for rows in (1, 8, 48))
    assert not any(cut.spread and not cut.early for cuts in few for cut in cuts)


@pytest.mark.parametrize("most", [132, 264])
def test_programs_of_one_tile(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(tuning, "MLA_PROGRAMS", most)
    for rows in range(1, 27):
        cut = tuning.sparse_mla(rows, 16, 128, 512)
        assert cut.tiles == 1 and (cut.slices == 1 or rows * cut.programs <= most)
        assert cut.slices == 8 or most < 2 * rows * cut.programs


def test_tiles_of_both_caches() -> None:
    """A tile holds keys of one cache."""
    assert tuning.key_tiles(128, 512) == 10 and tuning.key_tiles(48, 16) == 2 and tuning.key_tiles(65, 0) == 2


def layer(**changes: Any) -> Any:
    values = {"head_dim": 512, "rope_dim": 64, "num_heads": 16, "window_size": 128}
    selection = SimpleNamespace(topk_indices=torch.empty(3, changes.pop("topk", 512)))
    return SimpleNamespace(**{**values, **changes}, selection=selection)


def test_layers_that_are_served() -> None:
    for heads in (1, 8, 16, 32, 64):
        assert select.unsupported_widths(layer(num_heads=heads)) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"head_dim": 576}, "head: found 576 columns, 64 rotated, expected 512, 64 rotated"),
        ({"rope_dim": 32}, "head: found 512 columns, 32 rotated"),
        ({"num_heads": 128}, "heads: found 128, expected 1 to 64 a rank"),
        ({"window_size": 4096}, "window: found 4096, expected 1 to 1024"),
        ({"topk": 4096}, "top-k: found 4096, expected 1 to 2048"),
    ],
)
def test_layers_that_are_not(changes: dict[str, Any], said: str) -> None:
    reason = select.unsupported_widths(layer(**changes))
    assert reason is not None and said in reason


def test_a_cpu_is_not_served() -> None:
    assert select.mla_unsupported(layer(), torch.device("cpu")) == "device: found cpu, expected cuda"


def weights(**changes: Any) -> Any:
    shapes = {"fused_wqa_wkv": (1792, 5120), "wq_b": (8192, 1280), "wo_a": (2048, 4096), "wo_b": (5120, 2048)}
    layers = {
        name: SimpleNamespace(weight=torch.empty(shape, dtype=torch.float8_e4m3fn, device="meta"), scale=torch.empty(0))
        for name, shape in {**shapes, **changes}.items()
    }
    return SimpleNamespace(**layers, o_groups=2)


def test_weights_that_are_served() -> None:
    assert select.unsupported_weights(weights()) is None
    assert select.projections_unsupported(weights(), torch.device("cpu")) == "device: found cpu, expected cuda"


def test_weights_that_are_not() -> None:
    assert "wo_a: projection: found [2080, 4096]" in str(select.unsupported_weights(weights(wo_a=(2080, 4096))))
    plain = weights()
    plain.wq_b = SimpleNamespace(weight=torch.empty(32, 32, dtype=torch.bfloat16), scale=None)
    assert select.unsupported_weights(plain) == "wq_b: found torch.bfloat16, expected float8_e4m3fn with scales"


class TestRefusals:
    """Inputs that a kernel would misread."""

    @pytest.mark.parametrize("states", [0, 3, 48])
    def test_pages(self, states: int) -> None:
        from specialized_decode.attention.fused_mla import log2_states

        with pytest.raises(ValueError, match=f"found {states} states a page, expected a power of two"):
            log2_states(states)
        assert [log2_states(1 << n) for n in range(8)] == list(range(8))

    def test_records_at_odd_addresses(self) -> None:
        from specialized_decode.attention.fused_mla import kv_pages

        buffer = torch.zeros(2 * 18688 + 16, dtype=torch.uint8)
        shape = (2, 32, 584)
        good = buffer.as_strided(shape, (18688, 584, 1))
        assert kv_pages(good)[1:] == (18688, 5)
        for bad in (
            buffer.as_strided(shape, (18690, 584, 1)),
            buffer.as_strided(shape, (18688, 584, 1), 8),
            good[:, :, :576],
            good.view(torch.int8),
        ):
            with pytest.raises(ValueError, match="pages at multiples of 16 bytes"):
                kv_pages(bad)
