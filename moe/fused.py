"""Launches of the low-batch MoE, four for up to eight rows; `select` says where they serve."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specialized_decode.boundary import UnfinalizedRows
from specialized_decode.moe import tuning
from specialized_decode.moe.expert_layout import PackedWeight, shard_width
from specialized_decode.moe.kernels.experts import down_kernel, up_kernel
from specialized_decode.moe.kernels.front import front_kernel
from specialized_decode.moe.kernels.route import route_kernel
from specialized_decode.moe.reference import IMAGE_TOKENS
from specialized_decode.moe.select import held_experts
from specialized_decode.moe.views import MoEView


@dataclass(frozen=True)
class Routing:
    """Where T rows go, of which `up` and `down` read. ids: [T, k] int32, weights: [T, k] float32.

    leaders [T, k] int32, members [E] int64: who does an expert's work, and for whom; see `kernels.experts`. plain,
    quads: the input as float16, times 1 / factors [T], in the columns' order and in the packed weights'.
    """

    ids: Tensor
    weights: Tensor
    leaders: Tensor
    members: Tensor
    plain: Tensor
    quads: Tensor
    factors: Tensor


@dataclass(frozen=True)
class Hidden:
    """Outputs of the SwiGLU in float16, times a constant: routed [T k, I held], shared [T, I]."""

    routed: Tensor
    shared: Tensor


class FusedMoE:
    """One layer's MoE on the kernels, for up to `max_rows` rows. It reads all weights in place and keeps no copy."""

    max_rows = tuning.MAX_ROWS

    def __init__(self, ffn: MoEView) -> None:
        """ffn: a layer for which `select.unsupported` gives no reason."""
        self.ffn = ffn
        experts = held_experts(ffn)
        self.count, self.hidden = ffn.gate.weight.shape
        self.width = ffn.shared_down.weight.shape[1]
        self.shapes = experts.projections
        self.w13, self.w2 = experts.w13, experts.w2
        self.gate = ffn.gate.weight.view(torch.int32)
        self.shared_up, self.shared_up_scale = _words(ffn.shared_up.weight, ffn.shared_up.scale)
        self.shared_down, self.shared_down_scale = _words(ffn.shared_down.weight, ffn.shared_down.scale)
        self.scale = tuning.activation_scale(ffn.limit)

    @property
    def variant(self) -> tuple[object, ...]:
        """Layers of which this is equal run the same compiled kernels."""
        return (self.count, self.hidden, self.width, self.ffn.topk, self.scale, self.ffn.image_bias is None)

    @property
    def kept_bytes(self) -> int:
        """GPU memory beside the model's: none."""
        return 0

    def warm_up(self) -> None:
        """Compiles and loads every kernel for every row count."""
        for rows in range(1, self.max_rows + 1):
            x = torch.zeros(rows, self.hidden, dtype=torch.bfloat16, device=self.gate.device)
            routing = self.route(x, torch.zeros(rows, dtype=torch.int64, device=self.gate.device))
            self.down(routing, self.up(routing))

    def route(self, x: Tensor, input_ids: Tensor) -> Routing:
        """x: [T, K] bfloat16, input_ids: [T] int64; two launches. Raises ValueError for other shapes and types."""
        rows, topk = x.shape[0], self.ffn.topk
        if not 0 < rows <= self.max_rows or x.shape[1] != self.hidden or x.dtype != torch.bfloat16:
            raise ValueError(
                f"MoE: found {x.dtype} {list(x.shape)}, expected bfloat16 [1 to {self.max_rows}, {self.hidden}]"
            )
        for name, tensor in (("x", x), ("input_ids", input_ids)):
            if not tensor.is_contiguous() or tensor.shape[0] != rows:
                found = f"shape {list(tensor.shape)}, strides {list(tensor.stride())}"
                raise ValueError(f"MoE: {name}: found {found}, expected {rows} contiguous rows")
        cut = tuning.front(self.hidden)
        assert cut is not None
        partial = x.new_empty(cut.splits, rows, self.count, dtype=torch.float32)
        plain, quads = (torch.empty(x.shape, dtype=torch.float16, device=x.device) for _ in range(2))
        factors = x.new_empty(rows, dtype=torch.float32)
        warps = tuning.FRONT_WARPS
        members = torch.empty(self.count, dtype=torch.int64, device=x.device)
        front_kernel[(self.count // tuning.TILE * cut.splits + rows,)](
            x, x.view(torch.int32), self.gate, partial, plain, quads, factors, members, rows, K=self.hidden,
            PADDED=_power(self.hidden), EXPERTS=self.count, SPLITS=cut.splits, WARPS=warps, BLOCKS=cut.blocks,
            num_warps=warps, launch_pdl=True,
        )  # fmt: skip
        ids = torch.empty(rows, topk, dtype=torch.int32, device=x.device)
        weights = x.new_empty(rows, topk, dtype=torch.float32)
        leaders = ids if rows == 1 else torch.empty_like(ids)
        bias, image_bias = self.ffn.bias, self.ffn.image_bias
        route_kernel[(rows,)](
            partial, bias, bias if image_bias is None else image_bias, input_ids, ids, weights, leaders, members, rows,
            self.ffn.scaling, FIRST_IMAGE=0 if image_bias is None else IMAGE_TOKENS.start, EXPERTS=self.count,
            PADDED=_power(self.count), SPLITS=cut.splits, TOPK=topk, TOPK_PADDED=_power(topk), RECORDED=rows > 1,
            num_warps=tuning.ROUTE_WARPS, launch_pdl=True,
        )  # fmt: skip
        return Routing(ids, weights, leaders, members, plain, quads, factors)

    def up(self, routing: Routing) -> Hidden:
        """Gate and up projections and the SwiGLU, of the routed experts and the shared one; one launch."""
        rows, topk = routing.ids.shape
        held = shard_width(self.width)
        device = routing.plain.device
        hidden = Hidden(
            torch.empty(rows * topk, held, dtype=torch.float16, device=device),
            torch.empty(rows, self.width, dtype=torch.float16, device=device),
        )
        cut = tuning.up(self.hidden, rows)
        assert cut is not None
        programs = self.width // 8 + rows * topk * (self.width // tuning.TILE)
        up_kernel[(programs,)](
            routing.leaders, routing.members, routing.quads.view(torch.int32), routing.plain.view(torch.int32),
            routing.factors, *_packed(self.w13), self.shared_up, self.shared_up_scale, hidden.routed, hidden.shared,
            rows, self.ffn.limit, TOPK=topk, K=self.hidden, I=self.width, I_HELD=held, N_HELD=self.shapes[0].rows,
            FIRST_UP=held, SCALE=self.scale, WARPS=cut.warps, CHUNK=cut.tiles, SHARED_CHUNK=cut.blocks,
            RECORDED=rows > 1, num_warps=cut.warps, maxnreg=tuning.REGISTERS, launch_pdl=True,
        )  # fmt: skip
        return hidden

    def down(self, routing: Routing, hidden: Hidden) -> UnfinalizedRows:
        """The second projections; one launch, which starts reading weights ahead of the first one's end."""
        rows, topk = routing.ids.shape
        out = torch.empty(rows, topk, self.hidden, dtype=torch.bfloat16, device=routing.plain.device)
        shared = out.new_empty(rows, self.hidden)
        cut = tuning.down(self.hidden, self.width, rows)
        programs = self.hidden // tuning.TILE // cut.warps
        programs += rows * topk * (programs // cut.repeat)
        down_kernel[(programs,)](
            routing.leaders, routing.members, hidden.routed.view(torch.int32), hidden.shared.view(torch.int32),
            *_packed(self.w2), self.shared_down, self.shared_down_scale, out, shared, rows, TOPK=topk, H=self.hidden,
            I=self.width, I_HELD=shard_width(self.width), N_HELD=self.shapes[1].rows, K_HELD=self.shapes[1].columns,
            SCALE=self.scale, WARPS=cut.warps, CHUNK=cut.tiles, SHARED_CHUNK=cut.blocks, REPEAT=cut.repeat,
            RECORDED=rows > 1, num_warps=cut.warps, launch_pdl=True,
        )  # fmt: skip
        return UnfinalizedRows(out, routing.weights, shared)


def _words(weight: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """An FP8 layer's bytes in fours, and its scales."""
    assert scale is not None
    return weight.view(torch.int32), scale.view(torch.uint8)


def _packed(weight: PackedWeight) -> tuple[Tensor, Tensor, Tensor]:
    """A projection as the kernels take it: two rows' scales in one number."""
    return weight.weight, weight.weight_scale.view(torch.uint8).view(torch.uint16), weight.weight_scale_2


def _power(count: int) -> int:
    """The smallest power of two that is not below `count`."""
    return 1 << (count - 1).bit_length()
