"""mHC by scalar formulas in float64, and bounds of a rounding to bfloat16."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]

# Half a unit in the last of bfloat16's 8 significant bits, and half of its smallest subnormal.
HALF_ULP = 2.0**-8
HALF_TINY = 2.0**-134


@dataclass(frozen=True)
class MixerWeights:
    """One sublayer's mHC projection."""

    fn: Tensor
    base: Tensor
    scale: Tensor
    rms_eps: float = 1e-20
    hc_eps: float = 1e-6
    sinkhorn_iters: int = 20


@dataclass(frozen=True)
class LayerWeights:
    """What a boundary reads of a layer."""

    layer_id: int
    attn_mixer: MixerWeights
    ffn_mixer: MixerWeights
    attn_norm: Tensor
    ffn_norm: Tensor
    eps: float = 1e-20


def numbers(tensor: Tensor) -> Array:
    """A tensor's values in float64."""
    return tensor.detach().double().numpy()


def bits(tensor: Tensor) -> Tensor:
    """A tensor's bytes, under which -0 is not 0 and a NaN is itself."""
    return tensor.contiguous().view(torch.uint8)


def same_bits(found: Tensor, expected: Tensor) -> bool:
    return found.dtype == expected.dtype and found.shape == expected.shape and torch.equal(bits(found), bits(expected))


def random_bf16(seed: int, *shape: int, size: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * size).to(torch.bfloat16)


def random_mixer(seed: int, hidden: int, streams: int = 4, hc_eps: float = 1e-6, iters: int = 20) -> MixerWeights:
    generator = torch.Generator().manual_seed(seed)
    rows, columns = (2 + streams) * streams, streams * hidden
    fn = torch.randn(rows, columns, generator=generator) * columns**-0.5
    base, scale = torch.randn(rows, generator=generator), torch.tensor([0.7, 1.3, 2.1])
    return MixerWeights(fn, base, scale, hc_eps=hc_eps, sinkhorn_iters=iters)


def random_layer(number: int, hidden: int, streams: int = 4) -> LayerWeights:
    norms = [random_bf16(100 * number + i, hidden) for i in range(2)]
    mixers = [random_mixer(100 * number + 10 + i, hidden, streams) for i in range(2)]
    return LayerWeights(number, mixers[0], mixers[1], norms[0], norms[1])


def coefficients(streams: Array, mixer: MixerWeights) -> tuple[Array, Array, Array]:
    """One token's streams [n, hidden] -> pre [n], post [n], comb [n, n], comb by source, then target."""
    n = len(streams)
    fn, base, scale = numbers(mixer.fn), numbers(mixer.base), numbers(mixer.scale)
    flat = streams.ravel()
    logits = fn @ flat / np.sqrt((flat**2).mean() + mixer.rms_eps)
    pre = np.array([_sigmoid(logits[i] * scale[0] + base[i]) + mixer.hc_eps for i in range(n)])
    post = np.array([2 * _sigmoid(logits[n + i] * scale[1] + base[n + i]) for i in range(n)])
    comb = np.empty((n, n))
    for source in range(n):
        row = [logits[2 * n + source * n + j] * scale[2] + base[2 * n + source * n + j] for j in range(n)]
        total = sum(np.exp(value - max(row)) for value in row)
        for target in range(n):
            comb[source, target] = np.exp(row[target] - max(row)) / total + mixer.hc_eps
    for iteration in range(mixer.sinkhorn_iters):
        if iteration:
            for source in range(n):
                comb[source] /= sum(comb[source]) + mixer.hc_eps
        for target in range(n):
            comb[:, target] /= sum(comb[:, target]) + mixer.hc_eps
    return pre, post, comb


def _sigmoid(x: float) -> float:
    small = np.exp(-abs(x))
    return float((1.0 if x >= 0 else small) / (1 + small))


def mixed(reduced: Array, streams: Array, post: Array, comb: Array) -> tuple[Array, Array]:
    """One token's streams after a sublayer, and the sum of the terms' magnitudes."""
    n = len(streams)
    values, sizes = np.zeros_like(streams), np.zeros_like(streams)
    for target in range(n):
        terms = [comb[source, target] * streams[source] for source in range(n)] + [post[target] * reduced]
        values[target], sizes[target] = sum(terms), sum(np.abs(term) for term in terms)
    return values, sizes


def collapsed(streams: Array, pre: Array) -> tuple[Array, Array]:
    """One token's streams weighted by pre, and the sum of the terms' magnitudes."""
    terms = [pre[i] * streams[i] for i in range(len(streams))]
    return sum(terms, np.zeros_like(streams[0])), sum((np.abs(term) for term in terms), np.zeros_like(streams[0]))


def normed(x: Array, weight: Array, eps: float) -> Array:
    """RMSNorm over the last dimension."""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def assert_rounded(found: Tensor, exact: Array, error: Array | float) -> None:
    """found is a bfloat16 rounding of something within `error` of `exact`."""
    assert found.dtype == torch.bfloat16
    assert_within(numbers(found), exact, HALF_ULP * np.abs(exact) + HALF_TINY + (1 + HALF_ULP) * np.asarray(error))


def assert_within(found: Array, exact: Array, error: Array | float) -> None:
    """Every value of `found` is within `error` of `exact`; a NaN never is."""
    assert found.shape == exact.shape, f"found {found.shape}, expected {exact.shape}"
    wrong = ~(np.abs(found - exact) <= error)
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        bound = np.broadcast_to(error, exact.shape)[at]
        raise AssertionError(
            f"{wrong.sum()} of {wrong.size} values off; at {at}: found {found[at]}, expected {exact[at]} +- {bound}"
        )
