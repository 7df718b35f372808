"""The wait compiles, and looks at the clock in every turn."""

from pathlib import Path

import pytest

from tests.gpu.stall import wait_while_set
from tests.helpers.compiled import Variant, compile_variant


def test_the_wait_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    ptx = compile_variant(Variant(wait_while_set, {"flag": "i64", "longest_ns": "i64"}, {}, 1), 90).asm["ptx"]
    # One ahead of the loop, one in it, where the flag is read again too.
    assert ptx.count("%globaltimer") == 2 and ptx.count("ld.volatile.global") == 2
    assert ptx.rindex("ld.volatile.global") > ptx.index("%globaltimer")
