"""Every Engram op in plain torch: the definition of right."""

import torch
from torch import Tensor

GATE_FLOOR = 1e-6


def inject(residual: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor, keep: Tensor, eps: float) -> Tensor:
    """residual [T, n, hidden] + gate * value, bfloat16.

    kv: [T, (n + 1) hidden], a key per stream and then the value. d = <rms(residual) q, rms(key) k> / sqrt(hidden);
    gate = sigmoid(sign(d) sqrt(max(|d|, 1e-6))), zero where keep [T] is False.
    """
    rows, n, hidden = residual.shape
    parts = kv.float().view(rows, n + 1, hidden)
    keys, value = parts[:, :n], parts[:, n:]
    x = residual.float()
    inverse_rms = (x.pow(2).mean(2, keepdim=True) + eps).rsqrt() * (keys.pow(2).mean(2, keepdim=True) + eps).rsqrt()
    dot = (x * q_weight.float() * k_weight.float() * keys).sum(2, keepdim=True) * inverse_rms * hidden**-0.5
    root = dot.abs().clamp_min(GATE_FLOOR).sqrt()
    gate = torch.where(dot < 0, -root, root).sigmoid()
    return (x + torch.where(keep.view(-1, 1, 1), gate, 0.0) * value).to(torch.bfloat16)
