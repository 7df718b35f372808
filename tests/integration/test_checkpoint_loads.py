"""Folders of `make-checkpoint` load in vLLM's own loader: every parameter gets its bytes, and none is left over.

vLLM's model classes are built on the CPU and its loader reads the folder. What each parameter must hold is put together
here from the checkpoint's tensors, apart from vLLM's mapping of names.
"""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specialized_decode.backbone.folder import ModelFolder
from specialized_decode.backbone.writer import tiny_plan, write_checkpoint
from tests.integration import vllm_model

DRAFTS = 3
# A parameter's last module -> the checkpoint's modules, whose rows it holds one after the other.
FUSED = {
    "fused_wqa_wkv": ("wq_a", "wkv"),
    "fused_wkv_wgate": ("wkv", "wgate"),
    "gate_up_proj": ("w1", "w3"),
    "down_proj": ("w2",),
    "embed_tokens": ("embed",),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tiny_plan(drafts=DRAFTS), tmp_path_factory.mktemp("checkpoint") / "drafts")


@pytest.fixture(scope="module")
def tensors(folder: Path) -> dict[str, Tensor]:
    """The checkpoint's tensors."""
    return {name: tensor for shard in folder.glob("*.safetensors") for name, tensor in load_file(shard).items()}


@pytest.fixture(scope="module")
def models(folder: Path) -> Iterator[tuple[Any, Any]]:
    """The target and the draft model, both loaded from the folder by vLLM's loader."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.models.deepseek_v41.nvidia.dspark import DSparkDeepseekV4ForCausalLM

    arguments = EngineArgs(
        model=str(folder),
        max_model_len=512,
        max_num_batched_tokens=512,
        engram_config={"cpu_offload": False},
        speculative_config={"method": "dspark", "num_speculative_tokens": 5},
    )
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        # Asked for, since vLLM takes the older runner where Triton finds no GPU; that one knows no DSpark.
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
        config = arguments.create_engine_config()
        stack.enter_context(vllm_model.one_rank(config))
        target = vllm_model.build(config, patch)
        torch.set_default_dtype(torch.bfloat16)
        try:
            draft = DSparkDeepseekV4ForCausalLM(vllm_config=config, prefix="draft")
        finally:
            torch.set_default_dtype(torch.float32)
        for model in (target, draft):
            for parameter in model.parameters():
                parameter.data.view(torch.uint8).fill_(0x5A)  # no tensor of the checkpoint is full of it
            DefaultModelLoader(config.load_config).load_weights(model, config.model_config)
        yield target, draft


def checkpoint_names(parameter: str, tensors: dict[str, Tensor]) -> list[str]:
    """The checkpoint's tensors that the target's parameter is made of, in order."""
    name = re.sub(r"\.weight_scale(_inv)?$", ".scale", parameter.removeprefix("model."))
    name = name.replace("e_score_correction_bias", "bias").replace("lm_head", "head")
    experts = re.fullmatch(r"(.+\.experts)\.routed_experts\.(w13|w2)_weight(_scale)?", name)
    if experts:
        matrices = ("w1", "w3") if experts[2] == "w13" else ("w2",)
        suffix = "scale" if experts[3] else "weight"
        count = len({one for one in tensors if re.fullmatch(rf"{re.escape(experts[1])}\.\d+\.w1\.weight", one)})
        return [f"{experts[1]}.{expert}.{part}.{suffix}" for expert in range(count) for part in matrices]
    for module, parts in FUSED.items():
        if f"{module}." in name:
            names = [name.replace(module, part) for part in parts]
            return [one for one in names if one in tensors]  # ratio 1 has no gate
    return [name]


def draft_names(parameter: str, tensors: dict[str, Tensor]) -> list[str]:
    """The same for the draft model's parameters."""
    name = parameter.removeprefix("model.")
    first, last = "mtp.0.", f"mtp.{DRAFTS - 1}."
    if name.startswith("layers."):
        name = name.replace("layers.", "mtp.", 1)
    elif name.startswith("main_"):
        name = first + name
    else:
        name = last + name.replace("markov_w1", "embed").replace("markov_w2", "head")
    return checkpoint_names(name, tensors)


def assert_holds(name: str, parameter: Tensor, parts: list[Tensor]) -> None:
    """Compares bytes: the parts' rows one after the other, in vLLM's form of scales, experts and sinks."""
    if name.endswith("attn_sink"):
        (sink,) = parts
        assert torch.equal(parameter[: len(sink)], sink), name
        assert bool(parameter[len(sink) :].isneginf().all()), name  # heads added to fill the kernel's 64
        return
    rows = torch.cat([part.contiguous().view(torch.uint8) for part in parts])
    found = parameter.detach().contiguous().view(torch.uint8)
    dense_scale = name.endswith(".weight_scale") and ".routed_experts." not in name
    if dense_scale:  # one scale per row and 32 columns instead of one per block of 32 x 32
        rows = rows.repeat_interleave(32, dim=0)
    assert torch.equal(found.reshape(rows.shape), rows), name


def assert_loaded(parameters: dict[str, Tensor], names: Any, tensors: dict[str, Tensor]) -> set[str]:
    """Compares every parameter; returns the checkpoint's names that they hold."""
    used: set[str] = set()
    for name, parameter in parameters.items():
        sources = names(name, tensors)
        assert_holds(name, parameter, [tensors[source] for source in sources])
        assert not used & set(sources), name
        used.update(sources)
    return used


def test_target(models: tuple[Any, Any], tensors: dict[str, Tensor], folder: Path) -> None:
    parameters = dict(models[0].named_parameters())
    assert len(parameters) == 339
    used = assert_loaded(parameters, checkpoint_names, tensors)
    assert used == {name for name in ModelFolder(folder).names if not name.startswith("mtp.")}


def test_drafts(models: tuple[Any, Any], tensors: dict[str, Tensor], folder: Path) -> None:
    # The embedding and the head are the target's, which vLLM puts in their place afterwards.
    shared = ("embed_tokens.", "lm_head.")
    parameters = {
        name: parameter
        for name, parameter in models[1].named_parameters()
        if not name.removeprefix("model.").startswith(shared)
    }
    used = assert_loaded(parameters, draft_names, tensors)
    assert used == {name for name in ModelFolder(folder).names if name.startswith("mtp.")}


def test_engram_hashes_like_the_plain_model(models: tuple[Any, Any], folder: Path) -> None:
    """vLLM compresses token ids by the folder's tokenizer, and refuses a count other than the configuration's."""
    from specialized_decode.backbone.tokenizer import compressed_token_map, load_tokenizer

    ids, count = compressed_token_map(load_tokenizer(folder))
    hashed = models[0].model.engram_hash
    assert torch.equal(hashed.token_map[: len(ids)].cpu().long(), torch.tensor(ids))
    assert count == int(hashed.token_map[: len(ids)].max()) + 1
