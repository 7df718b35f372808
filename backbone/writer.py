"""Writes a model folder with random weights in the release's form: config.json, tokenizer, shards, index."""

import contextlib
import errno
import hashlib
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import BinaryIO

from specialized_decode.backbone.config import ModelConfig
from specialized_decode.backbone.corpus import corpus
from specialized_decode.backbone.errors import InputError
from specialized_decode.backbone.folder import INDEX_FILE, ModelFolder
from specialized_decode.backbone.presets import (
    VOCAB_SIZE,
    CheckpointPlan,
    Json,
    flash_plan,
    release_sized_tokenizer,
    tiny_plan,
)
from specialized_decode.backbone.random_weights import random_chunks
from specialized_decode.backbone.tensors import STORED_DTYPES, Specs, draft_tensors, text_tensors
from specialized_decode.backbone.tokenizer import save_tokenizer, train_tokenizer

__all__ = [
    "CheckpointPlan",
    "flash_plan",
    "is_current",
    "plan_tensors",
    "tiny_plan",
    "write_checkpoint",
    "write_configuration",
]

RECORD_FILE = "generation.json"
SHARD_BYTES = 2_000_000_000
# Tokenizer, index, headers and configuration, rounded up.
_OTHER_BYTES = 64 << 20
# Raise it when the same plan would give other bytes, so that older folders are written anew.
_FORMAT = 2

Progress = Callable[[int, int, str], None]


def plan_tensors(plan: CheckpointPlan) -> Specs:
    """Every tensor of the plan's checkpoint, drafts included. Raises ConfigError."""
    config = ModelConfig.from_dict(plan.config, "plan")
    return text_tensors(config) | draft_tensors(config)


def write_checkpoint(
    plan: CheckpointPlan, out: str | Path, progress: Progress | None = None, replace: bool = False, workers: int = 1
) -> Path:
    """Writes the plan's checkpoint to folder `out` and returns it.

    The folder appears whole or not at all: everything goes into a hidden sibling that is renamed at the end
    and removed on any error, Ctrl-C included. `progress(done, total, name)` is told of tensor bytes after
    each tensor, with several `workers` (processes) after each shard. `replace` allows a non-empty `out`, which
    stays until the new folder is complete. The bytes do not depend on `workers`. Raises InputError for a folder
    that exists, cannot be written or does not fit the disk, ConfigError for a plan that is no model.
    """
    return _write_folder(plan, out, plan_tensors(plan), progress, replace, workers)


def write_configuration(plan: CheckpointPlan, out: str | Path, replace: bool = False) -> Path:
    """Writes the plan's config.json and tokenizer to folder `out` without weights, as `write_checkpoint` does else.

    For loaders that make up weights, such as vLLM's `load_format=dummy`.
    """
    plan_tensors(plan)  # refuses what is no model
    return _write_folder(plan, out, {}, None, replace, 1)


def _write_folder(
    plan: CheckpointPlan, out: str | Path, specs: Specs, progress: Progress | None, replace: bool, workers: int
) -> Path:
    out = Path(out).absolute()
    partial = out.parent / f".{out.name}.{os.getpid()}.partial"
    with _input_errors(out):
        if not replace and out.exists() and not (out.is_dir() and not any(out.iterdir())):
            raise InputError(f"{out}: found something there, expected no folder, an empty one, or leave to replace it")
        partial.mkdir()
        try:
            _check_space(out.parent, sum(spec.nbytes for spec in specs.values()) + _OTHER_BYTES)
            _write_files(plan, partial)
            if specs:
                _write_weights(specs, plan.seed, partial, progress, workers)
            _move_into_place(partial, out)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return out


def is_current(folder: str | Path, plan: CheckpointPlan) -> bool:
    """Whether `folder` holds exactly what `plan` would write: same record, and shards that match it."""
    folder = Path(folder)
    try:
        for name, content in _json_files(plan).items():
            if json.loads((folder / name).read_text(encoding="utf-8")) != content:
                return False
        with ModelFolder(folder) as model:
            model.check(plan_tensors(plan))
    except (OSError, ValueError):  # CheckpointError and JSON's error are both ValueErrors
        return False
    return (folder / "tokenizer.json").is_file()


def _json_files(plan: CheckpointPlan) -> dict[str, Json]:
    """The configuration, and a record of what else the folder was made from; loaders pass it over."""
    text = hashlib.sha256(corpus().encode()).hexdigest()
    record = {"format": _FORMAT, "seed": plan.seed, "tokenizer_text_sha256": text}
    return {"config.json": plan.config, RECORD_FILE: record}


@contextlib.contextmanager
def _input_errors(out: Path) -> Iterator[None]:
    """Turns the system's refusals into InputErrors that name the folder."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise InputError(f"{out}: the disk became full while writing; nothing was kept") from error
        message = f"{out}: cannot be written ({error.strerror}); expected a writable parent folder"
        raise InputError(message) from error


def _check_space(parent: Path, needed: int) -> None:
    free = shutil.disk_usage(parent).free
    if free < needed:
        sizes = f"found {free / 1e9:.2f} GB free, expected at least {needed / 1e9:.2f} GB"
        raise InputError(f"{parent}: {sizes}, which the checkpoint needs")


def _move_into_place(partial: Path, out: Path) -> None:
    """Renames `partial` to `out`; an older `out` is set aside first and deleted last."""
    old = partial.with_suffix(".old")
    if out.exists():
        out.rename(old)
    try:
        partial.rename(out)
    except BaseException:
        if old.exists():
            old.rename(out)
        raise
    if old.exists():
        shutil.rmtree(old) if old.is_dir() else old.unlink()


def _write_files(plan: CheckpointPlan, folder: Path) -> None:
    for name, content in _json_files(plan).items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    vocab_size = plan.config["text_config"]["vocab_size"]
    preset = vocab_size == VOCAB_SIZE
    save_tokenizer(release_sized_tokenizer() if preset else train_tokenizer(corpus(), vocab_size), folder)


def _write_weights(specs: Specs, seed: int, folder: Path, progress: Progress | None, workers: int) -> None:
    shards = _shards(specs)
    paths = [folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    total = sum(spec.nbytes for spec in specs.values())
    done = 0
    # Closed before an error goes on: no process may still write to a folder that is being removed.
    with contextlib.closing(_written(list(zip(paths, shards, strict=True)), specs, seed, workers)) as written:
        for names in written:
            done += sum(specs[name].nbytes for name in names)
            if progress is not None:
                progress(done, total, names[-1])
    weight_map = {name: path.name for path, names in zip(paths, shards, strict=True) for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": {name: weight_map[name] for name in specs}}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _written(
    shards: list[tuple[Path, list[str]]], specs: Specs, seed: int, workers: int
) -> Generator[list[str], None, None]:
    """Writes the shards and yields the names of tensors as they are written: one by one, or by shard with `workers`."""
    if workers == 1 or len(shards) == 1:
        for path, names in shards:
            for name in _write_shard(path, names, specs, seed):
                yield [name]
        return
    # Spawned: a fork of a process that has used torch may hang in its thread pool.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(shards)), mp_context=context) as pool:
        futures = {
            pool.submit(_write_whole_shard, path, names, _needed(names, specs), seed): names for path, names in shards
        }
        try:
            for future in as_completed(futures):
                future.result()
                yield futures[future]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _needed(names: list[str], specs: Specs) -> Specs:
    """The specs that the tensors `names` are made from: their own, and for a scale its weight's."""
    weights = [name.removesuffix("scale") + "weight" for name in names if name.endswith("scale")]
    return {name: specs[name] for name in [*names, *weights] if name in specs}


def _write_whole_shard(path: Path, names: list[str], specs: Specs, seed: int) -> None:
    for _ in _write_shard(path, names, specs, seed):
        pass


def _write_shard(path: Path, names: list[str], specs: Specs, seed: int) -> Iterator[str]:
    """Writes a shard and yields each tensor's name once it is written."""
    with path.open("wb") as file:
        file.write(_header(names, specs))
        for name in names:
            _write_tensor(file, name, specs, seed)
            yield name


def _write_tensor(file: BinaryIO, name: str, specs: Specs, seed: int) -> None:
    for chunk in random_chunks(name, specs, seed):
        file.write(chunk.data)


def _shards(specs: Specs) -> list[list[str]]:
    """Tensor names by shard, none larger than SHARD_BYTES unless a single tensor is.

    Within a shard wide elements come first, which aligns every tensor to its element.
    """
    shards: list[list[str]] = []
    room = 0
    for name, spec in specs.items():
        if not shards or spec.nbytes > room:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(name)
        room -= spec.nbytes
    return [sorted(names, key=lambda name: -specs[name].dtype.itemsize) for names in shards]


def _header(names: list[str], specs: Specs) -> bytes:
    """A safetensors header: its length in 8 bytes, then JSON, blank-padded to a multiple of 8.

    Written here because the library wants all of a shard's tensors in memory at once.
    """
    entries: Json = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        spec = specs[name]
        entries[name] = {
            "dtype": STORED_DTYPES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
