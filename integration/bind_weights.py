"""Dense layers of vLLM's model as the step packages read them, in the checkpoint's form.

vLLM repacks its FP8 layers once they are loaded (Humming deletes the parameters and makes its own), and dequantizes
`wo_a`. So a copy is taken just before, of those layers and of nothing else. Routed experts are never copied.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase

from specialized_decode.boundary import reference as boundary_reference
from specialized_decode.integration.stock import partial_output

_BLOCK = boundary_reference.MX_BLOCK
_PROCESS = "process_weights_after_loading"


@dataclass(frozen=True)
class CheckpointForm:
    """A dense FP8 layer as released: weight [N, K] float8_e4m3fn, scale UE8M0 [N/32, K/32] uint8."""

    weight: Tensor
    scale: Tensor

    @classmethod
    def of(cls, name: str, layer: Any) -> "CheckpointForm":
        """A copy of a layer that vLLM has loaded and not repacked.

        vLLM holds a block's scale once a row. Raises RuntimeError, naming the layer, for any other form.
        """
        weight, scale = layer.weight.data, layer.weight_scale.data
        expected = f"{name}: expected the checkpoint's FP8 weight"
        if weight.dtype != torch.float8_e4m3fn or weight.ndim != 2 or weight.shape[0] % _BLOCK:
            raise RuntimeError(f"{expected} [N, K], N a multiple of {_BLOCK}; found {_form(weight)}")
        rows, columns = weight.shape
        if scale.element_size() != 1 or scale.shape != (rows, columns // _BLOCK):
            raise RuntimeError(f"{expected}'s scale [{rows}, {columns // _BLOCK}] of one byte; found {_form(scale)}")
        blocks = scale.view(torch.uint8).unflatten(0, (-1, _BLOCK))
        if not bool((blocks == blocks[:, :1]).all()):
            raise RuntimeError(f"{expected} with one scale per {_BLOCK} x {_BLOCK}; found rows of a block that differ")
        return cls(weight.clone(), blocks[:, 0].clone())

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + self.scale.nbytes


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


class PreparedWeights:
    """Second copies of a model's dense FP8 layers, taken while vLLM loads it, whatever the loader."""

    def __init__(self) -> None:
        self._kept: dict[nn.Module, CheckpointForm] = {}

    @classmethod
    def watch(cls, model: nn.Module, wanted: Collection[nn.Module] | None = None) -> "PreparedWeights":
        """model: vLLM's, built and not loaded. Its dense FP8 layers, all or those wanted, are each copied when vLLM is
        about to repack it."""
        prepared = cls()
        for name, layer in dense_fp8_layers(model):
            if wanted is None or layer in wanted:
                prepared._keep_before_repack(name, layer)
        return prepared

    def _keep_before_repack(self, name: str, layer: Any) -> None:
        method = layer.quant_method
        repack: Callable[[nn.Module], None] = getattr(method, _PROCESS)
        assert _PROCESS not in vars(method), f"{name}: its quantization method serves another layer"

        def keep(loaded: nn.Module) -> None:
            # Once: from then on the layer is in vLLM's form.
            delattr(method, _PROCESS)
            assert loaded is layer, f"{name}: its quantization method serves another layer"
            self._kept[layer] = CheckpointForm.of(name, layer)
            repack(layer)

        setattr(method, _PROCESS, keep)

    def of(self, layer: nn.Module) -> CheckpointForm | None:
        """A layer's copy; None where none was taken."""
        return self._kept.get(layer)

    def drop(self, layers: Iterable[nn.Module]) -> None:
        """Forgets the copies of `layers`, where it has any."""
        for layer in layers:
            self._kept.pop(layer, None)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        return sum(kept.nbytes for kept in self._kept.values())


def dense_fp8_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """A model's dense layers whose loaded weights are FP8, with their names."""
    for name, module in model.named_modules():
        if isinstance(module, LinearBase) and module.weight.dtype == torch.float8_e4m3fn:
            yield name, module


class BoundLinear:
    """One dense layer; see LinearView. BF16 weights are vLLM's own tensors."""

    def __init__(self, layer: Any, prepared: PreparedWeights | None, reduces: bool = False) -> None:
        """layer: vLLM's module. reduces: its output is summed over the ranks; a call returns this rank's part."""
        self._layer, self._prepared, self._reduces = layer, prepared, reduces

    @property
    def weight(self) -> Tensor:
        """Raises RuntimeError for a layer that vLLM has repacked and of which no copy was taken."""
        kept = self._copy()
        weight: Tensor = self._layer.weight.data if kept is None else kept.weight
        return weight

    @property
    def scale(self) -> Tensor | None:
        kept = self._copy()
        return None if kept is None else kept.scale

    def _copy(self) -> CheckpointForm | None:
        kept = None if self._prepared is None else self._prepared.of(self._layer)
        # A layer with scales was FP8, whatever form it is in.
        if kept is None and hasattr(self._layer, "weight_scale"):
            raise RuntimeError(f"{self._layer.prefix}: found no prepared weight; they are off, or were not loaded")
        return kept

    def __call__(self, x: Tensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """vLLM's own multiplication. float32 outputs are of BF16 layers alone."""
        if out_dtype == torch.float32:
            weight = self.weight
            return boundary_reference.project_float(x, weight if weight.is_cuda else weight.float())
        if self._reduces:
            with partial_output(self._layer, "reduce_results", False):
                return _output(self._layer(x))
        return _output(self._layer(x))


def _output(returned: Any) -> Tensor:
    """vLLM's layers return a tensor, or that and a bias."""
    output: Tensor = returned[0] if isinstance(returned, tuple) else returned
    return output
