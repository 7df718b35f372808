"""The form in which vLLM holds routed experts on Hopper: places and values by hand, both ways, and what is refused."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specialized_decode.moe.expert_layout import (
    HummingExperts,
    Mxfp4Experts,
    PackedWeight,
    Projection,
    pack,
    projections,
    rebase,
    shard_width,
    unpack,
)
from specialized_decode.moe.reference import unpack_fp4
from tests.helpers.exact_formats import fp4_value, ue8m0_value
from tests.helpers.stock_experts import SCALES, WIDTHS, random_experts

# Multiples of all that vLLM and Humming round up to, so that nothing is padded.
HIDDEN, WIDTH = 256, 128
MINUS_HALF = 9

_CODES = np.array([fp4_value(code) for code in range(16)])
_POWERS = np.array([ue8m0_value(code) for code in range(256)])


def _packed(experts: Mxfp4Experts) -> HummingExperts:
    return pack(experts.w13, experts.w13_scale, experts.w2, experts.w2_scale)


def _zeros(hidden: int = HIDDEN, width: int = WIDTH, scale: int = 120, count: int = 2) -> Mxfp4Experts:
    codes, scales = torch.zeros(count, 2 * width, hidden // 2), torch.full((count, 2 * width, hidden // 32), scale)
    w2, w2_scale = torch.zeros(count, hidden, width // 2), torch.full((count, hidden, width // 32), scale)
    return Mxfp4Experts(*(t.to(torch.uint8) for t in (codes, scales, w2, w2_scale)))


def _set_code(codes: Tensor, expert: int, row: int, column: int, code: int) -> None:
    codes[expert, row, column // 2] = codes[expert, row, column // 2] | code << 4 * (column % 2)


def _codes(codes: Tensor) -> np.ndarray:
    return np.stack((codes.numpy() & 15, codes.numpy() >> 4), -1).reshape(*codes.shape[:-1], -1)


def _values(codes: Tensor, scales: Tensor) -> np.ndarray:
    return _CODES[_codes(codes)] * _POWERS[scales.numpy()].repeat(32, -1)


@pytest.mark.parametrize(
    ("expert", "row", "column", "word", "bits"),
    [
        (0, 0, 0, 0, 0x9),
        (0, 0, 1, 0, 0x810),
        (0, 0, 2, 0, 0x80100),
        (0, 0, 16, 0, 0x10080),
        (0, 0, 17, 0, 0x108000),
        (0, 0, 4, 4, 0x9),
        (0, 0, 32, 2, 0x9),
        (0, 8, 0, 1, 0x9),
        (0, 1, 0, 16, 0x9),
        (0, 15, 63, 127, 0x90000000),
        (0, 16, 0, 128, 0x9),
        (0, 255, 0, 15 * 128 + 28 * 4 + 1, 0x9),
        (0, 0, 64, 8 * 256, 0x9),
        (1, 0, 0, 4 * 8 * 256, 0x9),
    ],
)
def test_place_of_a_code(expert: int, row: int, column: int, word: int, bits: int) -> None:
    """-1/2 alone: one bit of magnitude, one of sign."""
    experts = _zeros()
    _set_code(experts.w13, expert, row, column, MINUS_HALF)
    words = _packed(experts).w13.weight.flatten().numpy().view(np.uint32)
    assert {int(i): hex(words[i]) for i in words.nonzero()[0]} == {word: hex(bits)}
    found, magnitude, sign = projections(HIDDEN, WIDTH)[0].code_bits(expert, row, column)
    assert (found, 1 << magnitude | 1 << sign) == (word, bits)


@pytest.mark.parametrize(
    ("expert", "row", "column", "place"),
    [
        (0, 0, 0, 0),
        (0, 8, 0, 1),
        (0, 1, 0, 8),
        (0, 63, 31, 63),
        (0, 64, 0, 64),
        (0, 65, 0, 72),
        (0, 0, 32, 256),
        (1, 0, 0, 8 * 256),
    ],
)
def test_place_of_a_scale(expert: int, row: int, column: int, place: int) -> None:
    experts = _zeros()
    experts.w13_scale[expert, row, column // 32] = 123
    held = _packed(experts).w13.weight_scale.view(torch.uint8).flatten().numpy()
    assert np.unique(held).tolist() == [1, 4]
    assert (held == 4).nonzero()[0].tolist() == [place]
    assert projections(HIDDEN, WIDTH)[0].scale_byte(expert, row, column) == place


@pytest.mark.parametrize("which", [0, 1], ids=["w13", "w2"])
@pytest.mark.parametrize(("hidden", "width"), [(HIDDEN, WIDTH), (160, 96), (384, 32)])
def test_every_place(hidden: int, width: int, which: int) -> None:
    """The methods of `Projection` over a whole projection, as tensors, against `unpack`."""
    experts = random_experts(0, 3, hidden, width, "as in a release")
    packed = _packed(experts)
    shape, held = packed.projections[which], (packed.w13, packed.w2)[which]
    codes, scales = [(experts.w13, experts.w13_scale), (experts.w2, experts.w2_scale)][which]
    size = codes.shape[1], 2 * codes.shape[2]
    expert, row, column = torch.meshgrid(*(torch.arange(n) for n in (3, *size)), indexing="ij")
    if which == 0:
        row = torch.where(row < width, row, row - width + shard_width(width))
    word, magnitude, sign = shape.code_bits(expert, row, column)
    words = held.weight.flatten()[word]
    found = words >> magnitude & 7 | (words >> sign & 1) << 3
    assert bool(((found == torch.from_numpy(_codes(codes))) | (found == 0)).all())
    assert np.array_equal(_CODES[found.numpy()], _CODES[_codes(codes)])  # -0 is the code that changes
    tile = shape.tile_word(expert, row, column)
    assert bool(((tile <= word) & (word < tile + 128) & (tile % 128 == 0)).all())
    stored = held.weight_scale.view(torch.uint8).flatten()[shape.scale_byte(expert, row, column)]
    base = held.weight_scale_2.log2().long()[:, None, None]
    assert torch.equal(stored + base + 127, scales.long().repeat_interleave(32, -1))


def test_shapes_at_every_tp() -> None:
    """The release's hidden size; the last widths are padded by vLLM and by Humming."""
    assert [projections(5120, width) for width in WIDTHS] == [
        (Projection(4608, 5120), Projection(5120, 2304)),
        (Projection(2304, 5120), Projection(5120, 1152)),
        (Projection(1280, 5120), Projection(5120, 640)),
        (Projection(768, 5120), Projection(5120, 384)),
    ]
    assert [shard_width(width) for width in WIDTHS] == [2304, 1152, 576, 320]


@pytest.mark.parametrize("width", WIDTHS)
def test_dtypes_and_shapes(width: int) -> None:
    packed = _packed(random_experts(1, 2, HIDDEN, width, "one"))
    for held, shape in zip((packed.w13, packed.w2), projections(HIDDEN, width), strict=True):
        assert (held.weight.dtype, held.weight.shape) == (torch.int32, (2, shape.columns // 64, 8 * shape.rows))
        assert held.weight_scale.dtype == torch.float8_e8m0fnu
        assert held.weight_scale.shape == (2, shape.columns // 32, shape.rows)
        assert (held.weight_scale_2.dtype, held.weight_scale_2.shape) == (torch.float32, (2,))


def _nearest(values: np.ndarray, unit: np.ndarray) -> np.ndarray:
    """`values` on the grid of e2m1 times `unit`, ties away from zero; float64, exact."""
    grid = _CODES[:8] * unit[..., None]
    distance = np.abs(np.abs(values)[..., None] - grid)
    # Of two equally near, the last.
    return np.take_along_axis(grid, 7 - distance[..., ::-1].argmin(-1)[..., None], -1)[..., 0] * np.sign(values)


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize(("hidden", "width"), [(HIDDEN, WIDTH), (160, 96), *((64, width) for width in WIDTHS)])
def test_round_trip(hidden: int, width: int, scales: str) -> None:
    """What `unpack` gives is the nearest that a span of 11 exponents allows, below the largest, padding's included."""
    experts = random_experts(width, 2, hidden, width, scales)
    found = unpack(_packed(experts))
    shapes = projections(hidden, width)
    for i, name in enumerate(("w13", "w2")):
        codes, held = getattr(experts, name), getattr(experts, name + "_scale")
        bytes_ = held.numpy().reshape(2, -1).astype(int)
        low, high = bytes_.min(1), bytes_.max(1)
        if shapes[i].rows > (2 * shard_width(width), hidden)[i]:
            low, high = np.minimum(low, 127), np.maximum(high, 127)
        if shard_width(width) > width:
            low = np.zeros_like(low)
        floor = np.maximum(low, high - 11)[:, None, None]
        unit = _POWERS[np.maximum(held.numpy(), floor)].repeat(32, -1)
        expected = _nearest(_values(codes, held), unit)
        codes, held = getattr(found, name), getattr(found, name + "_scale")
        assert np.array_equal(_values(codes, held), expected), name
        assert np.array_equal(_POWERS[held.numpy()].repeat(32, -1), unit), name
        assert codes.dtype == held.dtype == torch.uint8 and codes.is_contiguous() and held.is_contiguous()
        assert np.array_equal(unpack_fp4(codes, held, torch.float32).double().numpy(), expected), name


def test_unpacked_is_packed_alike() -> None:
    """Requantized once, nothing changes any more, down to the bytes."""
    once = _packed(random_experts(5, 2, HIDDEN, WIDTH, "further apart than 2**11"))
    twice = _packed(unpack(once))
    for first, second in ((once.w13, twice.w13), (once.w2, twice.w2)):
        assert torch.equal(first.weight_scale.view(torch.uint8), second.weight_scale.view(torch.uint8))
        assert torch.equal(first.weight_scale_2, second.weight_scale_2)
    values = [unpack_fp4(e.w2, e.w2_scale, torch.float32) for e in (unpack(once), unpack(twice))]
    assert torch.equal(*values)


@pytest.mark.parametrize(
    ("shift", "expected"),
    [
        (0, [0, 1, 2, 3, 4, 5, 6, 7, 0, 9, 10, 11, 12, 13, 14, 15]),
        (1, [0, 1, 1, 2, 2, 3, 4, 5, 0, 9, 9, 10, 10, 11, 12, 13]),
        (2, [0, 0, 1, 1, 1, 2, 2, 3, 0, 8, 9, 9, 9, 10, 10, 11]),
        (3, [0, 0, 0, 0, 1, 1, 1, 2, 0, 8, 8, 8, 9, 9, 9, 10]),
        (4, [0, 0, 0, 0, 0, 0, 1, 1, 0, 8, 8, 8, 8, 8, 9, 9]),
        (5, [0, 0, 0, 0, 0, 0, 0, 0, 0, 8, 8, 8, 8, 8, 8, 8]),
        (60, [0, 0, 0, 0, 0, 0, 0, 0, 0, 8, 8, 8, 8, 8, 8, 8]),
    ],
)
def test_requantized_codes(shift: int, expected: list[int]) -> None:
    """A group `shift` below the base, by hand. -0 becomes 0; what is rounded to zero keeps its sign."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(2, 2)[None]
    codes = torch.cat((codes, torch.zeros_like(codes)), 1)
    scales = torch.tensor([[[100 - shift], [100 - shift], [111], [111]]], dtype=torch.uint8)
    found, stored, scale_2 = rebase(codes, scales)
    assert found[0, 0].tolist() == expected * 2
    assert stored.flatten().tolist() == [1, 1, 12, 12]
    assert scale_2.tolist() == [2.0**-28]


def test_experts_are_rebased_apart() -> None:
    scales = torch.tensor([[[120], [131]], [[90], [90]], [[0], [3]], [[1], [1]]], dtype=torch.uint8)
    _, stored, scale_2 = rebase(torch.zeros(4, 2, 32, dtype=torch.uint8), scales)
    assert stored.flatten(1).tolist() == [[1, 12], [1, 1], [1, 4], [1, 1]]
    assert scale_2.tolist() == [2.0**-8, 2.0**-38, 2.0**-128, 2.0**-127]


def test_padded_rows_raise_the_largest_scale() -> None:
    """576 rows of 2**-20 are held as 768; the others' scale of 1 leaves nothing of codes 9 exponents below the base."""
    experts = _zeros(64, 288, scale=107)
    experts.w13.fill_(0x22)
    packed = _packed(experts)
    assert packed.w13.weight_scale_2.tolist() == [2.0**-12] * 2  # base 116
    assert not packed.w13.weight.any()
    assert packed.w13.weight_scale.view(torch.uint8).unique().tolist() == [1, 12]


def test_width_padded_by_vllm() -> None:
    """Up rows start at 320, and the scale of 0 in the rows between spreads every expert's scales over 11 exponents."""
    experts = _zeros(256, 288, scale=126)
    experts.w13[:, 288:].fill_(0x22)
    experts.w2.fill_(0x22)
    packed = _packed(experts)
    shape = packed.projections[0]
    words = packed.w13.weight.flatten()
    for row, code in ((287, 0), (288, 0), (319, 0), (320, 2), (607, 2), (608, 0)):
        word, magnitude, _ = shape.code_bits(1, row, 0)
        assert words[word] >> magnitude & 7 == code, row
    assert packed.w13.weight_scale_2.tolist() == [2.0**-12] * 2  # base 116, 11 below the scale of padded rows
    assert packed.w2.weight_scale_2.tolist() == [2.0**-13] * 2  # base 115; w2's rows are not padded
    held = packed.w2.weight_scale.view(torch.uint8)
    # Nine groups of the checkpoint, one that vLLM left zero, two with the row's largest scale.
    assert held[0, :, 0].tolist() == [12] * 9 + [1] + [12] * 2


def test_bytes_under_another_dtype() -> None:
    """As safetensors gives them."""
    experts = random_experts(2, 1, 64, 64, "as in a release")
    other = pack(
        experts.w13.view(torch.int8),
        experts.w13_scale.view(torch.float8_e8m0fnu),
        experts.w2.view(torch.int8),
        experts.w2_scale.view(torch.float8_e8m0fnu),
    )
    expected = _packed(experts)
    assert torch.equal(other.w13.weight, expected.w13.weight) and torch.equal(other.w2.weight, expected.w2.weight)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"w13": torch.zeros(2, 64, 64)}, "w13 is float32 [2, 64, 64], expected three dimensions of bytes"),
        ({"w2_scale": torch.zeros(2, 128, dtype=torch.uint8)}, "w2_scale is uint8 [2, 128], expected three"),
        ({"w13": torch.zeros(2, 64, 40, dtype=torch.uint8)}, "the hidden size is 80, expected a multiple of 32"),
        ({"w2": torch.zeros(2, 128, 8, dtype=torch.uint8)}, "the width is 16, expected a multiple of 32"),
        (
            {"w13": torch.zeros(2, 66, 64, dtype=torch.uint8)},
            "w13 is (2, 66, 64), expected (2, 64, 64) for hidden size 128, from w13, and width 32, from w2",
        ),
        ({"w13_scale": torch.zeros(2, 64, 8, dtype=torch.uint8)}, "w13_scale is (2, 64, 8), expected (2, 64, 4)"),
        ({"w2": torch.zeros(3, 128, 16, dtype=torch.uint8)}, "w2 is (3, 128, 16), expected (2, 128, 16)"),
        ({"w2_scale": torch.zeros(2, 1, 128, dtype=torch.uint8)}, "w2_scale is (2, 1, 128), expected (2, 128, 1)"),
    ],
)
def test_refused_shapes(changes: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        _packed(replace(_zeros(128, 32), **changes))


def test_refused_scales() -> None:
    experts = _zeros()
    experts.w2_scale[1, 3, 1] = 255
    with pytest.raises(ValueError, match="w2: expert 1 has a NaN scale"):
        _packed(experts)
    for low, high in ((0, 138), (112, 250)):
        experts = _zeros(scale=low)
        experts.w13_scale[1, 200, 0] = high
        assert _packed(experts).w13.weight_scale_2[1] == 2.0 ** (high - 11 - 128)
        experts.w13_scale[1, 200, 0] = high + 1
        message = f"w13: expert 1 has scales from 2**{low - 127} to 2**{high + 1 - 127}, further apart than the 2**138"
        with pytest.raises(ValueError, match=re.escape(message)):
            _packed(experts)
    # What vLLM leaves zero counts.
    with pytest.raises(ValueError, match=re.escape("w13: expert 0 has scales from 2**-127 to 2**12")):
        _packed(_zeros(width=96, scale=139))


def test_refused_tensors() -> None:
    """The tensors of a layer, as they are bound: one wrong at a time."""
    packed = _packed(_zeros(128, 96))

    def bound(name: str, **changes: Tensor) -> HummingExperts:
        changed: Any = {name: PackedWeight(**(vars(getattr(packed, name)) | changes))}
        return replace(packed, **changed)

    assert bound("w13").count == 2
    with pytest.raises(
        ValueError, match=re.escape("w13_weight is int64 [2, 2, 2048], expected int32 [2, 2, 2048] for")
    ):
        bound("w13", weight=packed.w13.weight.long())
    with pytest.raises(ValueError, match=re.escape("w2_weight is int32 [2, 2, 1024], expected int32 [2, 2, 2048] for")):
        bound("w2", weight=packed.w2.weight[..., :1024])
    with pytest.raises(ValueError, match=re.escape("w2_weight_scale is uint8 [2, 4, 256], expected float8_e8m0fnu")):
        bound("w2", weight_scale=packed.w2.weight_scale.view(torch.uint8))
    with pytest.raises(ValueError, match=re.escape("w13_weight_scale_2 is float32 [1], expected float32 [2]")):
        bound("w13", weight_scale_2=packed.w13.weight_scale_2[:1])
    with pytest.raises(ValueError, match="w13_weight is not contiguous"):
        bound("w13", weight=packed.w13.weight.transpose(1, 2).contiguous().transpose(1, 2))
    with pytest.raises(ValueError, match="for hidden size 128 and width 200"):
        replace(packed, width=200)
