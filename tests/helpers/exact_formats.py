"""The number formats, from their specifications: bit fields and exact arithmetic, no torch.

FP8 e4m3 is the OCP 8-bit floating point specification's (bias 7, no infinities, NaN where all other bits are set);
FP4 e2m1 and UE8M0 are the OCP Microscaling specification's; bfloat16 is the upper half of an IEEE float32.
"""

import math
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


def fp8_value(code: int) -> float:
    """The value of an FP8 e4m3 code."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


def fp4_value(code: int) -> float:
    """The value of an FP4 e2m1 code."""
    sign = -1.0 if code & 8 else 1.0
    exponent, mantissa = (code >> 1) & 3, code & 1
    if exponent == 0:
        return sign * mantissa * 0.5
    return sign * (2 + mantissa) * 2.0 ** (exponent - 2)


def ue8m0_value(code: int) -> float:
    """The value of a UE8M0 scale."""
    return math.nan if code == 255 else 2.0 ** (code - 127)


_FP8_MAGNITUDES = np.array([fp8_value(code) for code in range(127)])
_FP8_MIDPOINTS = (_FP8_MAGNITUDES[1:] + _FP8_MAGNITUDES[:-1]) / 2


def fp8_codes(values: ArrayLike) -> NDArray[np.uint8]:
    """The nearest FP8 e4m3 codes, ties to the even code; magnitudes up to 448."""
    x = np.asarray(values, dtype=np.float64)
    magnitude = np.abs(x)
    below = np.searchsorted(_FP8_MIDPOINTS, magnitude, side="left")
    above = np.searchsorted(_FP8_MIDPOINTS, magnitude, side="right")
    # The two differ at a tie only, by one; one of them is even.
    code = np.where(below % 2 == 0, below, above)
    return (code + 128 * np.signbit(x)).astype(np.uint8)


def fp8_values(codes: ArrayLike) -> Array:
    """`fp8_value` of an array."""
    return np.array([fp8_value(code) for code in range(256)])[np.asarray(codes)]


def bf16_bits(values: ArrayLike) -> NDArray[np.uint16]:
    """float32 values rounded to bfloat16, ties to even, as bits; finite values."""
    bits = np.asarray(values, dtype=np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def bf16(values: ArrayLike) -> Array:
    """float32 values rounded to bfloat16, as float64."""
    return (bf16_bits(values).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def scale_exponent(amax: float) -> int:
    """The smallest e with max(amax, 1e-4) <= 448 * 2**e, exactly."""
    wanted = max(Fraction(amax), Fraction(float(np.float32(1e-4)))) / 448
    exponent = math.frexp(wanted)[1] - 2
    while Fraction(2) ** exponent < wanted:
        exponent += 1
    return exponent


def kv_record(latent: ArrayLike, rotated: ArrayLike) -> bytes:
    """One KV record, data then scales: 448 FP8 values, 64 bfloat16 ones, 7 UE8M0 scales and a zero byte."""
    blocks = np.asarray(latent, dtype=np.float64).reshape(7, 64)
    exponents = [scale_exponent(np.abs(block).max()) for block in blocks]
    values = b"".join(fp8_codes(block / 2.0**e).tobytes() for block, e in zip(blocks, exponents, strict=True))
    tail = bf16_bits(rotated).astype("<u2").tobytes()
    return values + tail + bytes([e + 127 for e in exponents]) + b"\0"


def kv_values(record: bytes) -> Array:
    """What a KV record stands for: 512 values."""
    scales = np.array([ue8m0_value(code) for code in record[576:583]])
    values = fp8_values(np.frombuffer(record[:448], np.uint8)).reshape(7, 64) * scales[:, None]
    tail = (np.frombuffer(record[448:576], "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.concatenate((values.ravel(), tail.astype(np.float64)))


def index_record(key: ArrayLike) -> tuple[bytes, bytes]:
    """One index key: 128 FP8 values, and their scale as a little-endian float32."""
    x = np.asarray(key, dtype=np.float64)
    exponent = scale_exponent(np.abs(x).max())
    return fp8_codes(x / 2.0**exponent).tobytes(), np.array([2.0**exponent], "<f4").tobytes()
