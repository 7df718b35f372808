"""The contract: every internal of vLLM that this package uses, as data, and its comparison with the installed vLLM.

vLLM promises no stability for any of them, so only the tested version is accepted, unless another is allowed by name.
`check` reads vLLM's sources and objects; it needs no GPU and starts nothing.
"""

import ast
import dataclasses
import functools
import importlib
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any

TESTED = "0.33.0"
# Set to the installed version, it allows a vLLM other than TESTED.
ALLOW = "SPECIALIZED_DECODE_ALLOW_VLLM"

MODEL = "vllm.models.deepseek_v41.nvidia.model"


@dataclass(frozen=True)
class Internal:
    """One internal of vLLM, and what is relied on.

    name: qualified within its module, "" for the module itself. signature: parameters and defaults, without
    annotations. attributes: of a class, its instances or an enum: methods, fields, or what its methods assign to self.
    calls: what a function calls, as written. value: what it equals.
    """

    module: str
    name: str
    signature: str | None = None
    attributes: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    value: object = None

    def __str__(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module


CONTRACT: list[Internal] = [
    # Where the executor takes over.
    Internal(MODEL, "specialized_decode_config", signature="(vllm_config)"),
    Internal(
        MODEL,
        "DeepseekV41LLMForCausalLM.__init__",
        signature="(self, *, vllm_config, prefix='')",
        calls=("specialized_decode_config",),
    ),
    Internal(
        MODEL,
        "DeepseekV41LLMForCausalLM",
        attributes=("model", "lm_head", "specialized_decode", "specialized_decode_config"),
    ),
    Internal(MODEL, "DeepseekV41LLMForCausalLM.build_specialized_decode", signature="(self)"),
    Internal(MODEL, "DeepseekV41LLMForCausalLM.get_model_state_cls", signature="(self)"),
    Internal(
        MODEL,
        "DeepseekV41LLMForCausalLM.forward",
        signature="(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None, "
        "lookback_token_ids=None)",
        calls=("decode.plan", "self.model"),
    ),
    # What the deployment check reads.
    Internal(MODEL, "_select_dsv4_attn_cls", signature="(vllm_config)"),
    Internal("vllm.models.deepseek_v41.nvidia.flashmla", "DeepseekV4FlashMLAAttention"),
    Internal("vllm.models.deepseek_v41.nvidia.flashinfer_sparse", "DeepseekV4FlashInferMLAAttention"),
    Internal(
        "vllm.config",
        "VllmConfig",
        attributes=(
            *("model_config", "cache_config", "parallel_config", "compilation_config", "kernel_config"),
            *("attention_config", "offload_config", "quant_config", "lora_config", "speculative_config"),
            *("kv_transfer_config", "weight_transfer_config", "additional_config", "instance_id"),
            "use_v2_model_runner",
        ),
    ),
    Internal(
        "vllm.config",
        "ModelConfig",
        attributes=("architectures", "hf_config", "hf_text_config", "quantization_config", "enable_sleep_mode"),
    ),
    Internal(
        "vllm.config",
        "ParallelConfig",
        attributes=(
            *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "nnodes"),
            *("prefill_context_parallel_size", "decode_context_parallel_size"),
            *("enable_expert_parallel", "enable_eplb", "use_ubatching"),
        ),
    ),
    Internal("vllm.config", "CacheConfig", attributes=("cache_dtype", "gpu_memory_utilization")),
    Internal("vllm.config", "CompilationConfig", attributes=("mode", "cudagraph_mode", "cudagraph_capture_sizes")),
    Internal("vllm.config", "CUDAGraphMode", attributes=("FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "NONE")),
    Internal("vllm.config", "CompilationMode", attributes=("NONE", "VLLM_COMPILE")),
    Internal("vllm.config.kernel", "KernelConfig", attributes=("moe_backend", "enable_jit_warmup")),
    Internal("vllm.config.attention", "AttentionConfig", attributes=("backend", "hisparse_config")),
    Internal("vllm.config.kv_transfer", "KVTransferConfig", attributes=("kv_connector",)),
    Internal("vllm.config.offload", "OffloadConfig", attributes=("uva", "prefetch")),
    Internal("vllm.config.offload", "UVAOffloadConfig", attributes=("cpu_offload_gb",)),
    Internal("vllm.config.offload", "PrefetchOffloadConfig", attributes=("offload_group_size",)),
    Internal("vllm.config.quantization", "QuantizationConfigArgs", attributes=("linear", "moe", "targets", "ignore")),
    Internal("vllm.config.quantization", "QuantSpec", attributes=("weight", "activation")),
    Internal("vllm.config.speculative", "SpeculativeConfig", attributes=("method", "draft_model_config")),
    Internal("vllm.config", "get_current_vllm_config_or_none", signature="()"),
    Internal("vllm.config", "set_current_vllm_config", signature="(vllm_config, check_compile=False, prefix=None)"),
    Internal(
        "vllm.model_executor.kernels.linear",
        "init_mxfp8_linear_kernel",
        signature="(*, weight_shape, bmm_batch_size=None)",
    ),
    Internal("vllm.model_executor.kernels.linear.mxfp8.humming", "HummingMxfp8LinearKernel"),
    Internal(
        "vllm.model_executor.layers.fused_moe.oracle.mxfp4",
        "_get_priority_backends",
        signature="()",
        calls=("prioritize_humming",),
    ),
    Internal(
        "vllm.models.deepseek_v41.quant_config", "DeepseekV4FP8Config", attributes=("weight_block_size", "get_name")
    ),
    Internal(
        "vllm.envs",
        "",
        attributes=(
            *("VLLM_BATCH_INVARIANT", "VLLM_LOG_STATS_INTERVAL", "VLLM_HUMMING_INPUT_QUANT_CONFIG"),
            *("VLLM_HUMMING_ONLINE_QUANT_CONFIG", "VLLM_HUMMING_MOE_GEMM_TYPE", "VLLM_HUMMING_USE_F16_ACCUM"),
        ),
    ),
    Internal("vllm.distributed", "get_tp_group", signature="()"),
    Internal("vllm.distributed.parallel_state", "GroupCoordinator", attributes=("cpu_group", "world_size")),
    # What the counters of steps use.
    Internal(
        "vllm.v1.metrics.loggers",
        "PrometheusStatLogger.__init__",
        signature="(self, vllm_config, engine_indexes=None)",
    ),
    Internal("vllm.v1.metrics.loggers", "StatLoggerManager.__init__", calls=("PrometheusStatLogger",)),
    Internal("vllm.v1.metrics.prometheus", "get_prometheus_registry", calls=("multiprocess.MultiProcessCollector",)),
]


def check(contract: Sequence[Internal] | None = None) -> list[str]:
    """How the installed vLLM deviates, a line each; none where it is as tested. By default of all of CONTRACT."""
    return [line for internal in (CONTRACT if contract is None else contract) for line in _deviations(internal)]


def _deviations(internal: Internal) -> Iterator[str]:
    try:
        found = _resolve(internal.module, internal.name)
    except (AttributeError, ImportError) as error:
        yield f"{internal}: not found ({error})"
        return
    if internal.signature is not None:
        signature = _signature(found)
        if signature != internal.signature:
            yield f"{internal}: found signature {signature}, expected {internal.signature}"
    if internal.attributes:
        absent = sorted(set(internal.attributes) - _attributes(found))
        if absent:
            yield f"{internal}: has no {', '.join(absent)}"
    if internal.calls:
        uncalled = sorted(set(internal.calls) - set(_calls(found)))
        if uncalled:
            yield f"{internal}: does not call {', '.join(uncalled)}"
    if internal.value is not None and found != internal.value:
        yield f"{internal}: found {found!r}, expected {internal.value!r}"


def _resolve(module: str, name: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in name.split(".") if name else ():
        found = getattr(found, part)
    return found


def _signature(found: Any) -> str:
    """Parameters and defaults without annotations, such as (self, x, *, y=1)."""
    bare = inspect.Signature.empty
    parameters = inspect.signature(inspect.unwrap(found)).parameters.values()
    return str(inspect.Signature([parameter.replace(annotation=bare) for parameter in parameters]))


def _attributes(found: Any) -> set[str]:
    """What an object, the instances of a class, or a module have."""
    if isinstance(found, ModuleType):
        # vllm.envs answers for its variables in __getattr__, and lists them.
        return set(dir(found)) | set(getattr(found, "environment_variables", ()))
    if not isinstance(found, type):
        return set(dir(found))
    names = set(dir(found)) | set(getattr(found, "__annotations__", ()))
    if issubclass(found, Enum):
        return names | set(found.__members__)
    if dataclasses.is_dataclass(found):
        names |= {field.name for field in dataclasses.fields(found)}
    for base in found.__mro__:
        if base.__module__.startswith("vllm."):
            names |= _assigned(base)
    return names


@functools.cache
def _assigned(cls: type) -> frozenset[str]:
    """The names that a class's own methods assign to self, or register as parameters and buffers."""
    names = set()
    for node in ast.walk(_parse(cls)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            names.add(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_self(node.func.value):
            registers = node.func.attr in ("register_buffer", "register_parameter", "register_module")
            if registers and node.args and isinstance(node.args[0], ast.Constant):
                names.add(str(node.args[0].value))
    return frozenset(names)


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _calls(found: Any) -> set[str]:
    return {ast.unparse(node.func) for node in ast.walk(_parse(inspect.unwrap(found))) if isinstance(node, ast.Call)}


def _parse(found: Any) -> ast.Module:
    return ast.parse(textwrap.dedent(inspect.getsource(found)))
