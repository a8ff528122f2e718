"""Buckets: the fixed shapes of CUDA graphs, into which batches of any shape are copied.

The rows of a batch are copied into the memory of a bucket of the same or a larger size. The
remaining rows of the bucket come after ``cu_seqlens[-1]``. They do not change the results, because
attention never reads them and every other operation computes each row separately. The remaining
sequences of the bucket have no tokens.
"""

from __future__ import annotations

from typing import NamedTuple

SMALLEST = 16


class Bucket(NamedTuple):
    """The shape of the input of one graph: rows, sequences, and length of the longest sequence."""

    tokens: int
    batch: int
    max_seqlen: int


class PaddedBucket(NamedTuple):
    """The shape of the padded input of a graph that removes the padding itself.

    Attributes:
        batch: Number of sequences.
        length: Number of positions of each sequence, padding included.
    """

    batch: int
    length: int


class Buckets(NamedTuple):
    """The limits of the batches that have a bucket.

    Attributes:
        max_tokens: Largest number of tokens of a batch.
        max_batch: Largest number of sequences of a batch.
        max_seqlen: Largest number of tokens of a sequence.
    """

    max_tokens: int
    max_batch: int
    max_seqlen: int

    def find_padded(self, batch: int, length: int) -> PaddedBucket | None:
        """Return the smallest bucket that holds all positions of a padded batch.

        Args:
            batch: Number of sequences.
            length: Number of positions of each sequence, padding included.

        Returns:
            The bucket; or None if the batch has no position or exceeds a limit, or if the bucket
            would have more than `max_tokens` positions.

        Examples:
            >>> from fastbert.graphs.buckets import Buckets
            >>> Buckets(max_tokens=4096, max_batch=64, max_seqlen=512).find_padded(3, 20)
            PaddedBucket(batch=4, length=24)
        """
        if batch * length == 0 or batch > self.max_batch or length > self.max_seqlen:
            return None
        sequences = min(_power_of_two(batch), self.max_batch)
        places = min(_step(length), self.max_seqlen)
        fits = sequences * places <= self.max_tokens
        return PaddedBucket(sequences, places) if fits else None

    def find(self, tokens: int, batch: int, max_seqlen: int) -> Bucket | None:
        """Return the smallest bucket that holds a batch.

        The numbers of tokens of the buckets are the powers of two and the numbers halfway between
        them: 16, 24, 32, 48, …. Therefore a batch of 16 tokens or more leaves less than a third of
        the rows unused. The number of sequences and the longest length are powers of two, because
        sequences without tokens take almost no time. A number that would exceed a limit of this
        object is the limit instead, and the longest length is at most the number of tokens.

        Args:
            tokens: Number of tokens of the batch.
            batch: Number of sequences.
            max_seqlen: Length of the longest sequence.

        Returns:
            The bucket, or None if the batch exceeds a limit or has no token.

        Examples:
            >>> from fastbert.graphs.buckets import Buckets
            >>> Buckets(max_tokens=4096, max_batch=64, max_seqlen=512).find(20, 3, 9)
            Bucket(tokens=24, batch=4, max_seqlen=16)
        """
        limits = (self.max_tokens, self.max_batch, self.max_seqlen)
        asked = (tokens, batch, max_seqlen)
        if tokens == 0 or any(n > most for n, most in zip(asked, limits, strict=True)):
            return None
        rows = min(_step(tokens), self.max_tokens)
        longest = min(_power_of_two(max(max_seqlen, SMALLEST)), rows, self.max_seqlen)
        return Bucket(rows, min(_power_of_two(batch), self.max_batch), longest)


def _step(number: int) -> int:
    """Return the smallest of the numbers 16, 24, 32, 48, … that is at least `number`."""
    power = _power_of_two(max(number, SMALLEST))
    halfway = power // 4 * 3
    return halfway if SMALLEST <= halfway >= number else power


def _power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()
