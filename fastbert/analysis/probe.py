"""The structural probe: a learned distance of word vectors that predicts distances in trees."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fastbert.analysis.agreement import spearman

# Lengths of the sentences whose correlations are averaged, in words (Hewitt and Manning 2019).
LENGTHS = range(5, 51)
BATCH = 32


def tree_distances(heads: Sequence[int]) -> Tensor:
    """Return the number of edges between each pair of words of a dependency tree.

    Args:
        heads: Index of the head of each of n words; -1 for the root.

    Returns:
        Distances of shape ``(n, n)``, fp32.

    Raises:
        ValueError: If the heads are not a tree with one root.

    Examples:
        >>> from fastbert.analysis import tree_distances
        >>> tree_distances([1, -1, 1]).tolist()
        [[0.0, 1.0, 2.0], [1.0, 0.0, 1.0], [2.0, 1.0, 0.0]]
    """
    count = len(heads)
    if list(heads).count(-1) != 1 or not all(-1 <= head < count for head in heads):
        raise ValueError(f"heads: got {list(heads)}, allowed: indices of words, and one -1")
    distances = torch.full((count, count), math.inf)
    distances.fill_diagonal_(0.0)
    for word, head in enumerate(heads):
        if head >= 0:
            distances[word, head] = distances[head, word] = 1.0
    for middle in range(count):
        through = distances[:, middle, None] + distances[None, middle, :]
        distances = torch.minimum(distances, through)
    if not distances.isfinite().all():
        raise ValueError(f"heads: got {list(heads)}, which have a cycle, allowed: a tree")
    return distances


def edges(distances: Tensor) -> set[tuple[int, int]]:
    """Return the edges of the minimum spanning tree, as pairs ``(i, j)`` with i < j (Prim 1957).

    Args:
        distances: Symmetric distances of shape ``(n, n)``.

    Returns:
        ``n − 1`` edges. Among equal distances, the algorithm takes the pair whose word in the tree
        has the lowest index, and then the pair whose new word has the lowest index.
    """
    rows = distances.tolist()
    joined, others = [0], set(range(1, len(rows)))
    pairs = set()
    while others:
        _, i, j = min((rows[i][j], i, j) for i in joined for j in others)
        pairs.add((min(i, j), max(i, j)))
        joined.append(j)
        others.remove(j)
    return pairs


class DistanceProbe(nn.Module):
    """The squared distance ``‖B (hᵢ − hⱼ)‖²`` of word vectors hᵢ and hⱼ, with a learned matrix B.

    Args:
        width: Width H of the vectors, which is the number of columns of B.
        rank: Number of rows of B.

    Note:
        Hewitt and Manning 2019, equation 1.
    """

    def __init__(self, width: int, rank: int) -> None:
        """Create the matrix B with small random entries."""
        super().__init__()
        self.projection = nn.Parameter(torch.empty(rank, width).uniform_(-0.05, 0.05))

    def forward(self, vectors: Tensor) -> Tensor:
        """Compute the squared distances of all pairs of vectors.

        Args:
            vectors: Vectors of shape ``(…, n, H)``.

        Returns:
            Squared distances of shape ``(…, n, n)``.
        """
        points = vectors @ self.projection.T
        return (points[..., :, None, :] - points[..., None, :, :]).square().sum(-1)


def fit_probe(
    vectors: Sequence[Tensor],
    distances: Sequence[Tensor],
    *,
    rank: int = 64,
    epochs: int = 30,
    learning_rate: float = 1e-3,
    seed: int = 0,
) -> DistanceProbe:
    """Train a `DistanceProbe` on sentences with known syntax trees.

    The loss of a sentence is the sum of ``|d_tree − d_probe|`` over all pairs of words, divided by
    the square of the number of words (equation 2 of Hewitt and Manning 2019).

    Args:
        vectors: For each sentence of n words, the vectors ``(n, H)`` of its words.
        distances: For each sentence, the distances ``(n, n)`` of its words in the syntax tree.
        rank: Number of rows of the learned matrix B of `DistanceProbe`.
        epochs: Number of passes over the sentences.
        learning_rate: Learning rate of Adam, which falls to 0 along a cosine.
        seed: Seed of the matrix B and of the order of the batches.

    Returns:
        The trained probe, in eval mode.

    Raises:
        ValueError: If there is no sentence, or if `vectors` and `distances` differ in the number
            of sentences or words.
    """
    shapes = [(len(v), tuple(d.shape)) for v, d in zip(vectors, distances, strict=True)]
    if not shapes or any(shape != (n, n) for n, shape in shapes):
        raise ValueError("vectors and distances: allowed: (n, H) and (n, n) for each sentence")
    torch.manual_seed(seed)
    probe = DistanceProbe(vectors[0].shape[1], rank)
    optimizer = torch.optim.Adam(probe.parameters(), lr=learning_rate)
    # Sentences of the same length form batches without padding.
    by_length: dict[int, list[int]] = defaultdict(list)
    for i, (count, _) in enumerate(shapes):
        by_length[count].append(i)
    batches = [
        (torch.stack([vectors[i] for i in part]), torch.stack([distances[i] for i in part]))
        for rows in by_length.values()
        for part in (rows[k : k + BATCH] for k in range(0, len(rows), BATCH))
    ]
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(batches))
    for _ in range(epochs):
        for i in torch.randperm(len(batches)).tolist():
            x, target = batches[i]
            loss = (probe(x) - target).abs().mean((1, 2)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return probe.eval()


@dataclass(frozen=True)
class ProbeScore:
    """The agreement of distances with syntax trees.

    Attributes:
        spearman: Spearman's correlation of the distances from one word to all words of a sentence.
            The correlations are averaged over the words of all sentences of one length, and then
            over the lengths from 5 to 50 words.
        uuas: Share of the tree's edges, without direction, in the minimum spanning tree of the
            distances.
    """

    spearman: float
    uuas: float


def score(predicted: Sequence[Tensor], expected: Sequence[Tensor]) -> ProbeScore:
    """Compare predicted distances with the distances in trees.

    Args:
        predicted: For each sentence of n words, the predicted distances ``(n, n)`` of its words.
        expected: For each sentence, the distances ``(n, n)`` of its words in the syntax tree.

    Returns:
        The scores. The correlation is NaN if no sentence has 5 to 50 words.
    """
    by_length: dict[int, list[float]] = defaultdict(list)
    right = total = 0
    for ours, true in zip(predicted, expected, strict=True):
        count = len(true)
        wanted = edges(true)
        right += len(edges(ours) & wanted)
        total += len(wanted)
        if count in LENGTHS:
            rows = (spearman(a, b) for a, b in zip(ours, true, strict=True))
            # The correlation is NaN for a word whose distances are all equal.
            by_length[count] += [row for row in rows if not math.isnan(row)]
    means = [statistics.mean(values) for values in by_length.values() if values]
    return ProbeScore(statistics.mean(means) if means else math.nan, right / max(1, total))


def linear_distances(count: int) -> Tensor:
    """Return the distances ``|i − j|`` of n words by their positions, fp32 ``(n, n)``.

    These distances are the baseline of the probe: they use no vectors.
    """
    places = torch.arange(count, dtype=torch.float32)
    return (places[:, None] - places[None, :]).abs()
