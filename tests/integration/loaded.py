"""vLLM's model with kept weights, loaded and repacked on the CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from specialized_decode.integration import plugin
from specialized_decode.runtime import DecodeConfig
from tests.integration import vllm_model


def repack(kernel: Any, layer: Any) -> None:
    """In the place of Humming's: parameters are deleted, and words of the same names take their place."""
    rows = layer.weight.shape[0]
    for name in ("weight", "weight_scale"):
        layer.register_parameter(name, None)
        delattr(layer, name)
        setattr(layer, name, nn.Parameter(torch.zeros(rows, 3, dtype=torch.int32), requires_grad=False))


def process(model: Any) -> None:
    """vLLM's work on every dense layer after loading, in its loader's order. Experts stay as they were loaded."""
    from vllm.model_executor.layers.linear import LinearBase

    for module in model.modules():
        if isinstance(module, LinearBase):
            module.quant_method.process_weights_after_loading(module)


class Loaded:
    """vLLM's model, asked to keep weights, and the configuration that it was built from."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, **options: bool) -> None:
        from vllm.model_executor.kernels.linear.mxfp8.humming import HummingMxfp8LinearKernel

        from specialized_decode.integration import config as check

        plugin.register()
        patch.setattr(check, "deployment_config", lambda config: DecodeConfig())
        patch.setattr(HummingMxfp8LinearKernel, "process_weights_after_loading", repack)
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
        self.folder, self.patch = folder, patch
        self.config = self.configured(**options)

    def configured(self, **options: Any) -> Any:
        from vllm.engine.arg_utils import EngineArgs

        return EngineArgs(
            model=str(self.folder),
            max_model_len=512,
            max_num_batched_tokens=512,
            engram_config={"cpu_offload": False},
            additional_config={"decode_backend": "latency_specialized", "decode_reference_ops": True, **options},
        ).create_engine_config()

    def build(self, **options: Any) -> Any:
        """A model of a configuration of its own, in which its layers are registered."""
        from vllm.config import set_current_vllm_config

        config = self.configured(**options)
        with set_current_vllm_config(config):
            return vllm_model.build(config, self.patch)
