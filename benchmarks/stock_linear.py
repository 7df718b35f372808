"""Linear layers of vLLM, through its own backend; vLLM is imported when one is made."""

from typing import Any

import torch
from torch import Tensor


class StockLinear:
    """vLLM's FP8 linear layer, as Hopper's backend repacks and runs it."""

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        """weight: [N, K] e4m3, scale: [N / 32, K / 32] uint8; both are copied."""
        from vllm.model_executor.kernels.linear.mxfp8.humming import HummingMxfp8LinearKernel
        from vllm.model_executor.kernels.linear.mxfp8.Mxfp8LinearKernel import Mxfp8LinearLayerConfig

        rows, columns = weight.shape
        layer: Any = torch.nn.Module()
        layer.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
        layer.weight_scale = torch.nn.Parameter(scale.repeat_interleave(32, 0), requires_grad=False)
        layer.params_dtype, layer.has_bias = torch.bfloat16, False
        layer.input_size_per_partition, layer.output_partition_sizes = columns, [rows]
        self.layer, self.kernel = layer, HummingMxfp8LinearKernel(Mxfp8LinearLayerConfig((rows, columns)))
        self.kernel.process_weights_after_loading(layer)

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self.kernel.apply_weights(self.layer, x)
        return out
