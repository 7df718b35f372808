"""compute-sanitizer over every launch of the attention kernels."""

from pathlib import Path

import pytest

from tests.attention.sanitized import LAUNCHES
from tests.helpers.sanitizer import TOOLS, assert_clean, needed

pytestmark = needed


@pytest.mark.parametrize("tool", TOOLS)
def test_clean(tool: str) -> None:
    assert_clean(Path(__file__).absolute().parent / "sanitized.py", tool, LAUNCHES)
