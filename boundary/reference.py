"""Every boundary op in plain torch: the definition of right.

mHC: hyper-connections (Zhu et al., 2024) with a doubly stochastic residual mix (mHC, DeepSeek, 2025). T rows, n
streams of `hidden`; streams are bfloat16, mixes float32.
"""

import torch
from torch import Tensor

from specialized_decode.boundary.types import MixerView, QuantizedInput, UnfinalizedRows

FP8_MAX = 448.0
MX_BLOCK = 32


def broadcast_streams(x: Tensor, streams: int) -> Tensor:
    """[T, hidden] embeddings -> [T, n, hidden], one copy a stream."""
    return x.unsqueeze(1).repeat(1, streams, 1)


def coefficients(residual: Tensor, mixer: MixerView) -> tuple[Tensor, Tensor, Tensor]:
    """Streams -> (pre [T, n], post [T, n], comb [T, n, n]): an RMS-normalized projection, two sigmoids, a Sinkhorn."""
    rows, n, _ = residual.shape
    flat = residual.reshape(rows, -1).float()
    inverse_rms = (flat.pow(2).mean(1, keepdim=True) + mixer.rms_eps).rsqrt()
    logits = torch.nn.functional.linear(flat, mixer.fn) * inverse_rms
    scale = torch.cat([mixer.scale[i : i + 1].expand(width) for i, width in enumerate((n, n, n * n))])
    return _activate(logits * scale + mixer.base, n, mixer)


def _activate(logits: Tensor, n: int, mixer: MixerView) -> tuple[Tensor, Tensor, Tensor]:
    pre, post, comb = (part.contiguous() for part in logits.split([n, n, n * n], 1))
    # Row n and column n hold eps, so that the sums over n + 1 entries are the eps-regularized ones.
    table = pre.new_full((pre.shape[0], n + 1, n + 1), mixer.hc_eps)
    matrix = table[:, :n, :n]
    matrix.copy_(comb.view(-1, n, n).softmax(2) + mixer.hc_eps)
    by_column, by_row = table[:, :, :n], table[:, :n]
    for iteration in range(mixer.sinkhorn_iters):
        if iteration:
            matrix.div_(by_row.sum(2, keepdim=True))
        matrix.div_(by_column.sum(1, keepdim=True))
    return pre.sigmoid() + mixer.hc_eps, 2.0 * post.sigmoid(), matrix.contiguous()


def finalize(output: UnfinalizedRows) -> Tensor:
    """The top-k weighted sum plus the shared expert, [T, hidden] bfloat16."""
    routed = (output.rows.float() * output.weights.unsqueeze(2)).sum(1)
    return (routed + output.shared.float()).to(torch.bfloat16)


def all_reduce(contributions: Tensor) -> Tensor:
    """[ranks, T, hidden] bfloat16 -> [T, hidden] float32, summed in rank order, so that all ranks get the same bits."""
    total = contributions[0].float()
    for contribution in contributions[1:]:
        total = total + contribution.float()
    return total


def mix_streams(reduced: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """New stream j = sum_i comb[i, j] residual[i] + post[j] reduced; [T, n, hidden] bfloat16."""
    mixed = torch.bmm(comb.transpose(1, 2), residual.float())
    return (mixed + post.unsqueeze(2) * reduced.unsqueeze(1)).to(torch.bfloat16)


def collapse(residual: Tensor, pre: Tensor) -> Tensor:
    """The streams weighted by pre, [T, hidden] bfloat16."""
    return (residual.float() * pre.unsqueeze(2)).sum(1).to(torch.bfloat16)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm (Zhang and Sennrich, 2019) in float32, rounded once."""
    x32 = x.float()
    return (x32 * (x32.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight.float()).to(torch.bfloat16)


def stream_mean(residual: Tensor) -> Tensor:
    """The aux hidden state, [T, hidden] bfloat16."""
    return residual.float().mean(1).to(torch.bfloat16)


def quantize_mxfp8(x: Tensor) -> QuantizedInput:
    """OCP MX v1.0 FP8 with one power-of-two scale per 32 values: the smallest that keeps them within 448."""
    blocks = x.float().unflatten(-1, (-1, MX_BLOCK))
    amax = blocks.abs().amax(-1).clamp_min(2.0**-126)
    exponent = torch.ceil(torch.log2(amax / FP8_MAX)).clamp(-127, 127)
    values = (blocks * torch.exp2(-exponent).unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return QuantizedInput(values.flatten(-2), (exponent + 127).to(torch.uint8))


def project(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K] bfloat16 times a prepared weight [N, K] (see `prepare`) -> [T, N] bfloat16, accumulated in float32."""
    return (x.to(weight.dtype) @ weight.T).to(torch.bfloat16)


def project_float(x: Tensor, weight: Tensor) -> Tensor:
    """As `project`, with the float32 sums as they are: for logits that are compared with each other."""
    return torch.mm(x, weight.T, out_dtype=torch.float32) if weight.is_cuda else x.float() @ weight.T


def prepare(weight: Tensor, scale: Tensor | None) -> Tensor:
    """A dense weight as the reference multiplies it: float32 on a CPU, bfloat16 on a GPU; exact in both."""
    return dequantize(weight, scale).to(torch.bfloat16 if weight.is_cuda else torch.float32)


def dequantize(weight: Tensor, scale: Tensor | None) -> Tensor:
    """FP8 e4m3 [N, K] with UE8M0 [N/32, K/32] (or BF16 with None) -> float32."""
    if scale is None:
        return weight.float()
    rows, columns = weight.shape
    factors = scale.view(torch.float8_e8m0fnu).float()
    grid = factors.repeat_interleave(MX_BLOCK, 0)[:rows].repeat_interleave(MX_BLOCK, 1)[:, :columns]
    return weight.float() * grid
