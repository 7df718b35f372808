"""Number formats of the release and of vLLM's caches on Hopper.

UE8M0 is the exponent-only scale of the OCP Microscaling (MX) specification 1.0: byte b means 2**(b - 127).
FP4 is its e2m1. The cache records are vLLM 0.33.0's (`fp8_ds_mla` and the FP8 index cache); DESIGN names them.
"""

import torch
from torch import Tensor

from specialized_decode.backbone.config import WEIGHT_BLOCK

FP8_MAX = 448.0
# A KV record: 448 unrotated dimensions as FP8 in blocks of 64, then 64 rotated ones as BF16.
NOPE_DIM = 448
ROPE_DIM = 64
KV_BLOCK = 64
KV_DATA_BYTES = NOPE_DIM + 2 * ROPE_DIM
KV_SCALE_BYTES = 8
KV_RECORD_BYTES = KV_DATA_BYTES + KV_SCALE_BYTES
# An index key: 128 FP8 values and one float32 scale.
INDEX_DIM = 128
INDEX_RECORD_BYTES = INDEX_DIM + 4
# Pages of a cache group share physical blocks, so every page is padded to the KV data's stride.
PAGE_ALIGNMENT = KV_DATA_BYTES
_MIN_AMAX = 1e-4


def decode_ue8m0(scale: Tensor) -> Tensor:
    """UE8M0 bytes (`uint8` or `float8_e8m0fnu`, any shape) as float32."""
    return scale.view(torch.float8_e8m0fnu).float()


_FP8_VALUES = {
    dtype: torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(dtype)
    for dtype in (torch.float32, torch.float64)
}


def decode_fp8(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """FP8 e4m3 bytes (uint8, any shape) in `dtype`, float32 or float64."""
    if codes.is_cuda:
        return codes.contiguous().view(torch.float8_e4m3fn).to(dtype)
    # torch converts FP8 on a CPU one element after another, four times as slowly as a table does.
    return _FP8_VALUES[dtype].index_select(0, codes.flatten().int()).view(codes.shape)


def dequantize_fp8(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """[N, K] FP8 e4m3 with UE8M0 [ceil(N/32), ceil(K/32)] -> [N, K] in `dtype`; exact in bfloat16 and wider."""
    rows, columns = weight.shape
    factors = decode_ue8m0(scale).repeat_interleave(WEIGHT_BLOCK, 0)[:rows].repeat_interleave(WEIGHT_BLOCK, 1)
    return (weight.float() * factors[:, :columns]).to(dtype)


def dequantize_fp4(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., N, K/2] packed e2m1 (low nibble first), UE8M0 [..., N, K/32] -> [..., N, K] in `dtype`, exactly."""
    codes = packed.view(torch.uint8)
    codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    # e2m1 is e4m3 with two exponent bits and one of mantissa: in place, and 2**6 too small, subnormals included.
    bits = (codes & 8) << 4 | (codes & 7) << 2
    values = (decode_fp8(bits, torch.float32) * 64).to(dtype)
    return (values.unflatten(-1, (-1, 32)) * decode_ue8m0(scale).to(dtype).unsqueeze(-1)).flatten(-2)


def page_bytes(states: int, record: int) -> int:
    """Bytes of a page of `states` records of `record` bytes, padded to the group's alignment."""
    return -(-states * record // PAGE_ALIGNMENT) * PAGE_ALIGNMENT


def power_of_two_scale(amax: Tensor) -> Tensor:
    """The exponent e of the smallest 2**e with amax <= 448 * 2**e; amax is floored at 1e-4, as vLLM's kernels do."""
    return torch.ceil(torch.log2(amax.clamp_min(_MIN_AMAX) * (1.0 / FP8_MAX)))


def two_to(exponent: Tensor) -> Tensor:
    """2**exponent in float32, exactly, for whole exponents from -126 to 127."""
    return ((exponent.int() + 127) << 23).view(torch.float32)


def _to_fp8(values: Tensor) -> Tensor:
    return values.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def encode_kv(latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Packs latents into records.

    latent: [T, 448] float32 unrotated; rotated: [T, 64] float32. Returns data [T, 576] and scales [T, 8], both uint8.
    """
    blocks = latent.unflatten(-1, (-1, KV_BLOCK))
    exponent = power_of_two_scale(blocks.abs().amax(-1))
    fp8 = _to_fp8(blocks * two_to(-exponent).unsqueeze(-1)).flatten(-2)
    data = torch.cat((fp8.view(torch.uint8), rotated.to(torch.bfloat16).view(torch.uint8)), -1)
    scales = torch.zeros(*latent.shape[:-1], KV_SCALE_BYTES, dtype=torch.uint8, device=latent.device)
    scales[..., : blocks.shape[-2]] = (exponent + 127.0).clamp(0.0, 255.0).to(torch.uint8)
    return data, scales


def decode_kv(data: Tensor, scales: Tensor) -> Tensor:
    """Records ([..., 576] data, [..., 8] scales, uint8) -> latents [..., 512] float32, which bfloat16 holds exactly."""
    nope = decode_fp8(data[..., :NOPE_DIM], torch.float32).unflatten(-1, (-1, KV_BLOCK))
    nope = nope * decode_ue8m0(scales[..., : nope.shape[-2]]).unsqueeze(-1)
    rope = data[..., NOPE_DIM:].contiguous().view(torch.bfloat16).float()
    return torch.cat((nope.flatten(-2), rope), -1)


def encode_index_key(key: Tensor) -> tuple[Tensor, Tensor]:
    """[T, 128] float32 -> FP8 values [T, 128] uint8 and their float32 scale [T, 1], one power of two each."""
    exponent = power_of_two_scale(key.abs().amax(-1, keepdim=True))
    return _to_fp8(key * two_to(-exponent)).view(torch.uint8), two_to(exponent)


def kv_planes(cache: Tensor) -> tuple[Tensor, Tensor]:
    """A KV cache [blocks, states, 584] uint8 (any block stride) as its planes: data [.., 576] and scales [.., 8]."""
    return _planes(cache, KV_DATA_BYTES, KV_SCALE_BYTES)


def index_planes(cache: Tensor) -> tuple[Tensor, Tensor]:
    """An index cache [blocks, states, 132] uint8 as its planes: values [.., 128] uint8 and scales [.., 4] uint8."""
    return _planes(cache, INDEX_DIM, 4)


def _planes(cache: Tensor, first: int, second: int) -> tuple[Tensor, Tensor]:
    blocks, states, _ = cache.shape
    stride, offset = cache.stride(0), cache.storage_offset()
    data = cache.as_strided((blocks, states, first), (stride, first, 1), offset)
    return data, cache.as_strided((blocks, states, second), (stride, second, 1), offset + states * first)


def write_records(planes: tuple[Tensor, Tensor], slots: Tensor, data: Tensor, scales: Tensor) -> None:
    """Stores records at `slots` [T] int64 (block * states + state); slot -1 stores nothing.

    Rows without a slot write to block 0, which no request owns, so that shapes stay static in a graph.
    """
    states = planes[0].shape[1]
    block, state = slots.clamp_min(0) // states, slots.clamp_min(0) % states
    for plane, rows in zip(planes, (data, scales), strict=True):
        kept = torch.where((slots >= 0).unsqueeze(-1), rows, plane[block, state])
        plane[block, state] = kept


def gather_records(planes: tuple[Tensor, Tensor], slots: Tensor) -> tuple[Tensor, Tensor]:
    """Reads the records at `slots` (any shape, int64; -1 reads block 0, to be masked by the caller)."""
    states = planes[0].shape[1]
    block, state = slots.clamp_min(0) // states, slots.clamp_min(0) % states
    return planes[0][block, state], planes[1][block, state]
