"""The deployment check: every requirement of the executor in vLLM, as a row of one table.

Each rank evaluates all rows on its own facts; one MIN all-reduce makes all ranks agree, so that either every rank
builds the executor or every rank raises the same rows.
"""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specialized_decode.integration import contract
from specialized_decode.integration.facts import Deployment, Facts
from specialized_decode.integration.log import follow_vllm
from specialized_decode.runtime import DecodeConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

OPTION, BACKEND = "decode_backend", "latency_specialized"
TP_SIZES = (1, 2, 4, 8)
# The lowest and the highest minor version that kernels and peer memory were tested with.
TORCH = ((2, 11), (2, 14))
TRITON = ((3, 6), (3, 8))
# The version that vLLM 0.33.0 requires.
FLASHINFER = "0.7.2.post1"
ATTENTION_CLASSES = {"hopper": "DeepseekV4FlashMLAAttention", "blackwell": "DeepseekV4FlashInferMLAAttention"}
# What fp8_ds_mla may be called before the first layer resolves it; Blackwell's class keeps plain rows.
KV_CACHE_DTYPES = {"hopper": ("auto", "fp8", "fp8_ds_mla"), "blackwell": ("auto", "bfloat16", "fp8", "fp8_e4m3")}
MOE_BACKENDS = {"hopper": ("auto", "humming"), "blackwell": ("auto", "flashinfer_trtllm")}
QUANTIZATION = "deepseek_v4_fp8, blocks 32x32, fp4 experts"
GRAPH_MODES = ("FULL_AND_PIECEWISE", "FULL_DECODE_ONLY")


class UnsupportedDeployment(RuntimeError):
    """The executor was asked for and this deployment cannot run it; the message lists all that is missing."""


# What a row found, and whether that is enough.
Finding = tuple[str, bool]


@dataclass(frozen=True)
class Requirement:
    """One row: what is expected, why, how to satisfy it, and how to read it from the facts."""

    name: str
    expected: str
    remedy: str
    why: str
    find: Callable[[Facts], Finding]
    needs_configuration: bool = True


@dataclass(frozen=True)
class Row:
    """One requirement as a rank found it."""

    name: str
    ok: bool
    found: str
    expected: str
    remedy: str


def evaluate(facts: Facts) -> list[Row]:
    """Every row on these facts; without a configuration, those that need none. The order is the same on all ranks."""
    rows = []
    for requirement in REQUIREMENTS:
        if facts.deployment is None and requirement.needs_configuration:
            continue
        found, ok = requirement.find(facts)
        rows.append(Row(requirement.name, ok, found, requirement.expected, requirement.remedy))
    return rows


def missing(facts: Facts) -> list[Row]:
    """The rows that are not met."""
    return [row for row in evaluate(facts) if not row.ok]


def agree(rows: Sequence[Row], minimum: Callable[[list[int]], list[int]]) -> list[Row]:
    """The rows with `ok` as all ranks see it. `minimum`: element-wise MIN over the TP group, called once."""
    met = minimum([int(row.ok) for row in rows])
    return [
        row if row.ok == bool(everywhere) else replace(row, ok=False, found=f"{row.found} here, less on another rank")
        for row, everywhere in zip(rows, met, strict=True)
    ]


def refuse(rows: Sequence[Row]) -> None:
    """Raises UnsupportedDeployment, naming all rows that are not met, if there are any."""
    failed = [row for row in rows if not row.ok]
    if not failed:
        return
    lines = [
        f"{OPTION}={BACKEND} cannot run here: {len(failed)} of {len(rows)} requirements are not met.",
        *(f"  {row.name}: found {row.found}; expected {row.expected}. To satisfy: {row.remedy}." for row in failed),
        f"Without {OPTION} in --additional-config, or with {OPTION}=auto, vLLM runs its own layers.",
    ]
    raise UnsupportedDeployment("\n".join(lines))


def deployment_config(vllm_config: "VllmConfig") -> DecodeConfig:
    """Checks the deployment and returns the executor's configuration. Collective over vLLM's TP group.

    Raises UnsupportedDeployment on every rank when a row is not met on any.
    """
    follow_vllm()
    facts = Facts.gather(vllm_config)
    rows = agree(evaluate(facts), _tp_minimum)
    refuse(rows)
    assert facts.deployment is not None
    logger.info(
        "%s=%s: all %d requirements are met on %s; prepared weights may take %.2f GB of this GPU",
        *(OPTION, BACKEND, len(rows), facts.device.name, facts.deployment.prepared / 1e9),
    )
    return DecodeConfig(jit_warmup=vllm_config.kernel_config.enable_jit_warmup)


def _tp_minimum(values: list[int]) -> list[int]:
    """Element-wise MIN over vLLM's TP group, on the host."""
    import torch
    from torch.distributed import ReduceOp, all_reduce
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.int64)
    all_reduce(tensor, op=ReduceOp.MIN, group=group.cpu_group)
    return [int(value) for value in tensor]


def _configured(find: Callable[[Deployment], Finding]) -> Callable[[Facts], Finding]:
    """A row that reads vLLM's configuration alone."""

    @functools.wraps(find)
    def read(facts: Facts) -> Finding:
        assert facts.deployment is not None
        return find(facts.deployment)

    return read


def _minor(version: str | None, tested: tuple[tuple[int, int], tuple[int, int]]) -> Finding:
    if version is None:
        return "none", False
    major, minor, *_ = version.split("+")[0].split(".")
    return version, tested[0] <= (int(major), int(minor)) <= tested[1]


def _vllm(facts: Facts) -> Finding:
    found, allowed = facts.software.vllm, facts.software.allowed_vllm
    if found is None:
        return "none", False
    if found != contract.TESTED and found == allowed:
        return f"{found}, allowed by {contract.ALLOW}", True
    return found if allowed is None else f"{found}, with {contract.ALLOW}={allowed}", found == contract.TESTED


def _internals(facts: Facts) -> Finding:
    software = facts.software
    if software.internals:
        return "\n".join(software.internals), False
    read = software.vllm is not None and software.vllm in (contract.TESTED, software.allowed_vllm)
    return "as tested" if read else "not read", True


def _flashinfer(facts: Facts) -> Finding:
    found = facts.software.flashinfer
    if facts.device.family != "blackwell":
        return f"{found or 'none'}, not used on this GPU", True
    return found or "none", found == FLASHINFER


def _gpu(facts: Facts) -> Finding:
    device = facts.device
    if device.capability is None:
        return device.name, False
    return f"{device.name} ({'.'.join(map(str, device.capability))})", device.family is not None


def _tensor_parallel(facts: Facts) -> Finding:
    return str(facts.tensor_parallel), facts.tensor_parallel in TP_SIZES


def _peer_access(facts: Facts) -> Finding:
    found = facts.device.unreachable
    if found is not None:
        return found, False
    return "one rank" if facts.tensor_parallel == 1 else f"{facts.tensor_parallel} GPUs that reach each other", True


def _of_family(value: str, allowed: Mapping[str, tuple[str, ...]], facts: Facts) -> Finding:
    """A value that has to be among those of the GPU's family; any family's where the GPU has none."""
    family = facts.device.family
    values = allowed[family] if family is not None else tuple(x for few in allowed.values() for x in few)
    return value, value in values


def _attention_class(facts: Facts) -> Finding:
    assert facts.deployment is not None
    classes = {family: (name,) for family, name in ATTENTION_CLASSES.items()}
    return _of_family(facts.deployment.attention_class, classes, facts)


def _kv_cache_dtype(facts: Facts) -> Finding:
    assert facts.deployment is not None
    return _of_family(facts.deployment.kv_cache_dtype, KV_CACHE_DTYPES, facts)


def _dense_backend(facts: Facts) -> Finding:
    assert facts.deployment is not None
    found = facts.deployment.linear_kernel
    humming = found == "HummingMxfp8LinearKernel"
    return found, humming if facts.device.family == "hopper" else not found.startswith("none")


def _moe_backend(facts: Facts) -> Finding:
    assert facts.deployment is not None
    found, ok = _of_family(facts.deployment.moe_backend, MOE_BACKENDS, facts)
    if facts.device.family == "hopper" and not facts.software.humming:
        return f"{found}, Humming not installed", False
    return found, ok


def _memory(facts: Facts) -> Finding:
    deployment, device = facts.deployment, facts.device
    assert deployment is not None
    budget = min(device.free_memory, int(deployment.memory_fraction * device.total_memory))
    found = f"{deployment.weights / 1e9:.2f} GB of weights and {deployment.prepared / 1e9:.2f} GB of prepared weights"
    return f"{found} in {budget / 1e9:.2f} GB", deployment.weights + deployment.prepared <= budget


@_configured
def _contexts(deployment: Deployment) -> Finding:
    prefill, decode = deployment.prefill_context_parallel, deployment.decode_context_parallel
    return f"prefill {prefill}, decode {decode}", (prefill, decode) == (1, 1)


@_configured
def _quantization(deployment: Deployment) -> Finding:
    return deployment.quantization, deployment.quantization == QUANTIZATION


@_configured
def _humming_settings(deployment: Deployment) -> Finding:
    found = deployment.humming_settings
    return (", ".join(found), False) if found else ("none", True)


@_configured
def _graphs(deployment: Deployment) -> Finding:
    sizes = deployment.capture_sizes
    largest = f"up to {max(sizes)} rows" if sizes else "no capture sizes"
    return f"{deployment.cudagraph_mode}, {largest}", deployment.cudagraph_mode in GRAPH_MODES and bool(sizes)


def _is(read: Callable[[Deployment], int | str], value: int | str) -> Callable[[Facts], Finding]:
    return _configured(lambda deployment: (str(read(deployment)), read(deployment) == value))


def _off(read: Callable[[Deployment], bool]) -> Callable[[Facts], Finding]:
    return _configured(lambda deployment: ("on" if read(deployment) else "off", not read(deployment)))


def _absent(read: Callable[[Deployment], str | None]) -> Callable[[Facts], Finding]:
    return _configured(lambda deployment: (read(deployment) or "none", read(deployment) is None))


def _span(tested: tuple[tuple[int, int], tuple[int, int]]) -> str:
    low, high = (".".join(map(str, version)) for version in tested)
    return f"{low} to {high}"


REQUIREMENTS: tuple[Requirement, ...] = (
    Requirement(
        "vLLM",
        f"{contract.TESTED}",
        f"pip install vllm=={contract.TESTED}, or set {contract.ALLOW} to the installed version to try it",
        "The executor takes the place of parts of vLLM that promise no stability between versions.",
        _vllm,
        needs_configuration=False,
    ),
    Requirement(
        "vLLM internals",
        "every internal that is used, as in the tested version",
        f"pip install vllm=={contract.TESTED}",
        "Read when another version is allowed: what differs would fail later, or give wrong values.",
        _internals,
        needs_configuration=False,
    ),
    Requirement(
        "PyTorch",
        _span(TORCH),
        "install the PyTorch that vLLM requires",
        "Peer memory comes from PyTorch's symmetric memory, whose interface is not stable.",
        lambda facts: _minor(facts.software.torch, TORCH),
        needs_configuration=False,
    ),
    Requirement(
        "Triton",
        _span(TRITON),
        "install the Triton that PyTorch requires",
        "Kernels are compiled and tested with these.",
        lambda facts: _minor(facts.software.triton, TRITON),
        needs_configuration=False,
    ),
    Requirement(
        "FlashInfer",
        f"{FLASHINFER} on Blackwell",
        f"pip install flashinfer-python=={FLASHINFER}",
        "Sparse attention on Blackwell is FlashInfer's. Hopper does not use it.",
        _flashinfer,
        needs_configuration=False,
    ),
    Requirement(
        "GPU",
        "Hopper (9.x) or Blackwell (10.x)",
        "run on an H100, H200 or B200, with a driver that torch can use",
        "Layouts and kernels differ by family. Blackwell is compiled and checked, and has not been run.",
        _gpu,
        needs_configuration=False,
    ),
    Requirement(
        "Tensor parallelism",
        ", ".join(map(str, TP_SIZES[:-1])) + f" or {TP_SIZES[-1]}",
        "set --tensor-parallel-size to one of them",
        "Heads, output groups and expert widths divide by these.",
        _tensor_parallel,
        needs_configuration=False,
    ),
    Requirement(
        "Peer access",
        "every rank's GPU reaches every other's, on one node",
        "use GPUs of one NVLink domain, all visible to every rank, or fewer of them",
        "Ranks store their partial sums into each other's memory.",
        _peer_access,
        needs_configuration=False,
    ),
    Requirement(
        "Model",
        "DeepseekV41ForCausalLM",
        "serve a DeepSeek-V4.1 model",
        "The executor knows this model's layers only.",
        _is(lambda deployment: deployment.architecture, "DeepseekV41ForCausalLM"),
    ),
    Requirement(
        "Model Runner V2",
        "on",
        "unset VLLM_USE_V2_MODEL_RUNNER, and see vLLM's log for the option that V2 lacks",
        "Steps are planned, and counted, where V2 captures its graphs and prepares its attention.",
        _configured(lambda deployment: ("on" if deployment.runner_v2 else "off", deployment.runner_v2)),
    ),
    Requirement(
        "Pipeline parallelism",
        "1",
        "remove --pipeline-parallel-size",
        "A step runs all layers, from the embedding to the last norm.",
        _is(lambda deployment: deployment.pipeline_parallel, 1),
    ),
    Requirement(
        "Data parallelism",
        "1",
        "remove --data-parallel-size, and run one server for each replica",
        "Replicas would have to agree on every step.",
        _is(lambda deployment: deployment.data_parallel, 1),
    ),
    Requirement(
        "Expert parallelism",
        "off",
        "remove --enable-expert-parallel and --enable-eplb",
        "Experts are split by width over the ranks, not by number.",
        _off(lambda deployment: deployment.expert_parallel),
    ),
    Requirement(
        "Context parallelism",
        "prefill 1, decode 1",
        "remove --prefill-context-parallel-size and --decode-context-parallel-size",
        "Every rank holds the whole context.",
        _contexts,
    ),
    Requirement(
        "Micro-batching",
        "off",
        "remove --enable-dbo and --ubatch-size",
        "A step is one batch.",
        _off(lambda deployment: deployment.ubatching),
    ),
    Requirement(
        "Attention class",
        " or ".join(f"{name} on {family.capitalize()}" for family, name in ATTENTION_CLASSES.items()),
        "remove --attention-backend on Hopper; set it to FLASHINFER_MLA_SPARSE_DSV41 on Blackwell",
        "Caches and metadata are read in this class's layout.",
        _attention_class,
    ),
    Requirement(
        "KV cache dtype",
        "; ".join(f"{', '.join(names)} on {family.capitalize()}" for family, names in KV_CACHE_DTYPES.items()),
        "remove --kv-cache-dtype",
        "The executor writes and reads the records of the attention class.",
        _kv_cache_dtype,
    ),
    Requirement(
        "Checkpoint format",
        QUANTIZATION,
        "serve a model in the release's format, without --quantization",
        "Weights are read as FP8 in 32x32 blocks and FP4 experts.",
        _quantization,
    ),
    Requirement(
        "Quantization overrides",
        "none",
        "remove --quantization-config",
        "An override of activations or weights changes how the backends lay experts and scales out.",
        _absent(lambda deployment: deployment.quantization_override),
    ),
    Requirement(
        "Dense backend",
        "HummingMxfp8LinearKernel on Hopper; any that vLLM selects on Blackwell",
        "remove --linear-backend, its per-format overrides and VLLM_DISABLED_KERNELS; pip install humming-kernels",
        "A second copy of dense weights is taken around this backend's repacking.",
        _dense_backend,
    ),
    Requirement(
        "MoE backend",
        "; ".join(f"{', '.join(names)} on {family.capitalize()}" for family, names in MOE_BACKENDS.items()),
        "remove --moe-backend; pip install humming-kernels on Hopper",
        "Routed experts are never copied: they are read in the layout of this backend.",
        _moe_backend,
    ),
    Requirement(
        "Humming settings",
        "none",
        "unset them",
        "They change Humming's activations, its layouts or its sums.",
        _humming_settings,
    ),
    Requirement(
        "CUDA graphs",
        f"{' or '.join(GRAPH_MODES)}, with capture sizes",
        "remove --enforce-eager and cudagraph_mode from --compilation-config",
        "Steps run in full graphs that hold nothing but decodes. Mode FULL puts prefills into the same graphs.",
        _graphs,
    ),
    Requirement(
        "Compilation",
        "NONE",
        "remove mode from --compilation-config, and VLLM_USE_BREAKABLE_CUDAGRAPH=0",
        "A compiled model runs no layer of its own, nor ours.",
        _is(lambda deployment: deployment.compilation_mode, "NONE"),
    ),
    Requirement(
        "Sleep mode",
        "off",
        "remove --enable-sleep-mode",
        "Prepared weights and the mailbox would not survive it.",
        _off(lambda deployment: deployment.sleep_mode),
    ),
    Requirement(
        "LoRA",
        "off",
        "remove --enable-lora",
        "Adapters change the layers that prepared weights were taken from.",
        _off(lambda deployment: deployment.lora),
    ),
    Requirement(
        "KV transfer",
        "none",
        "remove --kv-transfer-config, --kv-offloading-size and hisparse_config",
        "A connector reads and writes caches between layers, whose hooks a step does not call.",
        _absent(lambda deployment: deployment.kv_transfer),
    ),
    Requirement(
        "Batch invariance",
        "off",
        "unset VLLM_BATCH_INVARIANT",
        "The executor's kernels depend on the number of rows.",
        _off(lambda deployment: deployment.batch_invariant),
    ),
    Requirement(
        "Fixed weights",
        "none",
        "remove --weight-transfer-config, --cpu-offload-gb and --offload-group-size",
        "Weights that move or change after loading leave prepared copies behind.",
        _absent(lambda deployment: deployment.changing_weights),
    ),
    Requirement(
        "Prepared weights",
        "room for the weights and the prepared weights",
        "free the GPU, raise --gpu-memory-utilization, or use a larger tensor-parallel size",
        "What the executor's own ops and kernels read is held a second time, in their form.",
        _memory,
    ),
)
