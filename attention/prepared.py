"""Dense FP8 weights as the low-batch projection reads them."""

from typing import NamedTuple

import torch
from torch import Tensor

TILE, BLOCK = 16, 32


class PreparedFp8(NamedTuple):
    """words: [N / 16, K / 32, 32, 4] int32, the fragments of mma.m16n8k16: of a tile's 32 columns, lane 4 g + t holds
    columns 8 t to 8 t + 7 of output g and of output g + 8, in words of four: first g, first g + 8, then the second
    four of each. `pack` has the bits of a word. scales: [N / 32, K / 32] uint8, UE8M0."""

    words: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K] of the weight."""
        tiles, blocks = self.words.shape[:2]
        return tiles * TILE, blocks * BLOCK


def pack(numbers: Tensor) -> Tensor:
    """e4m3 bytes [..., 4] uint8 -> words [...] int32, whose first two numbers lie where bfloat16 has sign, low exponent
    and high mantissa, in either half of the word. The other two fill what is left: their exponents 4 bits higher, their
    mantissas 4 lower, and their signs 4 bits higher around the word."""
    parts = numbers.to(torch.int32)
    first, second = parts[..., :2], parts[..., 2:]
    halves = (first & 0x80) << 8 | (first & 0x7F) << 4 | (second & 0x78) << 8 | second & 0x07
    halves = halves | (second.flip(-1) & 0x80) >> 4
    return halves[..., 0] | halves[..., 1] << 16


def unpack(words: Tensor) -> Tensor:
    """The bytes [..., 4] uint8 that `pack` was given."""
    halves = torch.stack((words, words >> 16), -1)
    first = halves >> 8 & 0x80 | halves >> 4 & 0x7F
    second = halves.flip(-1) << 4 & 0x80 | halves >> 8 & 0x78 | halves & 0x07
    return torch.cat((first, second), -1).to(torch.uint8)


def prepare_fp8(weight: Tensor, scale: Tensor) -> PreparedFp8:
    """weight: [N, K] float8_e4m3fn, scale: [N / 32, K / 32] UE8M0 -> the same bits in another order.

    Raises ValueError for other types, shapes, and scales of 255, which are no number.
    """
    n, k = weight.shape
    if weight.dtype != torch.float8_e4m3fn or n % BLOCK or k % BLOCK:
        raise ValueError(f"weight: found {weight.dtype} [{n}, {k}], expected float8_e4m3fn of multiples of {BLOCK}")
    scales = scale.view(torch.uint8)
    if scales.shape != (n // BLOCK, k // BLOCK):
        raise ValueError(f"scale: found {list(scales.shape)}, expected [{n // BLOCK}, {k // BLOCK}]")
    if bool((scales == 255).any()):
        raise ValueError("scale: found 255, which UE8M0 has for NaN, expected numbers")
    # tile, g or g + 8, g, block, t, first or second four, byte
    parts = weight.view(torch.uint8).reshape(n // TILE, 2, 8, k // BLOCK, 4, 2, 4)
    words = pack(parts.permute(0, 3, 2, 4, 5, 1, 6))
    return PreparedFp8(words.reshape(n // TILE, k // BLOCK, 32, 4), scales.contiguous())


def unprepare_fp8(prepared: PreparedFp8) -> Tensor:
    """The weight [N, K] float8_e4m3fn that `prepare_fp8` was given."""
    n, k = prepared.shape
    parts = unpack(prepared.words).reshape(n // TILE, k // BLOCK, 8, 4, 2, 2, 4)
    return parts.permute(0, 5, 2, 1, 3, 4, 6).reshape(n, k).view(torch.float8_e4m3fn)
