"""WordPiece tokenisation: BERT's normaliser and word splitting around a ``tokenizers`` model.

Folders have Hugging Face's layout, so ``AutoTokenizer.from_pretrained`` gives the same ids.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

# The order that trained vocabularies begin with.
SPECIAL_TOKENS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}


def truncate_pair(length_a: int, length_b: int, budget: int) -> tuple[int, int]:
    """The lengths of two segments after the longer is cut until both fit into ``budget`` tokens."""
    half = budget // 2
    if length_a + length_b <= budget:
        return length_a, length_b
    if length_a <= half:
        return length_a, budget - length_a
    if length_b <= budget - half:
        return budget - length_b, length_b
    return half, budget - half


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
        # Length is the caller's business; a saved tokenizer.json may have both switched on.
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self.backend = tokenizer
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = (
            vocab[self.special[name]] for name in SPECIAL_TOKENS
        )
        special_ids = [vocab[token] for token in self.special.values()]
        self.vocab_size = max(vocab.values()) + 1
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
        ids = self.backend.encode(text, add_special_tokens=False).ids
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
        a = self.backend.encode(first, add_special_tokens=False).ids
        b = self.backend.encode(second, add_special_tokens=False).ids
        if max_length is not None:
            length_a, length_b = truncate_pair(len(a), len(b), _room(max_length, 3))
            a, b = a[:length_a], b[:length_b]
        ids = [self.cls_id, *a, self.sep_id, *b, self.sep_id]
        return ids, [0] * (len(a) + 2) + [1] * (len(b) + 1)

    def encode_sentences(self, sentences: Sequence[str]) -> list[list[int]]:
        """Ids of each sentence without special tokens.

        A literal "[SEP]" or "[MASK]" in a corpus is ordinary text, so no special id but [UNK]
        occurs.
        """
        before = self.backend.encode_special_tokens
        self.backend.encode_special_tokens = True
        try:
            encodings = self.backend.encode_batch_fast(list(sentences), add_special_tokens=False)
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
        names = {key: _token_text(config[key]) for key in SPECIAL_TOKENS if config.get(key)}
        special = {**SPECIAL_TOKENS, **names}
        whole, vocab = folder / "tokenizer.json", folder / "vocab.txt"
        if whole.is_file():
            tokenizer = read_tokenizer(whole)
        elif vocab.is_file():
            tokenizer = build_tokenizer(
                _read_vocab(vocab),
                special,
                lowercase=config.get("do_lower_case", True),
                strip_accents=config.get("strip_accents"),
                chinese=config.get("tokenize_chinese_chars", True),
            )
        else:
            raise FileNotFoundError(
                f"tokenizer: {folder} holds neither tokenizer.json nor vocab.txt"
            )
        return cls(tokenizer, special)

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
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust side raises bare Exception
        raise ValueError(f"tokenizer: {path} is broken: {error}") from error


def read_config(folder: Path) -> dict[str, Any]:
    """The content of ``tokenizer_config.json``, {} without one. Raises ValueError when broken."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"tokenizer: {path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"tokenizer: {path} holds a {type(content).__name__}, allowed: an object")
    return content


def _token_text(token: str | dict[str, Any]) -> str:
    """Older configurations write a special token as an object with its text in ``content``."""
    return token if isinstance(token, str) else token["content"]


def _read_vocab(path: Path) -> dict[str, int]:
    lines = path.read_text(encoding="utf-8").split("\n")
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
