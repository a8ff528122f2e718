"""The examples that one shard gives in one epoch, as positions in the tokens of the shard.

The documents are cut as in `fastbert.data.NextSentencePairs`, but all documents of a shard at once:
step k computes run k of every document that has at least k runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from fastbert.data.prepared.shards import Shard


class Text(NamedTuple):
    """Documents of a shard, in which no sentence is longer than an example.

    Attributes:
        offsets: Index of the first token of each of the S sentences, followed by the number of
            tokens; int64 of shape ``(S + 1,)``.
        starts: Index of the first sentence of each of the D chosen documents, int64 of shape
            ``(D,)``.
        ends: Index after the last sentence of each chosen document, int64 of shape ``(D,)``.
    """

    offsets: np.ndarray
    starts: np.ndarray
    ends: np.ndarray


class Plan(NamedTuple):
    """The examples of a shard.

    Attributes:
        spans: For each of the n examples, the start and the end of the first segment in the tokens,
            and the start and the end of the second segment; uint32 of shape ``(n, 4)``. If the
            examples are not pairs, the second segment is empty.
        label: The label of each pair, bool of shape ``(n,)``: whether the second segment is from
            another document (NSP), or whether the segments are swapped (SOP). It is False if the
            examples are not pairs.
    """

    spans: np.ndarray
    label: np.ndarray


class _Runs(NamedTuple):
    """Runs of consecutive sentences, as arrays with one value per run.

    A run has the sentences ``start:end`` of its document, and a token budget.
    """

    document: np.ndarray
    start: np.ndarray
    end: np.ndarray
    budget: np.ndarray


def read_text(shard: Shard, documents: np.ndarray | None, room: int) -> Text:
    """Return documents of a shard; sentences of more than `room` tokens are cut into equal parts.

    A part has at most half of `room` tokens.

    Args:
        shard: The shard.
        documents: Numbers of the documents in the shard; None takes all.
        room: Largest number of tokens of an example, without special tokens.
    """
    offsets = np.asarray(shard.sentences, np.int64)
    sizes = np.diff(offsets)
    parts = np.where(sizes <= room, 1, -(-sizes // (room // 2)))
    first = np.concatenate([[0], np.cumsum(parts)])
    whole = np.repeat(np.arange(len(sizes)), parts)
    part = np.arange(len(whole)) - first[whole]
    cut = offsets[whole] + sizes[whole] * part // parts[whole]
    bounds = first[np.asarray(shard.documents, np.int64)]
    starts, ends = bounds[:-1], bounds[1:]
    if documents is not None:
        starts, ends = starts[documents], ends[documents]
    return Text(np.concatenate([cut, offsets[-1:]]), starts, ends)


def single(text: Text, rng: np.random.Generator, room: int, short: float) -> Plan:
    """Plan examples of one segment each; a segment is a run of sentences of one document."""
    runs = _runs(text, rng, room, short, least=1)
    a, b = text.offsets[runs.start], text.offsets[runs.end]
    spans = np.stack([a, b, b, b], axis=1).astype(np.uint32)
    return Plan(spans, np.zeros(len(spans), bool))


def ordered(text: Text, rng: np.random.Generator, room: int, short: float) -> Plan:
    """Plan pairs of consecutive segments, each swapped with probability 1/2.

    The objective is sentence-order prediction (Lan et al. 2020, 3.1).
    """
    runs = _runs(text, rng, room, short, least=2)
    middle = rng.integers(runs.start + 1, runs.end)
    # The segments are cut before the swap, so that their lengths do not reveal the label.
    a, b, end = (text.offsets[sentence] for sentence in (runs.start, middle, runs.end))
    spans = _cut(a, b, b, end, room)
    label = rng.random(len(spans)) < 0.5
    spans[label] = spans[label][:, [2, 3, 0, 1]]
    return Plan(spans, label)


def next_sentence(
    text: Text, others: Text | None, rng: np.random.Generator, room: int, short: float
) -> Plan:
    """Plan next-sentence pairs (Devlin et al. 2019, A.2).

    Args:
        text: The documents.
        others: Documents of another shard, from which the random second segments are drawn; None
            draws them from other documents of `text`.
        rng: Source of randomness.
        room: Largest number of tokens of both segments together.
        short: Share of the runs that have a random smaller budget, in [0, 1].
    """
    runs = _runs(text, rng, room, short, least=2)
    offsets = text.offsets
    middle = rng.integers(runs.start + 1, runs.end)
    label = rng.random(len(middle)) < 0.5
    a_start, a_end = offsets[runs.start], offsets[middle]
    b_start, b_end = offsets[middle], offsets[runs.end]
    budget = runs.budget - (a_end - a_start)
    source = text if others is None else others
    own = runs.document if others is None else None
    start, end = _elsewhere(source, own, budget, rng)
    b_start = np.where(label, source.offsets[start], b_start)
    b_end = np.where(label, source.offsets[end], b_end)
    return Plan(_cut(a_start, a_end, b_start, b_end, room), label)


def _runs(text: Text, rng: np.random.Generator, room: int, short: float, least: int) -> _Runs:
    """Cut each document of at least `least` sentences into runs of at least `least` sentences."""
    parts = list(_steps(text, rng, room, short, least))
    runs = _Runs(*map(np.concatenate, zip(*parts, strict=True))) if parts else _Runs(*_NONE)
    order = np.argsort(runs.start, kind="stable")
    return _Runs(*(values[order] for values in runs))


_NONE = (np.empty(0, np.int64),) * len(_Runs._fields)


def _steps(
    text: Text, rng: np.random.Generator, room: int, short: float, least: int
) -> Iterator[_Runs]:
    offsets = text.offsets
    document = np.flatnonzero(text.ends - text.starts >= least)
    start, last = text.starts[document], text.ends[document]
    while len(start):
        is_short = rng.random(len(start)) < short
        budget = np.where(is_short, rng.integers(2, room + 1, len(start)), room)
        end = np.searchsorted(offsets, offsets[start] + budget, side="right") - 1
        end = np.maximum(np.minimum(end, last), start + least)
        yield _Runs(document, start, end, budget)
        # If fewer than `least` sentences would remain, the next run also repeats the last sentences
        # of this run.
        start = np.where(end == last, end, np.minimum(end, last - least))
        more = start < last
        document, start, last = document[more], start[more], last[more]


def _elsewhere(
    text: Text, own: np.ndarray | None, budget: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Draw, for each budget, a random sentence and the sentences after it that fit the budget.

    A draw ends at the latest at the end of its document. Draw i takes no sentence of document
    ``own[i]``; if `own` is None, a draw may take any document.
    """
    counts = text.ends - text.starts
    before = np.concatenate([[0], np.cumsum(counts)])
    left_out = 0 if own is None else counts[own]
    # Each product, rounded down, is a random integer less than the number of sentences that the
    # draw may take. This number differs between draws, because each draw leaves out its document.
    drawn = (rng.random(len(budget)) * (before[-1] - left_out)).astype(np.int64)
    if own is not None:
        drawn += np.where(drawn >= before[own], left_out, 0)
    document = np.searchsorted(before, drawn, side="right") - 1
    start = text.starts[document] + drawn - before[document]
    end = np.searchsorted(text.offsets, text.offsets[start] + budget, side="right") - 1
    return start, np.maximum(np.minimum(end, text.ends[document]), start + 1)


def _cut(
    a_start: np.ndarray, a_end: np.ndarray, b_start: np.ndarray, b_end: np.ndarray, room: int
) -> np.ndarray:
    """Cut pairs to `room` tokens, at the start of the first segment and the end of the second.

    The segments get the lengths that `fastbert.data.tokenizer.truncate_pair` returns.
    """
    a, b = a_end - a_start, b_end - b_start
    short = np.minimum(a, b)
    long = np.maximum(short, room - short)
    both = short + long > room
    short, long = np.where(both, room // 2, short), np.where(both, room - room // 2, long)
    fits = a + b <= room
    kept_a = np.where(fits, a, np.where(a <= b, short, long))
    kept_b = np.where(fits, b, np.where(a <= b, long, short))
    return np.stack([a_end - kept_a, a_end, b_start, b_start + kept_b], axis=1).astype(np.uint32)
