"""The checkpoint writer: its bytes, its plans, and what it leaves behind when it fails."""

import copy
import hashlib
import json
import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from specialized_decode.backbone import writer
from specialized_decode.backbone.config import ModelConfig
from specialized_decode.backbone.corpus import corpus
from specialized_decode.backbone.errors import InputError
from specialized_decode.backbone.folder import INDEX_FILE, ModelFolder
from specialized_decode.backbone.random_weights import random_chunks
from specialized_decode.backbone.tensors import TensorSpec
from specialized_decode.backbone.tokenizer import TRAINED_IDS, compressed_token_map, load_tokenizer
from specialized_decode.backbone.writer import (
    CheckpointPlan,
    flash_plan,
    is_current,
    plan_tensors,
    tiny_plan,
    write_checkpoint,
    write_configuration,
)

SHARD = "model-00001-of-00001.safetensors"
MakePlan = Callable[[int], CheckpointPlan]


def _digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def _rms(tensor: torch.Tensor) -> float:
    return float(tensor.double().square().mean().sqrt())


def _dequantized(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """float32 weights [rows, columns] of an FP8 projection or, packed as int8, of an FP4 one."""
    weight, scale = tensors[f"{name}.weight"], tensors[f"{name}.scale"].float()
    if weight.dtype == torch.int8:
        codes = weight.view(torch.uint8)
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        values = torch.cat([values, -values])
        weight = values[torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()]
        return weight * scale.repeat_interleave(32, 1)
    rows = scale.repeat_interleave(weight.shape[0] // scale.shape[0], 0)
    return weight.float() * rows.repeat_interleave(weight.shape[1] // scale.shape[1], 1)


def test_tiny_folder_fits_its_configuration(tiny_folder: Path) -> None:
    config = ModelConfig.from_folder(tiny_folder)
    assert config.compress_ratios == (0, 0, 2, 2, 2, 2, 1, 1, 1, 1)
    assert json.loads((tiny_folder / "config.json").read_text()) == tiny_plan().config
    with ModelFolder(tiny_folder) as model:
        model.check(plan_tensors(tiny_plan()))
        assert model.names == list(plan_tensors(tiny_plan()))
    tokenizer = load_tokenizer(tiny_folder)
    assert tokenizer.get_vocab_size() == config.vocab_size
    assert compressed_token_map(tokenizer)[1] == config.engram_compressed_vocab_size
    assert is_current(tiny_folder, tiny_plan())


def test_same_seed_same_bytes(small_plan: MakePlan, small_folder: Path, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 2)
    try:
        again = write_checkpoint(small_plan(0), tmp_path / "again")
    finally:
        torch.set_num_threads(threads)
    assert _digest(again) == _digest(small_folder)
    other = write_checkpoint(small_plan(1), tmp_path / "other")
    assert _digest(other)[SHARD] != _digest(small_folder)[SHARD]


RECORDED = {
    "embed.weight": "7877868c11b34f5c",
    "layers.1.engram.embed.scale": "cce1e938b2bf6f5b",
    "layers.2.attn.wq_b.weight": "310b994568f37622",
    "layers.6.ffn.experts.1.w2.weight": "7d0d200d8ff2604d",
    "layers.9.ffn.experts.0.w1.scale": "7b7af47b72ab2eba",
    "layers.9.attn.attn_sink": "e5e4823e5d31fe24",
}


def test_bytes_do_not_change_between_versions(small_folder: Path) -> None:
    """Digests of some tensors of seed 0. Whoever changes the weights on purpose also raises `_FORMAT`."""
    tensors = load_file(small_folder / SHARD)
    found = {
        name: hashlib.sha256(tensors[name].view(torch.uint8).numpy().tobytes()).hexdigest()[:16] for name in RECORDED
    }
    assert found == RECORDED


def test_weights_have_the_sizes_meant(tiny_folder: Path) -> None:
    tensors = load_file(tiny_folder / SHARD)
    for name, gain in {
        "layers.0.attn.wq_a": 1.0,
        "layers.3.attn.wq_b": 1.5,
        "layers.3.attn.wo_a": 2.0,
        "layers.5.engram.wkv": 1.0,
        "layers.7.ffn.experts.3.w1": 3.0,
        "layers.7.ffn.experts.3.w2": 0.15,
    }.items():
        weight = _dequantized(tensors, name)
        assert _rms(weight) * weight.shape[1] ** 0.5 == pytest.approx(gain, rel=0.15), name
    assert _rms(tensors["embed.weight"]) == pytest.approx(1, rel=0.01)
    norm = tensors["layers.0.attn_norm.weight"].float()
    assert norm.mean() == pytest.approx(1, abs=0.03)
    assert 0.05 < norm.std() < 0.15


def test_every_code_and_several_scales_occur(tiny_folder: Path) -> None:
    tensors = load_file(tiny_folder / SHARD)
    experts = tensors["layers.0.ffn.experts.0.w1.weight"].view(torch.uint8)
    assert len(torch.unique(experts & 15)) == len(torch.unique(experts >> 4)) == 16
    for name in (
        "layers.0.ffn.experts.0.w1.scale",
        "layers.3.attn.wq_b.scale",
        "layers.1.engram.embed.scale",
    ):
        assert len(torch.unique(tensors[name].view(torch.uint8))) in (4, 5), name
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float8_e4m3fn:
            assert not torch.isnan(tensor.float()).any(), name
        if tensor.dtype in (torch.bfloat16, torch.float32):
            assert torch.isfinite(tensor).all(), name


def test_router_bias_changes_selections_without_making_them(tiny_folder: Path) -> None:
    tensors = load_file(tiny_folder / SHARD)
    x = torch.randn(512, 128, generator=torch.Generator().manual_seed(0))
    scores = torch.nn.functional.softplus(x @ tensors["layers.4.ffn.gate.weight"].float().T).sqrt()
    biases = (torch.zeros(16), tensors["layers.4.ffn.gate.bias"], tensors["layers.4.ffn.gate.bias_vl"])
    selections = [(scores + bias).topk(3).indices.sort().values for bias in biases]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert 0.2 < (selections[one] != selections[other]).any(-1).float().mean() < 0.99
    for selection in selections:
        assert len(selection.unique(dim=0)) > 50


def test_ids_that_no_text_yields_have_zero_head_rows(tiny_folder: Path) -> None:
    tensors = load_file(tiny_folder / SHARD)
    head = tensors["head.weight"]
    assert head.shape == (129280, 128)
    assert torch.equal(head.any(1), torch.arange(129280) < TRAINED_IDS)
    assert _rms(head[:TRAINED_IDS]) * 128**0.5 == pytest.approx(3, rel=0.01)
    assert tensors["embed.weight"][TRAINED_IDS:].any(1).all()
    ids = load_tokenizer(tiny_folder).encode(corpus() + "\n\x00 \N{GRINNING FACE}\ufdd0").ids
    assert max(ids) < TRAINED_IDS  # every byte is an id, so no text yields another


def test_zero_head_rows_may_start_in_any_chunk() -> None:
    # A chunk holds 2**18 elements: the trained rows of width 512 end in the fourth, those of width 96 in the first.
    for width in (96, 512):
        specs = {"head.weight": TensorSpec((4000, width), torch.bfloat16)}
        chunks = [chunk.copy() for chunk in random_chunks("head.weight", specs, 0)]
        rows = torch.from_numpy(np.concatenate(chunks)).view(torch.bfloat16).view(4000, width)
        assert torch.equal(rows.any(1), torch.arange(4000) < TRAINED_IDS)
        short = {"head.weight": TensorSpec((TRAINED_IDS, width), torch.bfloat16)}
        whole = np.concatenate([chunk.copy() for chunk in random_chunks("head.weight", short, 0)])
        assert torch.equal(rows[:TRAINED_IDS].flatten().view(torch.int16), torch.from_numpy(whole))


def test_drafts_are_written(small_plan: MakePlan, tmp_path: Path) -> None:
    plan = small_plan(0)
    config = copy.deepcopy(plan.config)
    config["text_config"] |= {"num_nextn_predict_layers": 3, "dspark_n_routed_experts": 2}
    config["text_config"]["compress_ratios"] += [0, 0, 0]
    folder = write_checkpoint(CheckpointPlan(config), tmp_path / "drafts")
    names = ModelFolder(folder).names
    assert "mtp.0.main_proj.scale" in names
    assert "mtp.2.markov_head.embed.weight" in names


def test_shards_are_split_and_aligned(
    small_plan: MakePlan, small_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "SHARD_BYTES", 1_000_000)
    folder = write_checkpoint(small_plan(0), tmp_path / "split")
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 5
    assert shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    whole = load_file(small_folder / SHARD)
    split: dict[str, torch.Tensor] = {}
    for shard in shards:
        assert shard.stat().st_size < 1_100_000
        header = json.loads(shard.read_bytes()[8 : 8 + int.from_bytes(shard.read_bytes()[:8], "little")])
        for name, entry in header.items():
            if name != "__metadata__":
                assert entry["data_offsets"][0] % whole[name].dtype.itemsize == 0
        split |= load_file(shard)
    assert split.keys() == whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(split[name].view(torch.uint8), tensor.view(torch.uint8)), name
    total = json.loads((folder / INDEX_FILE).read_text())["metadata"]["total_size"]
    assert total == sum(spec.nbytes for spec in plan_tensors(small_plan(0)).values())


def test_progress_counts_to_the_total(small_plan: MakePlan, tmp_path: Path) -> None:
    calls: list[tuple[int, int, str]] = []
    write_checkpoint(small_plan(0), tmp_path / "out", progress=lambda *call: calls.append(call))
    specs = plan_tensors(small_plan(0))
    total = sum(spec.nbytes for spec in specs.values())
    assert sorted(name for _, _, name in calls) == sorted(specs)
    assert calls[-1][:2] == (total, total)
    assert [done for done, _, _ in calls] == sorted(done for done, _, _ in calls)


def test_several_processes_write_the_same_bytes(
    small_plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "SHARD_BYTES", 2_000_000)
    one = write_checkpoint(small_plan(0), tmp_path / "one")
    calls: list[tuple[int, int, str]] = []
    two = write_checkpoint(small_plan(0), tmp_path / "two", lambda *call: calls.append(call), workers=2)
    assert _digest(two) == _digest(one)
    assert len(calls) == len(list(two.glob("*.safetensors"))) > 2
    assert calls[-1][0] == calls[-1][1]


def test_several_processes_leave_nothing_behind(
    small_plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "SHARD_BYTES", 1_000_000)

    def interrupt(done: int, total: int, name: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(small_plan(0), tmp_path / "out", progress=interrupt, workers=2)
    assert list(tmp_path.iterdir()) == []


def test_configuration_alone(small_plan: MakePlan, small_folder: Path, tmp_path: Path) -> None:
    folder = write_configuration(small_plan(0), tmp_path / "out")
    written = {path.name: path.read_bytes() for path in folder.iterdir()}
    names = {"config.json", "generation.json", "tokenizer.json", "tokenizer_config.json"}
    assert written == {name: (small_folder / name).read_bytes() for name in names}


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, MemoryError])
@pytest.mark.parametrize("existing", [False, True])
def test_interrupted_write_leaves_nothing_behind(
    small_plan: MakePlan, tmp_path: Path, error: type[BaseException], existing: bool
) -> None:
    out = tmp_path / "out"
    if existing:
        out.mkdir()
        (out / "old").write_text("kept")

    def interrupt(done: int, total: int, name: str) -> None:
        if done > total // 2:
            assert len(list(tmp_path.iterdir())) == 1 + existing  # something is there while it writes
            raise error

    with pytest.raises(error):
        write_checkpoint(small_plan(0), out, progress=interrupt, replace=existing)
    assert [path.name for path in tmp_path.rglob("*")] == (["out", "old"] if existing else [])


def test_disk_that_fills_up(small_plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*arguments: Any) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(writer, "_write_tensor", fill)
    with pytest.raises(InputError, match="out: the disk became full while writing; nothing was kept"):
        write_checkpoint(small_plan(0), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_too_little_disk(small_plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 10**6, 10**6))
    with pytest.raises(InputError, match=r"found 0\.00 GB free, expected at least 0\.\d\d GB, which the checkpoint"):
        write_checkpoint(small_plan(0), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_folder_in_use_is_refused_or_replaced(small_plan: MakePlan, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    write_checkpoint(small_plan(0), out)  # an empty folder is in no one's use
    with pytest.raises(InputError, match="out: found something there, expected no folder"):
        write_checkpoint(small_plan(1), out)
    assert is_current(out, small_plan(0))
    write_checkpoint(small_plan(1), out, replace=True)
    assert is_current(out, small_plan(1))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_file_in_the_way_is_refused(small_plan: MakePlan, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(InputError, match="out: found something there"):
        write_checkpoint(small_plan(0), tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


@pytest.mark.parametrize("parent", ["file", "absent"])
def test_unwritable_parent(small_plan: MakePlan, tmp_path: Path, parent: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"out: cannot be written \(.+\); expected a writable parent folder"):
        write_checkpoint(small_plan(0), tmp_path / parent / "out")


def test_stale_folders_are_not_current(small_plan: MakePlan, folder_copy: Path) -> None:
    assert is_current(folder_copy, small_plan(0))
    assert not is_current(folder_copy, small_plan(1))
    assert not is_current(folder_copy, tiny_plan())
    assert not is_current(folder_copy / "absent", small_plan(0))
    with (folder_copy / SHARD).open("rb+") as file:
        file.truncate(1000)
    assert not is_current(folder_copy, small_plan(0))


def test_changed_files_are_not_current(small_plan: MakePlan, folder_copy: Path) -> None:
    record = (folder_copy / writer.RECORD_FILE).read_text()
    (folder_copy / writer.RECORD_FILE).write_text("{")
    assert not is_current(folder_copy, small_plan(0))
    (folder_copy / writer.RECORD_FILE).write_text(record)
    (folder_copy / "tokenizer.json").unlink()
    assert not is_current(folder_copy, small_plan(0))


@pytest.mark.parametrize("layers", [4, 5, 6, 7, 8, 9, 12, 16, 23, 40, 61])
def test_flash_plans_of_any_depth_hold_every_kind_of_layer(layers: int) -> None:
    c = ModelConfig.from_dict(flash_plan(layers=layers, drafts=3).config, "flash")
    assert set(c.compress_ratios) == {0, 1, 2}
    assert any(c.consumes_candidates(layer) for layer in range(layers))
    assert c.candidate_source_layer_id in c.kv_source_layer_ids
    assert set(c.index_source_layer_ids) > set(c.kv_source_layer_ids)
    assert 1 in c.engram_layer_ids
    plan_tensors(flash_plan(layers=layers, experts=8))


def test_flash_plan_of_40_layers_is_the_release() -> None:
    c = ModelConfig.from_dict(flash_plan().config, "flash")
    assert c.compress_ratios == (0,) * 2 + (2,) * 18 + (1,) * 20
    assert c.kv_source_layer_ids == (2, 8, 14, 20)
    assert c.index_source_layer_ids == (2, 8, 14, 20, 24, 28, 32, 36)
    assert (c.candidate_source_layer_id, c.engram_layer_ids) == (20, (1, 14))
    assert c.dspark_target_layer_ids == (37, 38, 39)
    assert (c.num_attention_heads, c.o_groups, c.moe_intermediate_size) == (64, 8, 2304)


@pytest.mark.parametrize(("shard_tp", "heads", "groups", "width"), [(2, 32, 4, 1152), (4, 16, 2, 576), (8, 8, 1, 288)])
def test_flash_plan_of_one_rank(shard_tp: int, heads: int, groups: int, width: int) -> None:
    c = ModelConfig.from_dict(flash_plan(layers=8, shard_tp=shard_tp).config, "flash")
    assert (c.num_attention_heads, c.o_groups, c.moe_intermediate_size) == (heads, groups, width)
    assert (c.hidden_size, c.vocab_size, c.o_lora_rank) == (5120, 129280, 1024)


def test_engram_rows_are_different_primes() -> None:
    text = tiny_plan().config["text_config"]
    assert text["engram_num_embeddings"] == [
        509 + 521 + 523 + 541 + 547 + 557,
        563 + 569 + 571 + 577 + 587 + 593,
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": 3}, "layers: found 3, expected at least 4"),
        ({"shard_tp": 3}, r"shard_tp: found 3, expected one of \(1, 2, 4, 8\)"),
        ({"experts": 5}, "experts: found 5, expected at least 6"),
        ({"engram_rows_per_head": 1}, "engram_rows_per_head: found 1, expected at least 2"),
        ({"drafts": 1}, "drafts: found 1, expected 0, or 3"),
    ],
)
def test_impossible_plans_are_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        flash_plan(**arguments)
