"""EngramPrefetch: the same rows whether its WKV ran ahead or not, and its order in an emulated capture."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from specialized_decode.backbone.engram import Engram
from specialized_decode.backbone.graphs import CaptureError, EmulatedDevice, EmulatedStream, capture
from specialized_decode.engram import EngramPrefetch
from tests.helpers.small_config import small_config
from tests.helpers.step_gates import ForgetfulStream
from tests.helpers.step_linear import fp8_linear
from tests.helpers.step_mhc import assert_rounded, numbers, random_bf16, same_bits

CONFIG = small_config()
HIDDEN, STREAMS, MAX_ROWS = CONFIG.hidden_size, CONFIG.hc_mult, 49
LAYERS = CONFIG.engram_layer_ids
WIDTH = CONFIG.engram_columns * CONFIG.engram_head_dim


def _engram(layer: int) -> Engram:
    """An Engram layer with an FP8 `wkv` and random rows staged."""
    wkv = fp8_linear(layer, (STREAMS + 1) * HIDDEN, WIDTH, size=WIDTH**-0.5)
    table = torch.zeros(1, CONFIG.engram_head_dim, dtype=torch.float8_e4m3fn)
    q, k = random_bf16(layer + 1, STREAMS, HIDDEN), random_bf16(layer + 2, STREAMS, HIDDEN)
    engram = Engram(CONFIG, LAYERS.index(layer), table, torch.zeros(1, 2).byte(), wkv, q, k, MAX_ROWS)
    engram.staged.copy_(random_bf16(layer + 3, MAX_ROWS, WIDTH))
    return engram


@dataclass
class _Setup:
    device: EmulatedDevice
    engrams: dict[int, Engram]
    prefetch: EngramPrefetch


def _setup(stream_type: type[EmulatedStream] = EmulatedStream, max_rows: int = MAX_ROWS) -> _Setup:
    device, engrams = EmulatedDevice(), {layer: _engram(layer) for layer in LAYERS}
    streams = {layer: stream_type(f"engram {layer}", device) for layer in LAYERS}
    device.streams += streams.values()
    return _Setup(device, engrams, EngramPrefetch(engrams, streams, max_rows))


def _residual(layer: int, rows: int) -> tuple[Tensor, Tensor]:
    return random_bf16(layer + 10, rows, STREAMS, HIDDEN), torch.arange(rows) % 4 != 2


@pytest.mark.parametrize("rows", [*range(1, 17), 47, 48, 49])
def test_ahead_inline_and_the_plain_layer_give_the_same_bits(rows: int) -> None:
    setup = _setup()
    for started in (True, False):
        if started:
            setup.prefetch.start(rows)
        for layer in LAYERS:
            residual, keep = _residual(layer, rows)
            found = setup.prefetch.forward(layer, residual, keep)
            assert same_bits(found, setup.engrams[layer](residual, keep))
            assert not setup.prefetch.streams[layer].pending


def test_forward_in_float64() -> None:
    """From the staged rows and the stored weight on."""
    setup, layer, rows = _setup(), LAYERS[1], 5
    engram, (residual, keep) = setup.engrams[layer], _residual(layer, rows)
    found = setup.prefetch.forward(layer, residual, keep)
    assert engram.wkv.scale is not None
    scale = 2.0 ** (engram.wkv.scale.numpy().astype(float) - 127).repeat(32, 0).repeat(32, 1)
    weight = numbers(engram.wkv.weight) * scale
    for row in range(rows):
        staged = numbers(engram.staged[row])
        kv, sizes = (weight @ staged).reshape(5, HIDDEN), (np.abs(weight) @ np.abs(staged)).reshape(5, HIDDEN)
        for stream in range(STREAMS):
            old, key = numbers(residual[row, stream]), kv[stream]
            product = old * numbers(engram.q_weight[stream]) * numbers(engram.k_weight[stream]) * key
            dot = product.sum() / np.sqrt((old**2).mean() * (key**2).mean() * HIDDEN)
            root = math.sqrt(max(abs(dot), 1e-6))
            gate = 1 / (1 + math.exp(root if dot < 0 else -root)) if keep[row] else 0.0
            # The keys and the value are rounded to bfloat16; what that moves the dot product by moves the gate a
            # quarter as much under the root.
            moved = np.abs(product).sum() / np.sqrt((old**2).mean() * (key**2).mean() * HIDDEN) * 2**-8
            error = np.abs(kv[-1]) * (2**-8 + min(0.25, moved / root / 8)) + 1e-5 * sizes[-1]
            assert_rounded(found[row, stream], old + gate * kv[-1], error)


def test_each_layer_gets_its_own_rows() -> None:
    setup = _setup()
    setup.prefetch.start(3)
    residual, keep = random_bf16(0, 3, STREAMS, HIDDEN), torch.ones(3, dtype=torch.bool)
    # The later layer first: nothing depends on the order of the waits.
    found = {layer: setup.prefetch.forward(layer, residual, keep) for layer in reversed(LAYERS)}
    assert not same_bits(*found.values())
    for layer in LAYERS:
        assert same_bits(found[layer], setup.engrams[layer](residual, keep))


def test_start_reads_what_is_staged_then() -> None:
    """A started WKV keeps its rows when the next batch is staged; the next start takes the new ones."""
    setup, layer = _setup(), LAYERS[0]
    residual, keep = _residual(layer, 4)
    expected = setup.engrams[layer](residual, keep)
    setup.prefetch.start(4)
    setup.engrams[layer].staged.copy_(random_bf16(50, MAX_ROWS, WIDTH))
    assert same_bits(setup.prefetch.forward(layer, residual, keep), expected)
    assert same_bits(setup.prefetch.forward(layer, residual, keep), setup.engrams[layer](residual, keep))
    assert not same_bits(setup.engrams[layer](residual, keep), expected)


def test_join_collects_what_no_layer_waited_for() -> None:
    """The next step starts clean: its rows, even of another count, are its own."""
    setup = _setup()
    setup.prefetch.start(6)
    residual, keep = _residual(LAYERS[0], 6)
    setup.prefetch.forward(LAYERS[0], residual, keep)
    assert [stream.pending for stream in setup.prefetch.streams.values()] == [False, True]
    setup.prefetch.join()
    assert not any(stream.pending for stream in setup.prefetch.streams.values())
    for engram in setup.engrams.values():
        engram.staged.copy_(random_bf16(51, MAX_ROWS, WIDTH))
    for layer in LAYERS:
        residual, keep = _residual(layer, 2)
        assert same_bits(setup.prefetch.forward(layer, residual, keep), setup.engrams[layer](residual, keep))
    setup.prefetch.join()


@pytest.mark.parametrize("rows", [0, -1, 9])
def test_rows_out_of_range(rows: int) -> None:
    setup = _setup(max_rows=8)
    with pytest.raises(ValueError, match=rf"Engram prefetch: found {rows} rows, expected 1 to 8"):
        setup.prefetch.start(rows)
    assert not any(stream.pending for stream in setup.prefetch.streams.values())


def test_max_rows_are_in_range() -> None:
    setup = _setup(max_rows=8)
    setup.prefetch.start(8)
    residual, keep = _residual(LAYERS[0], 8)
    assert same_bits(setup.prefetch.forward(LAYERS[0], residual, keep), setup.engrams[LAYERS[0]](residual, keep))


def test_without_engram_layers_there_is_nothing_to_start() -> None:
    prefetch = EngramPrefetch({}, {}, 8)
    prefetch.start(3)
    prefetch.join()


@pytest.mark.parametrize("started", [True, False])
def test_padded_rows_stay_by_themselves(started: bool) -> None:
    setup, layer = _setup(), LAYERS[0]
    residual, keep = random_bf16(0, 8, STREAMS, HIDDEN), torch.ones(8, dtype=torch.bool)
    clean = setup.engrams[layer](residual, keep)
    residual[1::2], setup.engrams[layer].staged[1::2] = math.nan, math.nan
    if started:
        setup.prefetch.start(8)
    found = setup.prefetch.forward(layer, residual, keep)
    assert same_bits(found[::2], clean[::2]) and found[1::2].isnan().all()


# --- in a capture -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("started", [True, False])
def test_a_replay_injects_what_its_batch_staged(started: bool) -> None:
    setup, rows = _setup(), 5
    residual, keep = torch.zeros(rows, STREAMS, HIDDEN, dtype=torch.bfloat16), torch.zeros(rows, dtype=torch.bool)
    found: list[Tensor] = []

    def run() -> None:
        if started:
            setup.prefetch.start(rows)
        found.extend(setup.prefetch.forward(layer, residual, keep) for layer in LAYERS)
        setup.prefetch.join()

    graph = capture(setup.device, run)
    for seed in (60, 61):
        residual.copy_(random_bf16(seed, rows, STREAMS, HIDDEN))
        keep.copy_(torch.arange(rows) % 2 == seed % 2)
        for layer, engram in setup.engrams.items():
            engram.staged.copy_(random_bf16(seed + layer, MAX_ROWS, WIDTH))
        graph.replay()
        for output, engram in zip(found, setup.engrams.values(), strict=True):
            assert same_bits(output, engram(residual, keep))


def test_a_forward_that_does_not_wait_is_caught() -> None:
    setup = _setup(ForgetfulStream)
    residual, keep = _residual(LAYERS[0], 3)

    def run() -> None:
        setup.prefetch.start(3)
        setup.prefetch.forward(LAYERS[0], residual, keep)

    with pytest.raises(CaptureError, match=f"on main reads what engram {LAYERS[0]} wrote, without a join"):
        capture(setup.device, run)


def test_a_step_without_the_last_join_ends_no_capture() -> None:
    setup = _setup()
    residual, keep = _residual(LAYERS[0], 3)

    def run() -> None:
        setup.prefetch.start(3)
        setup.prefetch.forward(LAYERS[0], residual, keep)

    with pytest.raises(CaptureError, match=f"unjoined work on engram {LAYERS[1]}$"):
        capture(setup.device, run)


def test_one_layers_wait_is_not_anothers() -> None:
    """A layer's forward joins its own stream alone."""
    setup = _setup()
    setup.prefetch.start(3)
    residual, keep = _residual(LAYERS[1], 3)
    setup.prefetch.forward(LAYERS[1], residual, keep)
    assert [stream.pending for stream in setup.prefetch.streams.values()] == [True, False]
    setup.prefetch.join()
