"""What the deployment check looks at: facts of the installed software, of this rank's GPU, of vLLM's configuration.

The facts are plain data; only their `gather` functions ask vLLM and the device.
"""

import importlib.metadata
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from specialized_decode.boundary.select import unreachable
from specialized_decode.integration import contract, memory
from specialized_decode.integration.plugin import switches

if TYPE_CHECKING:
    from vllm.config import VllmConfig

FAMILIES = {9: "hopper", 10: "blackwell"}
# What changes how Humming quantizes or schedules, and so what its layouts mean.
HUMMING_VARIABLES = (
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_HUMMING_MOE_GEMM_TYPE",
    "VLLM_HUMMING_USE_F16_ACCUM",
)


@dataclass(frozen=True)
class Software:
    """Installed versions, None for what is not installed.

    allowed_vllm: the value of SPECIALIZED_DECODE_ALLOW_VLLM; internals: how vLLM's internals deviate from the contract.
    """

    vllm: str | None
    allowed_vllm: str | None
    internals: tuple[str, ...]
    torch: str
    triton: str | None
    flashinfer: str | None
    humming: bool

    @classmethod
    def gather(cls) -> "Software":
        found = installed("vllm")
        allowed = os.environ.get(contract.ALLOW)
        # Reading the contract takes seconds. The tested version was read by its tests; others need not be, but one.
        read = found is not None and found == allowed != contract.TESTED
        return cls(
            vllm=found,
            allowed_vllm=allowed,
            internals=tuple(contract.check()) if read else (),
            torch=torch.__version__,
            triton=installed("triton"),
            flashinfer=installed("flashinfer-python"),
            humming=importlib.util.find_spec("humming") is not None,
        )


@dataclass(frozen=True)
class Device:
    """One rank's GPU. unreachable: why ranks cannot store into each other's memory, or None; memory in bytes."""

    name: str
    capability: tuple[int, int] | None
    unreachable: str | None
    free_memory: int
    total_memory: int

    @property
    def family(self) -> str | None:
        """hopper, blackwell, or None for another GPU or none."""
        return None if self.capability is None else FAMILIES.get(self.capability[0])

    @classmethod
    def gather(cls, size: int, nodes: int = 1, ranks: Sequence[int] = ()) -> "Device":
        """The current device, in a TP group of `size`; or, from outside a group, the devices `ranks`, the first's name.

        Every one of them is asked whether it reaches its peers.
        """
        if not torch.cuda.is_available():
            return cls("none", None, "no GPU" if size > 1 else None, 0, 0)
        devices = [torch.device("cuda", rank) for rank in ranks or (torch.cuda.current_device(),)]
        reasons = [unreachable(device, size) for device in devices] if size > 1 else []
        found = [reason.removeprefix("peer access: found ").split(", expected")[0] for reason in reasons if reason]
        if nodes > 1:
            found.insert(0, f"{nodes} nodes")
        free, total = torch.cuda.mem_get_info(devices[0])
        return cls(
            name=torch.cuda.get_device_name(devices[0]),
            capability=torch.cuda.get_device_capability(devices[0]),
            unreachable=found[0] if found else None,
            free_memory=free,
            total_memory=total,
        )


@dataclass(frozen=True)
class Deployment:
    """vLLM's configuration, as far as the executor depends on it.

    attention_class and linear_kernel are what vLLM's own selection yields, or its refusal. weights and prepared: bytes
    that this rank's weights take at least, and that the second copy of its dense weights takes.
    """

    architecture: str
    runner_v2: bool
    pipeline_parallel: int
    data_parallel: int
    expert_parallel: bool
    prefill_context_parallel: int
    decode_context_parallel: int
    ubatching: bool
    attention_class: str
    kv_cache_dtype: str
    quantization: str
    quantization_override: str | None
    linear_kernel: str
    moe_backend: str
    humming_settings: tuple[str, ...]
    cudagraph_mode: str
    capture_sizes: tuple[int, ...]
    compilation_mode: str
    sleep_mode: bool
    lora: bool
    kv_transfer: str | None
    batch_invariant: bool
    changing_weights: str | None
    memory_fraction: float
    weights: int
    prepared: int

    @classmethod
    def gather(cls, config: "VllmConfig") -> "Deployment":
        import vllm.envs as envs

        model, parallel, compilation = config.model_config, config.parallel_config, config.compilation_config
        text, tp = model.hf_text_config, parallel.tensor_parallel_size
        mode = compilation.cudagraph_mode
        return cls(
            architecture=", ".join(model.architectures),
            runner_v2=config.use_v2_model_runner,
            pipeline_parallel=parallel.pipeline_parallel_size,
            data_parallel=parallel.data_parallel_size,
            expert_parallel=parallel.enable_expert_parallel or parallel.enable_eplb,
            prefill_context_parallel=parallel.prefill_context_parallel_size,
            decode_context_parallel=parallel.decode_context_parallel_size,
            ubatching=parallel.use_ubatching,
            attention_class=_attention_class(config),
            kv_cache_dtype=str(config.cache_config.cache_dtype),
            quantization=_quantization(config),
            quantization_override=_quantization_override(model.quantization_config),
            linear_kernel=_linear_kernel(config, (text.hidden_size, text.hidden_size)),
            moe_backend=config.kernel_config.moe_backend,
            humming_settings=tuple(f"{name}={os.environ[name]}" for name in HUMMING_VARIABLES if os.environ.get(name)),
            cudagraph_mode="NONE" if mode is None else mode.name,
            capture_sizes=tuple(compilation.cudagraph_capture_sizes or ()),
            compilation_mode="NONE" if compilation.mode is None else compilation.mode.name,
            sleep_mode=model.enable_sleep_mode,
            lora=config.lora_config is not None,
            kv_transfer=_kv_transfer(config),
            batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
            changing_weights=_changing_weights(config),
            memory_fraction=config.cache_config.gpu_memory_utilization,
            weights=memory.weight_bytes(text, tp, _draft_layers(config)),
            prepared=_prepared_bytes(text, tp, switches(config)),
        )


def _prepared_bytes(text: Any, tp: int, values: dict[str, Any]) -> int:
    """What is kept beside the model's weights, by the executor's switches: vLLM's own ops need no copy."""
    kernels, everything = values["decode_kernels"], values["decode_reference_ops"]
    kept = memory.prepared_bytes(text, tp) if everything else 0
    if "moe" in kernels and not everything:
        kept += memory.shared_expert_bytes(text, tp)
    if "attention" in kernels:
        kept += memory.projection_bytes(text, tp)
    return kept + (memory.mixer_bytes(text) if "boundary" in kernels else 0)


@dataclass(frozen=True)
class Facts:
    """What a rank knows. deployment: None where there is no configuration to look at."""

    software: Software
    device: Device
    tensor_parallel: int
    deployment: Deployment | None

    @classmethod
    def gather(cls, config: "VllmConfig", ranks: Sequence[int] = ()) -> "Facts":
        """This rank's facts. `ranks`: as in `Device.gather`."""
        parallel = config.parallel_config
        size = parallel.tensor_parallel_size
        device = Device.gather(size, parallel.nnodes, ranks)
        return cls(Software.gather(), device, size, Deployment.gather(config))


def installed(distribution: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _attention_class(config: "VllmConfig") -> str:
    from vllm.models.deepseek_v41.nvidia import model

    try:
        return model._select_dsv4_attn_cls(config).__name__
    except (NotImplementedError, ValueError) as error:
        return f"none: {error}"


def _linear_kernel(config: "VllmConfig", shape: tuple[int, int]) -> str:
    """The kernel class that vLLM selects for a dense MXFP8 layer [N, K]."""
    from vllm.config import get_current_vllm_config_or_none, set_current_vllm_config
    from vllm.model_executor.kernels.linear import init_mxfp8_linear_kernel

    try:
        if get_current_vllm_config_or_none() is not None:
            return type(init_mxfp8_linear_kernel(weight_shape=shape)).__name__
        with set_current_vllm_config(config):
            return type(init_mxfp8_linear_kernel(weight_shape=shape)).__name__
    except (NotImplementedError, ValueError) as error:
        return f"none: {error}"


def _quantization(config: "VllmConfig") -> str:
    """Dense and expert formats, such as `fp8 blocks 32x32, fp4 experts`."""
    quant, hf = config.quant_config, config.model_config.hf_config
    if quant is None:
        return "none"
    block = getattr(quant, "weight_block_size", None) or ()
    said = f"{quant.get_name()}, blocks {'x'.join(str(side) for side in block) or 'none'}"
    said += f", {getattr(hf, 'expert_dtype', 'fp4')} experts"
    algorithm = (getattr(hf, "quantization_config", None) or {}).get("moe_quant_algo")
    return said if not algorithm else f"{said} ({algorithm})"


def _quantization_override(arguments: Any) -> str | None:
    """Which sides of which layers vLLM's quantization_config sets, such as `moe.activation`."""
    if arguments is None:
        return None
    sides = [
        f"{kind}.{side}"
        for kind in ("linear", "moe")
        for side in ("weight", "activation")
        if getattr(getattr(arguments, kind), side, None) is not None
    ]
    return ", ".join([*sides, *(name for name in ("targets", "ignore") if getattr(arguments, name))]) or None


def _kv_transfer(config: "VllmConfig") -> str | None:
    transfer = config.kv_transfer_config
    if transfer is not None and transfer.kv_connector is not None:
        return str(transfer.kv_connector)
    return "HiSparse" if config.attention_config.hisparse_config is not None else None


def _changing_weights(config: "VllmConfig") -> str | None:
    """What moves or replaces weights after they are loaded, or None."""
    offload = config.offload_config
    if config.weight_transfer_config is not None:
        return "weight transfer"
    if offload.uva.cpu_offload_gb > 0 or offload.prefetch.offload_group_size > 0:
        return "weight offloading"
    return None


def _draft_layers(config: "VllmConfig") -> int:
    """The draft layers that are loaded beside the target's."""
    speculative = config.speculative_config
    if speculative is None or speculative.draft_model_config is None:
        return 0
    draft: Any = speculative.draft_model_config.hf_config
    named = getattr(draft, "n_mtp_layers", None) or getattr(draft, "num_nextn_predict_layers", None)
    return int(named or (3 if speculative.method == "dspark" else 0))
