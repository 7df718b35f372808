"""`doctor` where vLLM is installed: the deployment check's rows, without an engine."""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from specialized_decode.cli.main import main
from specialized_decode.integration import config as check
from specialized_decode.integration.facts import Device

Patch = pytest.MonkeyPatch
ROWS = [requirement.name for requirement in check.REQUIREMENTS]


@pytest.fixture
def h200(monkeypatch: Patch) -> None:
    """One H200, and the plugin of an installed package; a checkout has no entry points."""
    import vllm.config.vllm

    monkeypatch.setattr(vllm.config.vllm, "HAS_TRITON", True)
    # Set in this process by vLLM, and by the command.
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    monkeypatch.setenv("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    device = Device("NVIDIA H200", (9, 0), None, 140 << 30, 141 << 30)
    monkeypatch.setattr(Device, "gather", lambda *arguments, **more: device)
    real = importlib.metadata.entry_points
    point = importlib.metadata.EntryPoint("specialized_decode", "specialized_decode.x:y", "vllm.general_plugins")

    def points(**selected: str) -> Any:
        return [point] if selected.get("group") == point.group else real(**selected)

    monkeypatch.setattr("specialized_decode.cli.doctor.importlib.metadata.entry_points", points)


def _doctor(*arguments: object) -> tuple[int, dict[str, dict[str, Any]]]:
    result = CliRunner().invoke(main, ["doctor", "--json", "--deployment", "vllm", *map(str, arguments)])
    assert result.exit_code in (0, 1), result.output
    report = json.loads(result.stdout)
    return result.exit_code, {row["name"]: row for row in report["requirements"]}


def _missing(rows: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: row["found"] for name, row in rows.items() if not row["ok"] and name != "Memory"}


@pytest.mark.usefixtures("h200")
def test_prints_the_deployment_checks_rows(tiny_folder: Path) -> None:
    _, rows = _doctor(tiny_folder, "--vllm-args", "--max-model-len 512")
    assert list(rows) == ["Python", *ROWS, "vLLM plugin", "Configuration", "Tensors", "Tokenizer", "Memory"]
    assert _missing(rows) == {}
    for requirement in check.REQUIREMENTS:
        row = rows[requirement.name]
        assert (row["expected"], row["remedy"]) == (requirement.expected, requirement.remedy)
    assert rows["Attention class"]["found"] == "DeepseekV4FlashMLAAttention"


@pytest.mark.usefixtures("h200")
def test_flags_of_vllm_serve(tiny_folder: Path) -> None:
    option = '--additional-config \'{"decode_backend": "auto"}\''
    flags = f"--max-model-len 512 --enforce-eager --kv-cache-dtype bfloat16 {option}"
    code, rows = _doctor(tiny_folder, "--vllm-args", flags)
    assert code == 1
    assert _missing(rows) == {"KV cache dtype": "bfloat16", "CUDA graphs": "NONE, no capture sizes"}


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--no-such-flag", "unrecognized arguments: --no-such-flag"),
        ("--kv-cache-dtype nothing", "nothing"),
        ("--enable-lora", "LoRA is not supported for DeepseekV41ForCausalLM"),
    ],
)
def test_what_vllm_itself_refuses(tiny_folder: Path, flags: str, said: str) -> None:
    code, rows = _doctor(tiny_folder, "--vllm-args", flags)
    assert code == 1
    assert said in _missing(rows)["vLLM configuration"]


@pytest.mark.usefixtures("h200")
def test_without_a_model() -> None:
    code, rows = _doctor()
    names = [requirement.name for requirement in check.REQUIREMENTS if not requirement.needs_configuration]
    assert list(rows) == ["Python", *names, "vLLM plugin"]
    assert (code, _missing(rows)) == (0, {})


@pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM finds the GPU")
def test_a_process_of_its_own_without_a_gpu(tiny_folder: Path) -> None:
    """Nothing but the report on the standard output, whatever vLLM logs; and what vLLM says of the machine."""
    command = [sys.executable, "-m", "specialized_decode.cli.main", "doctor", str(tiny_folder), "--json"]
    command += ["--deployment", "vllm", "--vllm-args", "--max-model-len 512"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    del environment["VLLM_LOGGING_LEVEL"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 1
    rows = {row["name"]: row for row in json.loads(done.stdout)["requirements"]}
    assert "device" in rows["vLLM configuration"]["found"]
    assert not rows["GPU"]["ok"]
