"""`make-checkpoint`: its options, what it refuses, and what it leaves behind when it is interrupted."""

import hashlib
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from specialized_decode.backbone import writer
from specialized_decode.backbone.folder import ModelFolder
from specialized_decode.backbone.model import load_model
from specialized_decode.backbone.writer import CheckpointPlan, flash_plan, is_current, plan_tensors, tiny_plan
from specialized_decode.cli import checkpoint as module
from tests.cli.conftest import Invoke, refused
from tests.helpers.small_plan import few_layers_plan


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[CheckpointPlan]:
    """Writes nothing but a file of 12.3 MB; the plans asked for end up here."""
    asked: list[CheckpointPlan] = []

    def record(plan: CheckpointPlan, folder: Path, progress: Any, replace: bool, workers: int) -> None:
        plan_tensors(plan)
        asked.append(plan)
        folder.mkdir()
        (folder / "shard").write_bytes(bytes(12_300_000))

    monkeypatch.setattr(module, "write_checkpoint", record)
    return asked


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> CheckpointPlan:
    """The plan that --preset tiny stands for, for tests that write."""
    monkeypatch.setattr(module, "tiny_plan", lambda seed, drafts: CheckpointPlan(few_layers_plan().config, seed))
    return few_layers_plan()


def test_tiny_is_the_default_and_loads(invoke: Invoke, tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    result = invoke("make-checkpoint", folder)
    assert (result.exit_code, result.stderr) == (0, "")
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert result.stdout == f"{folder}: 10 layers, 16 experts, hidden size 128, {size / 1e9:.2f} GB\n"
    # The same seed, the same bytes.
    for path in folder.iterdir():
        digests = {hashlib.sha256((f / path.name).read_bytes()).digest() for f in (folder, tiny_folder)}
        assert len(digests) == 1, path.name
    assert load_model(folder, torch.device("cpu"), 8, 64).config.num_hidden_layers == 10
    # What --help says of its size.
    help_text = " ".join(invoke("make-checkpoint", "--help").stdout.split())
    said = re.search(r"tiny: every feature at small widths, (\d+) MB", help_text)
    assert said is not None
    assert size / 1e6 == pytest.approx(int(said[1]), rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "plan"),
    [
        ((), tiny_plan()),
        (("--preset", "tiny", "--seed", 5, "--drafts", 3), tiny_plan(5, 3)),
        (("--seed", -1), tiny_plan(-1)),
        (("--preset", "flash"), flash_plan(layers=4)),
        (("--preset", "flash", "--layers", 8), flash_plan(layers=8)),
        (("--preset", "flash", "--experts", 6), flash_plan(layers=4, experts=6)),
        (("--preset", "flash", "--shard-tp", 8), flash_plan(layers=4, shard_tp=8)),
        (("--preset", "flash", "--drafts", 3, "--seed", 9), flash_plan(layers=4, drafts=3, seed=9)),
        (
            ("--preset", "flash", "--layers", 40, "--experts", 32, "--shard-tp", 4),
            flash_plan(layers=40, experts=32, shard_tp=4),
        ),
    ],
)
def test_options(
    invoke: Invoke, plans: list[CheckpointPlan], tmp_path: Path, arguments: tuple[object, ...], plan: CheckpointPlan
) -> None:
    result = invoke("make-checkpoint", tmp_path / "out", *arguments)
    assert result.exit_code == 0
    assert plans == [plan]
    text = plan.config["text_config"]
    shape = f"{text['num_hidden_layers']} layers, {text['n_routed_experts']} experts, hidden size {text['hidden_size']}"
    assert result.stdout == f"{tmp_path / 'out'}: {shape}, 0.01 GB\n"


@pytest.mark.parametrize("option", [("--layers", "8"), ("--experts", "32"), ("--shard-tp", "1")])
def test_flash_options_need_flash(
    invoke: Invoke, plans: list[CheckpointPlan], tmp_path: Path, option: tuple[str, str]
) -> None:
    result = invoke("make-checkpoint", tmp_path / "out", *option)
    message = f"{option[0]}: found {option[1]} with --preset tiny, expected it with --preset flash only"
    assert refused(result, code=2) == message
    assert plans == []


@pytest.mark.parametrize(
    "option",
    [("--layers", 3), ("--experts", 5), ("--shard-tp", 3), ("--drafts", 1), ("--preset", "pro"), ("--seed", "x")],
)
def test_values_out_of_range(
    invoke: Invoke, plans: list[CheckpointPlan], tmp_path: Path, option: tuple[str, object]
) -> None:
    preset = () if option[0] == "--preset" else ("--preset", "flash")
    message = refused(invoke("make-checkpoint", tmp_path / "out", *preset, *option), code=2)
    assert message.startswith(f"Invalid value for '{option[0]}': ")
    assert str(option[1]) in message
    assert plans == []


def test_folder_is_needed(invoke: Invoke) -> None:
    assert refused(invoke("make-checkpoint"), code=2) == "Missing argument 'FOLDER'."


def test_existing_folder(invoke: Invoke, small: CheckpointPlan, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    assert invoke("make-checkpoint", folder).exit_code == 0  # an empty one is in no one's use
    assert refused(invoke("make-checkpoint", folder, "--seed", 1)) == (
        f"{folder}: found something there, expected no folder, an empty one, or leave to replace it"
    )
    assert is_current(folder, small)
    (folder / "mine").write_text("")
    assert invoke("make-checkpoint", folder, "--seed", 1, "--replace").exit_code == 0
    assert is_current(folder, CheckpointPlan(small.config, 1))
    assert not (folder / "mine").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("parent", ["file", "absent"])
def test_parent_that_cannot_be_written(invoke: Invoke, small: CheckpointPlan, tmp_path: Path, parent: str) -> None:
    """A file as the parent, since permissions do not bind every user."""
    (tmp_path / "file").write_text("")
    folder = tmp_path / parent / "out"
    message = refused(invoke("make-checkpoint", folder))
    assert re.fullmatch(rf"{folder}: cannot be written \(.+\); expected a writable parent folder", message)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_too_little_disk(
    invoke: Invoke, small: CheckpointPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_OTHER_BYTES", 1 << 60)
    message = refused(invoke("make-checkpoint", tmp_path / "out"))
    assert re.fullmatch(
        rf"{tmp_path}: found .+ GB free, expected at least 1152921504\.\d\d GB, which the checkpoint needs", message
    )
    assert list(tmp_path.iterdir()) == []


def test_no_weights(invoke: Invoke, small: CheckpointPlan, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    result = invoke("make-checkpoint", folder, "--no-weights")
    assert result.exit_code == 0
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "generation.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert re.fullmatch(rf"{folder}: \d+ layers, \d+ experts, hidden size \d+, 0\.0\d GB\n", result.stdout)


@pytest.mark.parametrize("existing", [False, True])
def test_interrupted(
    invoke: Invoke, small: CheckpointPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existing: bool
) -> None:
    folder = tmp_path / "out"
    if existing:
        folder.mkdir()
        (folder / "mine").write_text("kept")
    write, written = writer._write_tensor, []

    def interrupt(file: Any, name: str, *arguments: Any) -> None:
        write(file, name, *arguments)
        written.append(name)
        if len(written) == 20:
            raise KeyboardInterrupt

    monkeypatch.setattr(writer, "_write_tensor", interrupt)
    result = invoke("make-checkpoint", folder, *["--replace"][: int(existing)])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.split() == ["Aborted!"]
    assert len(written) == 20
    assert [path.name for path in tmp_path.rglob("*")] == (["out", "mine"] if existing else [])


def test_interrupted_process(command: list[str], environment: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "out"
    process = subprocess.Popen(
        [*command, "make-checkpoint", str(folder)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )
    try:
        deadline = time.monotonic() + 60
        # The configuration comes first, the tokenizer's training and the shards after it.
        while not list(tmp_path.glob(".out.*.partial/config.json")):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, "nothing was written"
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, stdout, stderr.split()) == (1, "", ["Aborted!"])
    assert list(tmp_path.iterdir()) == []


def test_unwritten_tensors_never_show(small: CheckpointPlan, invoke: Invoke, tmp_path: Path) -> None:
    """What is written is whole: every tensor of the plan is in the folder, in its shape."""
    invoke("make-checkpoint", tmp_path / "out")
    with ModelFolder(tmp_path / "out") as folder:
        folder.check(plan_tensors(small))
        assert set(folder.names) == set(plan_tensors(small))
