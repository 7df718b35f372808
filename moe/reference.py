"""Every MoE op in plain torch: the definition of right."""

import torch
from torch import Tensor

# The release's image tokens carry five consecutive ids from here on and are routed by a bias of their own.
IMAGE_TOKENS = range(129264, 129269)
# OCP MX v1.0, FP4 e2m1: the magnitudes of codes 0..7; bit 3 is the sign.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


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
    """[..., N, K/2] bytes and UE8M0 [..., N, K/32] -> [..., N, K] in `dtype`; exact in bfloat16."""
    codes = torch.stack((packed.view(torch.uint8) % 16, packed.view(torch.uint8) // 16), -1).flatten(-2)
    magnitude = torch.tensor(E2M1, dtype=dtype, device=packed.device)[(codes % 8).int()]
    values = torch.where(codes >= 8, -magnitude, magnitude)
    return values * scale.view(torch.float8_e8m0fnu).to(dtype).repeat_interleave(32, -1)


def expert_outputs(x: Tensor, w13: Tensor, w2: Tensor, limit: float) -> Tensor:
    """x [T, K] through every one of E experts (w13 [E, 2 I, K], w2 [E, K, I]) -> [E, T, K] bfloat16."""
    rows = x.to(w13.dtype).expand(w13.shape[0], -1, -1)
    hidden = swiglu(torch.bmm(rows, w13.transpose(1, 2)).to(torch.bfloat16), limit)
    return torch.bmm(hidden.to(w2.dtype), w2.transpose(1, 2)).to(torch.bfloat16)
