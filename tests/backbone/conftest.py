"""The small checkpoint, written once a process."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from specialized_decode.backbone.writer import CheckpointPlan, write_checkpoint
from tests.helpers import small_plan as small

MakePlan = Callable[[int], CheckpointPlan]


@pytest.fixture(scope="session")
def small_plan() -> MakePlan:
    """seed -> plan of the small checkpoint."""
    return small.small_plan


@pytest.fixture(scope="session")
def small_folder(small_plan: MakePlan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small checkpoint of seed 0, to be read only."""
    return write_checkpoint(small_plan(0), tmp_path_factory.mktemp("checkpoint") / "small")


@pytest.fixture
def folder_copy(small_folder: Path, tmp_path: Path) -> Path:
    """A copy of the small checkpoint that a test may damage."""
    return Path(shutil.copytree(small_folder, tmp_path / "copy"))
