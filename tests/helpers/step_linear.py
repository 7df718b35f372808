"""Random dense layers in the release's formats."""

import torch

from specialized_decode.backbone.linear import Linear


def fp8_linear(seed: int, rows: int, columns: int, size: float = 1.0, device: torch.device | None = None) -> Linear:
    """A dense layer as the release stores it: e4m3 with one scale per 32x32 block; values of about `size`."""
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(rows, columns, generator=generator) * size * 32).to(torch.float8_e4m3fn)
    scale = torch.randint(121, 124, (-(-rows // 32), -(-columns // 32)), generator=generator).to(torch.uint8)
    return Linear(weight.to(device), scale.to(device))
