"""Decode batches for sparse MLA: caches with blocks in no order, ragged contexts, selections; and what is right."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from specialized_decode.attention import SparseIndexTables, SparseMlaDecode, reference
from specialized_decode.backbone.cache import CacheMetadata
from tests.helpers.decode_batch import DecodeBatch

RECORD, WINDOW_STATES = 584, 32


@dataclass(frozen=True)
class Shape:
    """heads, ratio and the like of a layer; count: rows of a request; ratio 0: a layer with a window only."""

    heads: int = 16
    ratio: int = 1
    window: int = 128
    topk: int = 512
    states: int = 64
    count: int = 1
    q_rank: int = 1280


@dataclass
class MlaCase(DecodeBatch):
    """One layer and one step's batch."""

    shape: Shape

    def __post_init__(self) -> None:
        super().__post_init__()
        shape, device = self.shape, self.device
        longest = max(*self.contexts, 1)
        # Tokens before the window lie nowhere any more.
        spans = [(max(0, c - shape.window - shape.count), c) for c in self.contexts]
        self.window_cache, self.window = self._cache(WINDOW_STATES, spans)
        self.compressed_cache, self.compressed = None, None
        if shape.ratio:
            spans = [(0, c // shape.ratio) for c in self.contexts]
            self.compressed_cache, self.compressed = self._cache(shape.states, spans)
        selection = torch.full((self.rows + 3, shape.topk), -1, dtype=torch.int32)
        for row, (position, live) in enumerate(zip(self.positions.tolist(), self.live.tolist(), strict=True)):
            closed = (position + 1) // shape.ratio if shape.ratio and live else 0
            chosen = torch.randperm(closed, generator=self.generator)[: shape.topk].int()
            selection[row, : len(chosen)] = chosen
        self.selection = selection.to(device)
        angles = torch.rand(longest + 1, 32, generator=self.generator) * 6.28
        self.attn: Any = SimpleNamespace(
            num_heads=shape.heads,
            head_dim=512,
            rope_dim=64,
            q_lora_rank=shape.q_rank,
            window_size=shape.window,
            index_source=2 if shape.ratio else None,
            selection=SimpleNamespace(topk_indices=self.selection),
            sinks=self.normal(shape.heads).float(),
            cos_sin=torch.cat((angles.cos(), angles.sin()), 1).to(device),
            scale=512**-0.5,
            eps=1e-20,
            q_norm=(1 + 0.2 * self.normal(shape.q_rank)).bfloat16(),
            kv_norm=(1 + 0.2 * self.normal(512)).bfloat16(),
            window_cache=self.window_cache,
            compressed_cache=self.compressed_cache,
        )
        self.projected = self.normal(self.rows, shape.q_rank + 512).bfloat16()
        self.q = (2 * self.normal(self.rows, shape.heads, 512)).bfloat16()
        self.projected[~self.live], self.q[~self.live] = torch.nan, torch.nan

    def load(self, other: "MlaCase") -> None:
        """Copies another batch of the same shape into this one's tensors, which a graph reads."""
        pairs = [(self.positions, other.positions), (self.live, other.live), (self.selection, other.selection)]
        pairs += [(self.q, other.q), (self.attn.sinks, other.attn.sinks), (self.attn.cos_sin, other.attn.cos_sin)]
        pairs.append((self.window_cache, other.window_cache))
        metas = [(self.window, other.window)]
        if self.compressed is not None and other.compressed is not None:
            assert self.compressed_cache is not None and other.compressed_cache is not None
            pairs.append((self.compressed_cache, other.compressed_cache))
            metas.append((self.compressed, other.compressed))
        for mine, theirs in metas:
            pairs += [(mine.block_table, theirs.block_table), (mine.slot_mapping, theirs.slot_mapping)]
        for ours, its in pairs:
            ours.copy_(its)

    @property
    def caches(self) -> Any:
        return SimpleNamespace(window=self.window, compressed=self.compressed)

    def _cache(self, states: int, spans: list[tuple[int, int]]) -> tuple[Tensor, CacheMetadata]:
        """A cache that is the middle one of three in its blocks, and its metadata. spans: the states that a request
        holds, in blocks of its own in no order. Block 0, where tables point to else, holds no numbers."""
        requests, columns = len(spans), max(1, *(-(-end // states) for _, end in spans))
        table = torch.zeros(requests, columns, dtype=torch.int32)
        held = torch.zeros(requests, columns, dtype=torch.bool)
        for request, (start, end) in enumerate(spans):
            held[request, start // states : -(-end // states)] = True
        blocks = 1 + int(held.sum())
        table[held] = 1 + torch.randperm(blocks - 1, generator=self.generator).int()
        page = -(-states * RECORD // 576) * 576
        buffer = torch.full((blocks, 3 * page), 0xFF, dtype=torch.uint8)
        data, scales = random_records(blocks - 1, states, self.generator)
        buffer[1:, page : page + states * 576] = data
        buffer[1:, page + states * 576 : page + states * RECORD] = scales
        view = buffer.to(self.device).view(-1).as_strided((blocks, states, RECORD), (3 * page, RECORD, 1), page)
        return view, self.metadata(states, table, self.positions.cpu(), 1, columns * states)

    def tables(self, ops: Any = None) -> tuple[Tensor, Tensor | None]:
        """The window's slots and the selection's."""
        tables = SparseIndexTables(ops)
        selected = tables.selected(self.attn, self.compressed, self.window) if self.compressed is not None else None
        return tables.window(self.attn, self.window, self.positions), selected

    def by_reference(self) -> Tensor:
        """The plain ops, from q as projected to outputs turned back, bfloat16."""
        cos_sin = self.attn.cos_sin[self.positions].unsqueeze(1)
        mla = SparseMlaDecode(SparseIndexTables(), self.rows)
        out = mla(self.attn, reference.rope_tail(self.q, cos_sin), self.positions, self.caches)
        return reference.rope_tail(out, cos_sin, inverse=True)

    def exact(self, rounded_weights: bool = False) -> Tensor:
        """float64, of queries turned and rounded to bfloat16, not rounded otherwise; zero in padding rows.

        rounded_weights: as kernels multiply by them, bfloat16 relative to the largest.
        """
        cos_sin = self.attn.cos_sin[self.positions].unsqueeze(1)
        q, sink = reference.rope_tail(self.q, cos_sin).double(), self.attn.sinks.double().view(-1, 1)
        window, selected = self.tables()
        out = torch.zeros(self.rows, self.shape.heads, 512, dtype=torch.float64, device=self.device)
        for row in self.live.nonzero().flatten().tolist():
            kv = [_read(self.window_cache, window[row])]
            if selected is not None:
                kv.append(_read(self.compressed_cache, selected[row]))
            records = torch.cat(kv)
            logits = q[row] @ records.T * self.attn.scale
            peak = torch.maximum(logits.amax(1, keepdim=True), sink)
            weights = (logits - peak).exp()
            total = weights.sum(1, keepdim=True) + (sink - peak).exp()
            if rounded_weights:
                own = logits.amax(1, keepdim=True)
                weights = (logits - own).exp().bfloat16().double() * (own - peak).exp()
            out[row] = weights @ records / total
        tail = out[..., 448:].unflatten(-1, (32, 2))
        cos, sin = cos_sin.double().chunk(2, -1)
        real, imaginary = tail.unbind(-1)
        out[..., 448:] = torch.stack((real * cos + imaginary * sin, imaginary * cos - real * sin), -1).flatten(-2)
        return out


def _read(cache: Tensor | None, slots: Tensor) -> Tensor:
    assert cache is not None
    return reference.read_kv(cache, slots[slots >= 0].unsqueeze(0))[0].double()


def random_records(blocks: int, states: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """KV records of any numbers: data [blocks, states * 576] and scales [blocks, states * 8], uint8."""
    codes = torch.randint(0, 256, (blocks, states, 448), generator=generator, dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    tails = torch.randn(blocks, states, 64, generator=generator).bfloat16().view(torch.uint8)
    data = torch.cat((codes, tails), 2).flatten(1)
    # Numbers up to 448 * 2^-8; the last byte is no scale, and may hold anything.
    scales = torch.randint(112, 120, (blocks, states, 8), generator=generator, dtype=torch.uint8)
    scales[..., 7] = 255
    return data, scales.flatten(1)


def assert_as_good(found: Tensor, case: MlaCase) -> None:
    """found: bfloat16, its error no more than a tenth above that of a kernel whose weights are bfloat16; padding rows
    are zero."""
    assert found.dtype == torch.bfloat16 and found.shape == case.q.shape
    assert not found[~case.live].any(), "padding rows are not zero"
    assert found.isfinite().all(), f"{int((~found.isfinite()).sum())} values are not finite"
    true, usual = case.exact(), case.exact(rounded_weights=True).bfloat16()
    ours, theirs = (found.double() - true).norm().item(), (usual.double() - true).norm().item()
    assert ours <= 1.1 * theirs, f"found an error of {ours:g}, a kernel with bfloat16 weights has {theirs:g}"
    worst, allowed = (found.double() - true).abs().max().item(), (usual.double() - true).abs().max().item()
    assert worst <= 1.5 * allowed + 1e-6, f"found an error of {worst:g} at worst, expected about {allowed:g}"
