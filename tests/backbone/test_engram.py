"""Engram against scalar Python: primes by sieve, hashes with unbounded integers, the gate number by number."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from specialized_decode.backbone.engram import Engram, NgramHash, hash_multipliers, image_mask, table_sizes
from specialized_decode.backbone.linear import Linear
from tests.helpers.exact_formats import bf16, fp8_value, ue8m0_value
from tests.helpers.small_config import small_config

IMAGE = 129264
CONFIG = small_config()
# Several ids share a compressed id, as tokens that differ in case do; the map is as long as the vocabulary.
TOKEN_MAP = [(token * 7 + token // 50) % 1000 for token in range(129280)]


def _sieve(stop: int) -> list[int]:
    composite = bytearray(stop)
    for number in range(2, math.isqrt(stop) + 1):
        if not composite[number]:
            composite[number * number :: number] = b"\1" * len(range(number * number, stop, number))
    return [number for number in range(2, stop) if not composite[number]]


@pytest.mark.parametrize(("start", "heads", "ngram"), [(509, 2, 4), (2, 3, 3), (2000, 8, 4), (1000000, 8, 4)])
def test_tables_take_successive_primes(start: int, heads: int, ngram: int) -> None:
    config = small_config(engram_vocab_size=start, engram_n_heads=heads, engram_max_ngram_size=ngram)
    sizes = table_sizes(config)
    assert [len(layer) for layer in sizes] == [ngram - 1] * 2 and all(len(s) == heads for layer in sizes for s in layer)
    flat = [size for layer in sizes for row in layer for size in row]
    primes = [prime for prime in _sieve(start + 2000) if prime >= start]
    assert flat == primes[: len(flat)]


def test_first_primes_of_the_release_sized_table() -> None:
    assert table_sizes(small_config(engram_vocab_size=509))[0] == [[509, 521], [523, 541], [547, 557]]


def test_multipliers() -> None:
    """Odd, different per layer and lookback, and small enough that no product leaves int64."""
    found = hash_multipliers(CONFIG)
    assert found.shape == (2, 4) and found.dtype == torch.int64
    values = found.flatten().tolist()
    assert len(set(values)) == 8 and all(value % 2 == 1 for value in values)
    assert max(values) * 999 < 2**63 and max(values) * 999 > 2**58
    for layer, row in zip(CONFIG.engram_layer_ids, found.tolist(), strict=True):
        draws = np.random.Generator(np.random.PCG64(10007 * layer)).integers(0, (2**63 - 1) // 1000 // 2, 4)
        assert row == [2 * int(draw) + 1 for draw in draws]


def test_multipliers_of_the_release() -> None:
    """Layers 1 and 14 over 99,092 compressed ids: the numbers that vLLM 0.33.0 derives."""
    config = small_config(engram_layer_ids=(1, 14), engram_compressed_vocab_size=99_092)
    assert hash_multipliers(config).tolist() == [
        [76632096046245, 4839876093313, 35959672319349, 73987337458391],
        [67716810739261, 51510806800915, 30921347202721, 82619226485591],
    ]


@pytest.mark.parametrize("vocab", [1, 99_092, 129_280])
def test_multipliers_stay_in_range(vocab: int) -> None:
    found = hash_multipliers(small_config(engram_compressed_vocab_size=vocab)).flatten().tolist()
    assert all(value > 0 and value * (vocab - 1) < 2**63 for value in found)


def _text_hashes(ids: list[int]) -> list[list[list[int]]]:
    """[token][layer][column] rows of a whole text, by the definition, in Python's integers."""
    multipliers, sizes = hash_multipliers(CONFIG).tolist(), table_sizes(CONFIG)
    pad = TOKEN_MAP[CONFIG.engram_pad_token_id]
    result = []
    for position in range(len(ids)):
        token = []
        for layer in range(2):
            columns, rolling, broken, offset = [], 0, False, 0
            for shift in range(4):
                at = position - shift
                broken = broken or at < 0 or ids[at] == IMAGE
                rolling ^= (pad if broken else TOKEN_MAP[ids[at]]) * multipliers[layer][shift]
                if shift:
                    for prime in sizes[layer][shift - 1]:
                        columns.append(offset + rolling % prime)
                        offset += prime
            token.append(columns)
        result.append(token)
    return result


def _texts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 129264, length).tolist() for length in (1, 2, 3, 4, 9, 40)]
    # Images at the start, alone, in a row, at the end; ids next to the image's are ordinary.
    texts.append([IMAGE, 5, 6, 7, 8, IMAGE, 9, 10, IMAGE, IMAGE, 11, 12, 13, 14, 129265, 129263, 15, IMAGE])
    texts.append([IMAGE] * 6)
    texts.append([2] * 8)
    return texts


def _chunk_hashes(hasher: NgramHash, chunks: list[tuple[list[int], int, int]]) -> Tensor:
    """Hashes of a batch of (text, start, stop) chunks."""
    ids = [text[start:stop] for text, start, stop in chunks]
    lookback = [(text[:start][::-1] + [-1] * 3)[:3] for text, start, _ in chunks]
    lengths = [len(chunk) for chunk in ids]
    return hasher(
        torch.tensor([token for chunk in ids for token in chunk]),
        torch.tensor([p for _, start, stop in chunks for p in range(start, stop)]),
        torch.tensor([0, *lengths[:-1]]).cumsum(0).int(),
        torch.arange(len(chunks)).repeat_interleave(torch.tensor(lengths)).int(),
        torch.tensor(lookback),
    )


@pytest.fixture(scope="module")
def hasher() -> NgramHash:
    return NgramHash(CONFIG, TOKEN_MAP, torch.device("cpu"))


def test_whole_texts_in_one_batch(hasher: NgramHash) -> None:
    texts = _texts()
    found = _chunk_hashes(hasher, [(text, 0, len(text)) for text in texts])
    assert found.shape == (sum(map(len, texts)), 2, 6) and found.dtype == torch.int64
    assert found.tolist() == [token for text in texts for token in _text_hashes(text)]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
def test_chunks_with_lookback_give_the_same(hasher: NgramHash, size: int) -> None:
    """Chunks of `size` tokens (size 1 is decoding), all texts advancing together, a chunk each."""
    texts = _texts()
    found: list[list[list[list[int]]]] = [[] for _ in texts]
    for start in range(0, max(map(len, texts)), size):
        running = [i for i, text in enumerate(texts) if start < len(text)]
        chunks = [(texts[i], start, min(start + size, len(texts[i]))) for i in running]
        rows = iter(_chunk_hashes(hasher, chunks).tolist())
        for i, (_, first, last) in zip(running, chunks, strict=True):
            found[i] += [next(rows) for _ in range(first, last)]
    assert found == [_text_hashes(text) for text in texts]


def test_rows_fall_into_their_tables(hasher: NgramHash) -> None:
    text = np.random.default_rng(1).integers(0, 129264, 500).tolist()
    found = _chunk_hashes(hasher, [(text, 0, 500)])
    for layer, sizes in enumerate(table_sizes(CONFIG)):
        edges = [0, *np.cumsum([size for row in sizes for size in row]).tolist()]
        for column, (low, high) in enumerate(pairwise(edges)):
            values = found[:, layer, column]
            assert low <= values.min() and values.max() < high
            assert values.unique().numel() > 250


def test_an_unknown_token_before_the_chunk_counts_as_padding(hasher: NgramHash) -> None:
    """It does not end the n-gram: what lies before it still counts."""
    text = [50, 60, 70, 80, 90]
    lookback = torch.tensor([[-1, 60, 50]])
    args = torch.tensor([80]), torch.tensor([3]), torch.tensor([0]), torch.tensor([0])
    padded = [50, 60, CONFIG.engram_pad_token_id, 80]
    assert hasher(*args, lookback)[0].tolist() == _text_hashes(padded)[3]
    assert hasher(*args, lookback)[0].tolist() != _text_hashes(text)[3]


def test_an_image_token_in_the_lookback_ends_the_ngram(hasher: NgramHash) -> None:
    args = torch.tensor([80]), torch.tensor([3]), torch.tensor([0]), torch.tensor([0])
    found = hasher(*args, torch.tensor([[70, IMAGE, 50]]))[0].tolist()
    assert found == _text_hashes([50, IMAGE, 70, 80])[3] == _text_hashes([60, IMAGE, 70, 80])[3]


def test_image_mask_names_one_id() -> None:
    ids = torch.tensor([129263, 129264, 129265, 129268, 0, -1])
    assert image_mask(ids).tolist() == [False, True, False, False, False, False]


STREAMS, HIDDEN, ROWS = 4, 64, 40


def _engram(wkv: Tensor | None = None, max_tokens: int = 8) -> Engram:
    rng = np.random.default_rng(2)
    codes = rng.integers(0, 127, (ROWS, 64)) + 128 * rng.integers(0, 2, (ROWS, 64))
    table = torch.from_numpy(codes.astype(np.uint8)).view(torch.float8_e4m3fn)
    scale = torch.from_numpy(rng.integers(118, 124, (ROWS, 2)).astype(np.uint8)).view(torch.float8_e8m0fnu)
    generator = torch.Generator().manual_seed(3)
    if wkv is None:
        wkv = torch.randn((STREAMS + 1) * HIDDEN, 6 * 64, generator=generator).to(torch.bfloat16) * 0.05
    q, k = (torch.randn(STREAMS, HIDDEN, generator=generator).to(torch.bfloat16) for _ in range(2))
    return Engram(CONFIG, 1, table, scale, Linear(wkv), q, k, max_tokens)


def _looked_up(engram: Engram, hashes: Tensor) -> np.ndarray:
    table, scale = engram.table.view(torch.uint8), engram.scale.view(torch.uint8)
    return np.array(
        [
            [
                fp8_value(int(table[row, i])) * ue8m0_value(int(scale[row, i // 32]))
                for row in token.tolist()
                for i in range(64)
            ]
            for token in hashes
        ]
    )


def test_lookup() -> None:
    engram = _engram()
    hashes = torch.randint(ROWS, (5, 6), generator=torch.Generator().manual_seed(4))
    found = engram.lookup(hashes)
    assert found.dtype == torch.bfloat16
    np.testing.assert_array_equal(found.double().numpy(), _looked_up(engram, hashes))


def _gate(hidden: np.ndarray, key: np.ndarray, q: np.ndarray, k: np.ndarray) -> float:
    hidden_rms, key_rms = (math.sqrt((v**2).mean() + 1e-20) for v in (hidden, key))
    dot = sum(h / hidden_rms * a * b * w / key_rms for h, a, b, w in zip(hidden, q, k, key, strict=True))
    dot /= math.sqrt(len(hidden))
    root = math.sqrt(max(abs(dot), 1e-6))
    return 1 / (1 + math.exp(root if dot < 0 else -root))


def _injected(engram: Engram, residual: Tensor, kv: np.ndarray, keep: Tensor) -> np.ndarray:
    q, k = engram.q_weight.double().numpy(), engram.k_weight.double().numpy()
    result = residual.double().numpy().copy()
    for token in range(residual.shape[0]):
        parts = kv[token].reshape(STREAMS + 1, HIDDEN)
        for stream in range(STREAMS):
            if keep[token]:
                result[token, stream] += _gate(result[token, stream], parts[stream], q[stream], k[stream]) * parts[-1]
    return result


def test_injection() -> None:
    engram = _engram()
    generator = torch.Generator().manual_seed(5)
    residual = (torch.randn(6, STREAMS, HIDDEN, generator=generator) * 4).to(torch.bfloat16)
    kv = torch.randn(6, (STREAMS + 1) * HIDDEN, generator=generator).to(torch.bfloat16)
    keep = torch.tensor([True, True, False, True, False, True])
    found = engram.inject(residual, kv, keep)
    assert found.dtype == torch.bfloat16
    expected = _injected(engram, residual, kv.double().numpy(), keep)
    np.testing.assert_allclose(found.double().numpy(), expected, rtol=2**-8, atol=2**-7)
    assert torch.equal(found[~keep], residual[~keep])


@pytest.mark.parametrize(
    ("dot", "expected"),
    [
        (0.0, 1 / (1 + math.exp(-1e-3))),  # the floor, on the positive side
        (1e-9, 1 / (1 + math.exp(-1e-3))),
        (-1e-9, 1 / (1 + math.exp(1e-3))),
        (0.25, 1 / (1 + math.exp(-0.5))),
        (-0.25, 1 / (1 + math.exp(0.5))),
        (1.0, 1 / (1 + math.exp(-1.0))),
    ],
)
def test_gate_is_a_signed_root_with_a_floor(dot: float, expected: float) -> None:
    """Rows of one value have a normalized product of sqrt(hidden) q k. The stream is minus half the value, so that
    what is left of it shows how far the gate is from a half."""
    engram = _engram()
    engram.q_weight, engram.k_weight = torch.full((4, HIDDEN), -dot / math.sqrt(HIDDEN)), torch.ones(4, HIDDEN)
    residual = torch.full((1, STREAMS, HIDDEN), -(2.0**13), dtype=torch.bfloat16)
    kv = torch.ones(1, (STREAMS + 1) * HIDDEN)
    kv[:, STREAMS * HIDDEN :] = 2.0**14
    found = engram.inject(residual, kv, torch.tensor([True])).double().numpy()
    np.testing.assert_allclose(found, (expected - 0.5) * 2.0**14, rtol=2**-7)


def test_sizes_of_stream_and_key_do_not_matter() -> None:
    engram = _engram()
    generator = torch.Generator().manual_seed(6)
    residual = torch.randn(3, STREAMS, HIDDEN, generator=generator).to(torch.bfloat16)
    kv = torch.randn(3, (STREAMS + 1) * HIDDEN, generator=generator).to(torch.bfloat16)
    louder = kv.clone()
    louder[:, : STREAMS * HIDDEN] *= 256
    keep = torch.ones(3, dtype=torch.bool)
    torch.testing.assert_close(engram.inject(residual, louder, keep), engram.inject(residual, kv, keep))


def test_silence_is_not_a_division_by_zero() -> None:
    engram = _engram()
    kv = torch.ones(1, (STREAMS + 1) * HIDDEN, dtype=torch.bfloat16)
    found = engram.inject(torch.zeros(1, STREAMS, HIDDEN, dtype=torch.bfloat16), kv, torch.tensor([True]))
    np.testing.assert_allclose(found.double().numpy(), 1 / (1 + math.exp(-1e-3)), rtol=2**-8)


def test_forward_injects_what_was_prepared() -> None:
    engram = _engram()
    generator = torch.Generator().manual_seed(7)
    staged = engram.staged
    address = staged.data_ptr()
    for tokens in (5, 3):
        hashes = torch.randint(ROWS, (tokens, 2, 6), generator=generator)
        residual = torch.randn(tokens, STREAMS, HIDDEN, generator=generator).to(torch.bfloat16)
        keep = torch.ones(tokens, dtype=torch.bool)
        engram.prepare(hashes)
        found = engram(residual, keep)
        # Layer 14 of the release is the second Engram layer: it reads the second column of hashes.
        wkv = engram.wkv.weight.double().numpy()
        kv = bf16(_looked_up(engram, hashes[:, 1]) @ wkv.T)
        expected = _injected(engram, residual, kv, keep)
        np.testing.assert_allclose(found.double().numpy(), expected, rtol=0.02, atol=0.02)
    assert engram.staged.data_ptr() == address
