"""mHC: four residual streams mixed by per-token coefficients, in the release's lagged form.

Hyper-connections (Zhu et al., 2024) with a doubly stochastic residual mix (mHC, DeepSeek, 2025). A sublayer's input
is collapsed with the pre-mix that the *previous* sublayer's coefficients gave.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

POST_SCALE = 2.0


class Coefficients(NamedTuple):
    """float32 mixes of T tokens over n streams: pre [T, n], post [T, n], comb [T, n, n]."""

    pre: Tensor
    post: Tensor
    comb: Tensor


@dataclass(frozen=True)
class Mixer:
    """One sublayer's projection to coefficients: fn [(2 + n) n, n hidden], base [(2 + n) n], scale [3], float32."""

    fn: Tensor
    base: Tensor
    scale: Tensor
    rms_eps: float
    hc_eps: float
    sinkhorn_iters: int

    def __call__(self, residual: Tensor) -> Coefficients:
        """residual: [T, n, hidden] bfloat16."""
        streams = residual.shape[1]
        x = residual.flatten(1).float()
        mixes = (x @ self.fn.T) * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.rms_eps)
        pre, post, comb = mixes.split([streams, streams, streams * streams], -1)
        base_pre, base_post, base_comb = self.base.split([streams, streams, streams * streams])
        pre = torch.sigmoid(pre * self.scale[0] + base_pre) + self.hc_eps
        post = torch.sigmoid(post * self.scale[1] + base_post) * POST_SCALE
        comb = (comb * self.scale[2] + base_comb).unflatten(-1, (streams, streams))
        return Coefficients(pre, post, self.sinkhorn(comb.softmax(-1) + self.hc_eps))

    def sinkhorn(self, comb: Tensor) -> Tensor:
        """Sinkhorn-Knopp: columns, then rows and columns in turn; `sinkhorn_iters` column passes in all."""
        n = comb.shape[-1]
        # A border of eps makes every sum a sum plus eps.
        bordered = torch.nn.functional.pad(comb, (0, 1, 0, 1), value=self.hc_eps)
        inner, columns, rows = bordered[:, :n, :n], bordered[:, :, :n], bordered[:, :n]
        inner.div_(columns.sum(-2, keepdim=True))
        for _ in range(self.sinkhorn_iters - 1):
            inner.div_(rows.sum(-1, keepdim=True))
            inner.div_(columns.sum(-2, keepdim=True))
        return inner


def post_mix(output: Tensor, residual: Tensor, mix: Coefficients) -> Tensor:
    """The streams after a sublayer: output [T, hidden], residual [T, n, hidden] -> [T, n, hidden] bfloat16.

    New stream j is sum_i comb[i, j] residual[i] + post[j] output.
    """
    mixed = mix.comb.transpose(1, 2) @ residual.float()
    return (mixed + mix.post.unsqueeze(-1) * output.unsqueeze(1).float()).to(torch.bfloat16)


def collapse(residual: Tensor, pre: Tensor) -> Tensor:
    """[T, n, hidden] with pre [T, n] -> [T, hidden] bfloat16."""
    return (pre.unsqueeze(-1) * residual.float()).sum(1).to(torch.bfloat16)
