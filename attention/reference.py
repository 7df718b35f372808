"""Every attention op in plain torch: the definition of right.

T rows of a decode batch. Cache records are vLLM 0.33.0's on Hopper: a KV page holds `states` data rows of 576 bytes
(448 FP8 e4m3 in blocks of 64, 64 BF16 rotated), then `states` rows of 8 scale bytes (7 UE8M0, one pad); an index page
holds `states` rows of 128 FP8, then `states` float32 scales.
"""

import torch
from torch import Tensor

from specialized_decode.attention.views import CacheView, CompressorView, RingView

FP8_MAX = 448.0
NOPE, ROPE, KV_BLOCK = 448, 64, 64
KV_DATA, KV_SCALES = 576, 8
INDEX_DIM = 128
# Gathered float32 keys at a time; rows go through in chunks of so many bytes.
_CHUNK_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}
_NEGATIVE_INFINITY = float("-inf")
_CODES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
_FP8_TABLES = {torch.float32: _CODES.float(), torch.float64: _CODES.double()}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm (Zhang and Sennrich, 2019) in float32, rounded to bfloat16 once."""
    x32 = x.float()
    return (x32 * (x32.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight.float()).to(torch.bfloat16)


def rope(x: Tensor, cos_sin: Tensor, inverse: bool = False) -> Tensor:
    """Rotary embedding (Su et al., 2021) of pairs (2i, 2i + 1) of the last dimension, float32; cos_sin: [..., width],
    cosines then sines."""
    half = cos_sin.shape[-1] // 2
    cos, sin = cos_sin[..., :half], cos_sin[..., half:].neg() if inverse else cos_sin[..., half:]
    real, imaginary = x.unflatten(-1, (half, 2)).unbind(-1)
    return torch.stack((real * cos - imaginary * sin, imaginary * cos + real * sin), -1).flatten(-2)


def rope_tail(x: Tensor, cos_sin: Tensor, inverse: bool = False) -> Tensor:
    """Rotates the last cos_sin.shape[-1] dimensions of x, bfloat16."""
    out = x.clone()
    width = cos_sin.shape[-1]
    out[..., -width:] = rope(x[..., -width:].float(), cos_sin, inverse).to(torch.bfloat16)
    return out


def scale_exponent(amax: Tensor) -> Tensor:
    """int32 exponent e of the smallest power of two that brings amax (at least 1e-4) within FP8's 448."""
    return torch.ceil(torch.log2(amax.clamp_min(1e-4) * (1.0 / FP8_MAX))).int()


def power_of_two(exponent: Tensor) -> Tensor:
    """2**exponent as float32, built from its bits."""
    return (exponent + 127).bitwise_left_shift(23).view(torch.float32)


def quantize(x: Tensor, exponent: Tensor) -> Tensor:
    """x / 2**exponent as FP8 e4m3."""
    return (x * power_of_two(-exponent)).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def fp8_values(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """FP8 e4m3 bytes in float32 or float64. A CPU looks them up: torch's own conversion there is no vector code."""
    if codes.is_cuda:
        return codes.contiguous().view(torch.float8_e4m3fn).to(dtype)
    return torch.index_select(_FP8_TABLES[dtype], 0, codes.flatten().int()).view(codes.shape)


def page_planes(cache: Tensor, first: int, second: int) -> tuple[Tensor, Tensor]:
    """A page's two planes as views [blocks, states, first] and [blocks, states, second], in bytes."""
    blocks, states = cache.shape[:2]
    start, stride = cache.storage_offset(), cache.stride(0)
    return (
        cache.as_strided((blocks, states, first), (stride, first, 1), start),
        cache.as_strided((blocks, states, second), (stride, second, 1), start + states * first),
    )


def write_rows(planes: tuple[Tensor, Tensor], slots: Tensor, rows: tuple[Tensor, Tensor]) -> None:
    """Writes rows to their slots. A row without a slot (-1) leaves the null block's first row as it is."""
    states = planes[0].shape[1]
    index = (slots.clamp_min(0) // states, slots.clamp_min(0) % states)
    wanted = (slots >= 0).unsqueeze(1)
    for plane, row in zip(planes, rows, strict=True):
        plane[index] = row.where(wanted, plane[index])


def insert_kv(cache: Tensor, slots: Tensor, latent: Tensor, cos_sin: Tensor) -> None:
    """Rotates and quantizes latents [T, 512] bfloat16 and stores them as KV records."""
    x = latent.float()
    blocks = x[:, :NOPE].unflatten(1, (-1, KV_BLOCK))
    exponent = scale_exponent(blocks.abs().amax(2))
    fp8 = quantize(blocks, exponent.unsqueeze(2)).flatten(1).view(torch.uint8)
    tail = rope(x[:, NOPE:], cos_sin).to(torch.bfloat16).view(torch.uint8)
    scales = torch.nn.functional.pad((exponent + 127).to(torch.uint8), (0, 1))
    write_rows(page_planes(cache, KV_DATA, KV_SCALES), slots, (torch.cat((fp8, tail), 1), scales))


def read_kv(cache: Tensor, slots: Tensor) -> Tensor:
    """Records at `slots` [T, n] (-1: any) -> [T, n, 512] float32, which bfloat16 holds exactly."""
    states = cache.shape[1]
    data, scales = (
        p[slots.clamp_min(0) // states, slots.clamp_min(0) % states] for p in page_planes(cache, KV_DATA, KV_SCALES)
    )
    fp8 = fp8_values(data[..., :NOPE], torch.float32).unflatten(-1, (-1, KV_BLOCK))
    nope = (fp8 * power_of_two(scales[..., :7].int() - 127).unsqueeze(-1)).flatten(-2)
    return torch.cat((nope, data[..., NOPE:].contiguous().view(torch.bfloat16).float()), -1)


def compress(compressor: CompressorView, kv_score: Tensor, positions: Tensor, ring: RingView | None) -> Tensor:
    """kv_score [T, ratio * 512] float32 -> latents [T, 512] bfloat16, right where a row closes its group.

    Ratio 2: pools the row with the one before it, per dimension, by the softmax of their scores. The row before a
    request's first one here lies in the request's ring; the ring then takes the request's last rows.
    """
    if compressor.ratio == 1:
        return rms_norm(kv_score, compressor.norm, compressor.eps)
    assert ring is not None and compressor.state_cache is not None
    rows = torch.arange(kv_score.shape[0], device=kv_score.device)
    request = ring.token_to_req.long()
    begin, end = ring.query_start_loc.long()[request], ring.query_start_loc.long()[request + 1]
    owner = ring.slot_mapping.clamp_min(0) // ring.states
    stored = compressor.state_cache[owner, (positions - 1) % ring.states]
    before = stored.where((rows == begin).unsqueeze(1), kv_score.roll(1, 0))
    kept = (ring.slot_mapping >= 0) & (end - rows <= ring.states)
    index = (owner * kept, ring.slot_mapping % ring.states * kept)
    compressor.state_cache[index] = kv_score.where(kept.unsqueeze(1), compressor.state_cache[index])
    pair = torch.stack((before, kv_score), 1)
    width = kv_score.shape[1] // 2
    pooled = (pair[:, :, width:].softmax(1) * pair[:, :, :width]).sum(1)
    return rms_norm(pooled, compressor.norm, compressor.eps)


def insert_index_keys(cache: Tensor, slots: Tensor, key: Tensor, cos_sin: Tensor) -> None:
    """Rotates keys [T, 128] bfloat16 and stores them with one power-of-two float32 scale each."""
    x = rope_tail(key, cos_sin).float()
    exponent = scale_exponent(x.abs().amax(1, keepdim=True))
    values = quantize(x, exponent).view(torch.uint8)
    write_rows(page_planes(cache, INDEX_DIM, 4), slots, (values, power_of_two(exponent).view(torch.uint8)))


def index_queries(q: Tensor, weights: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """q [T, heads, 128], weights [T, heads] bfloat16 -> FP8 queries and float32 head weights, scales folded in."""
    rotated = rope_tail(q, cos_sin.unsqueeze(1)).float()
    exponent = scale_exponent(rotated.abs().amax(2))
    heads, width = q.shape[1:]
    return quantize(rotated, exponent.unsqueeze(2)), weights.float() * power_of_two(exponent) * (heads * width) ** -0.5


def index_scores(cache: Tensor, meta: CacheView, ratio: int, q: Tensor, weights: Tensor, positions: Tensor) -> Tensor:
    """[T, n] float32 scores of all compressed positions a request may hold, -inf past its last closed group.

    score = scale_k * sum_h weight_h * relu(q_h . k), in float64, where products of FP8 values and their sums are exact.
    """
    column = torch.arange(max(meta.max_seq_len // ratio, 1), device=q.device)
    blocks = meta.block_table[meta.token_to_req.long()].long()
    values, scales = page_planes(cache, INDEX_DIM, 4)
    step = max(1, _CHUNK_BYTES[q.device.type] // (8 * INDEX_DIM * column.shape[0]))
    chunks = []
    for start in range(0, q.shape[0], step):
        part = slice(start, start + step)
        index = (blocks[part][:, column // meta.states], column % meta.states)
        keys = fp8_values(values[index], torch.float64)
        dots = torch.bmm(q[part].double(), keys.transpose(1, 2)).relu()
        total = (weights[part].unsqueeze(2) * dots).sum(1)
        chunks.append((total * scales[index].contiguous().view(torch.float32).squeeze(2)).float())
    closed = (positions + 1) // ratio
    return torch.cat(chunks).masked_fill(column >= closed.unsqueeze(1), _NEGATIVE_INFINITY)


def candidate_blocks(scores: Tensor, closed: Tensor, size: int, count: int) -> Tensor:
    """The `count` blocks of `size` positions with the best single score, [T, count] int32, -1 padded.

    closed: [T] positions a row holds; the block of the newest is always chosen.
    """
    rows, width = scores.shape
    blocks = -(-width // size)
    best = scores.new_full((rows, blocks * size), _NEGATIVE_INFINITY)
    best[:, :width] = scores
    best = best.view(rows, blocks, size).amax(2)
    newest = ((closed - 1).clamp_min(0) // size).unsqueeze(1)
    pinned = torch.where(closed.unsqueeze(1) > 0, float("inf"), best.gather(1, newest))
    return _top(best.scatter(1, newest, pinned), count)


def candidate_flags(blocks: Tensor, size: int, width: int) -> Tensor:
    """[T, width] bool: whether a position lies in one of the candidate blocks [T, count]."""
    total = -(-width // size)
    flags = torch.zeros(blocks.shape[0], total + 1, dtype=torch.bool, device=blocks.device)
    flags.scatter_(1, torch.where((blocks < 0) | (blocks > total), total, blocks).long(), True)
    return flags[:, :total].repeat_interleave(size, 1)[:, :width]


def top_positions(scores: Tensor, count: int) -> Tensor:
    """The `count` best positions of each row, [T, count] int32, -1 where there are fewer."""
    return _top(scores, count)


def _top(scores: Tensor, count: int) -> Tensor:
    # Stable, so that of equal scores the earlier column wins, however wide the row is; NaN is never chosen.
    ranked = torch.where(scores == scores, scores, _NEGATIVE_INFINITY)
    values, indices = ranked.sort(dim=1, descending=True, stable=True)
    chosen = torch.where(values == _NEGATIVE_INFINITY, -1, indices)[:, :count].int()
    return torch.nn.functional.pad(chosen, (0, count - chosen.shape[1]), value=-1)


def window_slots(meta: CacheView, positions: Tensor, window: int) -> Tensor:
    """[T, window] slots of positions - window + 1 .. positions, -1 before the start and on padding rows."""
    wanted = positions.unsqueeze(1) + torch.arange(1 - window, 1, device=positions.device)
    return position_slots(meta, torch.where((meta.slot_mapping >= 0).unsqueeze(1), wanted, -1))


def position_slots(meta: CacheView, states: Tensor) -> Tensor:
    """Per-request states [T, n] (negative: none) -> physical slots [T, n] int64, -1 for none."""
    table = meta.block_table[meta.token_to_req.long()].long()
    inside = states.clamp_min(0).long()
    slots = table.gather(1, inside // meta.states) * meta.states + inside % meta.states
    return slots.where(states >= 0, torch.full_like(slots, -1))


def sparse_mla(q: Tensor, kv: Tensor, valid: Tensor, sinks: Tensor, scale: float) -> Tensor:
    """Attention with sinks: out_h = sum_j exp(s_hj) kv_j / (sum_j exp(s_hj) + exp(sink_h)), s = scale q . kv.

    q: [T, heads, 512] bfloat16; kv: [T, n, 512] float32; valid: [T, n]; -> [T, heads, 512] bfloat16.
    """
    kv = torch.where(valid.unsqueeze(2), kv, 0.0)
    logits = torch.bmm(q.float(), kv.transpose(1, 2)) * scale
    logits = torch.where(valid.unsqueeze(1), logits, _NEGATIVE_INFINITY)
    sink = sinks.view(1, -1, 1)
    limits = torch.finfo(torch.float32)
    # Finite, and the total not zero, also where nothing is valid and the sink is -inf, as a padding head's is.
    peak = torch.maximum(logits.amax(2, keepdim=True), sink).clamp_min(limits.min)
    weights = torch.exp(logits - peak)
    total = weights.sum(2, keepdim=True) + torch.exp(sink - peak)
    return (torch.bmm(weights, kv) / total.clamp_min(limits.tiny)).to(torch.bfloat16)


def grouped_projection(x: Tensor, weight: Tensor, groups: int) -> Tensor:
    """x [T, groups * K] through weight [groups * N, K], group by group -> [T, groups * N] bfloat16."""
    inputs = x.to(weight.dtype).unflatten(1, (groups, -1)).transpose(0, 1)
    outputs = torch.bmm(inputs, weight.unflatten(0, (groups, -1)).transpose(1, 2))
    return outputs.to(torch.bfloat16).transpose(0, 1).flatten(1)
