"""WordPiece tokenization with BERT's normalizer and word splitting, on the ``tokenizers`` library.

A tokenizer is saved in the layout of Hugging Face. ``AutoTokenizer.from_pretrained`` loads the
folder and gives the same ids.
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
from fastbert.file_size import check_file

# Trained vocabularies begin with these tokens, in this order.
SPECIAL_TOKENS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
# Ids are below this limit, because some arrays have one element per id. The largest published
# vocabularies have a sixteenth of this number of tokens.
MAX_VOCABULARY = 1 << 24


class Encoded(NamedTuple):
    """The ids of a text or of a pair of texts.

    Attributes:
        ids: Ids of the tokens, special tokens included.
        token_types: Token type of each id; empty if all token types are 0.
        truncated: Whether a text was cut.
    """

    ids: list[int]
    token_types: list[int]
    truncated: bool


@contextmanager
def rust_errors(what: str) -> Iterator[None]:
    """Turn the Rust library's errors in the ``with`` block into a ValueError that names `what`.

    The library raises bare Exception. It also raises PanicException, which derives from
    BaseException. TypeError, OSError and interrupts such as KeyboardInterrupt pass unchanged.
    """
    try:
        yield
    except (TypeError, OSError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise ValueError(f"{what}: {error}") from error


def lowercase_first(tokenizer: Tokenizer) -> None:
    """Make `tokenizer` convert a text to lower case before the normalizer of the tokenizer runs."""
    own = tokenizer.normalizer
    steps = [normalizers.Lowercase()] if own is None else [normalizers.Lowercase(), own]
    tokenizer.normalizer = normalizers.Sequence(steps)


def truncate_pair(length_a: int, length_b: int, budget: int) -> tuple[int, int]:
    """Return the lengths of two segments after they are cut to `budget` tokens in total.

    The longer segment is cut first, at most to the length of the shorter segment. If both segments
    are cut and `budget` is odd, the longer segment keeps one more token than the shorter segment,
    as in transformers.
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
    """Build a BERT tokenizer from `vocab`, which maps tokens to ids.

    The tokenizer adds ``[CLS]`` and ``[SEP]`` to a text if `vocab` has both tokens. `special` has
    the keys of `SPECIAL_TOKENS`. The other arguments are options of the ``BertNormalizer``;
    `chinese` puts blanks around Chinese characters.
    """
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
    """A tokenizer with a WordPiece model and BERT's five special tokens.

    Attributes:
        backend: The ``tokenizers.Tokenizer``.
        special: The special tokens by name, such as ``{"pad_token": "[PAD]", ...}``.
        pad_id: Id of ``[PAD]``.
        unk_id: Id of ``[UNK]``.
        cls_id: Id of ``[CLS]``.
        sep_id: Id of ``[SEP]``.
        mask_id: Id of ``[MASK]``.
        vocab_size: Largest id plus 1.
        is_special: bool of shape ``(vocab_size,)``, True at the ids of special tokens.
        ordinary_ids: Ids of all tokens that are not special, int64, sorted.

    Examples:
        >>> from fastbert.data import stories, train_tokenizer
        >>> tokenizer = train_tokenizer(stories(20, seed=0), 200)
        >>> ids = tokenizer.encode("The old mill.")
        >>> tokenizer.decode(ids)
        'the old mill.'
        >>> ids[0] == tokenizer.cls_id, ids[-1] == tokenizer.sep_id
        (True, True)
    """

    def __init__(self, tokenizer: Tokenizer, special: dict[str, str] | None = None) -> None:
        """Wrap a tokenizer and disable its padding and truncation.

        Args:
            tokenizer: The tokenizer, which is changed in place.
            special: The special tokens that differ from BERT's, by name (``"pad_token"``,
                ``"unk_token"``, ``"cls_token"``, ``"sep_token"``, ``"mask_token"``).

        Raises:
            ValueError: If the model is not WordPiece, if a special token is not in the vocabulary,
                or if an id is too large.
        """
        if not isinstance(tokenizer.model, models.WordPiece):
            kind = type(tokenizer.model).__name__
            raise ValueError(f"tokenizer: its model is {kind}, allowed: WordPiece")
        self.special = {**SPECIAL_TOKENS, **(special or {})}
        vocab = tokenizer.get_vocab()
        if missing := [token for token in self.special.values() if token not in vocab]:
            raise ValueError(f"tokenizer: special tokens not in the vocabulary: {missing}")
        if (largest := max(vocab.values())) >= MAX_VOCABULARY:
            raise ValueError(f"tokenizer: got the id {largest}, allowed: below {MAX_VOCABULARY}")
        # A saved tokenizer.json may enable padding and truncation, but here the caller chooses the
        # length.
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
        # The prefix alone ("##") begins a word; it is not a continuation piece.
        pieces = [i for token, i in vocab.items() if token.startswith(prefix) and token != prefix]
        self._continues[pieces] = True

    def __len__(self) -> int:
        """Return the size of the vocabulary."""
        return self.vocab_size

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_length: int | None = None
    ) -> list[int]:
        """Return the ids of ``[CLS] text [SEP]``.

        Args:
            text: The text.
            add_special_tokens: Whether ``[CLS]`` and ``[SEP]`` are added.
            max_length: Largest number of ids; the end of a longer text is cut. None cuts nothing.

        Returns:
            The ids.

        Raises:
            ValueError: If `max_length` leaves no room for the special tokens, or if the tokenizer
                fails.
        """
        ids = self._ids(text)
        if not add_special_tokens:
            return ids[:max_length]
        if max_length is not None:
            ids = ids[: _room(max_length, 2)]
        return [self.cls_id, *ids, self.sep_id]

    def encode_pair(
        self, first: str, second: str, *, max_length: int | None = None
    ) -> tuple[list[int], list[int]]:
        """Return the ids of ``[CLS] first [SEP] second [SEP]`` and their token types.

        Args:
            first: The first text.
            second: The second text.
            max_length: Largest number of ids; if there are more, the texts are cut at their ends,
                the longer text first. None cuts nothing.

        Returns:
            The ids, and the token types: 0 up to the first ``[SEP]``, then 1.

        Raises:
            ValueError: If `max_length` leaves no room for the special tokens, or if the tokenizer
                fails.
        """
        a, b = self._ids(first), self._ids(second)
        if max_length is not None:
            length_a, length_b = truncate_pair(len(a), len(b), _room(max_length, 3))
            a, b = a[:length_a], b[:length_b]
        ids = [self.cls_id, *a, self.sep_id, *b, self.sep_id]
        return ids, [0] * (len(a) + 2) + [1] * (len(b) + 1)

    def encode_within(self, max_length: int, first: str, second: str | None = None) -> Encoded:
        """Encode a text or a pair, and report whether it was cut.

        Args:
            max_length: Largest number of ids.
            first: The text, or the first text of a pair.
            second: The second text of a pair; None encodes a single text.

        Returns:
            The ids, the token types and whether a text was cut. The list of token types is empty
            for a single text.

        Raises:
            ValueError: If `max_length` leaves no room for the special tokens, or if the tokenizer
                fails.
        """
        texts = [first] if second is None else [first, second]
        with rust_errors("tokenizer: it fails"):
            # The fast method computes no offsets, which would take most of the time.
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
        """Convert every text that is encoded from now on to lower case."""
        lowercase_first(self.backend)

    def is_added(self, index: int) -> bool:
        """Return whether `index` is the id of a special token."""
        return bool(self.is_special[index])

    def encode_sentences(self, sentences: Sequence[str]) -> list[list[int]]:
        """Return the ids of each sentence without special tokens.

        A literal ``[SEP]`` or ``[MASK]`` in a sentence is ordinary text, so ``[UNK]`` is the only
        special token in the result.

        Args:
            sentences: The sentences.

        Returns:
            One list of ids per sentence.

        Raises:
            ValueError: If the tokenizer fails.
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
        """Return the text of `ids`, by default without special tokens."""
        return self.backend.decode(list(map(int, ids)), skip_special_tokens=skip_special_tokens)

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token, or None if the vocabulary does not have the token."""
        return self.backend.token_to_id(token)

    def id_to_token(self, index: int) -> str | None:
        """Return the token of an id, or None if no token has this id."""
        return self.backend.id_to_token(index)

    def word_starts(self, ids: np.ndarray) -> np.ndarray:
        """Return which ids begin a word.

        Args:
            ids: Ids of any shape.

        Returns:
            bool of the shape of `ids`, False at continuation pieces (``##``).
        """
        return ~self._continues[ids]

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> WordPieceTokenizer:
        """Load the tokenizer of a folder.

        ``tokenizer.json`` is preferred to ``vocab.txt``. ``tokenizer_config.json`` gives the
        special tokens. For ``vocab.txt``, it also gives ``do_lower_case``, which is true by
        default, ``strip_accents`` and ``tokenize_chinese_chars``.

        Args:
            folder: Folder with ``tokenizer.json`` or ``vocab.txt``.

        Returns:
            The tokenizer.

        Raises:
            FileNotFoundError: If the folder has neither file.
            ValueError: If a file is broken, or if the model is not WordPiece.
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
        """Write the tokenizer in the layout of Hugging Face.

        The files are ``tokenizer.json``, ``vocab.txt``, ``tokenizer_config.json`` and
        ``special_tokens_map.json``. Each file is replaced in one step, so that no reader sees an
        incomplete file.

        Args:
            folder: Folder, which is created if it does not exist.
            max_length: Value of ``model_max_length`` in tokens; None writes no such key.
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
        # There is one line per id, even for an id without a token, as in edited vocabularies.
        lines = [self.id_to_token(i) or f"[unused_id_{i}]" for i in range(self.vocab_size)]
        _write(folder / "vocab.txt", "".join(line + "\n" for line in lines))
        _write(folder / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")
        _write(folder / "special_tokens_map.json", json.dumps(self.special, indent=2) + "\n")
        _write(folder / "tokenizer.json", self.backend.to_str(pretty=True))


def _room(max_length: int, special: int) -> int:
    if max_length < special:
        raise ValueError(f"max_length: got {max_length}, allowed: at least {special}")
    return max_length - special


# The largest size of a tokenizer file, in bytes. The largest known tokenizer.json has 33 MB.
MOST_TOKENIZER_BYTES = 1 << 28


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a ``tokenizer.json``; raise ValueError if it is broken."""
    check_file(path, MOST_TOKENIZER_BYTES)
    with rust_errors(f"tokenizer: {path} is broken"):
        return Tokenizer.from_file(str(path))


CONFIG = "tokenizer_config.json"


def read_config(folder: Path) -> dict[str, Any]:
    """Read ``tokenizer_config.json``; an absent file gives {}, a broken file raises ValueError."""
    path = folder / CONFIG
    return json_file.read(path) if path.is_file() else {}


def _token_text(folder: Path, key: str, token: Any) -> str | None:
    """Return the text of a special token, or None if `token` is None.

    Older files have an object with the text as ``content`` instead of the text.
    """
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
    check_file(path, MOST_TOKENIZER_BYTES)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        number = error.object[: error.start].count(b"\n") + 1
        raise ValueError(f"tokenizer: {path}, line {number}: not UTF-8: {error.reason}") from error
    if lines[-1] == "":
        lines.pop()
    return {line.removesuffix("\r"): index for index, line in enumerate(lines)}


def _write(path: Path, text: str) -> None:
    """Write a temporary file and rename it, so that no reader sees an incomplete file."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        # mkstemp makes a private file, which here receives the usual permissions of a new file.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
