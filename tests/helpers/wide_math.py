"""Arithmetic whose results do not depend on what else is in the batch."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

# Products and transcendental functions: their kernels sum in another order, or take another path for the last few
# elements, at another size.
_WIDE = {"mm", "bmm", "_softmax", "exp", "sigmoid", "softplus", "rsqrt", "sqrt", "silu", "log2", "reciprocal"}


class WideMath(TorchDispatchMode):
    """Computes float32 operations in float64 and rounds once, so that equal rows give equal bits in any batch.

    Rounding alone is no bound to hold a model with FP8 caches, top-k selections and routed experts to: its last bit
    can turn one of those over, and with it the logits. What still differs under this mode is no rounding.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ not in _WIDE or not any(map(_is_float32, args)):
            return func(*args, **kwargs)
        result = func(*tree_map(lambda x: x.double() if _is_float32(x) else x, args), **kwargs)
        return result.float()


def _is_float32(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32
