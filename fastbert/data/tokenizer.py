"""WordPiece tokenisation: BERT's normaliser and word splitting around a ``tokenizers`` model.

Folders have Hugging Face's layout, so ``AutoTokenizer.from_pretrained`` gives the same ids.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from fastbert import json_file

# The order that trained vocabularies begin with.
SPECIAL_TOKENS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
# Ids are below this, for there are arrays with an entry per id. The largest vocabularies have a
# sixteenth of so many tokens.
MAX_VOCABULARY = 1 << 24


class Encoded(NamedTuple):
    """A text or a pair as ids; ``token_types`` [] where all are 0."""

    ids: list[int]
    token_types: list[int]
    truncated: bool


@contextmanager
def rust_errors(what: str) -> Iterator[None]:
    """Turns failures of the Rust library inside into a ValueError that begins with ``what``.

    The library raises bare Exception, and PanicException, which derives from BaseException.
    """
    try:
        yield
    except (TypeError, OSError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise ValueError(f"{what}: {error}") from error


def lowercase_first(tokenizer: Tokenizer) -> None:
    """Makes ``tokenizer`` lower-case a text before its own normaliser reads it."""
    own = tokenizer.normalizer
    steps = [normalizers.Lowercase()] if own is None else [normalizers.Lowercase(), own]
    tokenizer.normalizer = normalizers.Sequence(steps)


def truncate_pair(length_a: int, length_b: int, budget: int) -> tuple[int, int]:
    """The lengths of two segments after the longer is cut until both fit into ``budget`` tokens.

    Of an odd budget, the segment that was longer keeps the last token, as in transformers.
    """
    if length_a + length_b <= budget:
        return length_a, length_b
    short = min(length_a, length_b)
    long = max(short, budget - short)
    if short + long > budget:
        short, long = budget // 2, budget - budget // 2
    return (short, long) if length_a <= length_b else (long, short)


def build_tokenizer(
    vocab: dict[str, int],
    special: dict[str, str],
    *,
    lowercase: bool = True,
    strip_accents: bool | None = None,
    chinese: bool = True,
) -> Tokenizer:
    """A BERT tokenizer over ``vocab`` (token to id) that adds [CLS] and [SEP] by itself."""
    unk = special["unk_token"]
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token=unk))
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=strip_accents, handle_chinese_chars=chinese
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    cls, sep = special["cls_token"], special["sep_token"]
    if cls in vocab and sep in vocab:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{cls}:0 $A:0 {sep}:0",
            pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
            special_tokens=[(cls, vocab[cls]), (sep, vocab[sep])],
        )
    tokenizer.add_special_tokens([token for token in special.values() if token in vocab])
    return tokenizer


class WordPieceTokenizer:
    """A ``tokenizers.Tokenizer`` with a WordPiece model and BERT's five special tokens.

    ``pad_id, unk_id, cls_id, sep_id, mask_id`` are their ids, ``is_special`` is bool by id, shape
    (vocab_size,), and ``ordinary_ids`` holds the ids of all other tokens (int64, sorted). Raises
    ValueError for another kind of model or when a special token is not in the vocabulary.
    """

    def __init__(self, tokenizer: Tokenizer, special: dict[str, str] | None = None) -> None:
        if not isinstance(tokenizer.model, models.WordPiece):
            kind = type(tokenizer.model).__name__
            raise ValueError(f"tokenizer: its model is {kind}, allowed: WordPiece")
        self.special = {**SPECIAL_TOKENS, **(special or {})}
        vocab = tokenizer.get_vocab()
        if missing := [token for token in self.special.values() if token not in vocab]:
            raise ValueError(f"tokenizer: special tokens not in the vocabulary: {missing}")
        if (largest := max(vocab.values())) >= MAX_VOCABULARY:
            raise ValueError(f"tokenizer: got the id {largest}, allowed: below {MAX_VOCABULARY}")
        # Length is the caller's business; a saved tokenizer.json may have both switched on.
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self.backend = tokenizer
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = (
            vocab[self.special[name]] for name in SPECIAL_TOKENS
        )
        special_ids = [vocab[token] for token in self.special.values()]
        self.vocab_size = largest + 1
        self.is_special = np.zeros(self.vocab_size, dtype=bool)
        self.is_special[special_ids] = True
        self.ordinary_ids = np.setdiff1d(np.array(list(vocab.values())), special_ids)
        prefix = tokenizer.model.continuing_subword_prefix
        self._continues = np.zeros(self.vocab_size, dtype=bool)
        # The bare prefix is an ordinary token, a doubled number sign.
        pieces = [i for token, i in vocab.items() if token.startswith(prefix) and token != prefix]
        self._continues[pieces] = True

    def __len__(self) -> int:
        return self.vocab_size

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_length: int | None = None
    ) -> list[int]:
        """Ids of ``[CLS] text [SEP]``, or of ``text`` alone, cut at the right to ``max_length``."""
        ids = self._ids(text)
        if not add_special_tokens:
            return ids[:max_length]
        if max_length is not None:
            ids = ids[: _room(max_length, 2)]
        return [self.cls_id, *ids, self.sep_id]

    def encode_pair(
        self, first: str, second: str, *, max_length: int | None = None
    ) -> tuple[list[int], list[int]]:
        """Ids of ``[CLS] first [SEP] second [SEP]`` and their token types (0, then 1 after [SEP]).

        When the result would be longer than ``max_length``, the longer text is cut at its right.
        """
        a, b = self._ids(first), self._ids(second)
        if max_length is not None:
            length_a, length_b = truncate_pair(len(a), len(b), _room(max_length, 3))
            a, b = a[:length_a], b[:length_b]
        ids = [self.cls_id, *a, self.sep_id, *b, self.sep_id]
        return ids, [0] * (len(a) + 2) + [1] * (len(b) + 1)

    def encode_within(self, max_length: int, first: str, second: str | None = None) -> Encoded:
        """``encode`` or ``encode_pair`` of texts of any length, tokenised once, and whether they
        were cut."""
        texts = [first] if second is None else [first, second]
        with rust_errors("tokenizer: it fails"):
            # Without the offsets, which take most of the time.
            encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        a, *rest = (encoding.ids for encoding in encodings)
        room = _room(max_length, 2 + len(rest))
        if not rest:
            return Encoded([self.cls_id, *a[:room], self.sep_id], [], len(a) > room)
        length_a, length_b = truncate_pair(len(a), len(rest[0]), room)
        ids = [self.cls_id, *a[:length_a], self.sep_id, *rest[0][:length_b], self.sep_id]
        types = [0] * (length_a + 2) + [1] * (length_b + 1)
        return Encoded(ids, types, len(a) + len(rest[0]) > room)

    def _ids(self, text: str) -> list[int]:
        with rust_errors("tokenizer: it fails"):
            return self.backend.encode(text, add_special_tokens=False).ids

    def lowercase(self) -> None:
        """Lower-cases every text from now on, whatever the vocabulary's casing is."""
        lowercase_first(self.backend)

    def is_added(self, index: int) -> bool:
        """Whether an id is that of a special token."""
        return bool(self.is_special[index])

    def encode_sentences(self, sentences: Sequence[str]) -> list[list[int]]:
        """Ids of each sentence without special tokens.

        A literal "[SEP]" or "[MASK]" in a corpus is ordinary text, so no special id but [UNK]
        occurs.
        """
        before = self.backend.encode_special_tokens
        self.backend.encode_special_tokens = True
        try:
            with rust_errors("tokenizer: it fails"):
                encodings = self.backend.encode_batch_fast(
                    list(sentences), add_special_tokens=False
                )
        finally:
            self.backend.encode_special_tokens = before
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.backend.decode(list(map(int, ids)), skip_special_tokens=skip_special_tokens)

    def token_to_id(self, token: str) -> int | None:
        return self.backend.token_to_id(token)

    def id_to_token(self, index: int) -> str | None:
        return self.backend.id_to_token(index)

    def word_starts(self, ids: np.ndarray) -> np.ndarray:
        """For ids of any shape, bool of that shape: True where a word begins (no ``##`` piece)."""
        return ~self._continues[ids]

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> WordPieceTokenizer:
        """Opens ``tokenizer.json`` of a folder, or ``vocab.txt`` where that is all there is.

        ``tokenizer_config.json`` gives the names of the special tokens and, for ``vocab.txt``, the
        casing (``do_lower_case``, true unless said otherwise). Raises FileNotFoundError when
        neither file is there, ValueError when a file is broken.
        """
        folder = Path(folder)
        config = read_config(folder)
        names = {
            key: _token_text(folder, key, config[key]) for key in SPECIAL_TOKENS if key in config
        }
        special = {**SPECIAL_TOKENS, **{key: name for key, name in names.items() if name}}
        whole, vocab = folder / "tokenizer.json", folder / "vocab.txt"
        if whole.is_file():
            tokenizer = read_tokenizer(whole)
        elif vocab.is_file():
            casing = {
                "lowercase": _flag(folder, config, "do_lower_case", True),
                "strip_accents": _flag(folder, config, "strip_accents", None),
                "chinese": _flag(folder, config, "tokenize_chinese_chars", True),
            }
            pieces = _read_vocab(vocab)
            with rust_errors(f"tokenizer: {folder} is broken"):
                tokenizer = build_tokenizer(pieces, special, **casing)
        else:
            raise FileNotFoundError(
                f"tokenizer: {folder} holds neither tokenizer.json nor vocab.txt"
            )
        try:
            return cls(tokenizer, special)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from error

    def save(self, folder: str | os.PathLike[str], *, max_length: int | None = None) -> None:
        """Writes tokenizer.json, vocab.txt, tokenizer_config.json and special_tokens_map.json.

        ``max_length`` is recorded as ``model_max_length``. Each file appears whole or not at all.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        normalizer: Any = self.backend.normalizer
        config = {
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": getattr(normalizer, "lowercase", True),
            "strip_accents": getattr(normalizer, "strip_accents", None),
            "tokenize_chinese_chars": getattr(normalizer, "handle_chinese_chars", True),
            **self.special,
        }
        if max_length is not None:
            config["model_max_length"] = max_length
        # A line per id: ids that no token has (rare, in edited vocabularies) keep their line.
        lines = [self.id_to_token(i) or f"[unused_id_{i}]" for i in range(self.vocab_size)]
        _write(folder / "vocab.txt", "".join(line + "\n" for line in lines))
        _write(folder / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")
        _write(folder / "special_tokens_map.json", json.dumps(self.special, indent=2) + "\n")
        _write(folder / "tokenizer.json", self.backend.to_str(pretty=True))


def _room(max_length: int, special: int) -> int:
    if max_length < special:
        raise ValueError(f"max_length: got {max_length}, allowed: at least {special}")
    return max_length - special


def read_tokenizer(path: Path) -> Tokenizer:
    """A ``tokenizer.json``. Raises ValueError when it is broken."""
    with rust_errors(f"tokenizer: {path} is broken"):
        return Tokenizer.from_file(str(path))


CONFIG = "tokenizer_config.json"


def read_config(folder: Path) -> dict[str, Any]:
    """The content of ``tokenizer_config.json``, {} without one. Raises ValueError when broken."""
    path = folder / CONFIG
    return json_file.read(path) if path.is_file() else {}


def _token_text(folder: Path, key: str, token: Any) -> str | None:
    """Older configurations write a special token as an object with its text in ``content``."""
    text = token.get("content", token) if isinstance(token, dict) else token
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{folder / CONFIG}: {key}: got {token!r:.200}, allowed: a token's text")
    return text


def _flag(folder: Path, config: dict[str, Any], key: str, default: bool | None) -> Any:
    value = config.get(key, default)
    if not isinstance(value, bool) and value is not default:
        raise ValueError(f"{folder / CONFIG}: {key}: got {value!r:.200}, allowed: true or false")
    return value


def _read_vocab(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        number = error.object[: error.start].count(b"\n") + 1
        raise ValueError(f"tokenizer: {path}, line {number}: not UTF-8: {error.reason}") from error
    if lines[-1] == "":
        lines.pop()
    return {line.removesuffix("\r"): index for index, line in enumerate(lines)}


def _write(path: Path, text: str) -> None:
    """Writes through a temporary file and a rename, so that no reader sees half a file."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        # mkstemp makes files private; a checkpoint is readable as any other file is.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
