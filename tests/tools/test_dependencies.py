"""The packages import each other as BUILD.bazel allows, which Bazel checks for declared dependencies only."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools import lint

STEPS = {"attention", "engram", "logits", "moe"}

# The packages that a package may import, beside itself.
ALLOWED: dict[str, set[str]] = {
    "backbone": set(),
    "boundary": set(),
    **{step: {"boundary"} for step in STEPS},
    "runtime": {"boundary", *STEPS},
    "integration": {"boundary", "runtime", *STEPS},
    "cli": {"backbone", "boundary", "integration", "runtime", *STEPS},
}

# Installed packages that one package alone may import.
RESERVED = {"vllm": "integration"}

# A checkout's other folders; a wheel has none of them.
DEVELOPMENT = {"benchmarks", "tests", "tools"}


def imported_modules(source: str, module: str, is_package: bool) -> Iterator[str]:
    """The absolute names of what a source imports, by statement or by import_module("name").

    `from a import b` yields a.b: b may be a module.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            base = [node.module] if node.module else []
            if node.level:
                parents = module.split(".")
                base = parents[: len(parents) - node.level + is_package] + base
            for alias in node.names:
                yield ".".join([*base, alias.name])
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.args[0].value


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """What a source of the module specialized_decode.<package>... imports against the rule."""
    package = module.split(".")[1]
    found = []
    for name in imported_modules(source, module, is_package):
        top, _, rest = name.partition(".")
        inner = rest.partition(".")[0]
        if top == lint.IMPORT_ROOT:
            wrong = inner in ALLOWED and inner != package and inner not in ALLOWED[package]
        elif top in RESERVED:
            wrong = RESERVED[top] != package
        else:
            # The folders' own names work in a checkout only.
            wrong = top in DEVELOPMENT or top in ALLOWED
        if wrong:
            found.append(f"{module} imports {name}")
    return found


def sources(package: str) -> Iterator[tuple[str, Path]]:
    """The module names and files of a package."""
    for path in sorted((lint.ROOT / package).rglob("*.py")):
        parts = path.relative_to(lint.ROOT).with_suffix("").parts
        yield ".".join([lint.IMPORT_ROOT, *parts]).removesuffix(".__init__"), path


@pytest.mark.parametrize("package", lint.packages())
def test_imports(package: str) -> None:
    files = list(sources(package))
    assert files, f"no sources in {package}/"
    found = [
        violation
        for module, path in files
        for violation in violations(path.read_text(), module, path.name == "__init__.py")
    ]
    assert not found, "\n".join(found)


def test_import_root_imports_no_package() -> None:
    """The import root is part of every package: what it imports, all of them depend on."""
    source = (lint.ROOT / lint.IMPORT_ROOT / "__init__.py").read_text()
    names = imported_modules(source, lint.IMPORT_ROOT, is_package=True)
    assert not [name for name in names if name.startswith(lint.IMPORT_ROOT)]


def test_every_package_has_a_rule() -> None:
    assert set(lint.packages()) <= set(ALLOWED)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("boundary.step", "from specialized_decode.moe import MoEStep"),
        ("boundary.step", "from ..moe import MoEStep"),
        ("boundary.kernels.op", "from ...moe.step import MoEStep"),
        ("moe.step", "from specialized_decode import attention"),
        ("moe.step", "def late():\n    import specialized_decode.attention.step as step"),
        ("attention.step", "importlib.import_module('specialized_decode.backbone')"),
        ("attention.step", "from specialized_decode.runtime.gates import DecodeStep"),
        ("runtime.step", "from specialized_decode.backbone import config"),
        ("runtime.step", "from specialized_decode.cli.main import main"),
        ("backbone.model", "import specialized_decode.boundary"),
        ("runtime.step", "from vllm.config import VllmConfig"),
        ("cli.main", "import vllm"),
        ("moe.step", "from boundary import Boundaries"),
        ("moe.step", "from tests.helpers import tiny"),
    ],
)
def test_violation_is_found(module: str, source: str) -> None:
    assert violations(source, f"{lint.IMPORT_ROOT}.{module}")


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("moe.step", "from specialized_decode.boundary import BoundaryState"),
        ("moe.step", "from .reference import experts\nfrom ..boundary import BoundaryState\nimport torch"),
        ("moe.step", "from specialized_decode import __version__"),
        ("runtime.step", "from specialized_decode.moe.step import MoEStep"),
        ("integration.plugin", "import vllm"),
        ("cli.main", "from specialized_decode.backbone import config"),
    ],
)
def test_allowed_import_is_not_found(module: str, source: str) -> None:
    assert not violations(source, f"{lint.IMPORT_ROOT}.{module}")


def test_relative_import_of_a_package_is_its_own() -> None:
    """In __init__.py one dot means the package itself, not its parent."""
    assert not violations("from . import attention", f"{lint.IMPORT_ROOT}.moe", is_package=True)
    assert violations("from .. import attention", f"{lint.IMPORT_ROOT}.moe", is_package=True)
