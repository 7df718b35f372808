"""Which layers the MoE kernels serve."""

import torch

from specialized_decode.moe import tuning
from specialized_decode.moe.expert_layout import HummingExperts, PackedWeight
from specialized_decode.moe.views import MoEView

# vLLM's name of the backend whose form the kernels read.
LAYOUT = "HUMMING"
# As many as the kernels are checked for; a byte of `members` has room for a slot.
MAX_TOPK = 8
LARGEST_FLOAT16 = 65504


def held_experts(ffn: MoEView) -> HummingExperts:
    """A layer's routed experts as they are held. Raises ValueError where they are not in that form."""
    experts = ffn.experts
    bases = [getattr(experts, f"{name}_scale_2", None) for name in ("w13", "w2")]
    if bases[0] is None or bases[1] is None:
        raise ValueError("routed experts: found no weight_scale_2")
    hidden, width = ffn.shared_down.weight.shape
    w13, w2 = (experts.w13, experts.w13_scale, bases[0]), (experts.w2, experts.w2_scale, bases[1])
    return HummingExperts(PackedWeight(*w13), PackedWeight(*w2), hidden, width)


def unsupported(ffn: MoEView) -> str | None:
    """Why the kernels do not serve a layer whose experts are in Humming's form, or None."""
    return unsuited(ffn) or _unheld(ffn)


def unsuited(ffn: MoEView) -> str | None:
    """Why the kernels do not serve a layer, whatever form its experts are in, or None."""
    device = ffn.gate.weight.device
    if device.type != "cuda":
        return f"device: found {device.type}, expected cuda"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 9:
        return f"GPU: found compute capability {major}.{minor}, expected 9.0 or later"
    return misfit(ffn)


def unfit(ffn: MoEView) -> str | None:
    """Why the kernels cannot run a layer's shapes and types, whatever the device, or None."""
    return misfit(ffn) or _unheld(ffn)


def misfit(ffn: MoEView) -> str | None:
    """`unfit`, but for the routed experts."""
    gate, up, down = ffn.gate.weight, ffn.shared_up, ffn.shared_down
    hidden, width = down.weight.shape
    if gate.dtype != torch.bfloat16 or gate.shape[1] != hidden or gate.shape[0] % tuning.TILE:
        return f"gate: found {gate.dtype} {list(gate.shape)}, expected bfloat16 [a multiple of {tuning.TILE}, {hidden}]"
    if tuning.front(hidden) is None or tuning.up(hidden, 1) is None:
        return f"hidden size: found {hidden}, expected a multiple of {tuning.BLOCK * tuning.FRONT_WARPS}"
    if width % tuning.BLOCK:
        return f"width: found {width}, expected a multiple of {tuning.BLOCK}"
    for name, layer, rows in (("up", up, 2 * width), ("down", down, hidden)):
        columns = hidden if name == "up" else width
        blocks = (rows // tuning.BLOCK, columns // tuning.BLOCK)
        if layer.weight.dtype != torch.float8_e4m3fn or layer.scale is None or tuple(layer.scale.shape) != blocks:
            return (
                f"shared expert's {name}: found {layer.weight.dtype}, expected float8_e4m3fn with a scale per 32 x 32"
            )
        if tuple(layer.weight.shape) != (rows, columns):
            return f"shared expert's {name}: found {list(layer.weight.shape)}, expected {[rows, columns]}"
    if not 0 < ffn.topk <= MAX_TOPK:
        return f"topk: found {ffn.topk}, expected at most {MAX_TOPK}"
    if not 0 < ffn.limit**2 < LARGEST_FLOAT16:
        return f"swiglu_limit: found {ffn.limit}, expected one whose square is below {LARGEST_FLOAT16}"
    tensors = {"gate": gate, "shared up": up.weight, "shared down": down.weight, "bias": ffn.bias}
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            return f"{name}: found strides {tensor.stride()}, expected contiguous rows"
    return None


def _unheld(ffn: MoEView) -> str | None:
    """Why the routed experts' tensors are none in Humming's form, or None."""
    try:
        held_experts(ffn)
    except ValueError as error:
        return str(error)
    return None
