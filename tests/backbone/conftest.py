"""A checkpoint of a few megabytes: the tiny model's layers with two experts, 600 tokens and no image bias."""

import copy
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from specialized_decode.backbone.writer import CheckpointPlan, tiny_plan, write_checkpoint

MakePlan = Callable[[int], CheckpointPlan]


@pytest.fixture(scope="session")
def small_plan() -> MakePlan:
    """seed -> plan of the small checkpoint."""

    def make(seed: int) -> CheckpointPlan:
        config = copy.deepcopy(tiny_plan().config)
        del config["vision_config"]
        config["text_config"] |= {"vocab_size": 600, "n_routed_experts": 2, "num_experts_per_tok": 1}
        return CheckpointPlan(config, seed)

    return make


@pytest.fixture(scope="session")
def small_folder(small_plan: MakePlan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small checkpoint of seed 0, to be read only."""
    return write_checkpoint(small_plan(0), tmp_path_factory.mktemp("checkpoint") / "small")


@pytest.fixture
def folder_copy(small_folder: Path, tmp_path: Path) -> Path:
    """A copy of the small checkpoint that a test may damage."""
    return Path(shutil.copytree(small_folder, tmp_path / "copy"))
