"""Rotary position embedding (Su et al., 2021) with YaRN (Peng et al., 2023), in interleaved (GPT-J) pairs."""

import math

import torch
from torch import Tensor

from specialized_decode.backbone.config import ModelConfig


def inverse_frequencies(config: ModelConfig, compressed: bool) -> Tensor:
    """[rope/2] float32. Window-only layers rotate plainly at `rope_theta`; layers with a compressed cache at
    `compress_rope_theta`, YaRN-interpolated where `rope_scaling` is given (no attention-temperature factor)."""
    dim = config.qk_rope_head_dim
    base = config.compress_rope_theta if compressed else config.rope_theta
    plain = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    scaling = config.rope_scaling
    if not compressed or scaling is None:
        return plain
    length = scaling.original_max_position_embeddings

    def pair_of(rotations: float) -> float:
        # The pair that turns `rotations` times over the original context.
        return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(pair_of(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_of(scaling.beta_slow)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain / scaling.factor * ramp + plain * (1 - ramp)


def cos_sin_table(config: ModelConfig, compressed: bool, positions: int) -> Tensor:
    """[positions, rope] float32: cosines of the pairs, then sines."""
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * inverse_frequencies(config, compressed)
    return torch.cat((angles.cos(), angles.sin()), -1)


def rotate(x: Tensor, cos_sin: Tensor, inverse: bool = False) -> Tensor:
    """Rotates pairs (2i, 2i+1) of x [..., rope] float32 by the angles in cos_sin [..., rope] (broadcast)."""
    cos, sin = cos_sin.chunk(2, -1)
    if inverse:
        sin = -sin
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
