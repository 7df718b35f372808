"""Paged caches as bytes: pages of three caches in one buffer, of which the middle one's is looked at."""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specialized_decode.backbone.cache import CacheMetadata
from tests.helpers import exact_formats as exact
from tests.helpers.exact_formats import bf16
from tests.helpers.step_mhc import Array

KV, INDEX = (576, 8), (128, 4)


@dataclass
class PagedBytes:
    """`blocks` pages of `states` records, each record split over a page's two planes; other bytes are random."""

    blocks: int
    states: int
    planes: tuple[int, int]
    seed: int = 0
    buffer: Tensor = field(init=False)
    stride: int = field(init=False)
    offset: int = field(init=False)

    def __post_init__(self) -> None:
        page = -(-self.states * sum(self.planes) // 576) * 576
        self.stride, self.offset = 3 * page, page
        generator = torch.Generator().manual_seed(self.seed)
        self.buffer = torch.randint(256, (self.blocks * self.stride,), generator=generator).to(torch.uint8)

    @property
    def view(self) -> Tensor:
        """The cache [blocks, states, record] as a layer is handed it."""
        shape = (self.blocks, self.states, sum(self.planes))
        return self.buffer.as_strided(shape, (self.stride, shape[2], 1), self.offset)

    def places(self, slot: int) -> tuple[slice, slice]:
        """Where a record's two parts lie in the buffer."""
        first, second = self.planes
        base, state = slot // self.states * self.stride + self.offset, slot % self.states
        data, scales = base + state * first, base + self.states * first + state * second
        return slice(data, data + first), slice(scales, scales + second)

    def read(self, slot: int) -> bytes:
        return b"".join(self.buffer[place].numpy().tobytes() for place in self.places(slot))

    def write(self, slot: int, record: bytes) -> None:
        for place, part in zip(self.places(slot), (record[: self.planes[0]], record[self.planes[0] :]), strict=True):
            self.buffer[place] = torch.frombuffer(bytearray(part), dtype=torch.uint8)

    def untouched(self, before: Tensor, slots: list[int]) -> bool:
        """Whether no byte differs from `before` but those of the records at `slots`."""
        kept = torch.ones_like(self.buffer, dtype=torch.bool)
        for slot in slots:
            for place in self.places(slot):
                kept[place] = False
        return torch.equal(self.buffer[kept], before[kept])


def random_kv_record(rng: np.random.Generator) -> bytes:
    """A latent of any size as a KV record."""
    latent = bf16((rng.standard_normal(448) * 2.0 ** rng.integers(-4, 5)).astype(np.float32))
    return exact.kv_record(latent, bf16(rng.standard_normal(64).astype(np.float32)))


def random_index_record(rng: np.random.Generator) -> bytes:
    key = bf16((rng.standard_normal(128) * 2.0 ** rng.integers(-4, 5)).astype(np.float32))
    return b"".join(exact.index_record(key))


def index_values(record: bytes) -> Array:
    """What an index record stands for: 128 values."""
    scale = np.frombuffer(record[128:132], "<f4").astype(np.float64)
    return exact.fp8_values(np.frombuffer(record[:128], np.uint8)) * scale


def shuffled_table(requests: int, columns: int, seed: int) -> NDArray[np.int32]:
    """[requests, columns] distinct physical blocks in no order, none of them block 0."""
    blocks = np.random.default_rng(seed).permutation(np.arange(1, 1 + requests * columns))
    return blocks.reshape(requests, columns).astype(np.int32)


def metadata(
    table: NDArray[np.int32], states: int, counts: list[int], slots: list[int], max_seq_len: int = 1
) -> CacheMetadata:
    """Request r has `counts[r]` rows, which write to `slots`, -1 for none."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return CacheMetadata(
        num_prefills=0,
        num_decodes=len(counts),
        num_decode_tokens=sum(counts),
        max_seq_len=max_seq_len,
        states=states,
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        block_table=torch.from_numpy(table),
        token_to_req=torch.tensor(owner, dtype=torch.int32),
        query_start_loc=torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32),
    )


def quarter_turns(rows: int, seed: int, width: int = 64) -> Tensor:
    """[rows, width] cosines and sines of whole quarter turns: a rotation by them is exact."""
    turns = np.random.default_rng(seed).integers(0, 4, (rows, width // 2))
    cos, sin = np.array([1.0, 0.0, -1.0, 0.0])[turns], np.array([0.0, 1.0, 0.0, -1.0])[turns]
    return torch.from_numpy(np.concatenate((cos, sin), 1)).float()


def any_turns(rows: int, seed: int, width: int = 64) -> Tensor:
    """[rows, width] cosines and sines of random angles."""
    angles = torch.rand(rows, width // 2, generator=torch.Generator().manual_seed(seed)) * 6.28
    return torch.cat((angles.cos(), angles.sin()), 1)


def turned(tail: Array, cos_sin: Array, inverse: bool = False) -> Array:
    """Pairs (2i, 2i + 1) turned as complex numbers."""
    half = cos_sin.shape[-1] // 2
    turn = cos_sin[..., :half] + 1j * cos_sin[..., half:] * (-1 if inverse else 1)
    z = (tail[..., 0::2] + 1j * tail[..., 1::2]) * turn
    return np.stack((z.real, z.imag), -1).reshape(tail.shape)
