"""The tokens of a text, or of a pair of texts, with their words and sentences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import Encoding

from fastbert.data import WordPieceTokenizer
from fastbert.data.json_tokenizer import JsonTokenizer

ALLOWED = "a WordPieceTokenizer or JsonTokenizer of fastbert, or a fast tokenizer of transformers"
# Values of `Tokens.sentences` for a token that belongs to no text.
SPECIAL, PADDING = -1, -2


@dataclass
class Tokens:
    """The L tokens of a text or of a pair of texts.

    Attributes:
        ids: Token ids.
        types: Token types, 0 or 1.
        pieces: The tokens as the vocabulary writes them.
        sentences: 0 for the first text, 1 for the second text, `SPECIAL` or `PADDING`.
        words: Number of the word of each token, counted over both texts; None for special tokens
            and padding.
        surfaces: The words as the text spells them, indexed by the number of the word.
        mask_id: Id of the mask token; None if the vocabulary has no mask token.
        separator_ids: Ids of the tokens between and after texts.
        piece: Function from an id to the token as the vocabulary writes it.
        texts: The text, or the two texts of a pair.
    """

    ids: list[int]
    types: list[int]
    pieces: list[str]
    sentences: list[int]
    words: list[int | None]
    surfaces: list[str]
    mask_id: int | None
    separator_ids: frozenset[int]
    piece: Callable[[int], str | None]
    texts: list[str]

    def pad(self, length: int, pad_id: int) -> None:
        """Append padding up to a length.

        Args:
            length: Number of tokens after padding, at least L.
            pad_id: Id of the padding token.

        Raises:
            ValueError: If `length` is below the number of tokens.
        """
        missing = length - len(self.ids)
        if missing < 0:
            raise ValueError(f"pad_to: got {length}, allowed: at least {len(self.ids)}, the tokens")
        self.ids += [pad_id] * missing
        self.types += [0] * missing
        self.pieces += [self.piece(pad_id) or str(pad_id)] * missing
        self.sentences += [PADDING] * missing
        self.words += [None] * missing


def tokenize(tokenizer: Any, text: str, pair: str | None = None) -> Tokens:
    """Tokenize a text or a pair of texts, with the special tokens of the model.

    Args:
        tokenizer: A tokenizer of fastbert, or a fast tokenizer of transformers.
        text: The text, or the first text of a pair.
        pair: The second text of a pair, or None.

    Returns:
        The tokens, without padding and without truncation.

    Raises:
        TypeError: If `tokenizer` is not such a tokenizer, or a text is not a str.
        ValueError: If a text is blank, or if the texts have no tokens.
    """
    for name, value in (("text", text), ("pair", pair)):
        if value is not None and not isinstance(value, str):
            raise TypeError(f"{name}: got {type(value).__name__}, allowed: str")
        if value is not None and not value.strip():
            raise ValueError(f"{name}: got {value!r}, allowed: a text that is not empty")
    texts = [text] if pair is None else [text, pair]
    if isinstance(tokenizer, WordPieceTokenizer):
        tokens = _wordpiece(tokenizer, texts)
    elif isinstance(tokenizer, JsonTokenizer):
        tokens = _encoded(tokenizer.backend.encode(text, pair), texts, tokenizer.backend)
    elif getattr(tokenizer, "backend_tokenizer", None) is not None and callable(tokenizer):
        tokens = _stock(tokenizer, texts)
    else:
        raise TypeError(f"tokenizer: got {type(tokenizer).__name__}, allowed: {ALLOWED}")
    if not tokens.surfaces:
        name = "text" if pair is None else "text and pair"
        raise ValueError(f"{name}: got {text!r}, which has no tokens, allowed: a text with words")
    return tokens


def _stock(tokenizer: Any, texts: list[str]) -> Tokens:
    encoding = tokenizer(*texts, padding=False, truncation=False, verbose=False).encodings[0]
    tokens = _encoded(encoding, texts, tokenizer.backend_tokenizer)
    tokens.mask_id = tokenizer.mask_token_id
    ends = (tokenizer.sep_token_id, tokenizer.eos_token_id)
    tokens.separator_ids = frozenset(number for number in ends if number is not None)
    return tokens


def _encoded(encoding: Encoding, texts: list[str], backend: Any) -> Tokens:
    """Return the tokens of an encoding with special tokens."""
    special = encoding.special_tokens_mask
    found = zip(encoding.sequence_ids, special, strict=True)
    # A token has no sequence id if the tokenizer added it. A mask token that the text itself
    # contains has a sequence id, because it is a part of the text.
    sentences = [SPECIAL if number is None else number for number, _ in found]
    words, surfaces = _words(encoding, texts, sentences)
    known = {name: backend.token_to_id(name) for name in ("[MASK]", "<mask>", "[SEP]", "</s>")}
    masks = [known[name] for name in ("[MASK]", "<mask>") if known[name] is not None]
    ends = [known[name] for name in ("[SEP]", "</s>") if known[name] is not None]
    return Tokens(
        list(encoding.ids),
        list(encoding.type_ids),
        list(encoding.tokens),
        sentences,
        words,
        surfaces,
        masks[0] if masks else None,
        frozenset(ends),
        backend.id_to_token,
        texts,
    )


def _words(
    encoding: Encoding, texts: list[str], sentences: list[int]
) -> tuple[list[int | None], list[str]]:
    """Number the words over both texts, and return each word as the text spells it."""
    words: list[int | None] = []
    spans: list[tuple[int, int, int]] = []
    numbers: dict[tuple[int, int], int] = {}
    rows = zip(sentences, encoding.word_ids, encoding.offsets, strict=True)
    for place, (sentence, word, (start, end)) in enumerate(rows):
        if sentence < 0:
            words.append(None)
            continue
        # A token that the tokenizer assigns to no word, such as a mask, is a word of its own.
        key = (sentence, word if word is not None else -1 - place)
        if key not in numbers:
            numbers[key] = len(spans)
            spans.append((sentence, start, end))
        number = numbers[key]
        first = spans[number]
        spans[number] = (sentence, min(first[1], start), max(first[2], end))
        words.append(number)
    surfaces = [texts[sentence][start:end].strip() for sentence, start, end in spans]
    return words, surfaces


def _wordpiece(tokenizer: WordPieceTokenizer, texts: list[str]) -> Tokens:
    """Join the texts as BERT does: ``[CLS] a [SEP]`` or ``[CLS] a [SEP] b [SEP]``."""
    special = tokenizer.special
    tokens = Tokens(
        [tokenizer.cls_id],
        [0],
        [special["cls_token"]],
        [SPECIAL],
        [None],
        [],
        tokenizer.mask_id,
        frozenset([tokenizer.sep_id]),
        tokenizer.id_to_token,
        texts,
    )
    for number, text in enumerate(texts):
        encoding = tokenizer.backend.encode(text, add_special_tokens=False)
        sentences = [0] * len(encoding.ids)
        words, surfaces = _words(encoding, [text], sentences)
        before = len(tokens.surfaces)
        tokens.ids += [*encoding.ids, tokenizer.sep_id]
        tokens.types += [number] * (len(encoding.ids) + 1)
        tokens.pieces += [*encoding.tokens, special["sep_token"]]
        tokens.sentences += [number] * len(encoding.ids) + [SPECIAL]
        tokens.words += [*(None if w is None else w + before for w in words), None]
        tokens.surfaces += surfaces
    return tokens
