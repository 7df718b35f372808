"""The settings of the GPU scripts' engines, by vLLM's own checks and by the deployment check."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from vllm.engine.arg_utils import EngineArgs

from specialized_decode.cli.main import main
from specialized_decode.integration.config import missing
from specialized_decode.integration.facts import Deployment, Device, Facts, Software
from tests.gpu import drafts, drafts_phases, vision_phases
from tests.gpu.engine import engine_settings
from tests.gpu.executor_phases import EXECUTOR_OPTION

SOFTWARE = Software("0.33.0", None, (), "2.14.0+cu130", "3.8.0", "0.7.2.post1", humming=True)
H200 = Device("NVIDIA H200", (9, 0), None, 140 << 30, 141 << 30)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM takes a machine without a driver for one without Triton, and then does not choose V2."""
    import vllm.config.vllm

    monkeypatch.setattr(vllm.config.vllm, "HAS_TRITON", True)
    # What vLLM sets itself while it builds a configuration is taken back after the test.
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")


def refused(found: Any) -> list[str]:
    """Requirements that these settings do not meet on an H200."""
    return [row.name for row in missing(Facts(SOFTWARE, H200, 1, Deployment.gather(found)))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "flash"
    command = ["make-checkpoint", str(path), "--preset", "flash", "--layers", "8", "--shard-tp", "4", "--drafts", "3"]
    done = CliRunner().invoke(main, [*command, "--no-weights"])
    assert done.exit_code == 0, done.output
    return path


def config(folder: Path, sizes: Sequence[int], settings: dict[str, Any], patch: pytest.MonkeyPatch) -> Any:
    patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    return EngineArgs(model=str(folder), **engine_settings(sizes) | settings).create_engine_config()


def test_drafts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = config(folder, drafts.GRAPH_SIZES, drafts_phases.settings(EXECUTOR_OPTION), monkeypatch)
    assert found.speculative_config.synthetic_acceptance_rates == list(drafts.RATES["mixed"] or ())
    assert found.speculative_config.draft_model_config.hf_config.architectures
    assert found.cache_config.kv_cache_memory_bytes == 8 << 30
    assert found.compilation_config.cudagraph_capture_sizes == list(drafts.GRAPH_SIZES)
    assert refused(found) == []


def test_images(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = vision_phases.settings(SimpleNamespace(), EXECUTOR_OPTION)  # type: ignore[arg-type]
    found = config(folder, vision_phases.GRAPH_SIZES, settings, monkeypatch)
    assert found.model_config.is_multimodal_model
    assert found.model_config.multimodal_config.mm_encoder_attn_backend.name == "TORCH_SDPA"
    assert refused(found) == []


def test_the_tower(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own tower is filled to its last tensor."""
    import torch
    from torch import nn
    from vllm.models.deepseek_v4.common import vision

    from tests.integration import vllm_model

    found = config(folder, (1,), vision_phases.settings(SimpleNamespace(), None), monkeypatch)  # type: ignore[arg-type]
    with vllm_model.one_rank(found):
        hf = found.model_config.hf_config
        tower = nn.ModuleDict({"vision": vision.DeepseekV4ViT(hf), "aligner": vision.DeepseekV4Aligner(hf)})
        for parameter in tower.parameters():
            parameter.data.fill_(float("nan"))
        assert vision_phases.fill_tower(tower) == len(list(tower.parameters()))
        assert all(parameter.isfinite().all() for parameter in tower.parameters())
        # Norms, the one part of the tower that runs without a GPU beside its projections, pass values on.
        rows = torch.randn(9, hf.vision_dim, generator=torch.Generator().manual_seed(1))
        norm: Any = tower.get_submodule("vision.norm")
        assert 0.9 < float(norm(rows).detach().std()) < 1.1
