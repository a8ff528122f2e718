"""Next-sentence pairs: two halves of a document, or halves of two (Devlin et al. 2019, A.2).

A random half starts at any sentence of another document and fills the same token budget, as in the
code published with the paper. So the label can be told from what the halves are about, and from
whether the second one reads as what comes next.
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
    """One pair: ``[CLS] A [SEP] B [SEP]``.

    ids: int64 (n,). token_types: int64 (n,), 0 up to the first [SEP], then 1. is_random: False when
    B follows A in its document (next-sentence label 0), True when it is from another one (label 1).
    """

    ids: np.ndarray
    token_types: np.ndarray
    is_random: bool


class EpochPairs(Sequence[Instance]):
    """The pairs of one epoch, built when they are asked for.

    lengths: int64 (n,), tokens of each pair. is_random: bool (n,).
    """

    def __init__(
        self, tokens: np.ndarray, spans: np.ndarray, tokenizer: WordPieceTokenizer
    ) -> None:
        # spans: (n, 5): A's first token and end in ``tokens``, B's, and the label.
        self._tokens, self._spans = tokens, spans
        self._cls, self._sep = tokenizer.cls_id, tokenizer.sep_id
        self.lengths = spans[:, 1] - spans[:, 0] + spans[:, 3] - spans[:, 2] + 3
        self.is_random = spans[:, 4].astype(bool)

    def __len__(self) -> int:
        return len(self._spans)

    def write(self, index: int, ids: np.ndarray, token_types: np.ndarray) -> None:
        """Writes pair ``index`` into views of its length; ``token_types`` is zero before."""
        a_start, a_end, b_start, b_end, _ = self._spans[index].tolist()
        middle = a_end - a_start + 1
        ids[0] = self._cls
        ids[1:middle] = self._tokens[a_start:a_end]
        ids[middle] = self._sep
        ids[middle + 1 : -1] = self._tokens[b_start:b_end]
        ids[-1] = self._sep
        token_types[middle + 1 :] = 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        ids = np.empty(self.lengths[index], dtype=np.int64)
        token_types = np.zeros_like(ids)
        self.write(index, ids, token_types)
        return Instance(ids, token_types, bool(self.is_random[index]))


class NextSentencePairs:
    """Draws next-sentence pairs from documents.

    ``documents`` (lists of sentences) are tokenised once and held as ids, 4 bytes a token. Each
    epoch cuts every document into runs of sentences of up to ``max_length`` tokens with the three
    special ones, a share ``short`` of them to a random shorter length; cuts each run in two at a
    random place; and replaces the second half with probability 1/2 by one from another document. A
    document of one sentence serves as such a second half only. A sentence (or a table taken for
    one) of more than ``max_length`` - 3 tokens counts as several; where two halves are too long all
    the same, they lose the tokens farthest from the place where they meet.

    Raises ValueError when ``max_length`` is below 5, when there are fewer than two documents with
    text, or when none has two sentences.
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
        if max_length < 5:
            raise ValueError(
                f"max_length: got {max_length}, allowed: at least 5 ([CLS] a [SEP] b [SEP])"
            )
        if not 0.0 <= short <= 1.0:
            raise ValueError(f"short: got {short}, allowed: a number in [0, 1]")
        self.tokenizer, self.max_length, self.seed, self.short = tokenizer, max_length, seed, short
        # Sentence s is tokens[offsets[s]:offsets[s + 1]]; document d is sentences first[d] up to
        # first[d + 1]. Python lists, because they are read one number at a time.
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
        """The number of documents with text."""
        return len(self._first) - 1

    def epoch(self, index: int) -> EpochPairs:
        """The pairs of epoch ``index``, in document order; the same for the same seed and index."""
        rng = random.Random(f"pairs/{self.seed}/{index}")
        spans = [
            self._span(rng, document, start, end, target)
            for document in range(len(self))
            for start, end, target in self._runs(rng, document)
        ]
        return EpochPairs(self.tokens, np.array(spans, dtype=np.int64), self.tokenizer)

    def _runs(self, rng: random.Random, document: int) -> Iterator[tuple[int, int, int]]:
        """Runs of at least two sentences that cover the document, each with its token budget."""
        start, last = self._first[document], self._first[document + 1]
        while last - start >= 2:
            target = self.max_length - 3
            if rng.random() < self.short:
                target = rng.randint(2, target)
            end = max(start + 2, self._fit(start, last, target))
            yield start, end, target
            # A last sentence that would be left alone takes the one before it along again.
            start = end if end == last else min(end, last - 2)

    def _fit(self, start: int, last: int, budget: int) -> int:
        """The largest end <= last such that sentences start:end have at most ``budget`` tokens."""
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
        """Sentences of another document, from a random one up to ``budget`` tokens or its end."""
        first, last = self._first[document], self._first[document + 1]
        start = rng.randrange(len(self._offsets) - 1 - (last - first))
        if start >= first:
            start += last - first
        other_last = self._first[bisect_right(self._first, start)]
        return start, max(start + 1, self._fit(start, other_last, budget))


def _ends(start: int, length: int, room: int) -> list[int]:
    """Where a sentence ends, or its equal parts of at most half the room if it exceeds the room."""
    parts = 1 if length <= room else -(-length // (room // 2))
    return [start + length * (part + 1) // parts for part in range(parts)]


def _tokenise(
    documents: Iterable[Sequence[str]], tokenizer: WordPieceTokenizer, room: int
) -> tuple[np.ndarray, list[int], list[int]]:
    """All ids (int32), where sentences start in them, and where documents start in those."""
    chunks: list[np.ndarray] = []
    offsets, first = [0], [0]
    source = iter(documents)
    while batch := list(islice(source, _TOKENISED_AT_ONCE)):
        encoded = iter(tokenizer.encode_sentences([s for document in batch for s in document]))
        ids: list[int] = []
        for document in batch:
            # A sentence of nothing but, say, control characters has no tokens.
            for sentence in filter(None, islice(encoded, len(document))):
                ids += sentence
                offsets += _ends(offsets[-1], len(sentence), room)
            if len(offsets) - 1 > first[-1]:
                first.append(len(offsets) - 1)
        chunks.append(np.array(ids, dtype=np.int32))
    return np.concatenate(chunks) if chunks else np.empty(0, np.int32), offsets, first
