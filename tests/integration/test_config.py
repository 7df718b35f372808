"""The deployment check: every row fails on its own, on vLLM's own configuration, and says what and how."""

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from specialized_decode.integration import config as check
from specialized_decode.integration.facts import Deployment, Device, Facts, Software
from tests.integration.platform import H200Host

Patch = pytest.MonkeyPatch
Build = Callable[..., Any]

SOFTWARE = Software(
    vllm="0.33.0",
    allowed_vllm=None,
    internals=(),
    torch="2.14.0+cu130",
    triton="3.8.0",
    flashinfer="0.7.2.post1",
    humming=True,
)
H200 = Device("NVIDIA H200", (9, 0), None, 140 << 30, 141 << 30)
B200 = Device("NVIDIA B200", (10, 0), None, 178 << 30, 180 << 30)
FLASHINFER_CLASS = {"attention_backend": "FLASHINFER_MLA_SPARSE_DSV41"}


@pytest.fixture(autouse=True)
def environment(monkeypatch: Patch) -> None:
    """vLLM takes a machine without a driver for one without Triton, and then does not choose V2."""
    import vllm.config.vllm

    monkeypatch.setattr(vllm.config.vllm, "HAS_TRITON", True)
    # What vLLM sets itself while it builds a configuration is taken back after the test.
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")


def facts(configuration: Any, device: Device = H200, software: Software = SOFTWARE) -> Facts:
    size = configuration.parallel_config.tensor_parallel_size
    return Facts(software, device, size, Deployment.gather(configuration))


def failed(found: Facts) -> dict[str, str]:
    """What was found, by the names of the rows that are not met."""
    return {row.name: row.found for row in check.missing(found)}


def message(found: Facts) -> str:
    with pytest.raises(check.UnsupportedDeployment) as raised:
        check.refuse(check.evaluate(found))
    return str(raised.value)


@dataclass(frozen=True)
class Case:
    """A deployment that lacks one requirement: arguments of vLLM, variables, or other facts; and what is found."""

    row: str
    found: str
    arguments: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    software: dict[str, Any] = field(default_factory=dict)
    device: Device = H200
    # For what vLLM itself refuses for this model, in every configuration that it builds.
    deployment: dict[str, Any] = field(default_factory=dict)


CASES = (
    Case("vLLM", "none", software={"vllm": None}),
    Case("vLLM", "0.32.1", software={"vllm": "0.32.1"}),
    Case("vLLM", "0.33.0.post1", software={"vllm": "0.33.0.post1"}),
    Case(
        "vLLM",
        "0.34.0, with SPECIALIZED_DECODE_ALLOW_VLLM=0.33.1",
        software={"vllm": "0.34.0", "allowed_vllm": "0.33.1"},
    ),
    Case(
        "vLLM internals",
        "vllm.x: not found\nvllm.y: has no z",
        software={
            "vllm": "0.34.0",
            "allowed_vllm": "0.34.0",
            "internals": ("vllm.x: not found", "vllm.y: has no z"),
        },
    ),
    Case("PyTorch", "2.10.1", software={"torch": "2.10.1"}),
    Case("PyTorch", "2.15.0+cu130", software={"torch": "2.15.0+cu130"}),
    Case("PyTorch", "3.11.0", software={"torch": "3.11.0"}),
    Case("Triton", "3.5.1", software={"triton": "3.5.1"}),
    Case("Triton", "3.9.0", software={"triton": "3.9.0"}),
    Case("Triton", "none", software={"triton": None}),
    Case("FlashInfer", "0.7.2", FLASHINFER_CLASS, software={"flashinfer": "0.7.2"}, device=B200),
    Case("FlashInfer", "none", FLASHINFER_CLASS, software={"flashinfer": None}, device=B200),
    Case("GPU", "NVIDIA A100 (8.0)", device=replace(H200, name="NVIDIA A100", capability=(8, 0))),
    Case("GPU", "NVIDIA RTX PRO 6000 (12.0)", device=replace(H200, name="NVIDIA RTX PRO 6000", capability=(12, 0))),
    Case("GPU", "none", device=replace(H200, name="none", capability=None)),
    Case("Tensor parallelism", "16", {"tensor_parallel_size": 16, "hf_overrides": {"num_attention_heads": 64}}),
    Case(
        "Peer access",
        "none from GPU 0 to GPU 1",
        {"tensor_parallel_size": 2},
        device=replace(H200, unreachable="none from GPU 0 to GPU 1"),
    ),
    Case("Model", "DeepseekV4ForCausalLM", deployment={"architecture": "DeepseekV4ForCausalLM"}),
    Case("Model Runner V2", "off", variables={"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    Case("Pipeline parallelism", "2", {"pipeline_parallel_size": 2}),
    Case("Data parallelism", "2", {"data_parallel_size": 2}),
    Case("Expert parallelism", "on", {"enable_expert_parallel": True, "tensor_parallel_size": 2}),
    Case("Context parallelism", "prefill 2, decode 1", {"prefill_context_parallel_size": 2}),
    Case(
        "Context parallelism",
        "prefill 1, decode 2",
        {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
    ),
    Case("Micro-batching", "on", deployment={"ubatching": True}),
    Case("Attention class", "DeepseekV4FlashInferMLAAttention", FLASHINFER_CLASS),
    Case("Attention class", "DeepseekV4MegaAttnAttention", {"attention_backend": "FLASHMLA_MEGA_ATTN_DSV41"}),
    Case("Attention class", "DeepseekV4FlashMLAAttention", device=B200),
    Case(
        "Attention class",
        "none: FLASHINFER_MLA_SPARSE is not a DeepSeek V4.1 attention backend. Use FLASHINFER_MLA_SPARSE_DSV41 for "
        "DeepSeek V4.1 FlashInfer sparse MLA.",
        {"attention_backend": "FLASHINFER_MLA_SPARSE"},
    ),
    Case("KV cache dtype", "bfloat16", {"kv_cache_dtype": "bfloat16"}),
    Case("KV cache dtype", "nvfp4_ds_mla", {"kv_cache_dtype": "nvfp4_ds_mla"}),
    Case("KV cache dtype", "fp8_ds_mla", {"kv_cache_dtype": "fp8_ds_mla", **FLASHINFER_CLASS}, device=B200),
    Case("Checkpoint format", "none", deployment={"quantization": "none"}),
    Case(
        "Checkpoint format",
        "deepseek_v4_fp8, blocks 32x32, fp8 experts",
        {"hf_overrides": {"expert_dtype": "fp8"}},
    ),
    Case("Quantization overrides", "moe.activation", {"quantization_config": {"moe": {"activation": "mxfp8"}}}),
    Case("Quantization overrides", "linear.weight, moe.weight", {"quantization": "fp8_per_tensor"}),
    Case("Dense backend", "MarlinMxfp8LinearKernel", {"linear_backend": "marlin"}),
    Case(
        "Dense backend",
        "MarlinMxfp8LinearKernel",
        {"kernel_config": {"linear_backend_per_quant": {"mxfp8": "marlin"}}},
    ),
    Case("Dense backend", "MarlinMxfp8LinearKernel", variables={"VLLM_DISABLED_KERNELS": "HummingMxfp8LinearKernel"}),
    Case("MoE backend", "marlin", {"moe_backend": "marlin"}),
    Case("MoE backend", "auto, Humming not installed", software={"humming": False}),
    Case("MoE backend", "humming", {"moe_backend": "humming", **FLASHINFER_CLASS}, device=B200),
    *(
        Case("Humming settings", f"{name}={value}", variables={name: value})
        for name, value in {
            "VLLM_HUMMING_INPUT_QUANT_CONFIG": '{"dtype": "float8e4m3"}',
            "VLLM_HUMMING_ONLINE_QUANT_CONFIG": '{"dtype": "float8e4m3"}',
            "VLLM_HUMMING_MOE_GEMM_TYPE": "grouped",
            "VLLM_HUMMING_USE_F16_ACCUM": "1",
        }.items()
    ),
    Case("CUDA graphs", "NONE, no capture sizes", {"enforce_eager": True}),
    Case("CUDA graphs", "PIECEWISE, up to 256 rows", {"compilation_config": {"cudagraph_mode": "PIECEWISE"}}),
    Case("CUDA graphs", "FULL, up to 256 rows", {"compilation_config": {"cudagraph_mode": "FULL"}}),
    Case("Compilation", "VLLM_COMPILE", variables={"VLLM_USE_BREAKABLE_CUDAGRAPH": "0"}),
    Case("Sleep mode", "on", {"enable_sleep_mode": True}),
    Case("LoRA", "on", deployment={"lora": True}),
    Case("KV transfer", "OffloadingConnector", {"kv_offloading_size": 1}),
    Case("KV transfer", "HiSparse", {"attention_config": {"hisparse_config": {}}}),
    Case("Batch invariance", "on", variables={"VLLM_BATCH_INVARIANT": "1"}),
    Case("Fixed weights", "weight offloading", {"cpu_offload_gb": 1}),
    Case("Fixed weights", "weight transfer", {"weight_transfer_config": {"backend": "nccl"}}),
    Case(
        "Prepared weights",
        "1.05 GB of weights and 0.02 GB of prepared weights in 1.00 GB",
        device=replace(H200, free_memory=1_000_000_000),
        deployment={"weights": 1_050_000_000, "prepared": 20_000_000},
    ),
    Case(
        "Prepared weights",
        "98.00 GB of weights and 3.00 GB of prepared weights in 100.00 GB",
        {"gpu_memory_utilization": 0.5},
        device=replace(H200, free_memory=190_000_000_000, total_memory=200_000_000_000),
        deployment={"weights": 98_000_000_000, "prepared": 3_000_000_000},
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.row}: {case.found.splitlines()[0][:40]}")
def test_a_row_fails_alone_and_says_so(engine_config: Build, monkeypatch: Patch, case: Case) -> None:
    for name, value in case.variables.items():
        monkeypatch.setenv(name, value)
    found = facts(engine_config(**case.arguments), case.device, replace(SOFTWARE, **case.software))
    assert found.deployment is not None
    found = replace(found, deployment=replace(found.deployment, **case.deployment))
    assert failed(found) == {case.row: case.found}

    requirement = next(requirement for requirement in check.REQUIREMENTS if requirement.name == case.row)
    lines = message(found).split("\n")
    count = len(check.REQUIREMENTS)
    assert lines[0] == f"decode_backend=latency_specialized cannot run here: 1 of {count} requirements are not met."
    said = f"  {case.row}: found {case.found}; expected {requirement.expected}. To satisfy: {requirement.remedy}."
    assert "\n".join(lines[1:-1]) == said
    assert lines[-1].endswith("vLLM runs its own layers.")


def test_every_row_is_made_to_fail() -> None:
    assert {case.row for case in CASES} == {requirement.name for requirement in check.REQUIREMENTS}


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"tensor_parallel_size": 8, "hf_overrides": {"num_attention_heads": 64}},
        {"kv_cache_dtype": "fp8"},
        {"moe_backend": "humming", "linear_backend": "humming"},
        {"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}},
        {"attention_backend": "FLASHMLA_SPARSE_DSV41"},
        {"speculative_config": {"method": "dspark", "num_speculative_tokens": 5}},
        {"load_format": "dummy", "enable_prefix_caching": False},
    ],
    ids=str,
)
def test_what_is_supported(engine_config: Build, arguments: dict[str, Any]) -> None:
    found = facts(engine_config(**arguments))
    assert failed(found) == {}
    check.refuse(check.evaluate(found))


def test_blackwell(engine_config: Build, monkeypatch: Patch) -> None:
    """vLLM's own choice there is mega attention; the executor takes FlashInfer's."""
    monkeypatch.setattr(H200Host, "capability", (10, 0))
    found = facts(engine_config(**FLASHINFER_CLASS), B200)
    assert failed(found) == {}
    rows = {row.name: row.found for row in check.evaluate(found)}
    assert rows["Attention class"] == "DeepseekV4FlashInferMLAAttention"
    assert "Humming" not in rows["Dense backend"]


def test_what_a_plain_serve_reports(engine_config: Build) -> None:
    rows = {row.name: row.found for row in check.evaluate(facts(engine_config()))}
    assert list(rows) == [requirement.name for requirement in check.REQUIREMENTS]
    assert rows["Attention class"] == "DeepseekV4FlashMLAAttention"
    assert rows["Dense backend"] == "HummingMxfp8LinearKernel"
    assert rows["CUDA graphs"] == "FULL_AND_PIECEWISE, up to 256 rows"
    assert rows["FlashInfer"] == "0.7.2.post1, not used on this GPU"
    assert rows["Peer access"] == "one rank"


def test_another_version_that_is_allowed(engine_config: Build) -> None:
    software = replace(SOFTWARE, vllm="0.34.0", allowed_vllm="0.34.0")
    found = facts(engine_config(), software=software)
    assert failed(found) == {}
    rows = {row.name: row.found for row in check.evaluate(found)}
    assert rows["vLLM"] == "0.34.0, allowed by SPECIALIZED_DECODE_ALLOW_VLLM"
    assert rows["vLLM internals"] == "as tested"
    found = replace(found, software=replace(software, allowed_vllm=None))
    assert {row.name: row.found for row in check.evaluate(found)}["vLLM internals"] == "not read"


def test_all_that_is_missing_at_once(engine_config: Build) -> None:
    found = facts(engine_config(enforce_eager=True, enable_sleep_mode=True), replace(H200, capability=(8, 0)))
    names = ["GPU", "CUDA graphs", "Sleep mode"]
    assert list(failed(found)) == names
    assert re.findall(r"^  (.+?): found", message(found), flags=re.MULTILINE) == names


def test_rows_that_need_no_configuration() -> None:
    """What `doctor` prints where there is no model to configure."""
    rows = check.evaluate(Facts(SOFTWARE, H200, 3, None))
    names = "vLLM, vLLM internals, PyTorch, Triton, FlashInfer, GPU, Tensor parallelism, Peer access"
    assert ", ".join(row.name for row in rows) == names
    assert [row.name for row in rows if not row.ok] == ["Tensor parallelism"]


def test_installed_software() -> None:
    """In an environment made for the tested version."""
    found = Software.gather()
    assert (found.vllm, found.internals) == ("0.33.0", ())
    assert failed(Facts(found, H200, 1, None)) == {}


# What the model's constructor calls.


@pytest.fixture
def one_h200(monkeypatch: Patch) -> None:
    """A rank of one, whose log is put back where it was."""
    monkeypatch.setattr(Device, "gather", lambda size, nodes=1, ranks=(): H200)
    monkeypatch.setattr(check, "_tp_minimum", lambda values: values)
    ours = logging.getLogger("specialized_decode")
    monkeypatch.setattr(ours, "parent", ours.parent)
    monkeypatch.setattr(ours, "level", ours.level)


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.mark.usefixtures("one_h200")
def test_deployment_config(engine_config: Build, monkeypatch: Patch) -> None:
    """What it says goes to vLLM's log."""
    configuration = engine_config()
    theirs, seen = logging.getLogger("vllm"), _Lines()
    monkeypatch.setattr(theirs, "handlers", [seen])
    monkeypatch.setattr(theirs, "level", logging.INFO)
    found = check.deployment_config(configuration)
    assert (found.autotune, found.jit_warmup, found.kernels) == (False, True, frozenset())
    count, prepared = len(check.REQUIREMENTS), Deployment.gather(configuration).prepared
    (line,) = [line for line in seen.lines if line.startswith("decode_backend")]
    assert line == (
        f"decode_backend=latency_specialized: all {count} requirements are met on NVIDIA H200; "
        f"prepared weights may take {prepared / 1e9:.2f} GB of this GPU"
    )


@pytest.mark.usefixtures("one_h200")
def test_deployment_config_refuses(engine_config: Build) -> None:
    with pytest.raises(check.UnsupportedDeployment, match="Sleep mode: found on; expected off"):
        check.deployment_config(engine_config(enable_sleep_mode=True))


# The device.


@pytest.fixture
def four_gpus(monkeypatch: Patch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3, 4))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) != (1, 3))


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("size", "nodes", "found"),
    [
        (1, 1, None),
        (2, 1, None),
        (4, 1, "none from GPU 1 to GPU 3"),
        (8, 1, "4 GPUs visible to this rank"),
        (2, 2, "2 nodes"),
    ],
)
def test_a_rank_asks_for_its_own_peers(size: int, nodes: int, found: str | None) -> None:
    assert Device.gather(size, nodes) == Device("GPU 1", (9, 0), found, 3, 4)


def test_no_device(monkeypatch: Patch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Device.gather(2) == Device("none", None, "no GPU", 0, 0)
    assert Device.gather(1).unreachable is None
