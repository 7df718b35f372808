"""Attention against a second implementation: one text at a time, in float64, over records of bytes."""

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specialized_decode.backbone import attention as module
from specialized_decode.backbone.attention import Attention, Compressor, Indexer, Selection, sink_attention
from specialized_decode.backbone.cache import CacheMetadata, Caches, Request
from specialized_decode.backbone.config import ModelConfig
from specialized_decode.backbone.context import ForwardContext
from specialized_decode.backbone.formats import index_planes, write_records
from specialized_decode.backbone.linear import Linear
from specialized_decode.backbone.rope import cos_sin_table
from tests.helpers import exact_formats as exact
from tests.helpers.exact_formats import bf16
from tests.helpers.small_config import small_config

CPU = torch.device("cpu")
CONFIG = small_config()
CONTEXT = 128


def _bf16(generator: torch.Generator, *shape: int, size: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=generator) * size).to(torch.bfloat16)


# --- compressor -------------------------------------------------------------------------------------------------


class _Rings:
    """Metadata of chunks by hand: request r owns ring block r + 1 of `states` rows."""

    def __init__(self, states: int = 8) -> None:
        self.states = states

    def __call__(self, chunks: list[tuple[int, int, int]]) -> tuple[Tensor, CacheMetadata]:
        """chunks: (request, or -1 for padding; start; count) -> positions and metadata."""
        positions, slots, owner, starts = [], [], [], [0]
        for row, (request, start, count) in enumerate(chunks):
            for position in range(start, start + count):
                positions.append(position)
                slots.append(-1 if request < 0 else (request + 1) * self.states + position % self.states)
                owner.append(row)
            starts.append(starts[-1] + count)
        table = torch.tensor([[max(request, -1) + 1] for request, _, _ in chunks], dtype=torch.int32)
        meta = CacheMetadata(
            num_prefills=0,
            num_decodes=len(chunks),
            num_decode_tokens=starts[-1],
            max_seq_len=CONTEXT,
            states=self.states,
            slot_mapping=torch.tensor(slots),
            block_table=table,
            token_to_req=torch.tensor(owner, dtype=torch.int32),
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
        )
        return torch.tensor(positions), meta


def _compressor(ratio: int, rings: int = 4) -> Compressor:
    generator = torch.Generator().manual_seed(0)
    weight, norm = _bf16(generator, ratio * 512, 64), _bf16(generator, 512)
    compressor = Compressor(ratio, Linear(weight), norm, 1e-20)
    if ratio > 1:
        compressor.state_cache = torch.full((rings, 8, 1024), math.nan)
    return compressor


def _norm(x: np.ndarray, weight: Tensor) -> np.ndarray:
    """RMSNorm of one row, rounded once."""
    return bf16(x / math.sqrt((x**2).mean() + 1e-20) * weight.double().numpy())


def _pooled(kv_score: np.ndarray, norm: Tensor) -> np.ndarray:
    """The latent of a group of rows [ratio, 2 * 512]: dimension by dimension a softmax over the rows."""
    result = np.empty(512)
    for d in range(512):
        weights = np.exp(kv_score[:, 512 + d] - kv_score[:, 512 + d].max())
        result[d] = (weights * kv_score[:, d]).sum() / weights.sum()
    return _norm(result, norm)


def _ulps_apart(found: Tensor, expected: np.ndarray) -> None:
    """Within bfloat16's rounding of a float64 result."""
    np.testing.assert_allclose(found.double().numpy(), expected, rtol=2**-7, atol=1e-6)


def test_ratio_1_only_norms() -> None:
    compressor = _compressor(1)
    kv = torch.randn(5, 512, generator=torch.Generator().manual_seed(1)) * 3
    found = compressor.latent(kv, torch.arange(5), None)
    assert found.dtype == torch.bfloat16
    _ulps_apart(found, np.stack([_norm(row, compressor.norm) for row in kv.double().numpy()]))


def test_ratio_2_pools_pairs() -> None:
    compressor = _compressor(2)
    rows = torch.randn(12, 1024, generator=torch.Generator().manual_seed(2)) * 4
    positions, meta = _Rings()([(0, 0, 12)])
    found = compressor.latent(rows, positions, meta)
    for last in range(1, 12, 2):
        _ulps_apart(found[last], _pooled(rows[last - 1 : last + 1].double().numpy(), compressor.norm))


def test_ratio_2_softmax_does_not_overflow() -> None:
    compressor = _compressor(2)
    rows = torch.ones(2, 1024)
    rows[0, :512], rows[0, 512:], rows[1, 512:] = 5.0, 3e38, -3e38
    positions, meta = _Rings()([(0, 0, 2)])
    found = compressor.latent(rows, positions, meta)
    _ulps_apart(found[1], _norm(np.full(512, 5.0), compressor.norm))


@pytest.mark.parametrize("splits", [[1] * 40, [1, 39], [3, 5, 7, 9, 16], [8, 8, 8, 8, 8], [9, 1, 1, 20, 9], [40]])
def test_chunks_of_any_split_give_the_latents_of_one_pass(splits: list[int]) -> None:
    """Longer chunks than the ring too: its rows are the last ones'."""
    rows = torch.randn(40, 1024, generator=torch.Generator().manual_seed(3))
    whole = _compressor(2)
    expected = whole.latent(rows, *_Rings()([(0, 0, 40)]))
    compressor, start, found = _compressor(2), 0, []
    for count in splits:
        found.append(compressor.latent(rows[start : start + count], *_Rings()([(0, start, count)])))
        start += count
    assert torch.equal(torch.cat(found)[1::2], expected[1::2])
    assert whole.state_cache is not None and compressor.state_cache is not None
    assert torch.equal(whole.state_cache[1], rows[32:40]) and torch.equal(compressor.state_cache[1], rows[32:40])


class _Writes(TorchDispatchMode):
    """Notes the index tensors of every indexed write."""

    def __init__(self) -> None:
        super().__init__()
        self.indices: list[list[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.index_put_, torch.ops.aten._index_put_impl_):
            self.indices.append(args[1])
        return func(*args, **(kwargs or {}))


def test_no_two_rows_of_a_chunk_go_to_one_ring_row() -> None:
    """On a GPU either could win."""
    compressor = _compressor(2)
    rows = torch.randn(40, 1024, generator=torch.Generator().manual_seed(3))
    with _Writes() as writes:
        compressor.latent(rows, *_Rings()([(0, 3, 30), (1, 0, 10)]))
    assert writes.indices
    for blocks, ring_rows in writes.indices:
        written = [pair for pair in zip(blocks.tolist(), ring_rows.tolist(), strict=True) if pair[0]]
        assert len(set(written)) == len(written) == 16


def test_requests_do_not_mix() -> None:
    """Three requests of different lengths in common batches, with a padding request between them."""
    generator = torch.Generator().manual_seed(4)
    rows = [torch.randn(30, 1024, generator=generator) for _ in range(3)]
    compressor = _compressor(2)
    batches = [
        [(0, 0, 5), (1, 0, 11)],
        [(0, 5, 1), (-1, 0, 1), (1, 11, 1), (2, 0, 1)],
        [(2, 1, 20), (0, 6, 3), (1, 12, 2)],
        [(1, 14, 6), (2, 21, 6), (0, 9, 6), (-1, 0, 6)],
    ]
    for chunks in batches:
        stacked = [rows[r][s : s + c] if r >= 0 else torch.full((c, 1024), math.nan) for r, s, c in chunks]
        positions, meta = _Rings()(chunks)
        found = compressor.latent(torch.cat(stacked), positions, meta)
        at = 0
        for request, start, count in chunks:
            for position in range(start, start + count):
                if request >= 0 and position % 2:
                    pair = rows[request][position - 1 : position + 1].double().numpy()
                    _ulps_apart(found[at], _pooled(pair, compressor.norm))
                at += 1
    assert compressor.state_cache is not None
    assert compressor.state_cache[0].isnan().all(), "padding wrote to the null ring"


def test_rejected_drafts_are_forgotten() -> None:
    """A step of 6 rows of which 1 was kept: the next step starts over behind it, and reads the row it kept."""
    rows = torch.randn(20, 1024, generator=torch.Generator().manual_seed(5))
    drafts = torch.randn(5, 1024, generator=torch.Generator().manual_seed(6))
    compressor = _compressor(2)
    compressor.latent(rows[:10], *_Rings()([(0, 0, 10)]))
    compressor.latent(torch.cat((rows[10:11], drafts)), *_Rings()([(0, 10, 6)]))
    found = compressor.latent(rows[11:17], *_Rings()([(0, 11, 6)]))
    for last in (11, 13, 15):
        _ulps_apart(found[last - 11], _pooled(rows[last - 1 : last + 1].double().numpy(), compressor.norm))


# --- indexer ----------------------------------------------------------------------------------------------------


def _indexer(layer: int, config: ModelConfig = CONFIG, q_rank: int = 512) -> Indexer:
    """An indexer whose queries are qr itself (4 heads of 128), and whose head weights are x's first values."""
    wq_b = Linear(torch.eye(512, q_rank, dtype=torch.bfloat16))
    weights = Linear(torch.eye(4, 64, dtype=torch.bfloat16))
    wk = Linear(torch.eye(128, 512, dtype=torch.bfloat16))
    return Indexer(config, layer, wq_b, weights, wk, torch.ones(128, dtype=torch.bfloat16))


def _paged(request_states: list[int], states: int, seed: int) -> tuple[Tensor, CacheMetadata, list[list[bytes]]]:
    """An index cache of shuffled blocks full of keys, one row of the batch per request, and the keys' records."""
    rng = np.random.default_rng(seed)
    columns = -(-max(request_states) // states)
    blocks = rng.permutation(np.arange(1, 1 + columns * len(request_states)))
    table = torch.from_numpy(blocks.reshape(len(request_states), columns).astype(np.int32))
    cache = torch.zeros(1 + len(blocks), states, 132, dtype=torch.uint8)
    records: list[list[bytes]] = []
    for request, count in enumerate(request_states):
        records.append([])
        for at in range(count):
            values, scale = exact.index_record(bf16(rng.standard_normal(128) * 10.0 ** rng.integers(-1, 2)))
            records[-1].append(values + scale)
            slot = int(table[request, at // states]) * states + at % states
            parts = [torch.frombuffer(bytearray(part), dtype=torch.uint8)[None] for part in (values, scale)]
            write_records(index_planes(cache), torch.tensor([slot]), parts[0], parts[1])
    rows = len(request_states)
    meta = CacheMetadata(
        num_prefills=0,
        num_decodes=rows,
        num_decode_tokens=rows,
        max_seq_len=max(request_states) * 2,
        states=states,
        slot_mapping=torch.zeros(rows, dtype=torch.int64),
        block_table=table,
        token_to_req=torch.arange(rows, dtype=torch.int32),
        query_start_loc=torch.arange(rows + 1, dtype=torch.int32),
    )
    return cache, meta, records


def _key(record: bytes) -> np.ndarray:
    return exact.fp8_values(np.frombuffer(record[:128], np.uint8)) * np.frombuffer(record[128:], "<f4")[0]


def _score(q: np.ndarray, weights: np.ndarray, key: np.ndarray) -> float:
    """sum over heads of weight * relu(q . k)."""
    return sum(float(weights[h]) * max(0.0, float(q[h] @ key)) for h in range(len(q)))


@pytest.mark.parametrize("gather_bytes", [4 << 20, 1])
def test_scores_against_a_loop(monkeypatch: pytest.MonkeyPatch, gather_bytes: int) -> None:
    monkeypatch.setattr(module, "_GATHER_BYTES", {"cpu": gather_bytes})
    indexer = _indexer(2)
    indexer.k_cache, meta, records = _paged([40, 7, 33, 1], 32, 0)
    generator = torch.Generator().manual_seed(7)
    q = torch.randn(4, 4, 128, generator=generator).to(torch.float8_e4m3fn).float()
    weights = torch.randn(4, 4, generator=generator)
    # Request 1's token closes no eighth group; request 3 has none at all.
    positions = torch.tensor([79, 14, 60, 0])
    found = indexer.scores(q, weights, meta, positions)
    assert found.shape == (4, 40) and found.dtype == torch.float32
    for row, closed in enumerate((40, 7, 30, 0)):
        for at in range(40):
            if at >= closed:
                assert found[row, at] == -math.inf
            else:
                expected = _score(q[row].double().numpy(), weights[row].numpy(), _key(records[row][at]))
                assert float(found[row, at]) == pytest.approx(expected, rel=1e-4, abs=1e-3)


def test_queries_are_rounded_and_their_scales_go_into_the_weights() -> None:
    indexer = _indexer(2)
    generator = torch.Generator().manual_seed(8)
    qr, x = _bf16(generator, 3, 512, size=5.0), _bf16(generator, 3, 64)
    qr[0, :128], qr[1, 128:256] = 0.0, 448.0 * 2.0**-3
    table = cos_sin_table(CONFIG, True, 50)[[0, 1, 49]]
    fp8, weights = indexer.queries(qr, x, table)
    assert fp8.shape == (3, 4, 128) and weights.shape == (3, 4)
    for token in range(3):
        for head in range(4):
            q = qr[token, 128 * head : 128 * head + 128].double().numpy()
            q = np.concatenate((q[:64], _rotated(q[64:], table[token])))
            scale = 2.0 ** exact.scale_exponent(float(np.abs(q).max()))
            expected = exact.fp8_values(exact.fp8_codes(q / scale))
            # A rotated value may fall on the other side of a rounding edge in float32.
            assert (fp8[token, head].double().numpy() != expected).sum() <= 1
            weight = float(x[token, head]) * scale / math.sqrt(128 * 4)
            assert float(weights[token, head]) == pytest.approx(weight, rel=1e-6)


def _rotated(tail: np.ndarray, cos_sin: Tensor, inverse: bool = False) -> np.ndarray:
    """64 numbers turned as 32 complex ones, rounded."""
    cos, sin = cos_sin.double().numpy()[:32], cos_sin.double().numpy()[32:]
    z = (tail[0::2] + 1j * tail[1::2]) * (cos + 1j * (-sin if inverse else sin))
    return bf16(np.stack((z.real, z.imag), -1).ravel())


def test_select_takes_the_best_and_pads() -> None:
    """topk is 16: more closed positions than that, fewer, and none."""
    scores = torch.full((3, 40), -math.inf)
    generator = torch.Generator().manual_seed(9)
    scores[0, :33], scores[1, :5] = torch.randn(33, generator=generator), torch.randn(5, generator=generator)
    out = torch.full((3, 16), 77, dtype=torch.int32)
    _indexer(2).select(scores, out)
    best = sorted(range(33), key=lambda at: -float(scores[0, at]))[:16]
    assert sorted(out[0].tolist()) == sorted(best)
    assert sorted(out[1].tolist()) == [-1] * 11 + [0, 1, 2, 3, 4]
    assert out[2].tolist() == [-1] * 16


@pytest.mark.parametrize("width", [1, 15, 16])
def test_select_of_no_more_than_topk(width: int) -> None:
    out = torch.full((1, 16), 77, dtype=torch.int32)
    _indexer(2).select(torch.zeros(1, width), out)
    assert sorted(out[0].tolist()) == [-1] * (16 - width) + list(range(width))


def test_source_publishes_its_best_blocks_with_the_newest() -> None:
    """Blocks of 4 positions, 6 of them published; layer 6 has ratio 1."""
    indexer = _indexer(6)
    generator = torch.Generator().manual_seed(10)
    positions = torch.tensor([37, 36, 35, 9, 0, 22])
    scores = torch.randn(6, 38, generator=generator)
    scores = scores.masked_fill(torch.arange(38) > positions[:, None], -math.inf)
    scores[0, 36:38] = -1e30  # the newest block is the worst one
    out = torch.full((6, 6), 77, dtype=torch.int32)
    indexer.publish_candidates(scores, positions, out)
    for row, position in enumerate(positions.tolist()):
        blocks = range(position // 4 + 1)
        newest = position // 4
        best = {b: max(float(s) for s in scores[row, 4 * b : 4 * b + 4]) for b in blocks if b != newest}
        expected = [newest, *sorted(best, key=lambda b: -best[b])[:5]]
        assert sorted(out[row].tolist()) == sorted(expected + [-1] * (6 - len(expected))), f"row {row}"


def test_source_without_a_closed_group_publishes_nothing() -> None:
    indexer = _indexer(2, small_config(candidate_source_layer_id=2))
    out = torch.full((1, 6), 77, dtype=torch.int32)
    indexer.publish_candidates(torch.full((1, 3), -math.inf), torch.tensor([0]), out)
    assert out[0].tolist() == [-1] * 6


def test_consumer_scores_inside_the_candidates_only() -> None:
    scores = torch.randn(3, 38, generator=torch.Generator().manual_seed(11))
    blocks = torch.tensor([[0, 9, 4, -1, -1, -1], [-1] * 6, [0, 1, 2, 3, 99, 10]], dtype=torch.int32)
    found = _indexer(8).restrict(scores, blocks)
    for row in range(3):
        for at in range(38):
            inside = at // 4 in blocks[row].tolist()
            assert float(found[row, at]) == (float(scores[row, at]) if inside else -math.inf)


def test_index_keys_are_stored_where_they_close_a_group() -> None:
    indexer = _indexer(2)
    generator = torch.Generator().manual_seed(12)
    latent = _bf16(generator, 4, 512, size=2.0)
    table = cos_sin_table(CONFIG, True, 20)[[2, 2, 4, 4]]
    indexer.k_cache, meta, _ = _paged([4, 4, 4, 4], 32, 1)
    before = indexer.k_cache.clone()
    slots = torch.tensor([-1, 40, -1, 41])
    meta = CacheMetadata(**{**vars(meta), "slot_mapping": slots})
    indexer.store_keys(latent, table, meta)
    values, scales = index_planes(indexer.k_cache)
    for row, slot in ((1, 40), (3, 41)):
        key = _norm(latent[row, :128].double().numpy(), torch.ones(128))
        key = np.concatenate((key[:64], _rotated(key[64:], table[row])))
        record = values[slot // 32, slot % 32].numpy().tobytes() + scales[slot // 32, slot % 32].numpy().tobytes()
        expected = b"".join(exact.index_record(key))
        assert record[128:] == expected[128:]
        # Values within a rounding edge of each other, and hardly any that are.
        differences = np.abs(_key(record) - _key(expected))
        assert (differences > 0).sum() <= 3 and differences.max() <= np.abs(key).max() / 14
    planes = [(before, indexer.k_cache)]
    for old, new in planes:
        untouched = [block for block in range(len(old)) if block != 1]
        assert torch.equal(old[untouched], new[untouched])


# --- the attention itself ----------------------------------------------------------------------------------------


def test_sink_attention_against_a_loop() -> None:
    generator = torch.Generator().manual_seed(13)
    q, kv = _bf16(generator, 3, 4, 512), torch.randn(3, 9, 512, generator=generator)
    valid = torch.rand(3, 9, generator=generator) > 0.4
    valid[2] = False
    kv[~valid] = math.nan
    sinks = torch.tensor([0.3, -2.0, 5.0, 0.0])
    found = sink_attention(q, kv, valid, sinks, 512**-0.5)
    assert found.dtype == torch.bfloat16
    for token in range(3):
        entries = [kv[token, n].double().numpy() for n in range(9) if valid[token, n]]
        for head in range(4):
            expected = _sink_softmax(q[token, head].double().numpy(), entries, float(sinks[head]))
            np.testing.assert_allclose(found[token, head].double().numpy(), expected, rtol=2**-7, atol=1e-5)
    assert not found[2].any()


def _sink_softmax(q: np.ndarray, entries: list[np.ndarray], sink: float) -> np.ndarray:
    logits = [float(q @ entry) / math.sqrt(512) for entry in entries]
    peak = max([*logits, sink])
    denominator = math.exp(sink - peak) + sum(math.exp(logit - peak) for logit in logits)
    result = np.zeros(512)
    for logit, entry in zip(logits, entries, strict=True):
        result += math.exp(logit - peak) / denominator * entry
    return result


def test_large_logits_do_not_overflow() -> None:
    q = torch.full((1, 1, 512), 100.0, dtype=torch.bfloat16)
    kv = torch.cat((torch.full((1, 1, 512), 50.0), torch.full((1, 1, 512), 49.0)), 1)
    found = sink_attention(q, kv, torch.ones(1, 2, dtype=torch.bool), torch.tensor([1000.0]), 512**-0.5)
    assert found.eq(50.0).all()


LAYERS = (0, 2, 3, 6, 7, 8)
LENGTHS = (110, 37, 70)


class _Setup:
    """One attention layer of every kind over common caches: a window only; a source and a reader at ratio 2; at
    ratio 1 the candidate source, a reader, and a candidate consumer that has an indexer but no keys."""

    def __init__(self, rows: int = 4, max_tokens: int = 256) -> None:
        self.context, self.selection = ForwardContext(), Selection(CONFIG, max_tokens, CPU)
        self.caches = Caches(CONFIG, rows, CONTEXT, max_tokens, CPU)
        self.layers = {layer: self._layer(layer) for layer in LAYERS}
        generator = torch.Generator().manual_seed(99)
        self.inputs = {layer: [_bf16(generator, n, 64) for n in LENGTHS] for layer in LAYERS}
        self.found = {layer: [torch.full((n, 64), math.nan) for n in LENGTHS] for layer in LAYERS}
        self.topk = {layer: [torch.zeros(n, 16, dtype=torch.int32) for n in LENGTHS] for layer in LAYERS}
        self.blocks = [torch.zeros(n, 6, dtype=torch.int32) for n in LENGTHS]
        self.requests: list[Request] = [self.caches.open(list(range(n))) for n in LENGTHS]

    def _layer(self, layer: int) -> Attention:
        g = torch.Generator().manual_seed(layer)

        def linear(rows: int, columns: int) -> Linear:
            return Linear(_bf16(g, rows, columns, size=columns**-0.5))

        ratio = CONFIG.compress_ratios[layer]
        owns, indexes = layer in CONFIG.kv_source_layer_ids, layer in CONFIG.index_source_layer_ids
        compressor = Compressor(ratio, linear(512 * ratio, 64), _bf16(g, 512), 1e-20) if owns else None
        keys = (linear(128, 512), _bf16(g, 128)) if owns else (None, None)
        indexer = Indexer(CONFIG, layer, linear(512, 32), linear(4, 64), *keys) if indexes else None
        attention = Attention(
            CONFIG,
            layer,
            self.context,
            self.selection,
            fused_wqa_wkv=linear(32 + 512, 64),
            q_norm=_bf16(g, 32),
            kv_norm=_bf16(g, 512),
            wq_b=linear(4 * 512, 32),
            wo_a=linear(2 * 32, 2 * 512),
            wo_b=linear(64, 64),
            sinks=torch.randn(4, generator=g),
            cos_sin=cos_sin_table(CONFIG, ratio > 0, CONTEXT),
            compressor=compressor,
            indexer=indexer,
        )
        attention.bind_caches(self.caches.views)
        return attention

    def run(self, chunks: list[tuple[int, int]], padding: float = math.nan, **options: bool) -> dict[int, Tensor]:
        """One batch: (text, or -1 for padding; count). Notes every text's outputs and selections."""
        requests = [self.requests[text] if text >= 0 else None for text, _ in chunks]
        counts = [count for _, count in chunks]
        batch = self.caches.batch(requests, counts, decode_length=6, **options)
        outputs = {}
        for number, layer in self.layers.items():
            x = torch.cat(
                [
                    self.inputs[number][text][r.computed : r.computed + count]
                    if r is not None
                    else torch.full((count, 64), padding, dtype=torch.bfloat16)
                    for (text, count), r in zip(chunks, requests, strict=True)
                ]
            )
            with self.context.running(batch.metadata):
                outputs[number] = layer(batch.positions, x)
            self._note(number, chunks, outputs[number])
        for request, count in zip(requests, counts, strict=True):
            if request is not None:
                request.computed += count
        return outputs

    def _note(self, number: int, chunks: list[tuple[int, int]], output: Tensor) -> None:
        at = 0
        assert self.selection.candidate_blocks is not None
        for text, count in chunks:
            if text >= 0:
                rows, start = slice(at, at + count), self.requests[text].computed
                self.found[number][text][start : start + count] = output[rows].float()
                self.topk[number][text][start : start + count] = self.selection.topk_indices[rows]
                if number == CONFIG.candidate_source_layer_id:
                    self.blocks[text][start : start + count] = self.selection.candidate_blocks[rows]
            at += count


class _Source(NamedTuple):
    """What a source leaves for its readers: compressed entries and index keys, by position."""

    entries: list[np.ndarray]
    keys: list[np.ndarray]


class _Reference:
    """One text through the layers, token by token in float64. Selections are checked, then taken as found: where two
    scores are as good as equal, either choice is right."""

    def __init__(self, setup: _Setup, text: int) -> None:
        self.setup, self.text, self.sources = setup, text, dict[int, _Source]()

    def layer(self, number: int) -> np.ndarray:
        attention, x = self.setup.layers[number], self.setup.inputs[number][self.text].double().numpy()
        qr_kv = bf16(x @ attention.fused_wqa_wkv.weight.double().numpy().T)
        qr = [_norm(row[:32], attention.q_norm) for row in qr_kv]
        kv = [_norm(row[32:], attention.kv_norm) for row in qr_kv]
        window = [self._stored(row, attention.cos_sin[at]) for at, row in enumerate(kv)]
        ratio = CONFIG.compress_ratios[number]
        if attention.compressor is not None:
            self.sources[number] = self._compress(attention, x, ratio)
        if attention.indexer is not None:
            self._check_selection(attention, number, qr, x)
        rows = []
        for at in range(len(x)):
            entries = window[max(0, at - 47) : at + 1]
            if ratio:
                chosen = self.setup.topk[self._index_source(number)][self.text][at].tolist()
                entries = entries + [self._source(number).entries[i] for i in chosen if i >= 0]
            rows.append(self._token(attention, at, qr[at], entries))
        return np.stack(rows)

    def _source(self, number: int) -> _Source:
        return self.sources[max(s for s in CONFIG.kv_source_layer_ids if s <= number)]

    def _index_source(self, number: int) -> int:
        return max(s for s in CONFIG.index_source_layer_ids if s <= number)

    @staticmethod
    def _stored(latent: np.ndarray, cos_sin: Tensor) -> np.ndarray:
        return exact.kv_values(exact.kv_record(latent[:448], _rotated(latent[448:], cos_sin)))

    def _compress(self, attention: Attention, x: np.ndarray, ratio: int) -> _Source:
        compressor, indexer = attention.compressor, attention.indexer
        assert compressor is not None and indexer is not None and indexer.wk is not None and indexer.k_norm is not None
        rows = x @ compressor.fused_wkv_wgate.weight.double().numpy().T
        entries, keys = [], []
        for first in range(0, len(x) - ratio + 1, ratio):
            group = rows[first : first + ratio]
            latent = _norm(group[0], compressor.norm) if ratio == 1 else _pooled(group, compressor.norm)
            cos_sin = attention.cos_sin[first]
            entries.append(self._stored(latent, cos_sin))
            key = _norm(bf16(indexer.wk.weight.double().numpy() @ latent), indexer.k_norm)
            key = np.concatenate((key[:64], _rotated(key[64:], cos_sin)))
            keys.append(_key(b"".join(exact.index_record(key))))
        return _Source(entries, keys)

    def _check_selection(self, attention: Attention, number: int, qr: list[np.ndarray], x: np.ndarray) -> None:
        indexer, keys = attention.indexer, self._source(number).keys
        assert indexer is not None
        wq_b, weights_proj = (w.weight.double().numpy() for w in (indexer.wq_b, indexer.weights_proj))
        for at in range(len(x)):
            weights, heads = bf16(weights_proj @ x[at]) / math.sqrt(4 * 128), bf16(wq_b @ qr[at]).reshape(4, 128)
            q = np.empty((4, 128))
            for head in range(4):
                row = np.concatenate((heads[head, :64], _rotated(heads[head, 64:], attention.cos_sin[at])))
                scale = 2.0 ** exact.scale_exponent(float(np.abs(row).max()))
                q[head] = exact.fp8_values(exact.fp8_codes(row / scale)) * scale
            closed = (at + 1) // CONFIG.compress_ratios[number]
            scores = {i: _score(q, weights, keys[i]) for i in range(closed)}
            if number == CONFIG.candidate_source_layer_id:
                self._check_blocks(at, scores)
            if CONFIG.consumes_candidates(number):
                blocks = set(self.setup.blocks[self.text][at].tolist())
                scores = {i: score for i, score in scores.items() if i // 4 in blocks}
            _check_best(self.setup.topk[number][self.text][at].tolist(), scores, 16)

    def _check_blocks(self, at: int, scores: dict[int, float]) -> None:
        best: dict[int, float] = {}
        for position, score in scores.items():
            best[position // 4] = max(score, best.get(position // 4, -math.inf))
        best[at // 4] = math.inf
        _check_best(self.setup.blocks[self.text][at].tolist(), best, 6)

    def _token(self, attention: Attention, at: int, qr: np.ndarray, entries: list[np.ndarray]) -> np.ndarray:
        q = bf16(attention.wq_b.weight.double().numpy() @ qr).reshape(4, 512)
        heads = []
        for head in range(4):
            row = np.concatenate((q[head, :448], _rotated(q[head, 448:], attention.cos_sin[at])))
            out = bf16(_sink_softmax(row, entries, float(attention.sinks[head])))
            heads.append(np.concatenate((out[:448], _rotated(out[448:], attention.cos_sin[at], inverse=True))))
        wo_a, wo_b = attention.wo_a.weight.double().numpy(), attention.wo_b.weight.double().numpy()
        # Group 0 is heads 0 and 1 with wo_a's first 32 rows.
        low = [bf16(wo_a[32 * g : 32 * g + 32] @ np.concatenate(heads[2 * g : 2 * g + 2])) for g in range(2)]
        return bf16(wo_b @ np.concatenate(low))


def _check_best(found: list[int], scores: dict[int, float], count: int) -> None:
    """`found` holds the `count` best of `scores`, or all of them, and -1 otherwise; up to rounding."""
    chosen = [i for i in found if i >= 0]
    assert len(set(chosen)) == len(chosen) == min(count, len(scores))
    assert set(chosen) <= set(scores)
    left = [score for i, score in scores.items() if i not in chosen]
    if left:
        finite = [abs(score) for score in scores.values() if score < math.inf]
        assert min(scores[i] for i in chosen) >= max(left) - 0.03 * max(finite)


ONE_PASS = [[(0, 110), (1, 37), (2, 70)]]
RAGGED = [
    [(0, 33)],
    [(0, 1), (1, 20)],
    [(0, 15), (1, 1), (2, 64)],
    [(2, 1), (0, 1), (1, 1)],
    [(0, 6), (2, 5), (1, 6)],
    [(1, 1), (2, 0), (0, 47)],
    *[[(0, 1), (-1, 1), (1, 1)]] * 7,
    [(1, 1)],
]


@pytest.mark.parametrize("schedule", [ONE_PASS, RAGGED], ids=["one pass", "ragged"])
@pytest.mark.parametrize("gather_bytes", [4 << 20, 1 << 19])
def test_layers_against_the_reference(
    monkeypatch: pytest.MonkeyPatch, schedule: list[list[tuple[int, int]]], gather_bytes: int
) -> None:
    """Three texts, in one prefill or in chunks, drafts and single tokens; readers use their source's cache."""
    monkeypatch.setattr(module, "_GATHER_BYTES", {"cpu": gather_bytes})
    setup = _Setup()
    for chunks in schedule:
        setup.run(chunks)
    for text in range(len(LENGTHS)):
        assert setup.requests[text].computed == LENGTHS[text]
        reference = _Reference(setup, text)
        for number in LAYERS:
            expected = reference.layer(number)
            error = np.abs(setup.found[number][text].double().numpy() - expected).max()
            assert error < 0.02 * np.abs(expected).max(), f"layer {number}, text {text}"


def test_graph_shaped_batches_give_the_same() -> None:
    """Static metadata widens what is scored to the whole context; the values stay."""
    static, dynamic = _Setup(), _Setup()
    for setup, options in ((static, {"static": True}), (dynamic, {"static": False})):
        setup.run([(0, 50), (1, 20)])
        for _ in range(5):
            setup.run([(0, 1), (1, 1)], **options)
    for number in LAYERS:
        for text in (0, 1):
            a, b = static.found[number][text][:25], dynamic.found[number][text][:25]
            torch.testing.assert_close(a, b, rtol=2**-6, atol=2**-8)
            chosen = [s.topk[number][text][20:25].sort().values for s in (static, dynamic)]
            assert torch.equal(*chosen)


@pytest.mark.parametrize("padding", [1.0, math.nan])
def test_padding_rows_are_zero_and_change_nothing(padding: float) -> None:
    padded, plain = _Setup(), _Setup()
    # Whatever lies in the null blocks must reach nobody.
    groups = (padded.caches.window, padded.caches.compressed)
    for group in groups:
        group.buffer[: group.stride] = 0x41
    for setup in (padded, plain):
        setup.run([(0, 60), (1, 9)])
    outputs = padded.run([(0, 1), (-1, 1), (1, 1), (-1, 1)], padding)
    expected = plain.run([(0, 1), (1, 1)])
    for number in LAYERS:
        assert not outputs[number][[1, 3]].any(), f"layer {number}"
        torch.testing.assert_close(outputs[number][[0, 2]], expected[number], rtol=2**-6, atol=2**-8)
    for group in groups:
        assert group.buffer[: group.stride].eq(0x41).all(), "padding wrote to the null block"
        assert group.buffer[group.stride :].any()
    assert all(not ring[0].any() for ring in padded.caches.rings.values())


def test_a_batch_of_padding_only() -> None:
    setup = _Setup()
    outputs = setup.run([(-1, 1), (-1, 1)], static=True)
    assert all(not output.any() for output in outputs.values())


def test_sharing_layers_are_bound_to_their_source() -> None:
    setup = _Setup()
    views = setup.caches.views
    for reader, source in ((3, 2), (7, 6), (8, 6)):
        cache = setup.layers[reader].compressed_cache
        assert cache is not None
        assert cache.data_ptr() == views[f"layers.{source}.attn"].data_ptr()
        window = setup.layers[reader].window_cache
        assert window is not None and window.data_ptr() == views[f"layers.{reader}.attn.swa_cache"].data_ptr()
    consumer = setup.layers[8].indexer
    assert consumer is not None and consumer.k_cache is not None
    assert consumer.k_cache.data_ptr() == views["layers.6.attn.indexer.k_cache"].data_ptr()
    assert setup.layers[0].compressed_cache is None


def test_a_layer_runs_inside_a_forward_context_only() -> None:
    setup = _Setup()
    with pytest.raises(AssertionError, match="forward context"):
        setup.layers[0](torch.zeros(1, dtype=torch.int64), torch.zeros(1, 64, dtype=torch.bfloat16))
