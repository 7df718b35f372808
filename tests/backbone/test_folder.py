"""Reading a model folder, and what is said of a damaged one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specialized_decode.backbone.config import ModelConfig
from specialized_decode.backbone.errors import CheckpointError
from specialized_decode.backbone.folder import INDEX_FILE, LONE_FILE, ModelFolder
from specialized_decode.backbone.tensors import Specs, TensorSpec, text_tensors

SHARD = "model-00001-of-00001.safetensors"


def _specs(folder: Path) -> Specs:
    return text_tensors(ModelConfig.from_folder(folder))


def _edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / SHARD)
    change(tensors)
    save_file(tensors, folder / SHARD)


def _edit_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX_FILE).read_text())
    change(index["weight_map"])
    (folder / INDEX_FILE).write_text(json.dumps(index))


def _refusal(folder: Path) -> str:
    specs = _specs(folder)
    with pytest.raises(CheckpointError) as caught, ModelFolder(folder) as model:
        model.check(specs)
    return str(caught.value)


def test_tensors_are_those_of_the_shard(small_folder: Path) -> None:
    specs = _specs(small_folder)
    stored = load_file(small_folder / SHARD)
    with ModelFolder(small_folder) as model:
        model.check(specs)
        assert set(model.names) == set(stored) == set(specs)
        for name, spec in specs.items():
            tensor = model.tensor(name, spec)
            assert (tensor.dtype, tuple(tensor.shape)) == (spec.dtype, spec.shape)
            assert torch.equal(tensor.view(torch.uint8), stored[name].view(torch.uint8)), name


def test_tensors_outlive_the_folder(small_folder: Path) -> None:
    spec = _specs(small_folder)["norm.weight"]
    with ModelFolder(small_folder) as model:
        tensor = model.tensor("norm.weight", spec)
    assert torch.equal(tensor, load_file(small_folder / SHARD)["norm.weight"])
    assert torch.equal(model.tensor("norm.weight", spec), tensor)  # and it can be used again


def test_lone_shard_needs_no_index(folder_copy: Path) -> None:
    (folder_copy / INDEX_FILE).unlink()
    (folder_copy / SHARD).rename(folder_copy / LONE_FILE)
    with ModelFolder(folder_copy) as model:
        model.check(_specs(folder_copy))


def test_several_shards(folder_copy: Path) -> None:
    tensors = load_file(folder_copy / SHARD)
    save_file({"norm.weight": tensors.pop("norm.weight")}, folder_copy / "b.safetensors")
    save_file(tensors, folder_copy / SHARD)
    _edit_index(folder_copy, lambda index: index.update({"norm.weight": "b.safetensors"}))
    with ModelFolder(folder_copy) as model:
        model.check(_specs(folder_copy))
        assert model.tensor("norm.weight", TensorSpec((128,), torch.bfloat16)).shape == (128,)


def test_check_reads_no_data(folder_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specialized_decode.backbone.folder.safe_open", None)
    ModelFolder(folder_copy).check(_specs(folder_copy))


def test_every_problem_is_in_one_error(folder_copy: Path) -> None:
    def damage(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["layers.3.attn.attn_sink"]
        tensors["layers.4.ffn_norm.weight"] = torch.ones(127, dtype=torch.bfloat16)
        tensors["layers.5.hc_attn_base"] = torch.ones(24, dtype=torch.float16)

    _edit_tensors(folder_copy, damage)
    _edit_index(folder_copy, lambda index: index.pop("layers.2.attn.indexer.wk.weight"))
    assert _refusal(folder_copy).splitlines() == [
        f"{folder_copy}: the checkpoint does not fit its config.json",
        "2 missing:",
        "  layers.2.attn.indexer.wk.weight: in no shard, expected BF16 [128, 512]",
        f"  {SHARD}: layers.3.attn.attn_sink: listed in the index but absent, expected F32 [4]",
        "1 misshapen:",
        f"  {SHARD}: layers.4.ffn_norm.weight: found BF16 [127], expected BF16 [128]",
        "1 wrong dtype:",
        f"  {SHARD}: layers.5.hc_attn_base: found F16 [24], expected F32 [24]",
    ]


def test_long_lists_are_cut(folder_copy: Path) -> None:
    _edit_index(folder_copy, lambda index: [index.pop(name) for name in list(index) if ".experts." in name])
    message = _refusal(folder_copy)
    assert f"{10 * 2 * 6} missing:" in message
    assert message.endswith(f"  ... and {10 * 2 * 6 - 8} more")
    assert len(message.splitlines()) == 11


def test_truncated_shard(folder_copy: Path) -> None:
    shard = folder_copy / SHARD
    size = shard.stat().st_size
    with shard.open("rb+") as file:
        file.truncate(size - 1)
    assert f"{shard}: found {size - 1} bytes, expected {size} by its header (truncated shard?)" in _refusal(folder_copy)


@pytest.mark.parametrize("size", [0, 5, 100])
def test_shard_truncated_in_its_header(folder_copy: Path, size: int) -> None:
    with (folder_copy / SHARD).open("rb+") as file:
        file.truncate(size)
    assert f"{SHARD}: found {size} bytes, expected a safetensors header (truncated shard?)" in _refusal(folder_copy)


def test_absent_shard(folder_copy: Path) -> None:
    (folder_copy / SHARD).unlink()
    message = _refusal(folder_copy)
    assert f"{folder_copy / SHARD}: not found, expected because the index lists it" in message
    assert len(message.splitlines()) == 2  # said once, not for every tensor


@pytest.mark.parametrize(
    "header",
    [
        b"{}}",
        b"[]",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32"}}',
        b'{"a": {"dtype": "F32", "shape": 3}}',
        b"\xff\xfe",
    ],
)
def test_broken_header(folder_copy: Path, header: bytes) -> None:
    (folder_copy / SHARD).write_bytes(len(header).to_bytes(8, "little") + header)
    assert f"{SHARD}: broken safetensors header" in _refusal(folder_copy)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", r"not valid JSON .*; expected an index of shards"),
        ("\udc80", r"not valid JSON .*; expected an index of shards"),
        ("[]", r"weight_map: found none, expected an object"),
        ('{"weight_map": {"a": 1}}', r"weight_map: found none, expected an object"),
        (
            '{"weight_map": {"a": "../b.safetensors"}}',
            r"weight_map.a: found .*, expected a file beside the index",
        ),
    ],
)
def test_broken_index(folder_copy: Path, text: str, expected: str) -> None:
    (folder_copy / INDEX_FILE).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match=rf"{INDEX_FILE}: {expected}"):
        ModelFolder(folder_copy)


def test_folder_without_tensors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"found neither {INDEX_FILE} nor {LONE_FILE}"):
        ModelFolder(tmp_path)


def test_tensor_refuses_what_is_not_as_expected(small_folder: Path) -> None:
    with ModelFolder(small_folder) as model:
        with pytest.raises(CheckpointError, match=r"nothing\.weight: in no shard"):
            model.tensor("nothing.weight", TensorSpec((1,), torch.float32))
        with pytest.raises(CheckpointError, match=r"norm\.weight: found BF16 \[128\], expected F32 \[128\]"):
            model.tensor("norm.weight", TensorSpec((128,), torch.float32))


def test_shard_that_vanishes_after_the_check(folder_copy: Path) -> None:
    specs = _specs(folder_copy)
    with ModelFolder(folder_copy) as model:
        model.check(specs)
        shutil.rmtree(folder_copy)
        with pytest.raises(CheckpointError, match=r"norm\.weight: cannot be read"):
            model.tensor("norm.weight", specs["norm.weight"])
