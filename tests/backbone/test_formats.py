"""Number formats and cache records, byte by byte against their specifications."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from specialized_decode.backbone import formats
from tests.helpers import exact_formats as exact

E8M0 = torch.float8_e8m0fnu
CODES = torch.arange(256, dtype=torch.uint8)


def _same(found: Tensor, expected: np.ndarray) -> None:
    """Equal values, NaN at the same places, zeros of the same sign."""
    actual = found.double().numpy()
    np.testing.assert_array_equal(actual, expected)
    finite = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(actual)[finite], np.signbit(expected)[finite])


@pytest.mark.parametrize("dtype", [torch.uint8, E8M0])
def test_every_ue8m0_code(dtype: torch.dtype) -> None:
    found = formats.decode_ue8m0(CODES.view(dtype))
    assert found.dtype == torch.float32
    _same(found, np.array([exact.ue8m0_value(code) for code in range(256)]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [10, 126, 127, 128, 240])
def test_every_fp8_code(dtype: torch.dtype, scale: int) -> None:
    weight = CODES.view(32, 8).view(torch.float8_e4m3fn)
    found = formats.dequantize_fp8(weight, torch.tensor([[scale]], dtype=torch.uint8), dtype)
    values = np.array([exact.fp8_value(code) for code in range(256)]).reshape(32, 8)
    assert found.dtype == dtype
    _same(found, values * exact.ue8m0_value(scale))


@pytest.mark.parametrize("shape", [(32, 32), (64, 96), (40, 72), (33, 31), (65, 33), (1, 1), (100, 160)])
def test_fp8_blocks_are_32_by_32_also_where_they_are_ragged(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 127, shape, dtype=np.uint8)
    scales = rng.integers(110, 140, (-(-shape[0] // 32), -(-shape[1] // 32)), dtype=np.uint8)
    weight, scale = torch.from_numpy(codes).view(torch.float8_e4m3fn), torch.from_numpy(scales)
    expected = np.empty(shape)
    for row in range(shape[0]):
        for column in range(shape[1]):
            factor = exact.ue8m0_value(int(scales[row // 32, column // 32]))
            expected[row, column] = exact.fp8_value(int(codes[row, column])) * factor
    _same(formats.dequantize_fp8(weight, scale.view(E8M0), torch.bfloat16), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("packed_dtype", [torch.uint8, torch.int8])
def test_every_fp4_byte(dtype: torch.dtype, packed_dtype: torch.dtype) -> None:
    """Two experts of 8 rows of 32 values; the low nibble comes first."""
    packed = CODES.view(2, 8, 16)
    scales = torch.arange(120, 136, dtype=torch.uint8).view(2, 8, 1)
    expected = np.empty((2, 8, 32))
    for expert in range(2):
        for row in range(8):
            factor = exact.ue8m0_value(int(scales[expert, row, 0]))
            for byte in range(16):
                code = int(packed[expert, row, byte])
                expected[expert, row, 2 * byte] = exact.fp4_value(code & 15) * factor
                expected[expert, row, 2 * byte + 1] = exact.fp4_value(code >> 4) * factor
    found = formats.dequantize_fp4(packed.view(packed_dtype), scales.view(E8M0), dtype)
    assert found.dtype == dtype
    _same(found, expected)


def test_fp4_scales_go_by_32_along_k() -> None:
    rng = np.random.default_rng(1)
    packed = rng.integers(0, 256, (3, 48), dtype=np.uint8)
    scales = rng.integers(100, 150, (3, 3), dtype=np.uint8)
    found = formats.dequantize_fp4(torch.from_numpy(packed), torch.from_numpy(scales), torch.float32)
    for row in range(3):
        for k in range(96):
            code = int(packed[row, k // 2]) >> (4 * (k % 2)) & 15
            assert found[row, k] == exact.fp4_value(code) * exact.ue8m0_value(int(scales[row, k // 32]))


def test_scale_of_every_bfloat16() -> None:
    """Latents, keys and queries are bfloat16: the scale is exactly the smallest one for each of them."""
    bits = np.arange(0, 0x7F80, dtype=np.uint32) << 16
    amax = bits.view(np.float32)
    expected = [exact.scale_exponent(float(value)) for value in amax]
    found = formats.power_of_two_scale(torch.from_numpy(amax))
    assert found.tolist() == expected
    assert min(expected) == -22 and max(expected) == 120


@pytest.mark.parametrize("k", [-21, -1, 0, 1, 60, 118])
def test_scale_changes_past_448(k: int) -> None:
    edge = 448.0 * 2.0**k
    found = formats.power_of_two_scale(torch.tensor([edge * (1 - 2**-8), edge, edge * (1 + 2**-7)]))
    assert found.tolist() == [k, k, k + 1]


@pytest.mark.parametrize("amax", [0.0, 1e-45, 1e-38, 9e-5])
def test_scale_has_a_floor(amax: float) -> None:
    """448 * 2**-22 is the first at or above 1e-4."""
    assert formats.power_of_two_scale(torch.tensor(amax)) == -22


def test_two_to_is_exact() -> None:
    exponents = torch.arange(-126.0, 128.0)
    assert formats.two_to(exponents).tolist() == [2.0**e for e in range(-126, 128)]


def _latents() -> np.ndarray:
    """[T, 512] float32, the first 448 of them bfloat16 values: ordinary rows and the awkward ones."""
    rng = np.random.default_rng(2)
    rows = [rng.standard_normal(512) * 10.0**power for power in (-6, -3, 0, 3, 30)]
    rows.append(np.zeros(512))
    rows.append(np.full(512, 2.0**-130))  # subnormal
    rows.append(np.full(512, 3.38e38))
    mixed = rng.standard_normal(512)
    mixed[:64] = 0.0
    mixed[64:128] = 448.0 * 2.0**-5
    mixed[128:192] *= 1e-8
    mixed[192] = -448.0 * 2.0**9
    mixed[256] = 1e30
    rows.append(mixed)
    # Every midpoint between two FP8 values, which must go to the even code, and a 448 that keeps the scale 1.
    magnitudes = np.array([exact.fp8_value(code) for code in range(127)])
    ties = (magnitudes[1:] + magnitudes[:-1]) / 2
    row = np.zeros(512)
    row[0], row[64], row[1:64], row[65:128] = 448.0, -448.0, ties[:63], -ties[63:]
    rows.append(row)
    values = np.stack(rows).astype(np.float32)
    values[:, :448] = exact.bf16(values[:, :448])
    return values


def test_kv_records_byte_by_byte() -> None:
    rows = torch.from_numpy(_latents())
    data, scales = formats.encode_kv(rows[:, :448], rows[:, 448:])
    assert data.shape == (len(rows), 576) and scales.shape == (len(rows), 8)
    assert data.dtype == scales.dtype == torch.uint8
    for row, values in enumerate(_latents()):
        found = data[row].numpy().tobytes() + scales[row].numpy().tobytes()
        assert found == exact.kv_record(values[:448], values[448:]), f"row {row}"


def test_kv_record_by_hand() -> None:
    """A record spelled out: 1.0 is e4m3's 0x38, at a scale of 2**-8 (448 * 2**-8 = 1.75) it is 256, 0x78."""
    latent, rotated = torch.zeros(1, 448), torch.zeros(1, 64)
    latent[0, 0], latent[0, 447], rotated[0, 0], rotated[0, 63] = 1.0, -448.0, 1.0, -2.0
    data, scales = formats.encode_kv(latent, rotated)
    expected = bytearray(576)
    expected[0], expected[447] = 0x78, 0xFE
    expected[448:450], expected[574:576] = b"\x80\x3f", b"\x00\xc0"
    assert data[0].numpy().tobytes() == bytes(expected)
    assert scales[0].tolist() == [127 - 8, *[127 - 22] * 5, 127, 0]


def test_kv_decoding() -> None:
    """Random bytes (no NaN codes, scales of a bfloat16's range) decode to what they stand for."""
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 127, (20, 448)) + 128 * rng.integers(0, 2, (20, 448))
    tail = exact.bf16_bits(rng.standard_normal((20, 64)))
    scales = rng.integers(20, 245, (20, 8))
    data = torch.cat((torch.from_numpy(codes.astype(np.uint8)), torch.from_numpy(tail.view(np.uint8))), -1)
    found = formats.decode_kv(data.view(4, 5, 576), torch.from_numpy(scales.astype(np.uint8)).view(4, 5, 8))
    assert found.shape == (4, 5, 512) and found.dtype == torch.float32
    for row in range(20):
        record = data[row].numpy().tobytes() + scales[row].astype(np.uint8).tobytes()
        _same(found.view(20, 512)[row], exact.kv_values(record))


def test_kv_decoding_of_a_block_without_a_value() -> None:
    """NaN codes and the NaN scale stay visible; the pad byte means nothing."""
    data, scales = torch.zeros(1, 576, dtype=torch.uint8), torch.full((1, 8), 127, dtype=torch.uint8)
    data[0, 0], data[0, 1], scales[0, 6], scales[0, 7] = 0x7F, 0xFF, 255, 255
    found = formats.decode_kv(data, scales)[0]
    assert found.isnan().nonzero().flatten().tolist() == [0, 1, *range(384, 448)]


def test_index_keys_byte_by_byte() -> None:
    keys = exact.bf16(_latents()[:, :128]).astype(np.float32)
    values, scale = formats.encode_index_key(torch.from_numpy(keys))
    assert values.dtype == torch.uint8 and scale.dtype == torch.float32 and scale.shape == (len(keys), 1)
    for row, key in enumerate(keys):
        found = values[row].numpy().tobytes(), scale[row].numpy().tobytes()
        assert found == exact.index_record(key), f"row {row}"


@pytest.mark.parametrize(
    ("states", "record", "expected"),
    [(32, 584, 33 * 576), (64, 584, 65 * 576), (64, 132, 15 * 576), (32, 132, 8 * 576), (1, 576, 576), (1, 577, 1152)],
)
def test_pages_are_padded_to_576(states: int, record: int, expected: int) -> None:
    assert formats.page_bytes(states, record) == expected


STATES, BLOCKS, STRIDE, OFFSET = 4, 3, 6000, 100


def _caches() -> tuple[Tensor, Tensor, Tensor]:
    """A buffer of a byte pattern, and in it a KV cache and, after its page, an index cache."""
    buffer = (torch.arange(OFFSET + BLOCKS * STRIDE) % 251).to(torch.uint8)
    kv = buffer.as_strided((BLOCKS, STATES, 584), (STRIDE, 584, 1), OFFSET)
    index = buffer.as_strided((BLOCKS, STATES, 132), (STRIDE, 132, 1), OFFSET + 2880)
    return buffer, kv, index


def test_records_lie_in_two_planes_of_a_strided_block() -> None:
    buffer, kv, index = _caches()
    expected = bytearray(buffer.numpy().tobytes())
    generator = torch.Generator().manual_seed(0)
    slots = torch.tensor([STATES, 2 * STATES + 3, -1, STATES + 2])
    data = torch.randint(256, (4, 576), generator=generator).to(torch.uint8)
    scales = torch.randint(256, (4, 8), generator=generator).to(torch.uint8)
    keys = torch.randint(256, (4, 128), generator=generator).to(torch.uint8)
    key_scales = torch.randint(256, (4, 4), generator=generator).to(torch.uint8)
    formats.write_records(formats.kv_planes(kv), slots, data, scales)
    formats.write_records(formats.index_planes(index), slots, keys, key_scales)
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        page, state = OFFSET + slot // STATES * STRIDE, slot % STATES
        for at, plane in ((page + state * 576, data), (page + STATES * 576 + state * 8, scales)):
            expected[at : at + plane.shape[1]] = plane[row].numpy().tobytes()
        page += 2880
        for at, plane in ((page + state * 128, keys), (page + STATES * 128 + state * 4, key_scales)):
            expected[at : at + plane.shape[1]] = plane[row].numpy().tobytes()
    assert buffer.numpy().tobytes() == bytes(expected)
    for planes, first, second in (
        (formats.kv_planes(kv), data, scales),
        (formats.index_planes(index), keys, key_scales),
    ):
        grid = slots[[0, 3, 1, 1]].view(2, 2)
        found = formats.gather_records(planes, grid)
        assert torch.equal(found[0], first[[0, 3, 1, 1]].view(2, 2, -1))
        assert torch.equal(found[1], second[[0, 3, 1, 1]].view(2, 2, -1))


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_slot_minus_one_writes_nothing(rows: int) -> None:
    buffer, kv, _ = _caches()
    before = buffer.clone()
    slots = torch.full((rows,), -1)
    poison = torch.full((rows, 576), 0x7F, dtype=torch.uint8)
    formats.write_records(formats.kv_planes(kv), slots, poison, poison[:, :8])
    assert torch.equal(buffer, before)


def test_slot_minus_one_reads_the_null_block() -> None:
    _, kv, _ = _caches()
    data, scales = formats.gather_records(formats.kv_planes(kv), torch.tensor([-1]))
    assert torch.equal(data[0], formats.kv_planes(kv)[0][0, 0])
    assert torch.equal(scales[0], formats.kv_planes(kv)[1][0, 0])


def test_offsets_past_two_gigabytes() -> None:
    """Three blocks whose stride is 1.5 GB; the memory is reserved, and only the records' pages are touched."""
    stride = 3 << 29
    buffer = torch.empty(2 * stride + formats.page_bytes(2, 584), dtype=torch.uint8)
    cache = buffer.as_strided((3, 2, 584), (stride, 584, 1), 0)
    data, scales = torch.full((1, 576), 7, dtype=torch.uint8), torch.full((1, 8), 9, dtype=torch.uint8)
    # The rows that write nothing read and write the null block.
    buffer[: 2 * 584] = 3
    formats.write_records(formats.kv_planes(cache), torch.tensor([5, -1]), data.repeat(2, 1), scales.repeat(2, 1))
    assert buffer[2 * stride + 576 : 2 * stride + 1152].eq(7).all()
    assert buffer[2 * stride + 1160 : 2 * stride + 1168].eq(9).all()
    found = formats.gather_records(formats.kv_planes(cache), torch.tensor([5]))
    assert found[0].eq(7).all() and found[1].eq(9).all()
    assert buffer[: 2 * 584].eq(3).all()


def test_the_specifications_agree_with_themselves() -> None:
    """The reference's own anchors: the formats' documented extremes."""
    assert exact.fp8_value(0x7E) == 448.0 and exact.fp8_value(1) == 2.0**-9 and exact.fp8_value(8) == 2.0**-6
    assert math.isnan(exact.fp8_value(0x7F)) and exact.fp4_value(7) == 6.0 and exact.fp4_value(9) == -0.5
    assert exact.fp8_codes([0.0, 1.0, -448.0, 2.0**-10, 3 * 2.0**-10]).tolist() == [0, 0x38, 0xFE, 0, 2]
    assert exact.bf16_bits([1.0, 1.0 + 2**-8, 1.0 + 3 * 2**-8]).tolist() == [0x3F80, 0x3F80, 0x3F82]
