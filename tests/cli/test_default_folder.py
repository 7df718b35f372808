"""The folder that `decode` uses where none is given."""

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from specialized_decode.backbone.writer import is_current
from specialized_decode.cli import decode as module
from tests.cli.conftest import STEP_TIME, Invoke, Run, line, refused, texts
from tests.helpers.small_plan import few_layers_plan

ARGUMENTS = ("decode", "--prompt", "a", "--tokens", "1")


def _times(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in [folder, *folder.iterdir()]}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A small model in the tiny one's place; returns its folder in the cache, which is not there yet."""
    monkeypatch.setattr(module, "tiny_plan", few_layers_plan)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "specialized-decode" / "tiny"


def test_written_once_and_reused(invoke: Invoke, small: Path) -> None:
    first = invoke(*ARGUMENTS)
    assert first.exit_code == 0
    assert first.stderr == f"writing the tiny model to {small}\n"
    assert first.stdout.startswith(f"model   {small}: 4 layers, ")
    assert is_current(small, few_layers_plan())
    before = _times(small)
    second = invoke(*ARGUMENTS)
    assert (second.exit_code, second.stderr) == (0, "")
    assert second.stdout.splitlines()[:3] == first.stdout.splitlines()[:3]
    assert _times(small) == before
    assert [path.name for path in small.parent.iterdir()] == ["tiny"]


@pytest.mark.parametrize("damage", ["another record", "truncated shard", "no tokenizer"])
def test_written_anew_when_it_is_not_whole(invoke: Invoke, small: Path, small_folder: Path, damage: str) -> None:
    shutil.copytree(small_folder, small)
    if damage == "another record":
        (small / "generation.json").write_text('{"format": 0}')
    elif damage == "truncated shard":
        os.truncate(small / "model-00001-of-00001.safetensors", 100)
    else:
        (small / "tokenizer.json").unlink()
    result = invoke(*ARGUMENTS)
    assert result.exit_code == 0
    assert result.stderr == f"writing the tiny model to {small}\n"
    assert is_current(small, few_layers_plan())
    assert [path.name for path in small.parent.iterdir()] == ["tiny"]


def test_home_where_no_cache_is_set(
    invoke: Invoke, small: Path, small_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = tmp_path / "home" / ".cache" / "specialized-decode" / "tiny"
    shutil.copytree(small_folder, folder)
    result = invoke(*ARGUMENTS)
    assert result.stdout.startswith(f"model   {folder}: ")
    assert not small.exists()


@pytest.mark.parametrize("in_the_way", ["cache", "cache/specialized-decode"])
def test_cache_that_cannot_be_made(invoke: Invoke, small: Path, tmp_path: Path, in_the_way: str) -> None:
    """A file in the way stands for any reason, as permissions do not bind every user."""
    (tmp_path / in_the_way).parent.mkdir(exist_ok=True)
    (tmp_path / in_the_way).write_text("mine")
    message = refused(invoke(*ARGUMENTS))
    assert message.startswith(f"{small.parent}: cannot be made (")
    assert message.endswith("); set XDG_CACHE_HOME")
    assert (tmp_path / in_the_way).read_text() == "mine"


def test_cache_that_cannot_be_written(invoke: Invoke, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mkdir = Path.mkdir

    def refuse(path: Path, *arguments: Any, **options: Any) -> None:
        if path.name.endswith(".partial"):
            raise PermissionError(13, os.strerror(13))
        mkdir(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", refuse)
    result = invoke(*ARGUMENTS)
    assert refused(result) == f"{small}: cannot be written (Permission denied); expected a writable parent folder"


def test_the_tiny_model_on_the_default_prompts(run: Run, tiny_folder: Path, tmp_path: Path) -> None:
    """In a process of its own. A folder that this version wrote is current to it, and is left as it is."""
    link = tmp_path / "specialized-decode" / "tiny"
    link.parent.mkdir()
    link.symlink_to(tiny_folder)
    before = _times(tiny_folder)
    result = run("decode", "--tokens", "4", XDG_CACHE_HOME=str(tmp_path))
    assert (result.returncode, result.stderr) == (0, "")  # no bar where standard error is no terminal
    assert link.is_symlink()
    assert _times(tiny_folder) == before
    lines = result.stdout.splitlines()
    assert lines[0] == f"model   {link}: 10 layers, hidden size 128, 16 experts"
    assert lines[1] == f"device  cpu, 1 threads, torch {torch.__version__}"
    rows = texts(result.stdout)
    lengths = [row[0] for row in rows]
    assert lines[2] == f"rows    3, prompts of {lengths[0]}, {lengths[1]}, {lengths[2]} tokens"
    # The shortest stays inside the window of 48; the longest goes past the top-k of 32 positions of 2 tokens.
    assert lengths[0] + 4 < 48
    assert lengths[2] > 2 * 32
    for _, _, plain, executor in rows:
        assert plain == executor
        assert len(plain) > len("''")
    assert len({row[2] for row in rows}) == 3
    assert line(result.stdout, "identical tokens") == "12 of 12"
    prefills = -(-sum(lengths) // 512)
    account = rf"{prefills + 3} steps, {{}} by the executor, {prefills} on the plain layers: prefill{{}}; "
    plain = account.format(0, ", 3 on the plain layers: no executor") + STEP_TIME.format(3)
    assert re.fullmatch(plain, line(result.stdout, "plain layers"))
    assert re.fullmatch(account.format(3, "") + STEP_TIME.format(3), line(result.stdout, "executor"))
    memory = re.fullmatch(r"(\d+\.\d\d) GB of host memory", line(result.stdout, "peak memory"))
    assert memory is not None
    assert 0.1 < float(memory[1]) < 64
