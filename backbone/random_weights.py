"""Seeded random weights, tensor by tensor, scaled so that activations keep their size over any depth.

Every element is looked up in a small table by random bits: one mechanism for all formats, with no dependence
on threads or on a library's distributions. The bits come from NumPy's SFC64, seeded by the plan's seed and
the tensor's name, so a tensor is the same whatever is written before it.
"""

import functools
import hashlib
import math
import re
from collections.abc import Iterator
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from specialized_decode.backbone.tensors import FP8, PACKED_FP4, UE8M0, Specs, TensorSpec
from specialized_decode.backbone.tokenizer import TRAINED_IDS

Array = npt.NDArray[Any]
# Elements made at a time: small enough to stay in a core's cache, large enough to hide the call.
_CHUNK = 1 << 18

# Name pattern -> (distribution, location, spread). "gain" divides the spread by sqrt(columns), so that an
# input of size 1 gives an output of size `spread`; the others take it as it is. First match wins.
_RULES: tuple[tuple[str, str, float, float], ...] = (
    (r"norm\.weight$", "normal", 1.0, 0.1),
    (r"attn_sink$", "uniform", 1.0, 1.0),
    # Coefficients of the residual streams: their logits have size 1, so they differ from token to token.
    (r"hc_\w+_fn$", "gain", 0.0, 1.0),
    (r"hc_\w+_base$", "normal", 0.0, 0.5),
    (r"hc_\w+_scale$", "uniform", 1.0, 0.5),
    (r"engram\.[qk]_weight$", "normal", 1.0, 0.25),
    # Scores lie around 0.8 +- 0.3: a bias of this size changes selections without making them.
    (r"gate\.bias(_vl)?$", "normal", 0.0, 0.2),
    (r"(^|engram\.|markov_head\.)embed\.(weight|scale)$", "normal", 0.0, 1.0),
    (r"markov_head\.head\.weight$", "gain", 0.0, 0.5),
    (r"^head\.weight$", "gain", 0.0, 3.0),
    # Queries a little long, so that attention prefers some positions; its average over many shrinks, so the
    # output projections widen it again.
    (r"attn\.wq_b\.", "gain", 0.0, 1.5),
    (r"attn\.wo_[ab]\.", "gain", 0.0, 2.0),
    # Gate and up of size 3 meet the clamp at 10 now and then; down brings the product back to size 1.
    (r"\.w[13]\.", "gain", 0.0, 3.0),
    (r"\.w2\.", "gain", 0.0, 0.15),
    (r"", "gain", 0.0, 1.0),
)


def random_chunks(name: str, specs: Specs, seed: int) -> Iterator[Array]:
    """The bytes of tensor `name`, as contiguous arrays in order."""
    spec = specs[name]
    words = _words(name, seed)
    table = _table(name, specs)
    bits = 8 if table is None or len(table) == 256 else 16
    elements = spec.nbytes // spec.dtype.itemsize
    for start in range(0, elements, _CHUNK):
        count = min(_CHUNK, elements - start)
        # A chunk is a whole number of 64-bit words, so the stream does not depend on how it is cut.
        raw = np.asarray(words.random_raw(-(-count * bits // 64)))
        index: npt.NDArray[Any] = raw.view(np.uint8 if bits == 8 else np.uint16)[:count]
        chunk = index if table is None else np.take(table, index)
        if name == "head.weight":
            # Ids that no text yields are never generated either: their rows are zero, as a padded vocabulary's are.
            chunk[max(0, TRAINED_IDS * spec.shape[1] - start) :] = 0
        yield chunk


def _words(name: str, seed: int) -> np.random.SFC64:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=32).digest()
    return np.random.SFC64(np.random.SeedSequence(int.from_bytes(digest, "little")))


def _table(name: str, specs: Specs) -> Array | None:
    """The element table of a tensor, of 2**8 or 2**16 entries; None where random bytes are already right."""
    spec = specs[name]
    if spec.dtype == PACKED_FP4:
        return None  # uniform over all sixteen codes, -0 among them
    if spec.dtype == FP8:
        return _fp8_codes()
    distribution, location, spread = _rule(name)
    if spec.dtype == UE8M0:
        weight = specs[name.removesuffix("scale") + "weight"]
        return _scale_codes(weight.dtype, spread / _fan_in(distribution, weight))
    return _values(distribution, location, spread / _fan_in(distribution, spec), spec.dtype)


def _rule(name: str) -> tuple[str, float, float]:
    return next(rule[1:] for rule in _RULES if re.search(rule[0], name))


def _fan_in(distribution: str, spec: TensorSpec) -> float:
    """What divides the spread: sqrt(columns) for a projection, 1 otherwise."""
    if distribution != "gain":
        return 1.0
    return math.sqrt(spec.shape[-1] * (2 if spec.dtype == PACKED_FP4 else 1))


@functools.cache
def _normal_quantiles(count: int) -> npt.NDArray[np.float32]:
    """`count` equally likely values of a standard normal distribution."""
    inverse = NormalDist().inv_cdf
    return np.array([inverse((i + 0.5) / count) for i in range(count)], dtype=np.float32)


@functools.lru_cache(maxsize=64)
def _values(distribution: str, location: float, spread: float, dtype: torch.dtype) -> Array:
    """2**16 equally likely values, as bits of `dtype` (bfloat16 or float32)."""
    uniform = distribution == "uniform"
    base = np.linspace(-1, 1, 1 << 16, dtype=np.float32) if uniform else _normal_quantiles(1 << 16)
    values = torch.from_numpy(base * np.float32(spread) + np.float32(location)).to(dtype)
    bits: Array = (values.view(torch.int16) if dtype == torch.bfloat16 else values).numpy()
    return bits


@functools.cache
def _fp8_codes() -> Array:
    """2**8 codes whose values are normal with deviation 100, of the 448 that e4m3 holds."""
    values = torch.from_numpy(_normal_quantiles(256) * np.float32(100))
    codes: Array = values.to(FP8).view(torch.uint8).numpy()
    return codes


@functools.cache
def _mean_square(dtype: torch.dtype) -> float:
    """Mean square of a stored code's value."""
    if dtype == PACKED_FP4:
        return sum(value**2 for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)) / 8
    return float(torch.from_numpy(_fp8_codes()).view(FP8).double().square().mean())


@functools.lru_cache(maxsize=256)
def _scale_codes(dtype: torch.dtype, size: float) -> Array:
    """2**8 UE8M0 codes over five exponents, such that scaled weights have root mean square `size`."""
    offsets = np.arange(256) % 4 - 2
    wanted = size**2 / _mean_square(dtype) / float(np.mean(4.0**offsets))
    exponent = math.floor(math.log(wanted, 4))
    # Raising a share of the blocks by one exponent reaches what lies between two powers of four.
    raised = (np.arange(256) // 4) < round(64 * (wanted / 4.0**exponent - 1) / 3)
    codes: Array = (127 + exponent + offsets + raised).astype(np.uint8)
    return codes
