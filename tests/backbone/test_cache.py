"""Paged caches and their metadata, against block arithmetic in plain Python."""

import numpy as np
import pytest
import torch

from specialized_decode.backbone.cache import Batch, Caches, Request
from specialized_decode.backbone.errors import PromptError
from tests.helpers.small_config import small_config

CPU = torch.device("cpu")
CONFIG = small_config()
WINDOW = CONFIG.sliding_window
SWA, RATIO_2, RATIO_1 = "layers.0.attn.swa_cache", "layers.2.attn", "layers.6.attn"
RING = "layers.2.attn.compressor.state_cache"


def _caches(rows: int = 4, context: int = 256, tokens: int = 64) -> Caches:
    return Caches(CONFIG, rows, context, tokens, CPU)


def _open(caches: Caches, length: int) -> Request:
    return caches.open([1000 + i for i in range(length)])


def _advance(caches: Caches, requests: list[Request], counts: list[int]) -> Batch:
    batch = caches.batch(list(requests), counts)
    for request, count in zip(requests, counts, strict=True):
        request.computed += count
    return batch


def _page(states: int, record: int) -> int:
    return (states * record + 575) // 576 * 576


def test_pages_of_a_group_follow_each_other_in_a_block() -> None:
    caches = _caches()
    window = _page(32, 584)
    assert caches.window.stride == 10 * window
    for layer in range(10):
        view = caches.views[f"layers.{layer}.attn.swa_cache"]
        assert view.shape[1:] == (32, 584) and view.stride() == (10 * window, 584, 1)
        assert view.storage_offset() == layer * window
    sizes = [
        (f"layers.{n}.attn{s}", 64 // r, w)
        for n, r in ((2, 2), (4, 2), (6, 1))
        for s, w in (("", 584), (".indexer.k_cache", 132))
    ]
    assert caches.compressed.stride == sum(_page(states, record) for _, states, record in sizes)
    offset = 0
    for name, states, record in sizes:
        view = caches.views[name]
        assert view.shape[1:] == (states, record) and view.stride() == (caches.compressed.stride, record, 1)
        assert view.storage_offset() == offset
        offset += _page(states, record)
    assert caches.views[RING].shape == (5, 8, 1024) and caches.views[RING].dtype == torch.float32
    assert set(caches.rings) == {RING, "layers.4.attn.compressor.state_cache"}


def test_blocks_are_taken_as_tokens_come_and_given_back() -> None:
    caches = _caches()
    free = sorted(caches.window.free), sorted(caches.compressed.free), sorted(caches.free_rings)
    assert 0 not in caches.window.free and 0 not in caches.compressed.free and 0 not in caches.free_rings
    first, second = _open(caches, 200), _open(caches, 200)
    assert not first.window_blocks and first.ring != second.ring
    _advance(caches, [first, second], [32, 1])
    assert (len(first.window_blocks), len(first.compressed_blocks)) == (1, 1)
    _advance(caches, [first, second], [1, 31])
    assert (len(first.window_blocks), len(second.window_blocks)) == (2, 1)
    _advance(caches, [first], [31])
    assert len(first.compressed_blocks) == 1
    _advance(caches, [first], [1])
    assert (len(first.window_blocks), len(first.compressed_blocks)) == (3, 2)
    owned = [*first.window_blocks, *second.window_blocks]
    assert 0 not in owned and len(set(owned)) == len(owned)
    caches.close(first)
    caches.close(second)
    assert (sorted(caches.window.free), sorted(caches.compressed.free), sorted(caches.free_rings)) == free


@pytest.mark.parametrize("step", [1, 6, 17])
def test_window_blocks_are_freed_once_and_the_window_stays_mapped(step: int) -> None:
    caches = _caches()
    request = _open(caches, 250)
    total = len(caches.window.free)
    while request.computed + step <= 250:
        batch = caches.batch([request], [step])
        table = batch.metadata[SWA].block_table[0].tolist()
        mapped = [block for block in request.window_blocks if block]
        assert len(set(mapped)) == len(mapped)
        assert not set(mapped) & set(caches.window.free)
        # No block is lost, and none is free twice.
        assert len(set(caches.window.free)) == len(caches.window.free) == total - len(mapped)
        for position in range(max(0, request.computed - WINDOW + 1), request.computed + step):
            assert table[position // 32] > 0, f"position {position} of {request.computed}"
        first = max(0, request.computed - WINDOW + 1) // 32
        assert table[:first] == [0] * first
        # What has been compressed is kept for good.
        assert len(request.compressed_blocks) == -(-(request.computed + step) // 64)
        request.computed += step
    caches.close(request)
    assert len(set(caches.window.free)) == len(caches.window.free) == total


def test_slot_mappings_of_every_kind() -> None:
    caches = _caches()
    requests = [_open(caches, 200) for _ in range(3)]
    _advance(caches, requests, [70, 33, 1])
    computed = [r.computed for r in requests]
    counts = [6, 1, 40]
    batch = caches.batch(list(requests), counts)
    expected: dict[str, list[int]] = {SWA: [], RATIO_1: [], RATIO_2: [], RING: []}
    positions, ids, owners = [], [], []
    for number, (request, start, count) in enumerate(zip(requests, computed, counts, strict=True)):
        for position in range(start, start + count):
            positions.append(position)
            ids.append(1000 + position)
            owners.append(number)
            expected[SWA].append(request.window_blocks[position // 32] * 32 + position % 32)
            expected[RATIO_1].append(request.compressed_blocks[position // 64] * 64 + position % 64)
            # The odd token closes its pair; 32 pairs a block.
            pair = request.compressed_blocks[position // 64] * 32 + position // 2 % 32
            expected[RATIO_2].append(pair if position % 2 else -1)
            expected[RING].append(request.ring * 8 + position % 8)
    assert batch.num_tokens == 47
    assert batch.positions.tolist() == positions and batch.input_ids.tolist() == ids
    for name, slots in expected.items():
        meta = batch.metadata[name]
        assert meta.slot_mapping.tolist() == slots and meta.slot_mapping.dtype == torch.int64, name
        assert meta.token_to_req.tolist() == owners and meta.token_to_req.dtype == torch.int32
        assert meta.query_start_loc.tolist() == [0, 6, 7, 47] and meta.query_start_loc.dtype == torch.int32
        assert meta.block_table.dtype == torch.int32
        assert meta.max_seq_len == 76
    assert [batch.metadata[name].states for name in expected] == [32, 64, 32, 8]
    for layer in range(10):
        assert batch.metadata[f"layers.{layer}.attn.swa_cache"] is batch.metadata[SWA]
    assert batch.metadata["layers.6.attn.indexer.k_cache"] is batch.metadata[RATIO_1]
    assert batch.metadata["layers.4.attn"] is batch.metadata["layers.4.attn.indexer.k_cache"]


def test_block_tables() -> None:
    caches = _caches()
    requests = [_open(caches, 200) for _ in range(2)]
    _advance(caches, requests, [60, 5])
    _advance(caches, requests, [60, 5])
    batch = caches.batch([requests[1], None, requests[0]], [1, 1, 1])
    window, compressed, ring = (batch.metadata[name].block_table for name in (SWA, RATIO_1, RING))
    assert window.shape == (3, 8) and compressed.shape == (3, 4) and ring.shape == (3, 1)
    for table, blocks in ((window, "window_blocks"), (compressed, "compressed_blocks")):
        for row, request in enumerate((requests[1], None, requests[0])):
            owned = [] if request is None else getattr(request, blocks)
            assert table[row].tolist() == owned + [0] * (table.shape[1] - len(owned))
    assert ring.flatten().tolist() == [requests[1].ring, 0, requests[0].ring]
    # 120 tokens are computed, so positions before 73 are out of the window of 48: two whole blocks of them.
    assert requests[0].window_blocks[:2] == [0, 0] and requests[0].window_blocks[2] > 0


def test_padding_requests() -> None:
    caches = _caches()
    request = _open(caches, 10)
    _advance(caches, [request], [4])
    batch = caches.batch([None, request, None], [2, 1, 3])
    assert batch.positions.tolist() == [0, 1, 4, 0, 1, 2]
    assert batch.input_ids.tolist() == [0, 0, 1004, 0, 0, 0]
    for name in (SWA, RATIO_1, RING):
        slots = batch.metadata[name].slot_mapping.tolist()
        assert slots[:2] == [-1, -1] and slots[3:] == [-1, -1, -1] and slots[2] >= 0
    assert batch.metadata[RATIO_2].slot_mapping.tolist() == [-1] * 6
    assert batch.lookback_ids.tolist() == [[-1] * 3, [1003, 1002, 1001], [-1] * 3]
    assert batch.metadata[SWA].max_seq_len == 5


def test_a_batch_of_padding_only() -> None:
    batch = _caches().batch([None] * 3, [1, 1, 1], static=True)
    assert batch.metadata[SWA].max_seq_len == 256 and batch.num_tokens == 3
    assert all(meta.slot_mapping.eq(-1).all() for meta in batch.metadata.values())


@pytest.mark.parametrize(
    ("computed", "expected"),
    [(0, [-1, -1, -1]), (1, [1000, -1, -1]), (2, [1001, 1000, -1]), (3, [1002, 1001, 1000]), (9, [1008, 1007, 1006])],
)
def test_lookback_is_latest_first(computed: int, expected: list[int]) -> None:
    caches = _caches()
    request = _open(caches, 20)
    if computed:
        _advance(caches, [request], [computed])
    assert caches.batch([request], [1]).lookback_ids.tolist() == [expected]


@pytest.mark.parametrize(
    ("counts", "decode_length", "decodes", "decode_tokens"),
    [
        ([1, 1, 1], 1, 3, 3),
        ([1, 1, 2], 1, 2, 2),
        ([2, 1, 1], 1, 0, 0),
        ([6, 6, 6], 6, 3, 18),
        ([6, 1, 7], 6, 2, 7),
        ([1, 7, 1], 6, 1, 1),
        ([1, 0, 1], 1, 3, 2),
    ],
)
def test_decodes_come_before_prefills(counts: list[int], decode_length: int, decodes: int, decode_tokens: int) -> None:
    caches = _caches()
    requests: list[Request | None] = [_open(caches, 20) for _ in counts]
    batch = caches.batch(requests, counts, decode_length=decode_length)
    for meta in batch.metadata.values():
        assert (meta.num_decodes, meta.num_prefills, meta.num_decode_tokens) == (decodes, 3 - decodes, decode_tokens)


def test_static_metadata_covers_the_whole_context() -> None:
    caches = _caches()
    request = _open(caches, 20)
    assert caches.batch([request], [1]).metadata[SWA].max_seq_len == 1
    assert caches.batch([request], [1], static=True).metadata[SWA].max_seq_len == 256


def test_load_fills_the_tensors_that_a_graph_reads() -> None:
    caches = _caches()
    requests = [_open(caches, 100) for _ in range(2)]
    captured = caches.batch([None, None], [1, 1], static=True)
    addresses = [tensor.data_ptr() for tensor in captured.tensors()]
    _advance(caches, requests, [40, 3])
    other = caches.batch([requests[1], requests[0]], [1, 1], static=True)
    captured.load(other)
    assert [tensor.data_ptr() for tensor in captured.tensors()] == addresses
    assert len(addresses) == len(set(addresses))
    assert captured.input_ids.tolist() == [1003, 1040] and captured.positions.tolist() == [3, 40]
    assert torch.equal(captured.lookback_ids, other.lookback_ids)
    for name, meta in other.metadata.items():
        mine = captured.metadata[name]
        for field in ("slot_mapping", "block_table", "token_to_req", "query_start_loc"):
            assert torch.equal(getattr(mine, field), getattr(meta, field)), f"{name} {field}"


@pytest.mark.parametrize(
    ("counts", "context"),
    [([1, 1, 1], 256), ([1], 256), ([2, 1], 256), ([1, 1], 128)],
)
def test_load_refuses_another_shape_and_changes_nothing(counts: list[int], context: int) -> None:
    captured = _caches().batch([None, None], [1, 1])
    other = _caches(context=context)
    requests: list[Request | None] = [_open(other, 20) for _ in counts]
    before = [tensor.clone() for tensor in captured.tensors()]
    with pytest.raises(ValueError, match=r"batch of another shape: found .*, expected"):
        captured.load(other.batch(requests, counts))
    for old, new in zip(before, captured.tensors(), strict=True):
        assert torch.equal(old, new)


def test_more_requests_than_slots() -> None:
    caches = _caches(rows=2)
    first = _open(caches, 5)
    _open(caches, 5)
    with pytest.raises(PromptError, match="every request slot is in use"):
        _open(caches, 5)
    caches.close(first)
    assert _open(caches, 5).ring == first.ring


def test_a_request_past_the_context() -> None:
    caches = _caches(context=64, tokens=128)
    request = _open(caches, 70)
    with pytest.raises(PromptError, match="found 65 tokens, expected at most the context of 64"):
        caches.batch([request], [65])
    assert not request.window_blocks
    caches.batch([request], [64])


def test_out_of_blocks() -> None:
    caches = _caches(rows=1, context=256, tokens=32)
    blocks = len(caches.window.free)
    assert blocks < 8
    request = _open(caches, 256)
    with pytest.raises(PromptError, match=f"all {blocks} window blocks are in use"):
        caches.batch([request], [256])
    # Closing gives back what the failed batch took.
    caches.close(request)
    assert len(caches.window.free) == blocks


@pytest.mark.parametrize(("rows", "tokens", "context"), [(8, 512, 4096), (4, 64, 1024), (3, 96, 512), (2, 32, 300)])
def test_every_request_can_be_prefilled_in_turn(rows: int, tokens: int, context: int) -> None:
    """As an engine does: one long prompt after another, in chunks as long as a batch may be."""
    caches = _caches(rows, context, tokens)
    requests = [_open(caches, context) for _ in range(rows)]
    for request in requests:
        for _ in range(2):
            _advance(caches, [request], [min(tokens, context // 2)])
    for _ in range(3):
        _advance(caches, requests, [1] * rows)


def test_full_batches_of_all_requests_never_run_out() -> None:
    """Random chunks of random requests, each batch within `max_tokens`, up to the whole context."""
    caches = _caches(rows=3, context=320, tokens=64)
    rng = np.random.default_rng(0)
    for _ in range(5):
        requests = [_open(caches, 320) for _ in range(3)]
        while any(r.computed < 320 for r in requests):
            room, running, counts = 64, [], []
            for request in requests:
                count = min(int(rng.integers(0, 40)), room, 320 - request.computed)
                if count:
                    running.append(request)
                    counts.append(count)
                    room -= count
            if running:
                _advance(caches, running, counts)
        for request in requests:
            caches.close(request)
    assert len(caches.window.free) == caches.window.blocks - 1


def test_a_model_without_compression() -> None:
    config = small_config(
        compress_ratios=(0,) * 10, kv_source_layer_ids=(), index_source_layer_ids=(), candidate_source_layer_id=-1
    )
    caches = Caches(config, 2, 128, 64, CPU)
    request = caches.open(list(range(100)))
    batch = caches.batch([request], [40])
    assert set(batch.metadata) == {f"layers.{i}.attn.swa_cache" for i in range(10)}
    assert not request.compressed_blocks and not caches.rings
