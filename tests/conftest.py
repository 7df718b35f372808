"""What holds for every test."""

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of test_gpu_*.py, and skips them where there is no CUDA device."""
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.path.name.startswith("test_gpu_"):
            item.add_marker("gpu")
            if not torch.cuda.is_available():
                item.add_marker(skip)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of `tiny_plan()`, shared by a process's tests: they copy what they want to change."""
    # Imported here, since most tests need no backbone.
    from specialized_decode.backbone.writer import tiny_plan, write_checkpoint

    return write_checkpoint(tiny_plan(), tmp_path_factory.mktemp("checkpoint") / "tiny")
