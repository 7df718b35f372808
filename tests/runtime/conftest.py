"""Small checkpoints, each written once a process, whichever tests ask for it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specialized_decode.backbone.writer import write_checkpoint
from tests.helpers.runtime_model import Layers, small_checkpoint

Folder = Callable[..., Path]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """layers, and widths that differ from the small model's -> the checkpoint's folder."""
    root = tmp_path_factory.mktemp("runtime")
    written: dict[str, Path] = {}

    def make(layers: Layers, **widths: Any) -> Path:
        key = repr((layers, sorted(widths.items())))
        if key not in written:
            written[key] = write_checkpoint(small_checkpoint(layers, **widths), root / str(len(written)))
        return written[key]

    return make
