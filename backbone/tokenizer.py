"""A byte-level BPE tokenizer with the release's vocabulary size, and Engram's compression of its ids."""

import json
import re
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from specialized_decode.backbone.config import IMAGE_TOKEN_ID
from specialized_decode.backbone.errors import CheckpointError

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
IMAGE_TOKEN = "<｜deepseek_image｜>"
# Merges worth learning from a few ten kilobytes of text; the other ids are placeholders that no text yields.
TRAINED_IDS = 1600


def train_tokenizer(text: str, vocab_size: int) -> Tokenizer:
    """Trains a tokenizer of exactly `vocab_size` ids on `text`; the same input gives the same tokenizer.

    Ids 0, 1, 2 are beginning, end and padding; IMAGE_TOKEN_ID is the image token where the vocabulary reaches
    that far.
    """
    vocab, merges = _learn(text, min(TRAINED_IDS, vocab_size))
    for token_id in range(len(vocab), vocab_size):
        vocab[IMAGE_TOKEN if token_id == IMAGE_TOKEN_ID else f"<placeholder{token_id}>"] = token_id
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [BOS, EOS, PAD] + ([IMAGE_TOKEN] if IMAGE_TOKEN in vocab else [])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json, the form `AutoTokenizer` reads."""
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
    }
    text = json.dumps(settings, indent=1, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Reads `folder`/tokenizer.json. Raises CheckpointError."""
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{path}: not found; expected the release's tokenizer.json beside config.json")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for whatever it cannot parse
        raise CheckpointError(f"{path}: not a tokenizer ({error}); expected the release's tokenizer.json") from None


def compressed_token_map(tokenizer: Tokenizer) -> tuple[list[int], int]:
    """Engram's smaller id space: tokens whose normalized text is equal share one id.

    Returns the compressed id of every token id, and how many there are. Ids are given in the order in which a
    normalized text first appears. A token that is no whole UTF-8 text counts by its raw form; one that
    normalizes to nothing counts by its text. The hashes' multipliers depend on the count: it has to be exact.
    """
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    texts = tokenizer.decode_batch([[token_id] for token_id in range(size)], skip_special_tokens=False)
    normalizer = _engram_normalizer()
    first: dict[str, int] = {}
    ids: list[int] = []
    for token_id, text in enumerate(texts):
        if "\ufffd" in text:
            key = tokenizer.id_to_token(token_id) or text
        elif text.isascii():
            key = _normalized_ascii(text) or text
        else:
            key = normalizer.normalize_str(text) or text
        ids.append(first.setdefault(key, len(first)))
    return ids, len(first)


def _learn(text: str, vocab_size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of at most `vocab_size` ids, trained on `text`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator([text], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [(left, right) for left, right in model["merges"]]


# Stands in for a lone space while blanks are trimmed, so that such a token keeps a key of its own.
_SPACE = "\ue000"
_BLANKS = re.compile(r"[ \t\r\n]+")
# What Strip() removes from ASCII text (Unicode White_Space); str.strip() alone would take \x1c..\x1f too.
_ASCII_WHITESPACE = " \t\n\v\f\r"


def _engram_normalizer() -> normalizers.Normalizer:
    """Compatibility forms, accents, case and blanks folded away, as the release's Engram was trained."""
    steps = [normalizers.NFKC(), normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()]
    blanks = normalizers.Replace(Regex(r"[ \t\r\n]+"), " ")
    keep_space = normalizers.Replace(Regex(r"^ $"), _SPACE)
    trim = [keep_space, normalizers.Strip(), normalizers.Replace(_SPACE, " ")]
    return normalizers.Sequence([*steps, blanks, *trim])


def _normalized_ascii(text: str) -> str:
    """The same on ASCII text, where the Unicode steps change nothing: most tokens, at a tenth of the time."""
    text = _BLANKS.sub(" ", text.lower())
    return text if text == " " else text.strip(_ASCII_WHITESPACE)
