"""Routed experts as vLLM 0.33.0 holds them on Hopper: Humming's W4A8 form of MXFP4, both ways, in plain torch.

`pack` gives the tensors that `Mxfp4MoEMethod.process_weights_after_loading` leaves on a layer under
`moe_backend=humming`, the default on sm_90, with activations in block FP8 (group 128); `unpack` takes them apart.
`Projection` says where a row's and a column's code and scale lie. Of a projection of N rows and K columns:

1. vLLM allocates a rank's width I rounded up to 64 and leaves what it does not load zero, scale bytes too. So gate
   rows start at 0, up rows at round_up(I, 64), and w2 has that many columns. Of the release's widths only 288 (TP8)
   changes, to 320.
2. Humming rounds K up to 128: zero codes under the largest scale of their row. Then N up to 256: zero codes under
   the scale 1, byte 127. N of w13 at TP4 is 1152, held as 1280; at TP8 640 as 768. K of w2 is 576 as 640; 320 as 384.
3. Scales are rebased, an expert's projection at a time and padding included. `high` is its largest byte, `base` the
   larger of its smallest and `high` - 11. weight_scale holds `byte - base + 1`, 1 to 12, and weight_scale_2
   2**(base - 128). A group below `base` takes 1, and its codes are requantized to the scale of `base`: to nearest,
   ties away from zero, a sign surviving its magnitude. Code 8, -0, becomes 0 everywhere.
   A weight is therefore  e2m1(code) * 2**weight_scale * weight_scale_2.
   Note the padding's part in it: with N padded, `high` is at least 127, and groups below 2**-11 lose bits.
4. weight is int32 [E, K/64, 8 N]. A tile of 16 rows and 64 columns is 128 consecutive words, 4 for each of 32 lanes.
   Lane 4 (row % 8) + (column % 16) / 4 holds rows `row` and `row` + 8, columns 0 to 3 of its quad in each 16; the order
   of its words is (column / 32 % 2, row / 8 % 2). In a word, the 3 bits of magnitude of (h, c), h = column / 16 % 2 and
   c = column % 4, are in nibble 4 h + c, the sign bit of (h, c) is the top bit of nibble 2 c + h: widened to FP8, every
   even nibble's sign belongs to h = 0.
5. weight_scale is float8_e8m0fnu, read as an integer, [E, K/32, N]. In each 64 rows, row 8 j + i is at 8 i + j.

There are no zero points. Read for this: vllm 0.33.0 (quantization/mxfp4.py, fused_moe/oracle/mxfp4.py,
fused_moe/routed_experts.py, quantization/utils/humming/) and humming-kernels 0.1.19 (transform.py, config/config.py,
schema/mxfp4.py, kernel/, include/humming/kernel/process.cuh and process_mxfp4.cuh, datatype/dequant_fused.cuh).

Held against both on a CPU, bit for bit, Humming's two kernels compiled for the host
(tests/integration/test_expert_layout.py), and on an H200 (tests/moe/test_gpu_expert_layout.py, 2026-11-30): on the
device those kernels do the same, subnormal numbers included; CUDA's 2**x is exact, down to weight_scale_2 = 2**-128;
Humming's GEMM multiplies by the weights as given in 3.
"""

from dataclasses import dataclass, fields
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

# Of one projection: columns of a scale, and the multiples that shapes are padded to.
GROUP = 32
SHARD_MULTIPLE, ROW_MULTIPLE, COLUMN_MULTIPLE = 64, 256, 128
# A tile of codes, 4 bits each: consecutive words, and in it the words of a lane.
TILE_ROWS, TILE_COLUMNS, TILE_WORDS, LANE_WORDS = 16, 64, 128, 4
# Exponents that a rebased scale may lie above its base: FP8 e4m3 has room for no more beside e2m1's three.
SPAN = 11
# Requantization multiplies by 2**-shift, built in float32's exponent; from here on that exponent wraps around.
SHIFT_LIMIT = 128

_NEGATIVE_ZERO = 8
# e2m1's magnitudes, in halves.
_HALVES = (0, 1, 2, 3, 4, 6, 8, 12)
# A shift of 5 or more leaves no magnitude.
_SHIFTS = 6

Index = TypeVar("Index", int, Tensor)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is not below `value`."""
    return -(-value // multiple) * multiple


def shard_width(width: int) -> int:
    """Rows that vLLM gives gate and up each, and columns of w2, for a rank's `width`: also the first up row."""
    return round_up(width, SHARD_MULTIPLE)


@dataclass(frozen=True)
class Projection:
    """Where w13 or w2 keeps things; rows N and columns K are padded, and the same for all experts.

    The methods take and return ints, or integer tensors that broadcast (int64: 384 experts pass 2**31 words).
    """

    rows: int
    columns: int

    def tile_word(self, expert: Index, row: Index, column: Index) -> Index:
        """Index into `weight`'s words of the tile that holds (row, column); its 128 words, 512 bytes, follow.

        Tiles of the same 64 columns lie one after the other, so any run of them is one contiguous copy.
        """
        block = expert * (self.columns // TILE_COLUMNS) + column // TILE_COLUMNS
        return block * (self.rows // TILE_ROWS * TILE_WORDS) + row // TILE_ROWS * TILE_WORDS

    def code_bits(self, expert: Index, row: Index, column: Index) -> tuple[Index, Index, Index]:
        """Of one code: index into `weight`'s words, lowest bit of its magnitude's three, and bit of its sign."""
        lane = row % 8 * 4 + column % 16 // 4
        word = lane * LANE_WORDS + column % 64 // 32 * 2 + row % 16 // 8
        half, place = column % 32 // 16, column % 4
        return self.tile_word(expert, row, column) + word, 16 * half + 4 * place, 8 * place + 4 * half + 3

    def scale_byte(self, expert: Index, row: Index, column: Index) -> Index:
        """Index into `weight_scale`'s bytes of the scale of (row, column)."""
        group = expert * (self.columns // GROUP) + column // GROUP
        return group * self.rows + row // 64 * 64 + row % 8 * 8 + row % 64 // 8


def projections(hidden: int, width: int) -> tuple[Projection, Projection]:
    """w13 and w2 as held, for a hidden size and a rank's width."""
    shard = shard_width(width)
    w13 = Projection(round_up(2 * shard, ROW_MULTIPLE), round_up(hidden, COLUMN_MULTIPLE))
    return w13, Projection(round_up(hidden, ROW_MULTIPLE), round_up(shard, COLUMN_MULTIPLE))


@dataclass(frozen=True)
class Mxfp4Experts:
    """Experts in the checkpoint's form, a rank's part: w13 [E, 2 I, H/2], w2 [E, H, I/2] uint8, two codes a byte, low
    nibble first, gate rows before up rows; scales [E, 2 I, H/32], [E, H, I/32] uint8, UE8M0."""

    w13: Tensor
    w13_scale: Tensor
    w2: Tensor
    w2_scale: Tensor

    @property
    def count(self) -> int:
        """E."""
        return self.w13.shape[0]


@dataclass(frozen=True)
class PackedWeight:
    """One projection as held, under vLLM's names: weight [E, K/64, 8 N] int32, weight_scale [E, K/32, N]
    float8_e8m0fnu, weight_scale_2 [E] float32."""

    weight: Tensor
    weight_scale: Tensor
    weight_scale_2: Tensor


@dataclass(frozen=True)
class HummingExperts:
    """All of a layer's routed experts as held.

    hidden: H. width: I, this rank's, unpadded. Raises ValueError where a tensor is not what these two ask for.
    """

    w13: PackedWeight
    w2: PackedWeight
    hidden: int
    width: int

    def __post_init__(self) -> None:
        count = self.count
        for name, weight, shape in zip(("w13", "w2"), (self.w13, self.w2), self.projections, strict=True):
            expected = {
                "weight": (torch.int32, (count, shape.columns // TILE_COLUMNS, 8 * shape.rows)),
                "weight_scale": (torch.float8_e8m0fnu, (count, shape.columns // GROUP, shape.rows)),
                "weight_scale_2": (torch.float32, (count,)),
            }
            for field in fields(weight):
                tensor: Tensor = getattr(weight, field.name)
                found = (tensor.dtype, tuple(tensor.shape))
                if found != expected[field.name]:
                    raise ValueError(
                        f"{name}_{field.name} is {_words(*found)}, expected {_words(*expected[field.name])} "
                        f"for hidden size {self.hidden} and width {self.width}"
                    )
                if not tensor.is_contiguous():
                    raise ValueError(f"{name}_{field.name} is not contiguous: its strides are {tensor.stride()}")

    @property
    def count(self) -> int:
        """E."""
        return self.w13.weight.shape[0]

    @property
    def projections(self) -> tuple[Projection, Projection]:
        """Where w13 and w2 keep their codes and scales."""
        return projections(self.hidden, self.width)

    def part(self, start: int, stop: int) -> "HummingExperts":
        """Experts start..stop, without a copy."""
        w13, w2 = (
            PackedWeight(*(getattr(weight, field.name)[start:stop] for field in fields(weight)))
            for weight in (self.w13, self.w2)
        )
        return HummingExperts(w13, w2, self.hidden, self.width)


def pack(w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor) -> HummingExperts:
    """A layer's experts in the checkpoint's form, as in `Mxfp4Experts`, -> as vLLM holds them.

    Bytes may come under another dtype of one byte. Raises ValueError for shapes that do not belong together, for NaN
    scales, and for scales so far apart that Humming's own requantization is undefined.
    """
    hidden, width = _sizes(w13, w13_scale, w2, w2_scale)
    w13, w13_scale, w2, w2_scale = (t.contiguous().view(torch.uint8) for t in (w13, w13_scale, w2, w2_scale))
    extra = shard_width(width) - width
    # vLLM's padding: behind gate, behind up, behind w2's columns.
    w13, w13_scale = (pad(t.unflatten(1, (2, width)), (0, 0, 0, extra)).flatten(1, 2) for t in (w13, w13_scale))
    w2, w2_scale = pad(w2, (0, extra // 2)), pad(w2_scale, (0, extra // GROUP))
    shapes = projections(hidden, width)
    return HummingExperts(
        _pack("w13", w13, w13_scale, shapes[0]), _pack("w2", w2, w2_scale, shapes[1]), hidden=hidden, width=width
    )


def unpack(experts: HummingExperts) -> Mxfp4Experts:
    """The codes and the scales that `experts` stand for, padding left off, in the checkpoint's form.

    Not the checkpoint's own bytes where `pack` requantized them. Reads nothing back from the device.
    """
    shapes, shard, width = experts.projections, shard_width(experts.width), experts.width
    w13 = _unpack(experts.w13, shapes[0])
    gate_up = tuple(t[:, : 2 * shard].unflatten(1, (2, shard))[:, :, :width].flatten(1, 2) for t in w13)
    w2, w2_scale = (t[:, : experts.hidden] for t in _unpack(experts.w2, shapes[1]))
    codes, scales = gate_up[0][..., : experts.hidden // 2], gate_up[1][..., : experts.hidden // GROUP]
    return Mxfp4Experts(
        *(t.contiguous() for t in (codes, scales, w2[..., : width // 2], w2_scale[..., : width // GROUP]))
    )


def rebase(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gives every expert's scales a common base, at most `SPAN` exponents below the largest.

    codes [E, N, K] uint8, one a byte; scales [E, N, K/32] uint8, UE8M0 -> requantized codes, scales less their base
    plus 1, and the base's values, weight_scale_2 [E] float32.
    """
    flat = scales.flatten(1)
    high = flat.amax(1)
    base = high - (high - flat.amin(1)).clamp_max(SPAN)
    raised = scales.maximum(base[:, None, None])
    shift = (raised - scales).clamp_max(_SHIFTS - 1).repeat_interleave(GROUP, -1)
    table = torch.tensor(_REQUANTIZED, dtype=torch.uint8, device=codes.device)
    codes = table.index_select(0, (shift * 16 + codes).flatten().int()).view(codes.shape)
    # A float64 made of its exponent: exact on every device, also where the float32 is subnormal.
    value = (base.long() - 128 + 1023 << 52).view(torch.float64)
    return codes, raised - base[:, None, None] + 1, value.float()


def _requantized(shift: int, code: int) -> int:
    """`code` at a scale 2**shift larger; ties away from zero."""
    if code == _NEGATIVE_ZERO:
        return 0
    wanted = _HALVES[code & 7]
    nearest = min(range(8), key=lambda magnitude: (abs((_HALVES[magnitude] << shift) - wanted), -magnitude))
    return code & 8 | nearest


_REQUANTIZED = tuple(_requantized(shift, code) for shift in range(_SHIFTS) for code in range(16))


def _pack(name: str, packed: Tensor, scales: Tensor, shape: Projection) -> PackedWeight:
    """One projection: Humming's padding, then rebase, then order."""
    _check_scales(name, scales)
    rows, columns = shape.rows - packed.shape[1], shape.columns - 2 * packed.shape[2]
    widest = scales.amax(2, keepdim=True).expand(-1, -1, columns // GROUP)
    scales = pad(torch.cat((scales, widest), 2), (0, 0, 0, rows), value=127)
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(2)
    codes, scales, scale_2 = rebase(pad(codes, (0, columns, 0, rows)), scales)
    ordered = scales.unflatten(1, (-1, 8, 8)).permute(0, 4, 1, 3, 2).reshape(len(scales), -1, shape.rows)
    return PackedWeight(_interleave(codes), ordered.view(torch.float8_e8m0fnu), scale_2)


def _unpack(weight: PackedWeight, shape: Projection) -> tuple[Tensor, Tensor]:
    """Codes [E, N, K/2], two a byte, and UE8M0 scales [E, N, K/32], with the padding; uint8 both."""
    codes = _deinterleave(weight.weight, shape)
    held = weight.weight_scale.view(torch.uint8).unflatten(2, (-1, 8, 8))
    scales = held.permute(0, 2, 4, 3, 1).flatten(1, 3)
    base = torch.frexp(weight.weight_scale_2.double()).exponent + 127
    return codes[..., ::2] | codes[..., 1::2] << 4, scales + (base - 1).to(torch.uint8)[:, None, None]


def _interleave(codes: Tensor) -> Tensor:
    """[E, N, K] uint8, one code a byte -> the words of `weight`."""
    count, rows, columns = codes.shape
    # expert; row: tile, half, row; column: tile, half, half, quad, column
    parts = (
        codes.view(count, rows // 16, 2, 8, columns // 64, 2, 2, 4, 4).permute(0, 4, 1, 3, 7, 5, 2, 6, 8).contiguous()
    )
    nibbles = (parts & 7).flatten(7) | (parts & 8).transpose(7, 8).flatten(7)
    return (nibbles[..., ::2] | nibbles[..., 1::2] << 4).view(torch.int32).reshape(count, columns // 64, 8 * rows)


def _deinterleave(weight: Tensor, shape: Projection) -> Tensor:
    """The inverse of `_interleave`."""
    packed = weight.view(torch.uint8).view(
        len(weight), shape.columns // 64, shape.rows // 16, 8, 4, 2, 2, LANE_WORDS
    )  # expert; column tile, row tile, row, quad; column half, row half; byte
    nibbles = torch.stack((packed & 15, packed >> 4), -1).flatten(7)
    codes: Tensor = nibbles.unflatten(7, (2, 4)) & 7 | (nibbles.unflatten(7, (4, 2)) & 8).transpose(7, 8)
    return codes.permute(0, 2, 6, 3, 1, 5, 7, 4, 8).reshape(len(weight), shape.rows, shape.columns)


def _sizes(w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor) -> tuple[int, int]:
    """Hidden size and width of experts in the checkpoint's form; ValueError if their tensors do not fit together."""
    tensors = {"w13": w13, "w13_scale": w13_scale, "w2": w2, "w2_scale": w2_scale}
    for name, tensor in tensors.items():
        if tensor.dim() != 3 or tensor.element_size() != 1:
            raise ValueError(
                f"{name} is {_words(tensor.dtype, tuple(tensor.shape))}, expected three dimensions of bytes"
            )
    count, hidden, width = w13.shape[0], 2 * w13.shape[2], 2 * w2.shape[2]
    for name, size in (("hidden size", hidden), ("width", width)):
        if size == 0 or size % GROUP:
            raise ValueError(f"the {name} is {size}, expected a multiple of {GROUP}")
    expected = {
        "w13": (count, 2 * width, hidden // 2),
        "w13_scale": (count, 2 * width, hidden // GROUP),
        "w2": (count, hidden, width // 2),
        "w2_scale": (count, hidden, width // GROUP),
    }
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != expected[name]:
            raise ValueError(
                f"{name} is {tuple(tensor.shape)}, expected {expected[name]} for hidden size {hidden}, from w13, "
                f"and width {width}, from w2"
            )
    return hidden, width


def _check_scales(name: str, scales: Tensor) -> None:
    """Refuses scales that Humming cannot rebase; reads them back from the device."""
    flat = scales.flatten(1)
    ends = torch.stack((flat.amin(1), flat.amax(1)), 1).tolist()
    for expert, (low, high) in enumerate(ends):
        if high == 255:
            raise ValueError(f"{name}: expert {expert} has a NaN scale")
        if high - SPAN - low >= SHIFT_LIMIT:
            raise ValueError(
                f"{name}: expert {expert} has scales from 2**{low - 127} to 2**{high - 127}, further apart than "
                f"the 2**{SPAN + SHIFT_LIMIT - 1} that Humming can requantize"
            )


def _words(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
