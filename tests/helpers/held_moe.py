"""A layer whose routed experts are in Humming's form, as vLLM would hold them, and its outputs in float64."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specialized_decode.moe.expert_layout import HummingExperts, PackedWeight, pack, unpack
from specialized_decode.moe.held import HummingForm
from specialized_decode.moe.reference import unpack_fp4

if TYPE_CHECKING:
    # Its kernels need Triton.
    from specialized_decode.moe.fused import Routing

TOPK, SCALING, LIMIT = 6, 1.5, 10.0


@dataclass
class Linear:
    """See LinearView; only its weights are read."""

    weight: Tensor
    scale: Tensor | None = None

    def __call__(self, x: Tensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
        raise NotImplementedError("the kernels read the weights")


class HeldMoE:
    """See MoEView. Calling it is whatever `stock` is."""

    topk, scaling, limit = TOPK, SCALING, LIMIT
    routing_hook: Callable[[Tensor], None] | None = None

    def __init__(
        self,
        gate: Tensor,
        bias: Tensor,
        image_bias: Tensor | None,
        held: HummingExperts,
        shared_up: Linear,
        shared_down: Linear,
        stock: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        self.gate, self.bias, self.image_bias, self.held = Linear(gate), bias, image_bias, held
        self.experts, self.shared_up, self.shared_down, self.stock = HummingForm(held), shared_up, shared_down, stock

    def __call__(self, x: Tensor, input_ids: Tensor) -> Tensor:
        assert self.stock is not None, "found a step on the stock path"
        return self.stock(x, input_ids)


def held_moe(
    seed: int, experts: int, hidden: int, width: int, device: str = "cpu", wide: bool = False, image: bool = True
) -> HeldMoE:
    """Random weights of sizes that keep activations near one. wide: scales of an expert span more than 2**11."""
    generator = torch.Generator(device).manual_seed(seed)

    def numbers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, device=device, dtype=torch.uint8)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    # An e2m1 code is about 2.6 in the root mean square.
    def scales(columns: int, *shape: int) -> Tensor:
        middle = 127 - round(0.5 * torch.tensor(columns * 7.0).log2().item())
        return numbers(middle - (18 if wide else 2), middle + 2, *shape, columns // 32)

    def fp8(rows: int, columns: int) -> Linear:
        scale = numbers(118, 121, rows // 32, columns // 32)
        factor = torch.exp2(scale.float() - 127).repeat_interleave(32, 0).repeat_interleave(32, 1)
        return Linear((normal(rows, columns) * columns**-0.5 / factor).to(torch.float8_e4m3fn), scale)

    # A part at a time: packing takes many times the memory of what it packs.
    parts = [
        pack(
            numbers(0, 256, count, 2 * width, hidden // 2),
            scales(hidden, count, 2 * width),
            numbers(0, 256, count, hidden, width // 2),
            scales(width, count, hidden),
        )
        for count in [min(32, experts - first) for first in range(0, experts, 32)]
    ]
    held = HummingExperts(
        _joined([part.w13 for part in parts]), _joined([part.w2 for part in parts]), hidden=hidden, width=width
    )
    gate = (normal(experts, hidden) * hidden**-0.5).bfloat16()
    bias, image_bias = normal(experts) * 0.3, normal(experts) * 0.3 if image else None
    return HeldMoE(gate, bias, image_bias, held, fp8(2 * width, hidden), fp8(hidden, width))


def _joined(parts: list[PackedWeight]) -> PackedWeight:
    weights, scales, bases = zip(*(vars(part).values() for part in parts), strict=True)
    scale = torch.cat([one.view(torch.uint8) for one in scales]).view(torch.float8_e8m0fnu)
    return PackedWeight(torch.cat(weights), scale, torch.cat(bases))


def inputs(seed: int, rows: int, hidden: int, device: str = "cpu", size: float = 1.0) -> tuple[Tensor, Tensor]:
    """x [rows, hidden] and input ids, every third of an image; rows behind the last hold NaN."""
    generator = torch.Generator(device).manual_seed(seed)
    padded = torch.full((rows + 2, hidden), torch.nan, dtype=torch.bfloat16, device=device)
    padded[:rows] = (torch.randn(rows, hidden, generator=generator, device=device) * size).bfloat16()
    ids = torch.arange(rows, device=device)
    return padded[:rows], torch.where(ids % 3 == 1, 129264 + ids % 5, ids)


def prefer(ffn: HeldMoE, experts: list[list[int]]) -> Tensor:
    """x [rows, hidden] whose row t chooses experts[t]; changes the gate."""
    rows, weight = len(experts), ffn.gate.weight
    x, _ = inputs(1, rows, weight.shape[1], weight.device.type)
    x[:, :rows] = torch.eye(rows, device=weight.device) * 4
    weight[:, :rows] = 0
    for row, chosen in enumerate(experts):
        weight[chosen, row] = 20
    return x


def assert_led(routing: "Routing", experts: list[list[int]]) -> None:
    """Every expert that `experts`, by row, names has one leader, which chose it, and its members are who did."""
    for pair, leader in enumerate(routing.leaders.flatten().tolist()):
        if leader >= 0:
            assert leader == routing.ids.flatten()[pair]
    led = [leader for leader in routing.leaders.flatten().tolist() if leader >= 0]
    assert sorted(led) == sorted({one for chosen in experts for one in chosen})
    for expert in led:
        slots = [chosen.index(expert) + 1 if expert in chosen else 0 for chosen in routing.ids.tolist()]
        assert int(routing.members[expert]) == sum(slot << 8 * row for row, slot in enumerate(slots))


def exact_logits(ffn: HeldMoE, x: Tensor) -> Tensor:
    """[T, E] float64."""
    return x.double() @ ffn.gate.weight.double().T


def exact_swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    gate = gate.clamp_max(LIMIT)
    return gate * gate.sigmoid() * up.clamp(-LIMIT, LIMIT)


def exact_rows(ffn: HeldMoE, x: Tensor, ids: Tensor) -> Tensor:
    """The chosen experts' outputs [T, k, hidden] float64, rounded nowhere, from the weights that are held."""
    out = torch.empty(*ids.shape, x.shape[1], dtype=torch.float64, device=x.device)
    for number in ids.unique().tolist():
        codes = unpack(ffn.held.part(number, number + 1))
        w13 = unpack_fp4(codes.w13[0], codes.w13_scale[0], torch.float64)
        w2 = unpack_fp4(codes.w2[0], codes.w2_scale[0], torch.float64)
        here = ids == number
        tokens = here.nonzero()[:, 0]
        out[here] = exact_swiglu(x[tokens].double() @ w13.T) @ w2.T
    return out


def exact_shared(ffn: HeldMoE, x: Tensor) -> Tensor:
    """The shared expert's output [T, hidden] float64, rounded nowhere."""
    up, down = (_dequantized(layer) for layer in (ffn.shared_up, ffn.shared_down))
    return exact_swiglu(x.double() @ up.T) @ down.T


def _dequantized(layer: Any) -> Tensor:
    factor = torch.exp2(layer.scale.double() - 127).repeat_interleave(32, 0).repeat_interleave(32, 1)
    weight: Tensor = layer.weight.double() * factor
    return weight
