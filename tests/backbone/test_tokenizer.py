"""The tokenizer, and Engram's compression of its ids."""

import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

from specialized_decode.backbone.corpus import corpus
from specialized_decode.backbone.errors import CheckpointError
from specialized_decode.backbone.presets import release_sized_tokenizer
from specialized_decode.backbone.tokenizer import (
    BOS,
    EOS,
    IMAGE_TOKEN,
    PAD,
    compressed_token_map,
    load_tokenizer,
    save_tokenizer,
    train_tokenizer,
)


def test_corpus_has_text_of_several_kinds() -> None:
    text = corpus()
    assert 20_000 < len(text.encode()) < 40_000
    for sample in ("memory", "def fibonacci", "Straße", "où l'on", "河流"):
        assert sample in text


def test_special_tokens_have_the_release_ids() -> None:
    tokenizer = release_sized_tokenizer()
    assert tokenizer.get_vocab_size(with_added_tokens=True) == 129280
    assert [tokenizer.token_to_id(token) for token in (BOS, EOS, PAD, IMAGE_TOKEN)] == [0, 1, 2, 129264]
    assert sorted(tokenizer.get_vocab(with_added_tokens=True).values()) == list(range(129280))
    assert tokenizer.encode(f"a{IMAGE_TOKEN}b").ids[1] == 129264
    assert tokenizer.decode([0, 129264, 1]) == ""  # special tokens are no text


@pytest.mark.parametrize(
    "text",
    [
        "The river begins where water can no longer stay.",
        " \t\r\n  x",
        "Größe où 河流 \U0001f600 \x1c\x00",
        "",
    ],
)
def test_text_survives_the_round_trip(text: str) -> None:
    tokenizer = release_sized_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_words_of_the_corpus_are_single_tokens() -> None:
    assert release_sized_tokenizer().encode(" water").tokens == ["Ġwater"]
    # Four bytes a token or better: it has learned from the text.
    assert len(release_sized_tokenizer().encode(corpus()).ids) < len(corpus().encode()) / 4 * 1.25


def test_training_is_reproducible() -> None:
    assert train_tokenizer(corpus(), 3000).to_str() == train_tokenizer(corpus(), 3000).to_str()


def test_small_vocabulary_has_no_image_token() -> None:
    tokenizer = train_tokenizer(corpus(), 600)
    assert tokenizer.get_vocab_size() == 600
    assert tokenizer.token_to_id(IMAGE_TOKEN) is None


def test_saved_tokenizer_loads(tmp_path: Path) -> None:
    save_tokenizer(release_sized_tokenizer(), tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.to_str() == release_sized_tokenizer().to_str()


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not found; expected"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 7}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer .*; expected"):
        load_tokenizer(tmp_path)


def _words(*texts: str) -> Tokenizer:
    """A tokenizer whose token i decodes to texts[i]."""
    tokenizer = Tokenizer(models.WordLevel({text: i for i, text in enumerate(texts)}, unk_token=texts[0]))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


@pytest.mark.parametrize(
    ("texts", "ids"),
    [
        (["The", " the", "THE", "then"], [0, 0, 0, 1]),
        (["é", "e", "É", "E\u0301", "ê"], [0, 0, 0, 0, 0]),  # accents and case fold
        (["ﬁ", "fi", "²", "2"], [0, 0, 1, 1]),  # compatibility forms fold
        (["ß", "ss"], [0, 1]),  # lower case, not case folding
        ([" ", "  ", "\t\n", "\u00a0"], [0, 0, 0, 0]),  # a blank run is one space, kept
        ([" a", "a ", "\ta\n", "a"], [0, 0, 0, 0]),
        (["a b", "a \t b", "ab"], [0, 0, 1]),
        (["\v", "\f", "\x1c", "\x1d"], [0, 1, 2, 3]),  # \v and \f strip to nothing and count by their text
        (["\x1ca", "a", "\va"], [0, 1, 1]),  # information separators are no white space
        (["\u0301", "\u0300"], [0, 1]),  # accents alone vanish, and count by their text
        (["\ue000", " "], [0, 0]),
    ],
)
def test_equal_normalized_texts_share_an_id(texts: list[str], ids: list[int]) -> None:
    assert compressed_token_map(_words(*texts)) == (ids, max(ids) + 1)


def test_partial_characters_count_by_their_raw_form() -> None:
    tokenizer = release_sized_tokenizer()
    ids, size = compressed_token_map(tokenizer)
    vocab = tokenizer.get_vocab()
    first, second = vocab["Ã"], vocab["Ä"]  # the bytes 0xc3 and 0xc4 alone: no character
    assert ids[first] != ids[second]
    assert size == max(ids) + 1 < len(ids) == 129280
    assert ids[vocab["Ġthe"]] == ids[vocab["The"]]


def test_map_of_a_release_sized_vocabulary_is_quick() -> None:
    tokenizer = release_sized_tokenizer()
    start = time.process_time()
    compressed_token_map(tokenizer)
    assert time.process_time() - start < 10
