"""Every MoE op in plain torch: the definition of right."""

import torch
from torch import Tensor

# The release's image tokens carry five consecutive ids from here on and are routed by a bias of their own.
IMAGE_TOKENS = range(129264, 129269)


def router_scores(logits: Tensor) -> Tensor:
    """sqrt(softplus(logit)), float32; softplus is the identity above 20, where exp adds nothing."""
    return torch.nn.functional.softplus(logits, threshold=20).sqrt()


def select_experts(
    logits: Tensor, bias: Tensor, image_bias: Tensor | None, input_ids: Tensor, topk: int, scaling: float
) -> tuple[Tensor, Tensor]:
    """logits [T, E] float32 -> expert ids [T, k] int64 and weights [T, k] float32.

    The k best by score + bias; weights are their scores without the bias, renormalized, times `scaling`.
    """
    scores = router_scores(logits)
    biased = scores + bias
    if image_bias is not None:
        image = (input_ids >= IMAGE_TOKENS.start) & (input_ids < IMAGE_TOKENS.stop)
        biased = torch.where(image.unsqueeze(1), scores + image_bias, biased)
    # Of equal experts the lower id wins, and NaN loses to all: what vLLM's router does.
    biased = torch.where(biased == biased, biased, -1e30)
    ids = biased.argsort(dim=1, descending=True, stable=True)[:, :topk]
    chosen = torch.gather(scores, 1, ids)
    total = chosen.sum(1, keepdim=True)
    return ids, chosen * (scaling / total.where(total > 0, torch.ones_like(total)))


def swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, +-limit), bfloat16; gate_up [..., 2 I], gate first."""
    half = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :half].float().clamp_max(limit), gate_up[..., half:].float().clamp(-limit, limit)
    return (torch.nn.functional.silu(gate) * up).to(torch.bfloat16)


def unpack_fp4(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., N, K/2] bytes and UE8M0 [..., N, K/32] -> [..., N, K] in `dtype`; exact in bfloat16.

    OCP MX v1.0, FP4 e2m1: bit 3 is the sign, bits 2 and 1 the exponent, bit 0 the mantissa; code 0 is 0 and code 1 1/2.
    """
    codes = torch.stack((packed.view(torch.uint8) % 16, packed.view(torch.uint8) // 16), -1).flatten(-2).int()
    exponent, mantissa = (codes >> 1) & 3, codes & 1
    normal = (2 + mantissa) << exponent
    # In quarters: codes 0 and 1 are 0 and 2; a normal value is (2 + m) 2**e / 4, e from 1.
    quarters = torch.where(exponent == 0, 2 * mantissa, normal).to(dtype)
    values = torch.where(codes >= 8, -quarters, quarters) / 4
    return values * scale.view(torch.float8_e8m0fnu).to(dtype).repeat_interleave(32, -1)


def expert_outputs(x: Tensor, w13: Tensor, w2: Tensor, limit: float) -> Tensor:
    """x [T, K] through every one of E experts (w13 [E, 2 I, K], w2 [E, K, I]) -> [E, T, K] bfloat16."""
    rows = x.to(w13.dtype).expand(w13.shape[0], -1, -1)
    hidden = swiglu(torch.bmm(rows, w13.transpose(1, 2)).to(torch.bfloat16), limit)
    return torch.bmm(hidden.to(w2.dtype), w2.transpose(1, 2)).to(torch.bfloat16)
