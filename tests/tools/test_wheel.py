"""The wheel: what lies in it, and that it works in an environment without the checkout."""

import configparser
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from tools import lint
from tools.python.build_wheel import build_wheel

DEPENDENCIES = {"click", "numpy", "safetensors", "tokenizers", "torch", "tqdm"}


def version() -> str:
    """The version of the checkout."""
    source = (lint.ROOT / lint.IMPORT_ROOT / "__init__.py").read_text()
    (found,) = re.findall(r'^__version__ = "(.+)"$', source, flags=re.MULTILINE)
    return str(found)


def package_files() -> set[str]:
    """The files of the packages, as paths of the checkout; data lies in folders named `data`."""
    files = {
        path.relative_to(lint.ROOT)
        for folder in [lint.IMPORT_ROOT, *lint.packages()]
        for path in (lint.ROOT / folder).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    return {
        str(path) for path in files if path.suffix == ".py" or path.name == "py.typed" or path.parts[1:2] == ("data",)
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bazel's //:wheel, or, outside Bazel, one built from the checkout."""
    name = f"specialized_decode-{version()}-py3-none-any.whl"
    if (lint.ROOT / name).exists():
        return lint.ROOT / name
    pytest.importorskip("build")
    out = tmp_path_factory.mktemp("wheel") / name
    sources = [*sorted(package_files()), "pyproject.toml", "setup.py", "LICENSE", "README.md"]
    before = Path.cwd()
    os.chdir(lint.ROOT)
    try:
        build_wheel([Path(source) for source in sources], out)
    finally:
        os.chdir(before)
    return out


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def test_one_top_level_name(names: set[str]) -> None:
    tops = {name.split("/")[0] for name in names}
    assert tops == {lint.IMPORT_ROOT, f"specialized_decode-{version()}.dist-info"}


def test_holds_every_source_and_data_file(names: set[str]) -> None:
    expected = {
        file if file.startswith(f"{lint.IMPORT_ROOT}/") else f"{lint.IMPORT_ROOT}/{file}" for file in package_files()
    }
    assert {name for name in names if ".dist-info/" not in name} == expected


def test_metadata(metadata: Message) -> None:
    assert metadata["Name"] == "specialized-decode"
    assert metadata["Version"] == version()
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    requirements = metadata.get_all("Requires-Dist") or []
    assert {re.split(r"[^\w-]", line)[0] for line in requirements} == DEPENDENCIES
    assert "torch>=2.11" in requirements


def test_vllm_finds_the_plugin(wheel: Path) -> None:
    """Under the group and the name that vLLM and VLLM_PLUGINS know it by."""
    parser = configparser.ConfigParser()
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt"))
        parser.read_string(archive.read(name).decode())
    assert dict(parser["vllm.general_plugins"]) == {
        "specialized_decode": "specialized_decode.integration.plugin:register"
    }


def test_installs_and_runs(wheel: Path, tmp_path: Path) -> None:
    """Installed beside the dependencies alone, every package comes from there and the command runs."""
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False, symlinks=True)
    python = environment / "bin" / "python"
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "RUNFILES", "PIP"))}
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--no-deps",
        "--no-index",
        str(wheel),
    ]
    subprocess.run(install, cwd=tmp_path, env=variables, check=True)

    # The dependencies are those of the environment that runs this test.
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    script = "\n".join(
        [
            "import importlib, sys",
            "for name in sys.argv[1:]:",
            "    print(importlib.import_module(name).__file__)",
        ]
    )
    modules = [lint.IMPORT_ROOT, *(f"{lint.IMPORT_ROOT}.{package}" for package in lint.packages())]
    result = subprocess.run(
        [python, "-c", script, *modules],
        cwd=tmp_path,
        env=variables,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    files = result.stdout.splitlines()
    assert len(files) == len(modules)
    assert [file for file in files if not file.startswith(f"{site}/")] == []

    command = environment / "bin" / "specialized-decode"
    subprocess.run([command, "--help"], cwd=tmp_path, env=variables, check=True, stdout=subprocess.DEVNULL)


def test_unpacked_on_the_path_is_found_by_vllm(wheel: Path, tmp_path: Path) -> None:
    """As docs/operators.md has it for a host without pip: the metadata has to be there, too."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    script = "from importlib.metadata import entry_points as e; print(*e(group='vllm.general_plugins'), sep='\\n')"
    # -S: nothing of this environment's own packages.
    command = [sys.executable, "-S", "-c", script]
    (metadata,) = tmp_path.glob("*.dist-info")

    def found() -> str:
        environment = {"PYTHONPATH": str(tmp_path)}
        done = subprocess.run(command, env=environment, cwd=tmp_path, check=True, stdout=subprocess.PIPE, text=True)
        return done.stdout.strip()

    assert "specialized_decode.integration.plugin:register" in found()
    metadata.rename(tmp_path / "elsewhere")
    assert found() == ""
