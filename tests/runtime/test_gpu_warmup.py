"""What the warm-up leaves for captures to do, on a GPU."""

from pathlib import Path
from typing import Any

import pytest

from specialized_decode.runtime import KERNELS
from tests.helpers.runtime_model import Pair

ROWS = (1, 4, 5, 16, 17, 48, 49, 70)


@pytest.mark.parametrize("families", [frozenset({"boundary"}), KERNELS], ids=["boundary", "all"])
def test_no_capture_compiles(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, families: frozenset[str]) -> None:
    """Every row count's kernels are there before its capture, on both sides of every gate."""
    import triton

    # In a process of its own it compiles all of them here.
    pair = Pair(tiny_folder, device="cuda", max_rows=72, max_context=256, max_tokens=512, kernels=families)
    pair.backbone.set_aux_layers((1,))
    compiled: list[str] = []

    def note(*args: Any, fn: Any, **kwargs: Any) -> None:
        compiled.append(str(getattr(fn, "name", fn)))

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    for rows in ROWS:
        pair.capture(rows)
        assert compiled == [], f"{rows} rows"
    pair.capture(12, 6)
    assert compiled == [], "verification"
