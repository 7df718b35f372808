"""Paged caches in vLLM's layouts, the blocks' allocation, and the metadata that attention reads them through.

Window pages hold 32 tokens. Compressed pages and index-key pages hold `block_size / ratio` states and share block
tables. The pages of a group's layers follow each other in a physical block, so a layer's block stride is the sum of
all of them. Block 0 of every group is the null block: padding reads it and no request owns it.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from specialized_decode.backbone.config import ModelConfig
from specialized_decode.backbone.errors import PromptError
from specialized_decode.backbone.formats import INDEX_RECORD_BYTES, KV_RECORD_BYTES, page_bytes

WINDOW_BLOCK = 32
COMPRESSED_BLOCK = 64
# Rows of the open compression group that a request keeps: the drafts of a step, the bonus token and the row before.
RING_ROWS = 8


def window_name(layer: int) -> str:
    """Names follow vLLM's cache prefixes, which the attention metadata is keyed by."""
    return f"layers.{layer}.attn.swa_cache"


def compressed_name(layer: int) -> str:
    return f"layers.{layer}.attn"


def index_name(layer: int) -> str:
    return f"layers.{layer}.attn.indexer.k_cache"


def ring_name(layer: int) -> str:
    return f"layers.{layer}.attn.compressor.state_cache"


@dataclass(frozen=True)
class CacheMetadata:
    """How a batch of T tokens of R requests reads and writes one cache.

    slot_mapping: [T] int64, block * states per page + state, -1 where the token writes nothing; block_table: [R, n]
    int32; token_to_req: [T] int32; query_start_loc: [R + 1] int32. The counts and `max_seq_len` (tokens) are host
    numbers; `states` is a page's.
    """

    num_prefills: int
    num_decodes: int
    num_decode_tokens: int
    max_seq_len: int
    states: int
    slot_mapping: Tensor
    block_table: Tensor
    token_to_req: Tensor
    query_start_loc: Tensor


class PagedGroup:
    """The caches of one group: one buffer of `blocks` blocks, a page of every member in each block."""

    def __init__(self, pages: dict[str, tuple[int, int]], blocks: int, device: torch.device) -> None:
        """pages: name -> (states, record bytes)."""
        sizes = {name: page_bytes(states, record) for name, (states, record) in pages.items()}
        self.blocks = blocks
        self.stride = sum(sizes.values())
        self.buffer = torch.zeros(blocks * self.stride, dtype=torch.uint8, device=device)
        self.free = list(range(blocks - 1, 0, -1))
        self.views: dict[str, Tensor] = {}
        offset = 0
        for name, (states, record) in pages.items():
            self.views[name] = self.buffer.as_strided((blocks, states, record), (self.stride, record, 1), offset)
            offset += sizes[name]

    def take(self, what: str) -> int:
        """A free block. Raises PromptError when there is none."""
        if not self.free:
            raise PromptError(
                f"cache: all {self.blocks - 1} {what} blocks are in use; expected fewer or shorter requests"
            )
        return self.free.pop()


@dataclass
class Request:
    """One sequence's tokens and blocks. `computed` counts the tokens whose caches are written."""

    tokens: list[int]
    ring: int
    computed: int = 0
    window_blocks: list[int] = field(default_factory=list)
    compressed_blocks: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Batch:
    """T tokens of R requests, ready for the model.

    input_ids, positions: [T] int64; lookback_ids: [R, max n-gram - 1] int64, the ids before each request's first
    token, latest first, -1 where there is none; metadata: cache name -> CacheMetadata, shared by caches of a kind.
    """

    input_ids: Tensor
    positions: Tensor
    lookback_ids: Tensor
    metadata: dict[str, CacheMetadata]

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]

    def tensors(self) -> list[Tensor]:
        """Every tensor once, in a fixed order."""
        kinds = {id(meta): meta for meta in self.metadata.values()}.values()
        found = [self.input_ids, self.positions, self.lookback_ids]
        for meta in kinds:
            found += [meta.slot_mapping, meta.block_table]
        first = next(iter(kinds))
        return [*found, first.token_to_req, first.query_start_loc]

    def load(self, other: "Batch") -> None:
        """Copies `other`, a batch of the same shape, into this one's tensors, which a graph reads."""
        pairs = list(zip(self.tensors(), other.tensors(), strict=True))
        for mine, theirs in pairs:
            if mine.shape != theirs.shape:
                raise ValueError(f"batch of another shape: found {tuple(theirs.shape)}, expected {tuple(mine.shape)}")
        for mine, theirs in pairs:
            mine.copy_(theirs)


class Caches:
    """All caches of a model for up to `max_requests` requests of `max_context` tokens, prefilled in chunks of at most
    `max_tokens` tokens."""

    def __init__(
        self, config: ModelConfig, max_requests: int, max_context: int, max_tokens: int, device: torch.device
    ) -> None:
        self.config, self.max_context, self.device = config, max_context, device
        self.window_columns = -(-max_context // WINDOW_BLOCK)
        self.compressed_columns = -(-max_context // COMPRESSED_BLOCK)
        # A request keeps the blocks its window touches; a chunk's tokens need theirs until the chunk is done.
        live = -(-config.sliding_window // WINDOW_BLOCK) + 1
        chunk = -(-max_tokens // WINDOW_BLOCK) + max_requests
        window_blocks = 1 + min(max_requests * self.window_columns, max_requests * live + chunk)
        pages = {window_name(i): (WINDOW_BLOCK, KV_RECORD_BYTES) for i in range(config.num_hidden_layers)}
        self.window = PagedGroup(pages, window_blocks, device)
        self.ratios = {layer: config.compress_ratios[layer] for layer in config.kv_source_layer_ids}
        compressed: dict[str, tuple[int, int]] = {}
        for layer, ratio in self.ratios.items():
            compressed[compressed_name(layer)] = (COMPRESSED_BLOCK // ratio, KV_RECORD_BYTES)
            compressed[index_name(layer)] = (COMPRESSED_BLOCK // ratio, INDEX_RECORD_BYTES)
        self.compressed = PagedGroup(compressed, 1 + max_requests * self.compressed_columns, device)
        self.rings = {
            ring_name(layer): torch.zeros(1 + max_requests, RING_ROWS, 2 * config.head_dim, device=device)
            for layer, ratio in self.ratios.items()
            if ratio > 1
        }
        self.free_rings = list(range(max_requests, 0, -1))
        self.open_requests: list[Request] = []
        self.views: dict[str, Tensor] = {**self.window.views, **self.compressed.views, **self.rings}

    def open(self, tokens: list[int]) -> Request:
        """A request for a sequence that starts with `tokens`; its blocks are taken as it is computed."""
        if not self.free_rings:
            raise PromptError("cache: every request slot is in use; expected fewer requests at a time")
        request = Request(list(tokens), self.free_rings.pop())
        self.open_requests.append(request)
        return request

    def close(self, request: Request) -> None:
        """Gives the request's blocks back."""
        self.window.free += [block for block in request.window_blocks if block]
        self.compressed.free += request.compressed_blocks
        self.free_rings.append(request.ring)
        self.open_requests = [other for other in self.open_requests if other is not request]

    def _release(self, request: Request) -> None:
        """Gives back the blocks that the window has left behind."""
        gone = max(0, request.computed - self.config.sliding_window + 1) // WINDOW_BLOCK
        for index in range(min(gone, len(request.window_blocks))):
            if request.window_blocks[index]:
                self.window.free.append(request.window_blocks[index])
                request.window_blocks[index] = 0

    def reserve(self, request: Request, count: int) -> None:
        """Takes the blocks that the next `count` tokens need."""
        end = request.computed + count
        if end > self.max_context:
            raise PromptError(f"request: found {end} tokens, expected at most the context of {self.max_context}")
        while len(request.window_blocks) * WINDOW_BLOCK < end:
            request.window_blocks.append(self.window.take("window"))
        while self.ratios and len(request.compressed_blocks) * COMPRESSED_BLOCK < end:
            request.compressed_blocks.append(self.compressed.take("compressed"))

    def batch(
        self, requests: list[Request | None], counts: list[int], *, decode_length: int = 1, static: bool = False
    ) -> Batch:
        """The next `counts[r]` uncomputed tokens of every request; None is padding, a request of length 0.

        decode_length: the longest query that counts as decoding (a token, or a token and its drafts). static:
        metadata for a graph, whose host numbers must hold for every later replay.
        """
        # Of every open request: one that sits batches out would keep a whole chunk's blocks meanwhile.
        for open_request in self.open_requests:
            self._release(open_request)
        for request, count in zip(requests, counts, strict=True):
            if request is not None:
                self.reserve(request, count)
        starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        owner = np.repeat(np.arange(len(requests)), counts)
        computed = np.array([0 if r is None else r.computed for r in requests], dtype=np.int64)
        positions = np.arange(starts[-1]) - starts[owner] + computed[owner]
        valid = np.array([r is not None for r in requests])[owner]
        ids = [0] * int(starts[-1])
        for request, start, count in zip(requests, starts, counts, strict=False):
            if request is not None:
                ids[start : start + count] = request.tokens[request.computed : request.computed + count]
        longest = max((r.computed + c for r, c in zip(requests, counts, strict=True) if r is not None), default=1)
        split = _decodes(counts, decode_length)
        kinds = self._metadata(
            requests, counts, split, owner, positions, valid, self.max_context if static else longest
        )
        metadata = dict.fromkeys(self.window.views, kinds["window"])
        for layer, ratio in self.ratios.items():
            metadata[compressed_name(layer)] = metadata[index_name(layer)] = kinds[f"ratio {ratio}"]
            if ratio > 1:
                metadata[ring_name(layer)] = kinds["ring"]
        return Batch(self._tensor(ids), self._tensor(positions), self._tensor(self._lookback(requests)), metadata)

    def _metadata(
        self,
        requests: list[Request | None],
        counts: list[int],
        decodes: int,
        owner: np.ndarray,
        positions: np.ndarray,
        valid: np.ndarray,
        max_seq_len: int,
    ) -> dict[str, CacheMetadata]:
        token_to_req = self._tensor(owner, torch.int32)
        starts = self._tensor(np.concatenate(([0], np.cumsum(counts))), torch.int32)

        def kind(table: np.ndarray, states: int, slots: np.ndarray) -> CacheMetadata:
            return CacheMetadata(
                num_prefills=len(counts) - decodes,
                num_decodes=decodes,
                num_decode_tokens=sum(counts[:decodes]),
                max_seq_len=max_seq_len,
                states=states,
                slot_mapping=self._tensor(np.where(valid, slots, -1)),
                block_table=self._tensor(table, torch.int32),
                token_to_req=token_to_req,
                query_start_loc=starts,
            )

        window = _table([[] if r is None else r.window_blocks for r in requests], self.window_columns)
        compressed = _table([[] if r is None else r.compressed_blocks for r in requests], self.compressed_columns)
        rings = np.array([[0 if r is None else r.ring] for r in requests])
        kinds = {"window": kind(window, WINDOW_BLOCK, _slots(window, owner, positions, WINDOW_BLOCK))}
        for ratio in set(self.ratios.values()):
            states = COMPRESSED_BLOCK // ratio
            slots = _slots(compressed, owner, positions // ratio, states)
            # A state is stored with the token that closes its group.
            slots = np.where((positions + 1) % ratio == 0, slots, -1)
            kinds[f"ratio {ratio}"] = kind(compressed, states, slots)
        kinds["ring"] = kind(rings, RING_ROWS, rings[owner, 0] * RING_ROWS + positions % RING_ROWS)
        return kinds

    def _lookback(self, requests: list[Request | None]) -> list[list[int]]:
        depth = max(self.config.engram_max_ngram_size - 1, 1)
        rows = []
        for request in requests:
            before = [] if request is None else request.tokens[: request.computed][-depth:][::-1]
            rows.append(before + [-1] * (depth - len(before)))
        return rows

    def _tensor(self, values: np.ndarray | list[int] | list[list[int]], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.as_tensor(np.asarray(values), dtype=dtype).to(self.device)


def _decodes(counts: list[int], longest: int) -> int:
    """Requests that decode. As in the serving engine, they come first; the first longer query starts the prefills."""
    return next((i for i, count in enumerate(counts) if count > longest), len(counts))


def _table(blocks: list[list[int]], columns: int) -> np.ndarray:
    """[R, columns] block table; columns past a request's blocks name the null block."""
    table = np.zeros((len(blocks), columns), dtype=np.int64)
    for row, owned in enumerate(blocks):
        table[row, : len(owned)] = owned
    return table


def _slots(table: np.ndarray, owner: np.ndarray, states: np.ndarray, page: int) -> np.ndarray:
    return table[owner, states // page] * page + states % page
