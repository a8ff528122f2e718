"""Next-sentence pairs: two texts of one document or of two documents (Devlin et al. 2019, A.2).

A random second text starts at any sentence of another document. A model can therefore infer the
label from the topics of the two texts and from the continuity between them. As in the code
published with the paper, a random second text has the token budget of the text that it replaces.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from fastbert.data.tokenizer import WordPieceTokenizer, truncate_pair

_TOKENISED_AT_ONCE = 1024


class Instance(NamedTuple):
    """One next-sentence pair, ``[CLS] A [SEP] B [SEP]``, of a first text A and a second text B.

    Attributes:
        ids: Ids of the n tokens, int64 of shape ``(n,)``.
        token_types: int64 of shape ``(n,)``; 0 up to the first ``[SEP]``, then 1.
        is_random: False when B follows A in the same document (label 0), and True when B is from
            another document (label 1).
    """

    ids: np.ndarray
    token_types: np.ndarray
    is_random: bool


def write_segments(
    ids: np.ndarray,
    token_types: np.ndarray,
    tokenizer: WordPieceTokenizer,
    first: np.ndarray,
    second: np.ndarray | None,
) -> None:
    """Write ``[CLS] A [SEP] B [SEP]``, or ``[CLS] A [SEP]`` if `second` is None.

    Args:
        ids: Receives the ids; int64 of shape ``(n,)``, where n counts the special tokens too.
        token_types: Receives the token types; int64 of shape ``(n,)``, which the caller must have
            filled with 0.
        tokenizer: Source of the ids of ``[CLS]`` and ``[SEP]``.
        first: Ids of the first segment A.
        second: Ids of the second segment B, or None.
    """
    middle = len(first) + 1
    ids[0] = tokenizer.cls_id
    ids[1:middle] = first
    ids[middle] = tokenizer.sep_id
    if second is not None:
        ids[middle + 1 : -1] = second
        ids[-1] = tokenizer.sep_id
        token_types[middle + 1 :] = 1


class EpochPairs(Sequence[Instance]):
    """The pairs of one epoch, each built on access.

    Attributes:
        lengths: Number of tokens of each of the n pairs, int64 of shape ``(n,)``.
        is_random: Whether the second text of each pair is from another document, bool of shape
            ``(n,)``.
    """

    def __init__(
        self, tokens: np.ndarray, spans: np.ndarray, tokenizer: WordPieceTokenizer
    ) -> None:
        """Store the tokens of all documents and the spans of the pairs.

        Args:
            tokens: Token ids of all documents, of shape ``(T,)``.
            spans: For each of n pairs, the start and the end of the first text in `tokens`, the
                start and the end of the second text, and the label; integers of shape ``(n, 5)``.
            tokenizer: Source of the ids of ``[CLS]`` and ``[SEP]``.
        """
        self._tokens, self._spans, self._tokenizer = tokens, spans, tokenizer
        self.lengths = spans[:, 1] - spans[:, 0] + spans[:, 3] - spans[:, 2] + 3
        self.is_random = spans[:, 4].astype(bool)

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self._spans)

    def write(self, index: int, ids: np.ndarray, token_types: np.ndarray) -> None:
        """Write one pair into two arrays.

        Args:
            index: Number of the pair.
            ids: Receives the ids; int64 of shape ``(n,)``, where n is the length of the pair.
            token_types: Receives the token types; int64 of shape ``(n,)``, which the caller must
                have filled with 0.
        """
        a_start, a_end, b_start, b_end, _ = self._spans[index].tolist()
        first, second = self._tokens[a_start:a_end], self._tokens[b_start:b_end]
        write_segments(ids, token_types, self._tokenizer, first, second)

    def __getitem__(self, index: Any) -> Any:
        """Build one `Instance`, or a list of them for a slice."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        ids = np.empty(self.lengths[index], dtype=np.int64)
        token_types = np.zeros_like(ids)
        self.write(index, ids, token_types)
        return Instance(ids, token_types, bool(self.is_random[index]))


class NextSentencePairs:
    """Next-sentence pairs that are drawn from documents in every epoch.

    The documents are tokenized once and stored as ids of 4 bytes. An epoch builds its pairs in
    three steps.

    1. Each document is cut into runs of sentences that fit into `max_length` tokens, special tokens
       included. A share `short` of the runs is limited to a random smaller number of tokens.
    2. Each run is cut into a first and a second text at a random boundary between sentences.
    3. With probability 1/2, the second text is replaced by sentences of another document.

    A document of one sentence is used only to replace the second text of another document's pair. A
    sentence of more than ``max_length - 3`` tokens is cut into several sentences. If the two texts
    together are still too long, the first text loses tokens at its start, and the second text loses
    tokens at its end.

    Attributes:
        tokens: Token ids of all documents, int32 of shape ``(T,)``.

    Examples:
        >>> from fastbert.data import NextSentencePairs, stories, train_tokenizer
        >>> documents = list(stories(20, seed=0))
        >>> tokenizer = train_tokenizer(documents, 200)
        >>> pairs = NextSentencePairs(documents, tokenizer, max_length=64, seed=0)
        >>> len(pairs)
        20
        >>> pair = pairs.epoch(0)[0]
        >>> tokenizer.id_to_token(int(pair.ids[0])), pair.token_types.shape == pair.ids.shape
        ('[CLS]', True)
    """

    def __init__(
        self,
        documents: Iterable[Sequence[str]],
        tokenizer: WordPieceTokenizer,
        *,
        max_length: int,
        seed: int,
        short: float = 0.1,
    ) -> None:
        """Tokenize the documents.

        Args:
            documents: Documents, each a list of sentences.
            tokenizer: The tokenizer that encodes the documents.
            max_length: Largest number of tokens of a pair, special tokens included; at least 5.
            seed: Seed of the pairs of every epoch.
            short: Share of the runs that are cut to a random shorter length, in [0, 1].

        Raises:
            ValueError: If `max_length` or `short` is out of range, if fewer than two documents have
                text, or if no document has two sentences.
        """
        if max_length < 5:
            raise ValueError(
                f"max_length: got {max_length}, allowed: at least 5 ([CLS] a [SEP] b [SEP])"
            )
        if not 0.0 <= short <= 1.0:
            raise ValueError(f"short: got {short}, allowed: a number in [0, 1]")
        self.tokenizer, self.max_length, self.seed, self.short = tokenizer, max_length, seed, short
        # Sentence s has the tokens _offsets[s]:_offsets[s + 1], and document d has the sentences
        # _first[d]:_first[d + 1]. `_offsets` and `_first` are Python lists, because a single number
        # is read faster from a list than from a numpy array.
        self.tokens, self._offsets, self._first = _tokenise(documents, tokenizer, max_length - 3)
        count = len(self._first) - 1
        if count < 2:
            raise ValueError(
                f"documents: got {count} with text, allowed: at least 2 "
                "(a random second half comes from another document)"
            )
        if len(self._offsets) - 1 == count:
            raise ValueError(
                f"documents: each of the {count} is a single sentence, allowed: "
                "documents of at least 2 sentences, of which one follows the other"
            )

    def __len__(self) -> int:
        """Return the number of documents with text."""
        return len(self._first) - 1

    def epoch(self, index: int) -> EpochPairs:
        """Return the pairs of one epoch, in the order of the documents.

        Args:
            index: Number of the epoch, from 0.

        Returns:
            The pairs, which depend only on the seed and `index`.
        """
        rng = random.Random(f"pairs/{self.seed}/{index}")
        spans = [
            self._span(rng, document, start, end, target)
            for document in range(len(self))
            for start, end, target in self._runs(rng, document)
        ]
        return EpochPairs(self.tokens, np.array(spans, dtype=np.int64), self.tokenizer)

    def _runs(self, rng: random.Random, document: int) -> Iterator[tuple[int, int, int]]:
        """Yield runs of two or more sentences that cover the document, with their token budgets."""
        start, last = self._first[document], self._first[document + 1]
        while last - start >= 2:
            target = self.max_length - 3
            if rng.random() < self.short:
                target = rng.randint(2, target)
            end = max(start + 2, self._fit(start, last, target))
            yield start, end, target
            # If only one sentence would remain, the next run also repeats the last sentence of
            # this run.
            start = end if end == last else min(end, last - 2)

    def _fit(self, start: int, last: int, budget: int) -> int:
        """Return the largest end at which sentences ``start:end`` have at most `budget` tokens.

        The end is at most `last`.
        """
        limit = self._offsets[start] + budget
        return bisect_right(self._offsets, limit, lo=start, hi=last + 1) - 1

    def _span(
        self, rng: random.Random, document: int, start: int, end: int, target: int
    ) -> tuple[int, int, int, int, bool]:
        offsets = self._offsets
        middle = rng.randint(start + 1, end - 1)
        is_random = rng.random() < 0.5
        b_start, b_end = middle, end
        if is_random:
            budget = target - (offsets[middle] - offsets[start])
            b_start, b_end = self._elsewhere(rng, document, budget)
        length_a, length_b = truncate_pair(
            offsets[middle] - offsets[start],
            offsets[b_end] - offsets[b_start],
            self.max_length - 3,
        )
        return (
            offsets[middle] - length_a,
            offsets[middle],
            offsets[b_start],
            offsets[b_start] + length_b,
            is_random,
        )

    def _elsewhere(self, rng: random.Random, document: int, budget: int) -> tuple[int, int]:
        """Draw a random sentence of another document, and sentences after it up to `budget` tokens.

        Returns:
            Number of the first sentence, and number after the last sentence.
        """
        first, last = self._first[document], self._first[document + 1]
        start = rng.randrange(len(self._offsets) - 1 - (last - first))
        if start >= first:
            start += last - first
        other_last = self._first[bisect_right(self._first, start)]
        return start, max(start + 1, self._fit(start, other_last, budget))


def _ends(start: int, length: int, room: int) -> list[int]:
    """Return the end of a sentence, or the ends of its equal parts if it is longer than `room`.

    A part has at most half of `room` tokens.
    """
    parts = 1 if length <= room else -(-length // (room // 2))
    return [start + length * (part + 1) // parts for part in range(parts)]


def _tokenise(
    documents: Iterable[Sequence[str]], tokenizer: WordPieceTokenizer, room: int
) -> tuple[np.ndarray, list[int], list[int]]:
    """Return the token ids of all documents, and the offsets of sentences and of documents.

    The offsets of sentences count tokens, and the offsets of documents count sentences. A sentence
    of more than `room` tokens is cut into several sentences.
    """
    chunks: list[np.ndarray] = []
    offsets, first = [0], [0]
    source = iter(documents)
    while batch := list(islice(source, _TOKENISED_AT_ONCE)):
        encoded = iter(tokenizer.encode_sentences([s for document in batch for s in document]))
        ids: list[int] = []
        for document in batch:
            # A sentence has no tokens if it consists of, for example, control characters.
            for sentence in filter(None, islice(encoded, len(document))):
                ids += sentence
                offsets += _ends(offsets[-1], len(sentence), room)
            if len(offsets) - 1 > first[-1]:
                first.append(len(offsets) - 1)
        chunks.append(np.array(ids, dtype=np.int32))
    return np.concatenate(chunks) if chunks else np.empty(0, np.int32), offsets, first
