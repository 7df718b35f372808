"""A model folder's tensors: safetensors shards behind an index, checked by header and mapped on first use."""

import json
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from specialized_decode.backbone.errors import CheckpointError
from specialized_decode.backbone.tensors import STORED_DTYPES, Specs, TensorSpec

INDEX_FILE = "model.safetensors.index.json"
LONE_FILE = "model.safetensors"
# Problems of one kind that an error lists before it only counts them.
_LISTED = 8


@dataclass(frozen=True)
class _Stored:
    """A tensor as a shard's header describes it."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class ModelFolder:
    """The tensors of folder `path`, by release name. A context manager; tensors outlive it."""

    def __init__(self, path: str | Path) -> None:
        """Reads the index (or the lone shard's header). Raises CheckpointError."""
        self.path = Path(path)
        self._headers: dict[str, dict[str, _Stored]] = {}
        self._open: dict[str, Any] = {}
        self._shard_of = self._read_index()

    @property
    def names(self) -> list[str]:
        """Names of all tensors, in the index's order."""
        return list(self._shard_of)

    def tensor(self, name: str, spec: TensorSpec, device: str | torch.device = "cpu") -> torch.Tensor:
        """The tensor `name` on `device`. Raises CheckpointError where it is absent or not like `spec`."""
        self.check({name: spec})
        shard = self._shard_of[name]
        try:
            if shard not in self._open:
                self._open[shard] = safe_open(self.path / shard, framework="pt")
            tensor: torch.Tensor = self._open[shard].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.path / shard}: {name}: cannot be read ({error})") from error
        return tensor.to(device)

    def check(self, specs: Specs) -> None:
        """Compares every spec with the shards' headers, reading no data.

        Raises one CheckpointError with every missing, misshapen or wrongly typed tensor, and every shard that
        is absent, broken or shorter than its header says.
        """
        broken: dict[str, str] = {}
        problems: dict[str, list[str]] = {"missing": [], "misshapen": [], "wrong dtype": []}
        for name, spec in specs.items():
            shard = self._shard_of.get(name)
            if shard is None:
                problems["missing"].append(f"{name}: in no shard, expected {_expected(spec)}")
            elif shard not in broken:
                try:
                    self._compare(shard, name, spec, problems)
                except CheckpointError as error:
                    broken[shard] = str(error)
        self._report(list(broken.values()), problems)

    def close(self) -> None:
        """Drops the mappings; the folder can still be used, and maps its shards anew."""
        self._open.clear()

    def __enter__(self) -> "ModelFolder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_index(self) -> dict[str, str]:
        """Tensor name -> shard file."""
        path = self.path / INDEX_FILE
        if not path.exists():
            if (self.path / LONE_FILE).exists():
                return dict.fromkeys(self._header(LONE_FILE), LONE_FILE)
            raise CheckpointError(f"{self.path}: found neither {INDEX_FILE} nor {LONE_FILE}, expected a model folder")
        try:
            index = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
        except ValueError as error:
            raise CheckpointError(f"{path}: not valid JSON ({error}); expected an index of shards") from None
        weight_map = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
            raise CheckpointError(f"{path}: weight_map: found none, expected an object of tensor name to shard file")
        for name, shard in weight_map.items():
            if Path(shard).name != shard:
                raise CheckpointError(f"{path}: weight_map.{name}: found {shard!r}, expected a file beside the index")
        return weight_map

    def _header(self, shard: str) -> dict[str, _Stored]:
        """The tensors a shard's header lists; checks that the file is as long as it says."""
        if shard not in self._headers:
            self._headers[shard] = _read_header(self.path / shard)
        return self._headers[shard]

    def _compare(self, shard: str, name: str, spec: TensorSpec, problems: dict[str, list[str]]) -> None:
        stored = self._header(shard).get(name)
        if stored is None:
            problems["missing"].append(f"{shard}: {name}: listed in the index but absent, expected {_expected(spec)}")
        elif stored.shape != spec.shape:
            problems["misshapen"].append(f"{shard}: {name}: found {stored}, expected {_expected(spec)}")
        elif stored.dtype != STORED_DTYPES[spec.dtype]:
            problems["wrong dtype"].append(f"{shard}: {name}: found {stored}, expected {_expected(spec)}")

    def _report(self, broken: list[str], problems: dict[str, list[str]]) -> None:
        lines = broken[:_LISTED]
        if len(broken) > _LISTED:
            lines.append(f"... and {len(broken) - _LISTED} more unreadable shards")
        for kind, found in problems.items():
            if found:
                lines.append(f"{len(found)} {kind}:")
                lines += [f"  {line}" for line in found[:_LISTED]]
                if len(found) > _LISTED:
                    lines.append(f"  ... and {len(found) - _LISTED} more")
        if lines:
            raise CheckpointError(f"{self.path}: the checkpoint does not fit its config.json\n" + "\n".join(lines))


def _expected(spec: TensorSpec) -> str:
    return f"{STORED_DTYPES[spec.dtype]} {list(spec.shape)}"


def _read_header(path: Path) -> dict[str, _Stored]:
    """Parses a safetensors header: an 8-byte little-endian length, then JSON. Raises CheckpointError."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= size - 8:
                raise CheckpointError(f"{path}: found {size} bytes, expected a safetensors header (truncated shard?)")
            entries = json.loads(file.read(length))
        entries.pop("__metadata__", None)
        stored = {name: _Stored(entry["dtype"], tuple(entry["shape"])) for name, entry in entries.items()}
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: not found, expected because the index lists it") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{path}: broken safetensors header ({type(error).__name__}: {error})") from None
    if size != 8 + length + end:
        raise CheckpointError(
            f"{path}: found {size} bytes, expected {8 + length + end} by its header (truncated shard?)"
        )
    return stored
