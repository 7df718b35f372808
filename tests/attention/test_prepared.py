"""Prepared weights: the same bytes, where a multiplication's fragments look for them."""

import pytest
import torch
from torch import Tensor

from specialized_decode.attention.prepared import PreparedFp8, pack, prepare_fp8, unpack, unprepare_fp8
from specialized_decode.boundary import reference

LANE = torch.arange(32)
G, T = LANE // 4, LANE % 4


def weight(n: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random bytes without NaN, and scales from 2^-15 to 2^7."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 256, (n, k), generator=generator, dtype=torch.uint8)
    numbers[(numbers & 0x7F) == 0x7F] = 0x80
    scale = torch.randint(112, 135, (n // 32, k // 32), generator=generator, dtype=torch.uint8)
    return numbers.view(torch.float8_e4m3fn), scale


@pytest.mark.parametrize(("n", "k"), [(32, 32), (64, 96), (1792, 5120)])
def test_round_trip(n: int, k: int) -> None:
    numbers, scale = weight(n, k)
    prepared = prepare_fp8(numbers, scale)
    assert prepared.shape == (n, k)
    assert torch.equal(unprepare_fp8(prepared).view(torch.uint8), numbers.view(torch.uint8))


def widen(words: Tensor) -> tuple[Tensor, Tensor]:
    """The kernel's instructions: words [...] -> the first and the second pair [..., 2] of numbers in float64."""
    bits = words.long() & 0xFFFFFFFF
    rotated = (bits >> 4 | bits << 28) & 0xFFFFFFFF
    pairs = (bits & 0x87F087F0, (rotated & 0x87808780) | (bits << 4 & 0x00700070))
    halves = [torch.stack((pair & 0xFFFF, pair >> 16), -1) for pair in pairs]
    first, second = ((half << 16).to(torch.int32).view(torch.float32).double() * 2.0**120 for half in halves)
    return first, second


def test_every_number_widens() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    every = every[(every & 0x7F) != 0x7F]
    # Each place in turn has every number, beside others.
    numbers = torch.stack([every.roll(shift) for shift in (0, 61, 122, 183)], -1)
    assert torch.equal(unpack(pack(numbers)), numbers)
    expected = numbers.view(torch.float8_e4m3fn).double()
    first, second = widen(pack(numbers))
    assert torch.equal(torch.cat((first, second), -1), expected)


def multiply(a: list[Tensor], b: list[Tensor]) -> Tensor:
    """mma.m16n8k16 as PTX defines its fragments. a: four registers of pairs [32, 2], b: two -> [32, 4]."""
    left, right = torch.zeros(16, 16, dtype=torch.double), torch.zeros(16, 8, dtype=torch.double)
    for j in range(2):
        left[G, 2 * T + j], left[G + 8, 2 * T + j] = a[0][:, j], a[1][:, j]
        left[G, 2 * T + 8 + j], left[G + 8, 2 * T + 8 + j] = a[2][:, j], a[3][:, j]
        right[2 * T + j, G], right[2 * T + 8 + j, G] = b[0][:, j], b[1][:, j]
    sums = left @ right
    return torch.stack([sums[G, 2 * T], sums[G, 2 * T + 1], sums[G + 8, 2 * T], sums[G + 8, 2 * T + 1]], 1)


def project(x: Tensor, prepared: PreparedFp8) -> Tensor:
    """The kernel's own walk over the prepared words, in float64."""
    rows, (n, k) = x.shape[0], prepared.shape
    y = torch.zeros(8, n, dtype=torch.double)
    row = G.clamp_max(rows - 1)
    for tile in range(n // 16):
        total = torch.zeros(32, 4, dtype=torch.double)
        for block in range(k // 32):
            first, second = widen(prepared.words[tile, block])
            own = x.double()[row.unsqueeze(1), block * 32 + 8 * T.unsqueeze(1) + torch.arange(8)].view(32, 4, 2)
            factor = 2.0 ** (int(prepared.scales[tile // 2, block]) - 127)
            for step in range(2):
                g, other = 2 * step, 2 * step + 1
                a = [first[:, g], first[:, other], second[:, g], second[:, other]]
                total += multiply(a, [own[:, g], own[:, other]]) * factor
        for place, (extra_row, extra_output) in enumerate(((0, 0), (1, 0), (0, 8), (1, 8))):
            y[2 * T + extra_row, tile * 16 + G + extra_output] = total[:, place]
    return y[:rows]


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
def test_fragments_give_the_product(rows: int) -> None:
    numbers, scale = weight(64, 96, rows)
    x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(rows)).bfloat16()
    expected = x.double() @ reference.dequantize(numbers, scale).double().T
    torch.testing.assert_close(project(x, prepare_fp8(numbers, scale)), expected, rtol=1e-12, atol=1e-9)


def test_other_weights_are_refused() -> None:
    numbers, scale = weight(64, 96)
    with pytest.raises(ValueError, match=r"weight: found torch.bfloat16 \[64, 96\]"):
        prepare_fp8(numbers.bfloat16(), scale)
    with pytest.raises(ValueError, match=r"\[48, 96\], expected float8_e4m3fn of multiples of 32"):
        prepare_fp8(numbers[:48], scale)
    with pytest.raises(ValueError, match=r"scale: found \[1, 3\], expected \[2, 3\]"):
        prepare_fp8(numbers, scale[:1])
    scale[1, 2] = 255
    with pytest.raises(ValueError, match="found 255"):
        prepare_fp8(numbers, scale)
