"""`doctor`: every requirement met, and each of them missing."""

import importlib.metadata
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import specialized_decode
from specialized_decode.backbone.config import ModelConfig
from specialized_decode.backbone.tensors import text_tensors
from specialized_decode.cli import doctor as module
from tests.cli.conftest import Invoke, Run
from tests.helpers.small_plan import compressed_vocab_size

SHARD = "model-00001-of-00001.safetensors"
Patch = pytest.MonkeyPatch
ROWS = {
    "cpu": ["Python", "PyTorch", "Tensor parallelism"],
    "cuda": ["Python", "PyTorch", "Tensor parallelism", "GPU", "GPUs", "Peer access"],
    "vllm": [
        "Python",
        "vLLM",
        "vLLM internals",
        "PyTorch",
        "Triton",
        "FlashInfer",
        "GPU",
        "Tensor parallelism",
        "Peer access",
        "vLLM plugin",
    ],
}
FOLDER_ROWS = ["Configuration", "Tensors", "Tokenizer", "Memory"]


@pytest.fixture
def no_gpu(monkeypatch: Patch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def _gpus(
    patch: Patch,
    count: int = 4,
    name: str = "NVIDIA H200",
    capability: tuple[int, int] = (9, 0),
    blocked: tuple[int, int] | None = None,
    free: int = 100_000_000_000,
) -> None:
    """A machine with `count` GPUs, of which one cannot reach another where `blocked` names them."""
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "device_count", lambda: count)
    patch.setattr(torch.cuda, "get_device_name", lambda device: name)
    patch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    patch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) != blocked)
    patch.setattr(torch.cuda, "mem_get_info", lambda *device: (free, 2 * free))


def _installed(patch: Patch, **versions: str | None) -> None:
    """Makes distributions appear with another version, or as not installed."""
    real = importlib.metadata.version

    def found(distribution: str) -> str:
        version = versions[distribution] if distribution in versions else real(distribution)
        if version is None:
            raise importlib.metadata.PackageNotFoundError(distribution)
        return version

    patch.setattr(importlib.metadata, "version", found)


def _plugins(patch: Patch, *values: str) -> None:
    """vLLM's general plugins: entry points of these values."""

    def points(*, group: str) -> list[importlib.metadata.EntryPoint]:
        assert group == "vllm.general_plugins"
        return [importlib.metadata.EntryPoint(f"plugin{i}", value, group) for i, value in enumerate(values)]

    patch.setattr(importlib.metadata, "entry_points", points)


def _serving(patch: Patch) -> None:
    """A machine that meets every requirement of --deployment vllm --tp 4."""
    _gpus(patch)
    patch.setattr(torch, "__version__", "2.14.0+cu130")
    _installed(patch, vllm="0.33.0", triton="3.8.0")
    _plugins(patch, "other.package:register", "specialized_decode.integration:register")


def _report(invoke: Invoke, *arguments: object) -> dict[str, dict[str, Any]]:
    """The requirements by name, in order, from --json; the text must say the same."""
    result = invoke("doctor", "--json", *arguments)
    assert result.stderr == ""
    report = json.loads(result.stdout)
    assert list(report) == ["version", "deployment", "runs", "requirements"]
    assert report["version"] == specialized_decode.__version__
    rows: list[dict[str, Any]] = report["requirements"]
    assert all(list(row) == ["name", "ok", "found", "expected", "remedy"] for row in rows)
    assert all(row["found"] and row["expected"] and row["remedy"] for row in rows)
    runs = all(row["ok"] for row in rows)
    assert (report["runs"], result.exit_code) == (runs, 0 if runs else 1)

    text = invoke("doctor", *arguments)
    assert (text.exit_code, text.stderr) == (result.exit_code, "")
    expected = [f"specialized-decode {specialized_decode.__version__}, deployment {report['deployment']}"]
    for row in rows:
        # Several lines of a row are set under it.
        found = "\n".join([" " * 10 * (i > 0) + text for i, text in enumerate(row["found"].split("\n"))])
        expected.append(f"  {'ok     ' if row['ok'] else 'MISSING'} {row['name']}: {found}")
        if not row["ok"]:
            expected.append(f"          expected {row['expected']}; {row['remedy']}")
    missing = sum(not row["ok"] for row in rows)
    expected.append("can run" if runs else f"cannot run: {missing} of {len(rows)} requirements are not met")
    # What is free may change between the two runs.
    free = re.compile(r"\d+\.\d\d GB free")
    assert free.sub("free", text.stdout) == free.sub("free", "\n".join(expected) + "\n")
    return {row["name"]: row for row in rows}


def _missing(rows: dict[str, dict[str, Any]]) -> dict[str, str]:
    """What was found, by the names of the requirements that are not met."""
    return {name: row["found"] for name, row in rows.items() if not row["ok"]}


def test_cpu_is_the_deployment_where_there_is_no_gpu(invoke: Invoke, no_gpu: None) -> None:
    rows = _report(invoke)
    assert list(rows) == ROWS["cpu"]
    assert _missing(rows) == {}
    assert rows["Python"]["found"] == ".".join(map(str, sys.version_info[:3]))
    assert rows["PyTorch"]["found"] == torch.__version__
    assert rows == _report(invoke, "--deployment", "cpu")


def test_cuda_is_the_deployment_where_there_is_a_gpu(invoke: Invoke, monkeypatch: Patch) -> None:
    _gpus(monkeypatch, count=1)
    rows = _report(invoke)
    assert list(rows) == ROWS["cuda"]
    assert _missing(rows) == {}
    assert rows["GPU"]["found"] == "NVIDIA H200 (hopper)"
    assert rows["GPUs"]["found"] == "1"
    assert rows["Peer access"]["found"] == "one GPU"


def test_serving(invoke: Invoke, monkeypatch: Patch) -> None:
    _serving(monkeypatch)
    rows = _report(invoke, "--deployment", "vllm", "--tp", 4)
    assert list(rows) == ROWS["vllm"]
    assert _missing(rows) == {}
    assert rows["Peer access"]["found"] == "4 GPUs that reach each other"
    assert rows["vLLM plugin"]["found"] == "plugin1"
    _gpus(monkeypatch, name="NVIDIA B200", capability=(10, 0))
    _installed(monkeypatch, **{"flashinfer-python": "0.7.2.post1"})
    rows = _report(invoke, "--deployment", "vllm")
    assert _missing(rows) == {}
    assert rows["GPU"]["found"] == "NVIDIA B200 (10.0)"


def _old_python(patch: Patch) -> None:
    patch.setattr(module, "sys", SimpleNamespace(version_info=(3, 10, 4, "final", 0), exit=sys.exit))


CASES: dict[str, tuple[Callable[[Patch], object], str, str, str]] = {
    "old Python": (_old_python, "Python", "3.10.4", "3.11 or later"),
    "old torch": (
        lambda p: p.setattr(torch, "__version__", "2.10.1+cu128"),
        "PyTorch",
        "2.10.1+cu128",
        "2.11 to 2.14",
    ),
    "torch of another major version": (
        lambda p: p.setattr(torch, "__version__", "1.13.0"),
        "PyTorch",
        "1.13.0",
        "2.11 to 2.14",
    ),
    "no Triton": (lambda p: _installed(p, triton=None), "Triton", "none", "3.6 to 3.8"),
    "another GPU": (
        lambda p: _gpus(p, name="NVIDIA A100", capability=(8, 0)),
        "GPU",
        "NVIDIA A100 (8.0)",
        "Hopper (9.x) or Blackwell (10.x)",
    ),
    "a later GPU": (
        lambda p: _gpus(p, name="NVIDIA RTX PRO 6000", capability=(12, 0)),
        "GPU",
        "NVIDIA RTX PRO 6000 (12.0)",
        "Hopper (9.x) or Blackwell (10.x)",
    ),
    "too few GPUs": (
        lambda p: _gpus(p, count=3),
        "Peer access",
        "3 GPUs visible to this rank",
        "every rank's GPU reaches every other's, on one node",
    ),
    "a GPU apart": (
        lambda p: _gpus(p, blocked=(2, 1)),
        "Peer access",
        "none from GPU 2 to GPU 1",
        "every rank's GPU reaches every other's, on one node",
    ),
    "no vLLM": (lambda p: _installed(p, vllm=None), "vLLM", "none", "0.33.0"),
    "an older vLLM": (lambda p: _installed(p, vllm="0.32.1"), "vLLM", "0.32.1", "0.33.0"),
    "a later vLLM": (lambda p: _installed(p, vllm="0.33.0.post1"), "vLLM", "0.33.0.post1", "0.33.0"),
    "no plugin": (_plugins, "vLLM plugin", "none", "an entry point of this package"),
    "another's plugin": (
        lambda p: _plugins(p, "specialized_decoder:register"),
        "vLLM plugin",
        "none",
        "an entry point of this package",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_one_requirement_is_missing(invoke: Invoke, monkeypatch: Patch, case: str) -> None:
    damage, name, found, expected = CASES[case]
    _serving(monkeypatch)
    damage(monkeypatch)
    rows = _report(invoke, "--deployment", "vllm", "--tp", 4)
    assert _missing(rows) == {name: found}
    assert rows[name]["expected"] == expected


@pytest.mark.parametrize("version", ["2.11.0", "2.11.0rc1", "2.13.0a0+git1234", "3.0.0"])
def test_torch_versions_that_are_late_enough(invoke: Invoke, no_gpu: None, monkeypatch: Patch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert _report(invoke)["PyTorch"]["ok"]


def test_no_gpu(invoke: Invoke, no_gpu: None, monkeypatch: Patch) -> None:
    _installed(monkeypatch, vllm=None)
    _plugins(monkeypatch)
    missing = _missing(_report(invoke, "--deployment", "vllm", "--tp", 2))
    assert missing["GPU"] == "none"
    assert missing["Peer access"] == "no GPU"
    assert {"vLLM", "vLLM plugin"} <= set(missing), "everything that is missing, at once"
    assert set(_missing(_report(invoke, "--deployment", "cuda"))) >= {"GPU", "GPUs"}


@pytest.mark.parametrize("deployment", ["cpu", "cuda"])
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_one_process_decodes_alone(invoke: Invoke, monkeypatch: Patch, deployment: str, tp: int) -> None:
    _gpus(monkeypatch, count=8)
    rows = _report(invoke, "--deployment", deployment, "--tp", tp)
    assert _missing(rows) == {"Tensor parallelism": str(tp)}
    assert rows["Tensor parallelism"]["expected"] == "1"
    assert _missing(_report(invoke, "--deployment", deployment, "--tp", 1)) == {}


def test_every_pair_of_the_gpus_that_are_used_is_asked(invoke: Invoke, monkeypatch: Patch) -> None:
    _serving(monkeypatch)
    _gpus(monkeypatch, count=8, blocked=(0, 7))
    assert _missing(_report(invoke, "--deployment", "vllm", "--tp", 4)) == {}
    assert _missing(_report(invoke, "--deployment", "vllm", "--tp", 8)) == {"Peer access": "none from GPU 0 to GPU 7"}


# A model folder.


def test_whole_folder(invoke: Invoke, no_gpu: None, small_folder: Path) -> None:
    rows = _report(invoke, small_folder)
    assert list(rows) == ROWS["cpu"] + FOLDER_ROWS
    assert _missing(rows) == {}
    specs = text_tensors(ModelConfig.from_folder(small_folder))
    size = (small_folder / SHARD).stat().st_size
    assert rows["Configuration"]["found"] == "4 layers, hidden size 128, 2 experts"
    assert rows["Tensors"]["found"] == f"{len(specs)} tensors, {size / 1e9:.2f} GB"
    assert rows["Tokenizer"]["found"] == f"{compressed_vocab_size()} compressed ids"
    assert re.fullmatch(rf"{size / 1e9:.2f} GB of weights, \d+\.\d\d GB free", rows["Memory"]["found"])


@pytest.mark.parametrize("damage", ["absent", "another model"])
def test_folder_without_a_fitting_config(
    invoke: Invoke, no_gpu: None, folder_copy: Path, tmp_path: Path, damage: str
) -> None:
    """The other checks of the folder need it, so they are not made."""
    path = folder_copy / "config.json"
    if damage == "absent":
        shutil.rmtree(folder_copy)
        found = f"{path}: cannot be read (No such file or directory); expected a DeepSeek-V4.1 model folder"
    else:
        path.write_text("{}")
        found = f"{path}: text_config: found nothing, expected an object holding the text model's hyper-parameters"
    rows = _report(invoke, folder_copy)
    assert list(rows) == [*ROWS["cpu"], "Configuration"]
    assert _missing(rows) == {"Configuration": found}


def test_everything_wrong_with_a_folder_at_once(invoke: Invoke, no_gpu: None, folder_copy: Path) -> None:
    with (folder_copy / SHARD).open("rb+") as file:
        file.truncate(100_000)
    (folder_copy / "tokenizer.json").unlink()
    size = (folder_copy / SHARD).stat().st_size
    rows = _report(invoke, folder_copy)
    missing = _missing(rows)
    assert list(missing) == ["Tensors", "Tokenizer"]
    assert f"{folder_copy / SHARD}: found {size} bytes, expected " in missing["Tensors"]
    assert missing["Tokenizer"].startswith(f"{folder_copy / 'tokenizer.json'}: not found; expected ")


def test_tokenizer_that_yields_other_ids(invoke: Invoke, no_gpu: None, folder_copy: Path) -> None:
    config = json.loads((folder_copy / "config.json").read_text())
    config["text_config"]["engram_compressed_vocab_size"] = 7
    (folder_copy / "config.json").write_text(json.dumps(config))
    found = f"{compressed_vocab_size()} compressed ids, not engram_compressed_vocab_size, 7"
    assert _missing(_report(invoke, folder_copy)) == {"Tokenizer": found}


@pytest.mark.parametrize("deployment", ["cpu", "cuda"])
def test_memory_is_short(invoke: Invoke, monkeypatch: Patch, small_folder: Path, deployment: str) -> None:
    """A gigabyte is enough for a few megabytes of weights, and a megabyte is not."""
    for free, enough in ((1_000_000_000, True), (1_000_000, False)):
        _gpus(monkeypatch, free=free if deployment == "cuda" else 0)
        monkeypatch.setattr(module, "_available_memory", lambda free=free: free if deployment == "cpu" else 0)
        rows = _report(invoke, small_folder, "--deployment", deployment)
        assert rows["Memory"]["found"].endswith(f"GB of weights, {free / 1e9:.2f} GB free")
        assert list(_missing(rows)) == ([] if enough else ["Memory"])


def test_memory_of_the_machine() -> None:
    assert 1_000_000 < module._available_memory() < 1 << 50


def test_flags_for_vllm_need_a_model_to_serve(invoke: Invoke, tmp_path: Path) -> None:
    for arguments in (["--deployment", "vllm"], [tmp_path, "--deployment", "cuda"]):
        result = invoke("doctor", *arguments, "--vllm-args", "--enforce-eager")
        assert (result.exit_code, result.stdout) == (2, "")
        assert "--vllm-args needs --deployment vllm and FOLDER." in result.stderr
    result = invoke("doctor", tmp_path, "--deployment", "vllm", "--vllm-args", "--served-model-name 'open")
    assert result.exit_code == 2
    assert "--vllm-args: No closing quotation." in result.stderr


@pytest.mark.parametrize("arguments", [("--tp", "3"), ("--deployment", "rocm")])
def test_wrong_command_lines(invoke: Invoke, arguments: tuple[str, str]) -> None:
    result = invoke("doctor", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"Invalid value for '{arguments[0]}'" in result.stderr


def test_a_process_of_its_own(run: Run, tmp_path: Path) -> None:
    done = run("doctor", tmp_path, "--deployment", "cpu", "--tp", "2")
    assert (done.returncode, done.stderr) == (1, "")
    assert "  MISSING Tensor parallelism: 2\n" in done.stdout
    assert f"  MISSING Configuration: {tmp_path / 'config.json'}: cannot be read" in done.stdout
    assert done.stdout.endswith("\ncannot run: 2 of 4 requirements are not met\n")
