"""compute-sanitizer over every launch of the boundary kernels on one rank."""

from pathlib import Path

import pytest

from tests.helpers.sanitizer import TOOLS, assert_clean, needed

pytestmark = needed


@pytest.mark.parametrize("tool", TOOLS)
def test_clean(tool: str) -> None:
    assert_clean(Path(__file__).absolute().parent / "sanitized.py", tool, 150)
