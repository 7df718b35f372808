"""The schedule between sublayers: the lagged chain, what runs beside it, and what an emulated capture sees of it."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from specialized_decode.backbone.graphs import CaptureError, EmulatedDevice, EmulatedStream, Graph, capture
from specialized_decode.backbone.host import SingleRank
from specialized_decode.boundary import Boundaries, BoundaryAllReduce, UnfinalizedRows, reference
from tests.helpers import step_mhc as mhc
from tests.helpers.step_gates import ForgetfulStream, Gates
from tests.helpers.step_mhc import Array, assert_rounded, assert_within, numbers, random_bf16, random_layer, same_bits

HIDDEN, LAYERS, MAX_ROWS = 64, 4, 49
SUM = 512 * 2.0**-24
# The layer whose streams an injection changes between its post-mix and its collapse.
INJECTED = 2
LAYER_WEIGHTS = [random_layer(number, HIDDEN) for number in range(LAYERS)]


class _Chain(NamedTuple):
    """What a run leaves: every sublayer's input, the streams it reads, the aux means, and the final pre-mix."""

    inputs: list[Tensor]
    streams: list[Tensor]
    aux: list[Tensor]
    pre: Tensor


def _boundaries(stream: EmulatedStream) -> Boundaries:
    all_reduce = BoundaryAllReduce(HIDDEN, MAX_ROWS, SingleRank(), torch.device("cpu"))
    return Boundaries(all_reduce, stream, 4)


def _output(x: Tensor, sublayer: int) -> Tensor:
    """A sublayer: any row-wise map of its input that is exact in bfloat16."""
    return x * (0.5 if sublayer % 2 == 0 else -2.0)


def _inject(residual: Tensor) -> Tensor:
    return residual.flip(2)


def _run(boundaries: Boundaries, x: Tensor, step: Gates, join: Callable[[], None]) -> _Chain:
    """LAYERS layers of two sublayers each, and the final streams; `join` is what follows every sublayer."""
    inputs, streams, aux, state = [], [], [], None
    for number, layer in enumerate(LAYER_WEIGHTS):
        if state is None:
            x, state = boundaries.first(layer, x, step)
        elif number == INJECTED:
            residual = boundaries.post_only(state)
            streams.append(residual)
            assert state.pending is None
            x = boundaries.pre(layer, _inject(residual), state, step)
        else:
            x, _, mean = boundaries.sublayer(layer, False, state, step, capture_aux=True)
            assert mean is not None
            aux.append(mean)
        for sublayer in (0, 1):
            inputs.append(x)
            streams.append(state.residual)
            state.pending = _output(x, sublayer)
            join()
            if sublayer == 0:
                x, quant, mean = boundaries.sublayer(layer, True, state, step)
                assert quant is None and mean is None and state.pending is None
    assert state is not None
    streams.append(boundaries.post_only(state))
    return _Chain(inputs, streams, aux, state.pre)


def _eager(rows: int, side_stream: bool) -> _Chain:
    boundaries = _boundaries(EmulatedDevice().stream("mhc"))
    return _run(boundaries, random_bf16(0, rows, HIDDEN), Gates(rows, side_stream=side_stream), boundaries.join)


# --- the chain --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 7, 16, 49])
@pytest.mark.parametrize("side_stream", [True, False])
def test_the_lagged_chain_in_float64(rows: int, side_stream: bool) -> None:
    """Each sublayer's input is collapsed with the pre-mix that the previous sublayer's streams gave.

    Streams are taken as found once they are checked, so that every bound is that of one boundary.
    """
    found, x = _eager(rows, side_stream), numbers(random_bf16(0, rows, HIDDEN))
    for row in range(rows):
        _check_token(found, row, x[row])


def _check_token(found: _Chain, row: int, embedding: Array) -> None:
    streams_at, inputs_at = iter(found.streams), iter(found.inputs)
    streams = np.stack([embedding] * 4)
    pre, post, comb, output = np.array([1.0, 0.0, 0.0, 0.0]), np.zeros(4), np.eye(4), np.zeros(HIDDEN)
    for number, layer in enumerate(LAYER_WEIGHTS):
        for sublayer, (mixer, norm) in enumerate(
            ((layer.attn_mixer, layer.attn_norm), (layer.ffn_mixer, layer.ffn_norm))
        ):
            streams = _check_streams(next(streams_at)[row], output, streams, post, comb)
            if number == INJECTED and sublayer == 0:
                streams = streams[:, ::-1]
                np.testing.assert_array_equal(numbers(next(streams_at)[row]), streams)
            x = next(inputs_at)[row]
            _check_input(x, streams, pre, norm)
            # This sublayer's pre-mix is the next one's.
            pre, post, comb = mhc.coefficients(streams, mixer)
            output = numbers(_output(x, sublayer))
    _check_streams(next(streams_at)[row], output, streams, post, comb)
    assert_within(numbers(found.pre[row]), pre, 1e-5)


def _check_streams(found: Tensor, output: Array, streams: Array, post: Array, comb: Array) -> Array:
    values, sizes = mhc.mixed(output, streams, post, comb)
    # The mixes are float32 results of their own: 1e-5 as the coefficients are checked.
    assert_rounded(found, values, (SUM + 1e-5) * sizes)
    return numbers(found)


def _check_input(found: Tensor, streams: Array, pre: Array, norm: Tensor) -> None:
    flat, sizes = mhc.collapsed(streams, pre)
    expected = mhc.normed(flat, numbers(norm), 1e-20)
    scale = np.abs(numbers(norm)) / np.sqrt((flat**2).mean())
    assert_rounded(found, expected, 2 * mhc.HALF_ULP * np.abs(expected) + (SUM + 1e-5) * sizes * scale)


def test_the_first_input_reads_stream_zero_exactly() -> None:
    """The broadcast needs no collapse: the input is the embedding, normed once."""
    x = random_bf16(0, 3, HIDDEN)
    boundaries = _boundaries(EmulatedDevice().stream("mhc"))
    found, state = boundaries.first(LAYER_WEIGHTS[0], x, Gates(3))
    expected = mhc.normed(numbers(x), numbers(LAYER_WEIGHTS[0].attn_norm), 1e-20)
    assert_rounded(found, expected, 1e-6 * np.abs(expected))
    assert state.pending is None
    for stream in range(4):
        assert same_bits(state.residual[:, stream], x)


@pytest.mark.parametrize("rows", [1, 2, 8, 47, 48, 49])
def test_the_side_stream_changes_no_bits(rows: int) -> None:
    beside, inline = _eager(rows, True), _eager(rows, False)
    assert len(beside.inputs) == 2 * LAYERS and len(beside.streams) == 2 * LAYERS + 2
    for found, expected in zip(
        [*beside.inputs, *beside.streams, *beside.aux, beside.pre],
        [*inline.inputs, *inline.streams, *inline.aux, inline.pre],
        strict=True,
    ):
        assert same_bits(found, expected)


@pytest.mark.parametrize("side_stream", [True, False])
def test_aux_means_are_of_the_streams_entering_the_layer(side_stream: bool) -> None:
    found = _eager(5, side_stream)
    # Layers 1 and 3; layer 2 takes its mean before the injection, which is the caller's to do.
    assert len(found.aux) == 2
    for mean, streams in zip(found.aux, (found.streams[2], found.streams[7]), strict=True):
        values = numbers(streams)
        assert_rounded(mean, (values[:, 0] + values[:, 1] + values[:, 2] + values[:, 3]) / 4, 0.0)


def test_padded_rows_stay_by_themselves() -> None:
    clean = _eager(6, True)
    boundaries = _boundaries(EmulatedDevice().stream("mhc"))
    x = random_bf16(0, 6, HIDDEN)
    x[[1, 5]] = torch.nan
    found = _run(boundaries, x, Gates(6), boundaries.join)
    for a, b in zip(
        [*found.inputs, *found.streams, *found.aux], [*clean.inputs, *clean.streams, *clean.aux], strict=True
    ):
        assert same_bits(a[[0, 2, 3, 4]], b[[0, 2, 3, 4]])


def test_sublayer_quantizes_the_input_where_asked() -> None:
    for quantize in (True, False):
        boundaries = _boundaries(EmulatedDevice().stream("mhc"))
        _, state = boundaries.first(LAYER_WEIGHTS[0], random_bf16(0, 3, HIDDEN), Gates(3))
        state.pending = random_bf16(1, 3, HIDDEN)
        boundaries.join()
        x, quant, aux = boundaries.sublayer(LAYER_WEIGHTS[0], True, state, Gates(3), quantize=quantize)
        assert aux is None and (quant is not None) == quantize
        if quant is not None:
            assert quant.values.shape == (3, HIDDEN) and quant.scales.shape == (3, HIDDEN // 32)
            back = quant.values.double() * torch.exp2(quant.scales.double() - 127).repeat_interleave(32, 1)
            assert (back - x.double()).abs().max() <= x.double().abs().max() * 2**-4


def test_sublayer_uses_the_mixer_and_norm_of_its_sublayer() -> None:
    """Attention and FFN of one layer have different ones, and the state carries the mixer's results."""
    layer = LAYER_WEIGHTS[1]
    for ffn, mixer, norm in ((False, layer.attn_mixer, layer.attn_norm), (True, layer.ffn_mixer, layer.ffn_norm)):
        boundaries = _boundaries(EmulatedDevice().stream("mhc"))
        _, state = boundaries.first(LAYER_WEIGHTS[0], random_bf16(0, 2, HIDDEN), Gates(2))
        state.pending, old_pre = random_bf16(1, 2, HIDDEN), numbers(state.pre)
        boundaries.join()
        x, _, _ = boundaries.sublayer(layer, ffn, state, Gates(2))
        for row in range(2):
            streams = numbers(state.residual[row])
            _check_input(x[row], streams, old_pre[row], norm)
            for part, value in zip((state.pre, state.post, state.comb), mhc.coefficients(streams, mixer), strict=True):
                assert_within(numbers(part[row]), value, 1e-5)


def test_unfinalized_and_finalized_outputs_give_the_same_boundary() -> None:
    weights = torch.rand(3, 2, generator=torch.Generator().manual_seed(3))
    unfinalized = UnfinalizedRows(random_bf16(1, 3, 2, HIDDEN), weights, random_bf16(2, 3, HIDDEN))
    results = []
    for pending in (unfinalized, reference.finalize(unfinalized)):
        boundaries = _boundaries(EmulatedDevice().stream("mhc"))
        _, state = boundaries.first(LAYER_WEIGHTS[0], random_bf16(0, 3, HIDDEN), Gates(3))
        state.pending = pending
        boundaries.join()
        x, _, _ = boundaries.sublayer(LAYER_WEIGHTS[1], False, state, Gates(3))
        results.append((x, state.residual, state.pre, state.post, state.comb))
    for found, expected in zip(*results, strict=True):
        assert same_bits(found, expected)


@pytest.mark.parametrize("call", ["sublayer", "post_only"])
def test_a_boundary_needs_an_output(call: str) -> None:
    boundaries = _boundaries(EmulatedDevice().stream("mhc"))
    _, state = boundaries.first(LAYER_WEIGHTS[0], random_bf16(0, 3, HIDDEN), Gates(3))
    with pytest.raises(AssertionError, match="a boundary follows a sublayer's output"):
        if call == "sublayer":
            boundaries.sublayer(LAYER_WEIGHTS[0], True, state, Gates(3))
        else:
            boundaries.post_only(state)


# --- the side stream in a capture -------------------------------------------------------------------------------


def _captured(stream_type: type[EmulatedStream], step: Gates, join: bool = True) -> _Chain:
    """One capture of the chain, then a replay with another input."""
    device = EmulatedDevice()
    stream = stream_type("mhc", device)
    device.streams.append(stream)
    boundaries = _boundaries(stream)
    x, chains = torch.zeros(step.rows, HIDDEN, dtype=torch.bfloat16), []
    graph = capture(device, lambda: chains.append(_run(boundaries, x, step, boundaries.join if join else lambda: None)))
    x.copy_(random_bf16(0, step.rows, HIDDEN))
    graph.replay()
    return chains[0]


@pytest.mark.parametrize("side_stream", [True, False])
@pytest.mark.parametrize("rows", [1, 8])
def test_a_replay_gives_the_bits_of_an_eager_run(rows: int, side_stream: bool) -> None:
    found, expected = _captured(EmulatedStream, Gates(rows, side_stream=side_stream)), _eager(rows, False)
    for a, b in zip(
        [*found.inputs, *found.aux, found.pre], [*expected.inputs, *expected.aux, expected.pre], strict=True
    ):
        assert same_bits(a, b)
    assert same_bits(found.streams[-1], expected.streams[-1])


@pytest.mark.parametrize(
    ("stream_type", "join"), [(EmulatedStream, False), (ForgetfulStream, True)], ids=["no join", "join without a wait"]
)
def test_a_missing_join_is_caught(stream_type: type[EmulatedStream], join: bool) -> None:
    """The mixes are written on the side stream: reading them without a wait is an error of the capture."""
    with pytest.raises(CaptureError, match="on main reads what mhc wrote, without a join between them"):
        _captured(stream_type, Gates(3), join)


def test_without_the_side_stream_there_is_nothing_to_join() -> None:
    found = _captured(ForgetfulStream, Gates(3, side_stream=False), join=False)
    assert same_bits(found.pre, _eager(3, False).pre)


def _one_boundary(step: Gates, join: bool, capture_aux: bool) -> Callable[[], Graph]:
    def run() -> None:
        boundaries.all_reduce.reset()
        x, state = boundaries.first(LAYER_WEIGHTS[0], random_bf16(0, step.rows, HIDDEN), step)
        state.pending = _output(x, 0)
        boundaries.join()
        _, _, mean = boundaries.sublayer(LAYER_WEIGHTS[1], False, state, step, capture_aux=capture_aux)
        if join:
            boundaries.join()
        if mean is not None:
            mean + 1

    device = EmulatedDevice()
    boundaries = _boundaries(device.stream("mhc"))
    return lambda: capture(device, run)


def test_an_aux_mean_is_ready_after_the_join() -> None:
    _one_boundary(Gates(2), join=True, capture_aux=True)()
    with pytest.raises(CaptureError, match="reads what mhc wrote"):
        _one_boundary(Gates(2), join=False, capture_aux=True)()


def test_coefficients_left_unjoined_end_no_capture() -> None:
    with pytest.raises(CaptureError, match="capture ended with unjoined work on mhc"):
        _one_boundary(Gates(2), join=False, capture_aux=False)()


@pytest.mark.parametrize("side_stream", [True, False])
def test_the_gate_decides_where_the_coefficients_run(side_stream: bool) -> None:
    boundaries = _boundaries(EmulatedDevice().stream("mhc"))
    step = Gates(2, side_stream=side_stream)
    x, state = boundaries.first(LAYER_WEIGHTS[0], random_bf16(0, 2, HIDDEN), step)
    assert boundaries.stream.pending == side_stream
    boundaries.join()
    assert not boundaries.stream.pending
    state.pending = x
    for advance in (
        lambda: boundaries.sublayer(LAYER_WEIGHTS[0], True, state, step),
        lambda: boundaries.pre(LAYER_WEIGHTS[1], state.residual, state, step),
    ):
        advance()
        assert boundaries.stream.pending == side_stream
        boundaries.join()
