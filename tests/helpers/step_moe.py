"""A small mixture of experts of the plain model, over random MXFP4 experts."""

import torch
from torch import Tensor

from specialized_decode.backbone.linear import Linear
from specialized_decode.backbone.moe import Experts, MoE
from tests.helpers.small_config import small_config
from tests.helpers.step_linear import fp8_linear
from tests.helpers.step_mhc import random_bf16

HIDDEN, WIDTH, EXPERTS, TOPK = 64, 32, 16, 3


def packed(seed: int, experts: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Random e2m1 codes [experts, rows, columns / 2] and their scales, all codes among them."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(256, (experts, rows, columns // 2), generator=generator).to(torch.uint8)
    return codes, torch.randint(121, 126, (experts, rows, columns // 32), generator=generator).to(torch.uint8)


def random_moe(seed: int = 0, experts: int = EXPERTS, image_bias: bool = True) -> MoE:
    """FP8 shared expert, BF16 gate, biases of both kinds."""
    config = small_config(n_routed_experts=experts, num_experts_per_tok=TOPK)
    generator = torch.Generator().manual_seed(seed)
    bias, image = (torch.randn(experts, generator=generator) * 0.5 for _ in range(2))
    return MoE(
        config,
        gate=Linear(random_bf16(seed + 1, experts, HIDDEN, size=HIDDEN**-0.5)),
        bias=bias,
        image_bias=image if image_bias else None,
        experts=Experts(*packed(seed + 2, experts, 2 * WIDTH, HIDDEN), *packed(seed + 3, experts, HIDDEN, WIDTH)),
        shared_up=fp8_linear(seed + 4, 2 * WIDTH, HIDDEN, size=HIDDEN**-0.5),
        shared_down=fp8_linear(seed + 5, HIDDEN, WIDTH, size=WIDTH**-0.5),
    )
