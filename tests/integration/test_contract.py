"""The contract with vLLM: the installed version keeps it, and a version that would not is caught, row by row."""

import sys
from collections.abc import Iterator
from enum import Enum
from types import ModuleType

import pytest

from specialized_decode.integration import contract
from specialized_decode.integration.contract import TESTED
from specialized_decode.integration.facts import Software, installed
from specialized_decode.integration.internals import CONTRACT, Internal


@pytest.mark.parametrize("internal", CONTRACT, ids=str)
def test_installed_vllm_keeps_it(internal: Internal) -> None:
    assert contract.check([internal]) == []


def test_installed_vllm_is_the_tested_version() -> None:
    assert installed("vllm") == TESTED


def test_rows_rely_on_something_and_are_not_repeated() -> None:
    rows = [(internal.module, internal.name) for internal in CONTRACT]
    assert len(rows) == len(set(rows))
    assert all(internal.module.split(".")[0] == "vllm" for internal in CONTRACT)


# What changes are caught. Each module below stands for a part of another version.

AS_TESTED = """
import enum

class Base:
    def __init__(self):
        self.from_base: int = 1

class Layer(Base):
    annotated: int
    def __init__(self, config, *, prefix=""):
        super().__init__()
        self.weight = build(config)
        self.register_buffer("zero_bias", None)
    @property
    def width(self):
        return 1
    def forward(self, x, positions=None):
        return self.weight.apply(x)

class Mode(enum.Enum):
    FULL = 2

def build(config):
    return config

LIMIT = 16
"""
MODULE = "vllm.stand_in"
ROWS = [
    Internal(MODULE, "Layer.__init__", signature="(self, config, *, prefix='')", calls=("build", "super")),
    Internal(MODULE, "Layer.forward", signature="(self, x, positions=None)", calls=("self.weight.apply",)),
    Internal(MODULE, "Layer", attributes=("weight", "zero_bias", "from_base", "annotated", "width", "forward")),
    Internal(MODULE, "Mode", attributes=("FULL",)),
    Internal(MODULE, "build", signature="(config)"),
    Internal(MODULE, "LIMIT", value=16),
    Internal(MODULE, "", attributes=("LIMIT", "build")),
]
# From -> to in the source, and what is said of it.
CHANGES = {
    "a method is gone": ("def forward", "def run", f"{MODULE}.Layer.forward: not found"),
    "a class is gone": ("class Mode", "class Kind", f"{MODULE}.Mode: not found"),
    "a parameter more": (
        "def build(config)",
        "def build(config, device)",
        f"{MODULE}.build: found signature (config, device), expected (config)",
    ),
    "another default": (
        "positions=None",
        "positions=0",
        f"{MODULE}.Layer.forward: found signature (self, x, positions=0), expected (self, x, positions=None)",
    ),
    "no longer by keyword alone": (
        '*, prefix=""',
        'prefix=""',
        f"{MODULE}.Layer.__init__: found signature (self, config, prefix=''), expected (self, config, *, prefix='')",
    ),
    "an attribute renamed": ("self.weight =", "self.kernel =", f"{MODULE}.Layer: has no weight"),
    "a base's attribute renamed": ("self.from_base", "self.renamed", f"{MODULE}.Layer: has no from_base"),
    "a buffer renamed": ('"zero_bias"', '"bias"', f"{MODULE}.Layer: has no zero_bias"),
    "a property renamed": ("def width", "def size", f"{MODULE}.Layer: has no width"),
    "a field renamed": ("annotated: int", "noted: int", f"{MODULE}.Layer: has no annotated"),
    "a member renamed": ("FULL =", "WHOLE =", f"{MODULE}.Mode: has no FULL"),
    "no longer called": ("build(config)\n        self.reg", "config\n        self.reg", "does not call build"),
    "another value": ("LIMIT = 16", "LIMIT = 32", f"{MODULE}.LIMIT: found 32, expected 16"),
    "a name of the module": ("LIMIT = 16", "", f"{MODULE}: has no LIMIT"),
}


@pytest.fixture
def stand_in(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Makes a source importable as vllm.stand_in."""

    def install(source: str) -> None:
        path = tmp_path_factory.mktemp("vllm") / "stand_in.py"
        path.write_text(source)
        module = ModuleType(MODULE)
        module.__file__ = str(path)
        exec(compile(source, str(path), "exec"), module.__dict__)
        monkeypatch.setitem(sys.modules, MODULE, module)

    yield install
    contract._assigned.cache_clear()


def test_what_is_as_tested(stand_in: object) -> None:
    stand_in(AS_TESTED)  # type: ignore[operator]
    assert contract.check(ROWS) == []


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_caught(stand_in: object, change: str) -> None:
    before, after, said = CHANGES[change]
    assert AS_TESTED.count(before) == 1
    stand_in(AS_TESTED.replace(before, after))  # type: ignore[operator]
    found = contract.check(ROWS)
    assert any(said in line for line in found), found


def test_a_missing_module_is_caught() -> None:
    (line,) = contract.check([Internal("vllm.no_such_module", "anything")])
    assert line == "vllm.no_such_module.anything: not found (No module named 'vllm.no_such_module')"


def test_real_rows_see_a_changed_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook itself: a vLLM that asks for one more argument, and one that has a mode less."""
    from vllm.models.deepseek_v41.nvidia import model

    class Fewer(Enum):
        NONE = 0
        FULL = 2

    monkeypatch.setattr(model, "specialized_decode_config", lambda vllm_config, device: None)
    monkeypatch.setattr("vllm.config.CUDAGraphMode", Fewer)
    monkeypatch.delattr(model.DeepseekV41LLMForCausalLM, "build_specialized_decode")
    name = "vllm.models.deepseek_v41.nvidia.model"
    assert [line.split(" (type")[0] for line in contract.check()] == [
        f"{name}.specialized_decode_config: found signature (vllm_config, device), expected (vllm_config)",
        f"{name}.DeepseekV41LLMForCausalLM.build_specialized_decode: not found",
        "vllm.config.CUDAGraphMode: has no FULL_AND_PIECEWISE, FULL_DECODE_ONLY, PIECEWISE",
    ]


def test_another_version_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the tested version is taken at its word."""
    monkeypatch.setattr(contract, "TESTED", "0.32.0")
    monkeypatch.setattr(contract, "CONTRACT", [Internal("vllm.gone", ""), *CONTRACT[:1]])
    monkeypatch.setenv(contract.ALLOW, "0.33.0")
    found = Software.gather()
    assert found.allowed_vllm == "0.33.0"
    assert found.internals == ("vllm.gone: not found (No module named 'vllm.gone')",)
