"""Examples that are drawn from a prepared corpus: pairs of segments, or single segments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fastbert.data.pairs import Instance, write_segments
from fastbert.data.prepared import plan
from fastbert.data.prepared.corpus import PreparedCorpus
from fastbert.data.prepared.shards import Shard

# The objectives are next-sentence prediction (BERT), sentence-order prediction (ALBERT), and
# neither of them (RoBERTa).
OBJECTIVES = ("nsp", "sop", "none")
# The seed of the examples begins with this number. The seeds of the order and of the masks begin
# with other numbers, so that an epoch's examples, order and masks are drawn independently.
_EXAMPLES = 3


class EpochExamples(Sequence[Instance]):
    """The examples of one epoch, each built on access from the mapped tokens.

    Attributes:
        lengths: Number of tokens of each of the n examples, of shape ``(n,)`` in the smallest
            unsigned integer dtype that holds ``max_length``.
        label: Label of each example, bool of shape ``(n,)``; all False if examples are not pairs.
        pairs: Whether an example has two segments.
    """

    def __init__(
        self, shards: Sequence[tuple[Shard, Shard]], plans: Sequence[plan.Plan], source: Any
    ) -> None:
        """Join the plans of all shards.

        Args:
            shards: For each plan, the shard of the plan, and the shard from which random second
                segments are drawn (objective ``"nsp"``).
            plans: The plan of each shard.
            source: The `PreparedExamples` that made the plans.
        """
        self.pairs = source.objective != "none"
        self._shards = shards
        self._first = np.cumsum([0, *(len(each.label) for each in plans)])
        self._spans = np.concatenate([each.spans for each in plans])
        self.label = np.concatenate([each.label for each in plans])
        self._tokenizer = source.corpus.tokenizer
        spans = self._spans
        special = 3 if self.pairs else 2
        sizes = spans[:, 1] - spans[:, 0] + spans[:, 3] - spans[:, 2] + special
        self.lengths = sizes.astype(np.min_scalar_type(source.max_length))
        # With the objective "nsp", a random second segment can be from another shard.
        self._other = source.objective == "nsp"

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self._spans)

    def write(self, index: int, ids: np.ndarray, token_types: np.ndarray) -> None:
        """Write one example into two arrays.

        Args:
            index: Number of the example.
            ids: Receives the ids; int64 of shape ``(n,)``, where n is the length of the example.
            token_types: Receives the token types; int64 of shape ``(n,)``, which the caller must
                have filled with 0.
        """
        own, other = self._shards[int(np.searchsorted(self._first, index, side="right")) - 1]
        a_start, a_end, b_start, b_end = self._spans[index].tolist()
        second = None
        if self.pairs:
            shard = other if self._other and self.label[index] else own
            second = shard.tokens[b_start:b_end]
        write_segments(ids, token_types, self._tokenizer, own.tokens[a_start:a_end], second)

    def __getitem__(self, index: Any) -> Any:
        """Build one `Instance`, or a list of them for a slice."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        ids = np.empty(self.lengths[index], dtype=np.int64)
        token_types = np.zeros_like(ids)
        self.write(index, ids, token_types)
        return Instance(ids, token_types, bool(self.label[index]))


class PreparedExamples:
    """Examples that are drawn again from a prepared corpus in every epoch.

    Example ``i`` of epoch ``k`` depends only on the corpus, the options, the seed, ``k`` and ``i``.
    Only a plan of about 19 bytes per example is in memory; the tokens stay in the mapped files.

    The documents are cut into runs of sentences as in `NextSentencePairs`. The runs of an epoch
    cover all sentences. If the examples are pairs, however, a document of one sentence has no run,
    and only ``"nsp"`` can draw it as a second segment. The objective determines how a run becomes
    an example.

    - ``"nsp"``: ``[CLS] A [SEP] B [SEP]``, where B follows A (label 0) or is from another document
      (label 1), each with probability 1/2. The other document is from the same shard, unless the
      shard has no other chosen document.
    - ``"sop"``: A and B are consecutive, and with probability 1/2 they are swapped (label 1), as in
      ALBERT (Lan et al. 2020).
    - ``"none"``: ``[CLS] A [SEP]`` without a label, as the inputs of RoBERTa within one document
      (Liu et al. 2019, 4.2).
    """

    def __init__(
        self,
        corpus: PreparedCorpus,
        *,
        max_length: int,
        seed: int,
        objective: str = "nsp",
        short: float = 0.1,
        documents: np.ndarray | None = None,
    ) -> None:
        """Choose documents of a corpus.

        Args:
            corpus: The corpus.
            max_length: Largest number of tokens of an example, special tokens included; at least 5.
            seed: Seed of the examples of every epoch; at least 0.
            objective: ``"nsp"``, ``"sop"`` or ``"none"``.
            short: Share of the runs that are cut to a random shorter length, in [0, 1].
            documents: Numbers of the documents, sorted, of shape ``(d,)``; None takes all.

        Raises:
            ValueError: If an option is out of range, if there is no document, or if there is only
                one document for ``"nsp"``.
        """
        if max_length < 5:
            raise ValueError(f"max_length: got {max_length}, allowed: at least 5")
        if seed < 0:
            raise ValueError(f"seed: got {seed}, allowed: at least 0")
        if objective not in OBJECTIVES:
            allowed = ", ".join(OBJECTIVES)
            raise ValueError(f"objective: got {objective!r}, allowed: {allowed}")
        if not 0.0 <= short <= 1.0:
            raise ValueError(f"short: got {short}, allowed: a number in [0, 1]")
        self.corpus, self.max_length, self.seed = corpus, max_length, seed
        self.objective, self.short = objective, short
        self._room = max_length - (2 if objective == "none" else 3)
        # `_chosen` has, for each shard with chosen documents, the shard, the numbers of its chosen
        # documents, and their count.
        self._chosen = _by_shard(corpus, documents)
        count = sum(number for _, _, number in self._chosen)
        if count < (2 if objective == "nsp" else 1):
            raise ValueError(
                f"documents: got {count}, allowed: at least 2 for the objective nsp (a random "
                "second segment is from another document), and 1 for the others"
            )

    def epoch(self, index: int) -> EpochExamples:
        """Return the examples of one epoch, in the order of the documents.

        Args:
            index: Number of the epoch, from 0.

        Returns:
            The examples.

        Raises:
            ValueError: If the examples are pairs, and no document has two sentences.
        """
        plans = [self._plan(place, index) for place in range(len(self._chosen))]
        if not any(len(plan.label) for plan in plans):
            raise ValueError(
                "documents: each of them is a single sentence, allowed: documents of at least 2 "
                'sentences, or the objective "none"'
            )
        shards = [(plan[0], self._chosen[self._other(i)][0]) for i, plan in enumerate(self._chosen)]
        return EpochExamples(shards, plans, self)

    def _other(self, place: int) -> int:
        """Return the index of the shard from which shard `place` draws random second segments."""
        if self._chosen[place][2] > 1:
            return place
        return (place + 1) % len(self._chosen)

    def _text(self, place: int) -> plan.Text:
        shard, documents, _ = self._chosen[place]
        return plan.read_text(shard, documents, self._room)

    def _plan(self, place: int, epoch: int) -> plan.Plan:
        rng = np.random.default_rng((_EXAMPLES, self.seed, epoch, place))
        text = self._text(place)
        if self.objective == "none":
            return plan.single(text, rng, self._room, self.short)
        if self.objective == "sop":
            return plan.ordered(text, rng, self._room, self.short)
        other = self._other(place)
        others = None if other == place else self._text(other)
        return plan.next_sentence(text, others, rng, self._room, self.short)


def _by_shard(
    corpus: PreparedCorpus, documents: np.ndarray | None
) -> list[tuple[Shard, np.ndarray | None, int]]:
    """Return each shard that has chosen documents, with their numbers in the shard and their count.

    If `documents` is None, all documents are chosen, and None replaces their numbers.
    """
    groups: list[tuple[Shard, np.ndarray | None, int]] = []
    start = 0
    for shard in corpus.shards:
        end = start + shard.record.documents
        if documents is None:
            own, count = None, shard.record.documents
        else:
            first, last = np.searchsorted(documents, [start, end])
            own, count = documents[first:last] - start, int(last - first)
        if count:
            groups.append((shard, own, count))
        start = end
    return groups
