"""Layer plans other than the presets': the executor follows the configuration, not a pattern of layers."""

import pytest

from specialized_decode.engram import EngramPrefetch
from tests.helpers.runtime_model import Layers, Pair, assert_same
from tests.runtime.conftest import Folder

PLANS = {
    "window only": Layers((0, 0, 0), engram_layer_ids=(2,)),
    "ratio 1 only": Layers((1, 1, 1, 1), (0, 2), (0, 1, 2, 3), 0),
    "ratio 2 only, no candidates": Layers((2, 2, 2, 2), (0, 3), (0, 1, 3), engram_layer_ids=(3,)),
    "candidates at ratio 2": Layers((0, 2, 2, 2), (1,), (1, 2, 3), 1, (2,)),
    "candidate source last": Layers((0, 1, 1), (1,), (1, 2), 2),
    "window layers between": Layers((2, 2, 0, 1, 1, 0, 1), (0, 3), (0, 1, 3, 6), 3, (2, 5)),
    "ratio 1 below ratio 2": Layers((1, 1, 2, 2), (0, 2), (0, 2, 3), engram_layer_ids=(1, 2, 3)),
    "Engram on the first layer": Layers((0, 1, 1), (1,), (1, 2), 1, (0, 2)),
    "Engram on the first layer alone": Layers((2, 0), (0,), (0,), engram_layer_ids=(0,)),
    "one layer": Layers((1,), (0,), (0,), 0),
    "one window layer with Engram": Layers((0,), engram_layer_ids=(0,)),
}


@pytest.mark.parametrize("layers", PLANS.values(), ids=PLANS)
def test_layer_plan(folder: Folder, layers: Layers) -> None:
    """Steps on both sides of the low-batch gate, with every aux layer, at contexts past the restriction."""
    pair = Pair(folder(layers), max_rows=4, max_context=128, max_tokens=128)
    count = len(layers.compress_ratios)
    pair.backbone.set_aux_layers(tuple(range(count, 0, -1)))
    requests = pair.open((1, 33, 90, 110))
    live = requests[-2:]
    plain, executed = pair.both(pair.capture(3), pair.batch([*live, None]))
    assert_same(plain, executed, rows=2)
    assert len(executed.aux) == count
    pair.advance(live)
    verification = pair.capture(2, 6)
    pair.advance(requests, 0, 6)
    assert_same(*pair.both(verification, pair.batch([requests[0], requests[2]], 6)), rows=12)
    assert_wired(pair, layers)


def assert_wired(pair: Pair, layers: Layers) -> None:
    """Engram, the candidate source and its consumers are where the plan has them, and nowhere else."""
    count, source = len(layers.compress_ratios), layers.candidate_source_layer_id
    plans = pair.executor.layers
    assert [plan.layer_id for plan in plans] == list(range(count))
    engrams = [plan.layer_id for plan in plans if plan.engram is not None]
    assert engrams == [layer for layer in layers.engram_layer_ids if layer > 0]
    assert (pair.executor.candidates is not None) == (source >= 0)
    assert [plan.layer_id for plan in plans if plan.attention.source is not None] == [source] * (source >= 0)
    consumers = [layer for layer in layers.index_source_layer_ids if 0 <= source < layer]
    assert [plan.layer_id for plan in plans if plan.attention.consumer is not None] == consumers


def test_engram_on_the_first_layer_is_never_applied(folder: Folder) -> None:
    """Hashes change nothing where the only Engram layer is the first; its table is not even prefetched."""
    pair = Pair(folder(PLANS["Engram on the first layer alone"]), max_rows=2, max_context=64, max_tokens=64)
    requests = pair.open((5, 40))
    batch = pair.batch(requests)
    before = pair.snapshot()
    with_hashes = pair.replayed(pair.capture(2), batch)
    pair.restore(before)
    assert_same(with_hashes, pair.replayed(pair.capture(2, use_engram=False), batch), rows=2)
    assert isinstance(pair.executor.engram, EngramPrefetch)
    assert not pair.executor.engram.engrams
