"""Every boundary op against scalar formulas in float64, and against the formats' bits."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from specialized_decode.boundary import UnfinalizedRows, reference
from tests.helpers import exact_formats as exact
from tests.helpers import step_mhc as mhc
from tests.helpers.step_mhc import assert_rounded, assert_within, numbers, random_bf16, random_mixer, same_bits

HIDDEN = 64
ROWS = [*range(1, 17), 47, 48, 49]
# What float32 sums of up to 512 terms may lose, relative to the sum of the terms' magnitudes.
SUM = 512 * 2.0**-24
INF = math.inf


def _assert_coefficients(residual: Tensor, mixer: mhc.MixerWeights) -> None:
    found = reference.coefficients(residual, mixer)
    rows, n, _ = residual.shape
    assert [tuple(part.shape) for part in found] == [(rows, n), (rows, n), (rows, n, n)]
    assert all(part.dtype == torch.float32 for part in found)
    for row in range(rows):
        expected = mhc.coefficients(numbers(residual[row]), mixer)
        for part, value in zip(found, expected, strict=True):
            assert_within(numbers(part[row]), value, 1e-5 * np.abs(value) + 2e-6)


# --- streams and coefficients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [1, 4])
def test_broadcast_streams(streams: int) -> None:
    x = random_bf16(0, 3, HIDDEN)
    x[0, :3] = torch.tensor([-0.0, math.nan, INF])
    found = reference.broadcast_streams(x, streams)
    assert found.shape == (3, streams, HIDDEN) and found.is_contiguous()
    for row in range(3):
        for stream in range(streams):
            assert same_bits(found[row, stream], x[row])
    found[0] = 0.0
    assert not x[0].eq(0.0).all(), "the streams share the embedding's memory"


@pytest.mark.parametrize("rows", ROWS)
def test_coefficients(rows: int) -> None:
    _assert_coefficients(random_bf16(rows, rows, 4, HIDDEN), random_mixer(1, HIDDEN))


@pytest.mark.parametrize("streams", [1, 2, 3])
@pytest.mark.parametrize("iters", [1, 2, 20])
def test_coefficients_of_other_widths(streams: int, iters: int) -> None:
    _assert_coefficients(random_bf16(2, 3, streams, HIDDEN), random_mixer(3, HIDDEN, streams, iters=iters))


def test_coefficients_have_their_epsilons_where_the_formula_has_them() -> None:
    """At 0.1, a missing or misplaced one shows."""
    _assert_coefficients(random_bf16(4, 3, 4, HIDDEN), random_mixer(5, HIDDEN, hc_eps=0.1, iters=3))


def test_coefficients_read_the_parts_and_their_scales_in_order() -> None:
    """A zero projection leaves the base: pre, then post, then comb by source and target."""
    mixer = mhc.MixerWeights(torch.zeros(24, 4 * HIDDEN), torch.linspace(-3, 3, 24), torch.tensor([5.0, 7.0, 9.0]))
    pre, post, comb = reference.coefficients(random_bf16(6, 1, 4, HIDDEN), mixer)
    base = mixer.base.double().numpy()
    assert_within(numbers(pre[0]), 1 / (1 + np.exp(-base[:4])) + 1e-6, 1e-6)
    assert_within(numbers(post[0]), 2 / (1 + np.exp(-base[4:8])), 1e-6)
    # Equal steps along the base make every row of the softmax the same: the result is uniform.
    assert_within(numbers(comb[0]), np.full((4, 4), 0.25), 1e-5)


def test_coefficients_of_silent_and_of_huge_streams() -> None:
    """Nothing to normalize gives the base alone; 2**40 times the streams gives the same as the streams."""
    mixer = random_mixer(7, HIDDEN)
    residual = random_bf16(8, 2, 4, HIDDEN)
    _assert_coefficients(torch.zeros_like(residual), mixer)
    for part, other in zip(
        reference.coefficients(residual, mixer), reference.coefficients(residual * 2.0**40, mixer), strict=True
    ):
        assert same_bits(part, other)


def test_sinkhorn_ends_doubly_stochastic() -> None:
    comb = numbers(reference.coefficients(random_bf16(9, 49, 4, HIDDEN), random_mixer(10, HIDDEN))[2])
    assert (comb > 0).all()
    assert_within(comb.sum(1), np.ones((49, 4)), 1e-5)
    # Columns are normalized last, so rows are near one only.
    assert_within(comb.sum(2), np.ones((49, 4)), 0.05)


def test_sinkhorn_at_extreme_logits() -> None:
    """One target takes everything: no overflow, and the others keep what the epsilon leaves them."""
    mixer = mhc.MixerWeights(torch.zeros(24, 4 * HIDDEN), torch.zeros(24), torch.ones(3))
    mixer.base[8::4] = 3e4
    mixer.base[:2], mixer.base[4:6] = torch.tensor([3e4, -3e4]), torch.tensor([3e4, -3e4])
    residual = random_bf16(11, 1, 4, HIDDEN)
    _assert_coefficients(residual, mixer)
    pre, post, _ = reference.coefficients(residual, mixer)
    assert pre[0, :2].tolist() == pytest.approx([1.0 + 1e-6, 1e-6]) and post[0, :2].tolist() == [2.0, 0.0]


# --- finalize and all-reduce ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("topk", [1, 6])
def test_finalize(rows: int, topk: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    weights = torch.rand(rows, topk, generator=generator)
    output = UnfinalizedRows(random_bf16(12, rows, topk, HIDDEN), weights, random_bf16(13, rows, HIDDEN))
    terms = numbers(output.rows) * numbers(weights)[:, :, None]
    values, sizes = numbers(output.shared).copy(), np.abs(numbers(output.shared))
    for k in range(topk):
        values, sizes = values + terms[:, k], sizes + np.abs(terms[:, k])
    assert_rounded(reference.finalize(output), values, SUM * sizes)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("rows", [1, 5, 16, 47, 48, 49])
def test_all_reduce_adds_in_rank_order(ranks: int, rows: int) -> None:
    contributions = random_bf16(14, ranks, rows, HIDDEN) * 2.0 ** torch.arange(ranks).view(-1, 1, 1)
    total = contributions[0].float().numpy()
    for rank in range(1, ranks):
        total = total + contributions[rank].float().numpy()
    assert total.dtype == np.float32
    assert same_bits(reference.all_reduce(contributions.to(torch.bfloat16)), torch.from_numpy(total))


def test_all_reduce_order_shows_in_the_bits() -> None:
    """2**24 swallows the one that comes after it, unless it has been taken away by then."""
    order = torch.tensor([2.0**24, 1.0, -(2.0**24)], dtype=torch.bfloat16).view(3, 1, 1)
    assert reference.all_reduce(order).item() == 0.0
    assert reference.all_reduce(order[[0, 2, 1]]).item() == 1.0


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([-0.0], -0.0),
        ([-0.0, -0.0], -0.0),
        ([-0.0, 0.0], 0.0),
        ([INF, 1.0], INF),
        ([-INF, 1.0], -INF),
        ([INF, -INF], math.nan),
        ([2.0**-133, 2.0**-133], 2.0**-132),
        ([2.0**-133, -(2.0**-126)], 2.0**-133 - 2.0**-126),
        ([3e38, 3e38], INF),
    ],
    ids=["-0", "-0 -0", "-0 0", "inf", "-inf", "inf -inf", "subnormals", "subnormal and normal", "overflow"],
)
def test_all_reduce_of_special_values(values: list[float], expected: float) -> None:
    found = reference.all_reduce(torch.tensor(values, dtype=torch.bfloat16).view(-1, 1, 1)).item()
    assert found == expected or (math.isnan(expected) and math.isnan(found))
    assert math.isnan(expected) or math.copysign(1.0, found) == math.copysign(1.0, expected)


# --- streams, collapse, norm ------------------------------------------------------------------------------------


def _mix_inputs(rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    reduced, residual = torch.randn(rows, HIDDEN, generator=generator), random_bf16(15, rows, 4, HIDDEN)
    post, comb = torch.rand(rows, 4, generator=generator) * 2, torch.rand(rows, 4, 4, generator=generator)
    return reduced, residual, post, comb


@pytest.mark.parametrize("rows", ROWS)
def test_mix_streams(rows: int) -> None:
    inputs = _mix_inputs(rows)
    found = reference.mix_streams(*inputs)
    assert found.shape == (rows, 4, HIDDEN)
    for row in range(rows):
        values, sizes = mhc.mixed(*(numbers(part[row]) for part in inputs))
        assert_rounded(found[row], values, SUM * sizes)


def test_mix_streams_reads_comb_by_source_then_target() -> None:
    """comb[2, 1] alone moves stream 2 to stream 1 exactly; the others fall silent."""
    residual, comb = random_bf16(16, 2, 4, HIDDEN), torch.zeros(2, 4, 4)
    comb[:, 2, 1] = 1.0
    found = reference.mix_streams(torch.ones(2, HIDDEN), residual, torch.zeros(2, 4), comb)
    assert torch.equal(found[:, 1], residual[:, 2]) and not found[:, [0, 2, 3]].any()


def test_mix_streams_does_not_round_the_reduced_output() -> None:
    """1 + 2**-12 is no bfloat16: less the stream of 1, its last bit is all that is left."""
    reduced = torch.full((1, HIDDEN), 1 + 2.0**-12)
    residual, comb = torch.full((1, 4, HIDDEN), -1.0, dtype=torch.bfloat16), torch.eye(4).unsqueeze(0)
    assert reference.mix_streams(reduced, residual, torch.ones(1, 4), comb).eq(2.0**-12).all()


@pytest.mark.parametrize("rows", ROWS)
def test_collapse(rows: int) -> None:
    residual = random_bf16(17, rows, 4, HIDDEN)
    pre = torch.rand(rows, 4, generator=torch.Generator().manual_seed(rows))
    found = reference.collapse(residual, pre)
    for row in range(rows):
        values, sizes = mhc.collapsed(numbers(residual[row]), numbers(pre[row]))
        assert_rounded(found[row], values, SUM * sizes)


def test_collapse_by_one_stream_is_exact() -> None:
    residual = random_bf16(18, 3, 4, HIDDEN)
    residual[0, 3, :2] = torch.tensor([2.0**-133, 3.3e38])
    pre = torch.tensor([[0.0, 0.0, 0.0, 1.0]]).repeat(3, 1)
    assert torch.equal(reference.collapse(residual, pre), residual[:, 3])


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("size", [1.0, 1e-10, 1e-25, 1e15])
def test_rms_norm(rows: int, size: float) -> None:
    """An epsilon of 1e-20 weighs as much as values of 1e-10, and is all there is under values of 1e-25."""
    x, weight = random_bf16(19, rows, HIDDEN, size=size), random_bf16(20, HIDDEN)
    expected = mhc.normed(numbers(x), numbers(weight), 1e-20)
    assert_rounded(reference.rms_norm(x, weight, 1e-20), expected, 1e-5 * np.abs(expected))


def test_rms_norm_of_zeros_keeps_their_signs() -> None:
    x = torch.tensor([[0.0, -0.0]], dtype=torch.bfloat16).repeat(2, HIDDEN // 2)
    assert same_bits(reference.rms_norm(x, torch.ones(HIDDEN, dtype=torch.bfloat16), 1e-20), x)


@pytest.mark.parametrize("rows", ROWS)
def test_stream_mean(rows: int) -> None:
    residual = random_bf16(21, rows, 4, HIDDEN)
    found = reference.stream_mean(residual)
    for row in range(rows):
        streams = numbers(residual[row])
        total = (streams[0] + streams[1] + streams[2] + streams[3]) / 4
        assert_rounded(found[row], total, SUM * np.abs(streams).sum(0) / 4)


def test_stream_mean_of_subnormals() -> None:
    residual = torch.full((1, 4, HIDDEN), 2.0**-133, dtype=torch.bfloat16)
    residual[0, :2] = -0.0
    assert reference.stream_mean(residual).eq(0.0).all(), "half a smallest subnormal rounds to even"
    residual[0, :2] = 2.0**-132
    assert reference.stream_mean(residual).eq(2.0**-132).all(), "one and a half rounds to even"


# --- MXFP8 ------------------------------------------------------------------------------------------------------


def _mx_exponent(amax: float) -> int:
    """The smallest e that E8M0 has, -127 to 127, with amax <= 448 * 2**e."""
    return next((e for e in range(-127, 127) if amax <= math.ldexp(448.0, e)), 127)


def _assert_mxfp8(x: Tensor) -> None:
    found = reference.quantize_mxfp8(x)
    rows, width = x.shape
    assert found.values.dtype == torch.float8_e4m3fn and found.values.shape == x.shape
    assert found.scales.dtype == torch.uint8 and found.scales.shape == (rows, width // 32)
    codes = found.values.view(torch.uint8).numpy()
    for row in range(rows):
        for block in range(width // 32):
            part = slice(32 * block, 32 * block + 32)
            values = numbers(x[row, part])
            exponent = _mx_exponent(float(np.abs(values).max()))
            assert int(found.scales[row, block]) == exponent + 127
            np.testing.assert_array_equal(codes[row, part], exact.fp8_codes(np.ldexp(values, -exponent)))


@pytest.mark.parametrize("rows", ROWS)
def test_mxfp8(rows: int) -> None:
    """Blocks of every size, from the subnormals to the largest values."""
    sizes = 2.0 ** torch.randint(-135, 124, (rows, 3), generator=torch.Generator().manual_seed(rows)).double()
    x = random_bf16(22, rows, 96).double().unflatten(1, (3, 32)) * sizes.unsqueeze(2)
    _assert_mxfp8(x.flatten(1).to(torch.bfloat16))


@pytest.mark.parametrize(
    "amax",
    [0.0, 2.0**-133, 2.0**-126, 448 * 2.0**-126, 1.0, 447.0, 448.0, 450.0, 2.0**127, 255 * 2.0**120],
    ids=["zeros", "smallest", "smallest normal", "scaled by 2**-126", "1", "447", "448", "450", "2**127", "largest"],
)
def test_mxfp8_blocks_by_their_largest_value(amax: float) -> None:
    """448 times a power of two takes that power, the next value twice it; the other values are fractions of it."""
    x = torch.zeros(2, 64, dtype=torch.bfloat16)
    x[0, :32] = amax * torch.linspace(-1, 1, 32, dtype=torch.float64)
    x[1, 32], x[1, 33] = -amax, -0.0
    _assert_mxfp8(x)


def test_mxfp8_of_every_power_and_its_neighbours() -> None:
    rows = []
    for exponent in range(-126, 120):
        for step in (446.0, 448.0, 450.0):
            rows.append([math.ldexp(step, exponent), *[0.0] * 31])
    _assert_mxfp8(torch.tensor(rows, dtype=torch.float64).to(torch.bfloat16))


def test_mxfp8_keeps_the_sign_of_zero() -> None:
    x = torch.zeros(1, 32, dtype=torch.bfloat16)
    x[0, 1], x[0, 2], x[0, 3] = -0.0, 1.0, -(2.0**-40)
    assert reference.quantize_mxfp8(x).values.view(torch.uint8)[0, :4].tolist() == [0, 0x80, 0x78, 0x80]


def test_mxfp8_of_infinities_saturates() -> None:
    """The format leaves the choice; the largest scale and value keep the sign and stay in their block."""
    x = random_bf16(23, 1, 64)
    x[0, 0], x[0, 1] = INF, -INF
    found = reference.quantize_mxfp8(x)
    assert found.scales[0, 0] == 254 and found.values[0, :2].float().tolist() == [448.0, -448.0]
    assert same_bits(found.values[:, 32:], reference.quantize_mxfp8(x[:, 32:]).values)


def test_mxfp8_of_nan_is_nan() -> None:
    x = random_bf16(24, 1, 64)
    x[0, 5] = math.nan
    found = reference.quantize_mxfp8(x)
    assert found.values[0, 5].float().isnan() and not found.values[0, 32:].float().isnan().any()


# --- dense weights ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(32, 32), (64, 96), (33, 65), (1, 31), (31, 1), (100, 40)])
@pytest.mark.parametrize("scale_dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_dequantize(shape: tuple[int, int], scale_dtype: torch.dtype) -> None:
    """Ragged blocks too: the last ones of a row or column cover what is left."""
    rng = np.random.default_rng(25)
    codes = rng.choice([c for c in range(256) if c & 127 != 127], shape).astype(np.uint8)
    scales = rng.integers(60, 190, [-(-side // 32) for side in shape]).astype(np.uint8)
    scales[0, 0], scales[-1, -1] = 0, 190
    found = reference.dequantize(
        torch.from_numpy(codes).view(torch.float8_e4m3fn), torch.from_numpy(scales).view(scale_dtype)
    )
    assert found.dtype == torch.float32
    for row in range(shape[0]):
        for column in range(shape[1]):
            value = exact.fp8_value(int(codes[row, column])) * exact.ue8m0_value(int(scales[row // 32, column // 32]))
            assert float(found[row, column]) == value


def test_dequantize_without_a_scale() -> None:
    weight = random_bf16(26, 5, 7)
    assert same_bits(reference.dequantize(weight, None), weight.float())


def test_prepare_on_a_cpu_is_float32() -> None:
    weight = random_bf16(27, 32, 64, size=10).to(torch.float8_e4m3fn)
    scale = torch.tensor([[127, 120]], dtype=torch.uint8)
    expected = weight.double() * torch.tensor([1.0, 2.0**-7]).double().repeat_interleave(32)
    assert same_bits(reference.prepare(weight, scale), expected.float())


@pytest.mark.parametrize("rows", ROWS)
def test_project(rows: int) -> None:
    x, weight = random_bf16(28, rows, 96), random_bf16(29, 40, 96).float()
    values, sizes = numbers(x) @ numbers(weight).T, np.abs(numbers(x)) @ np.abs(numbers(weight)).T
    assert_rounded(reference.project(x, weight), values, SUM * sizes)
    found = reference.project_float(x, weight)
    assert found.dtype == torch.float32
    assert_within(numbers(found), values, 96 * 2.0**-24 * sizes)


# --- rows apart -------------------------------------------------------------------------------------------------


def _finalize_rows(x: Tensor) -> Tensor:
    weights = torch.rand(x.shape[0], 4, generator=torch.Generator().manual_seed(30))
    return reference.finalize(UnfinalizedRows(x, weights, x[:, 0]))


def _coefficient_rows(x: Tensor) -> Tensor:
    return torch.cat([part.flatten(1) for part in reference.coefficients(x, random_mixer(31, HIDDEN))], 1)


def _mix_rows(x: Tensor) -> Tensor:
    reduced, _, post, comb = _mix_inputs(x.shape[0])
    return reference.mix_streams(reduced + 0 * x[:, 0].float(), x, post, comb)


def _mxfp8_rows(x: Tensor) -> Tensor:
    found = reference.quantize_mxfp8(x.flatten(1))
    return torch.cat((found.values.view(torch.uint8), found.scales), 1)


ROW_OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "coefficients": _coefficient_rows,
    "finalize": _finalize_rows,
    "all_reduce": lambda x: reference.all_reduce(torch.stack((x[:, 0], x[:, 1]))),
    "mix_streams": _mix_rows,
    "collapse": lambda x: reference.collapse(x, torch.ones(x.shape[0], 4)),
    "rms_norm": lambda x: reference.rms_norm(x[:, 0], torch.ones(HIDDEN), 1e-20),
    "stream_mean": reference.stream_mean,
    "quantize_mxfp8": _mxfp8_rows,
    "project": lambda x: reference.project(x.flatten(1), random_mixer(32, HIDDEN).fn),
    "project_float": lambda x: reference.project_float(x.flatten(1), random_mixer(32, HIDDEN).fn),
}


@pytest.mark.parametrize("op", ROW_OPS)
@pytest.mark.parametrize("poison", [math.nan, INF, -INF])
@pytest.mark.parametrize("rows", [2, 8, 16, 49])
def test_a_padded_row_stays_by_itself(op: str, poison: float, rows: int) -> None:
    """NaN or infinities in every other row leave the bits of the rows between."""
    x = random_bf16(33, rows, 4, HIDDEN)
    poisoned = x.clone()
    poisoned[1::2] = poison
    found, expected = ROW_OPS[op](poisoned), ROW_OPS[op](x)
    assert same_bits(found[::2], expected[::2])
    assert not same_bits(found[1::2], expected[1::2]), "the poison was not read at all"
