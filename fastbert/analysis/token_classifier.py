"""A classifier that encodes each token alone, and sums the results with attention weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastbert.analysis.fitting import Examples


class TokenClassifier(nn.Module):
    """A token-wise MLP whose outputs are summed by attention weights.

    ``logits = W₂ Σᵢ αᵢ tanh(W₁ eᵢ + b₁) + b₂``, where ``eᵢ`` is the fixed word embedding of token
    i and ``αᵢ`` is its attention weight; W₁, b₁, W₂ and b₂ are trained. Only the weighted sum
    combines tokens. If the attention weights of another model give a better classifier than
    uniform weights, they show which tokens matter without context.

    Args:
        embeddings: The table of word embeddings ``(V, H)``, which is not trained.
        num_labels: Number of labels.
        width: Number of hidden units of the MLP.
        learned: Whether the model learns its own attention weights,
            ``softmax(v · tanh(W₁ eᵢ + b₁))`` with a trained vector v.

    Note:
        The diagnostic of Wiegreffe and Pinter 2019, section 3.4.
    """

    def __init__(
        self, embeddings: Tensor, num_labels: int, *, width: int = 128, learned: bool = False
    ) -> None:
        """Create the layers."""
        super().__init__()
        self.register_buffer("embeddings", embeddings.detach().clone())
        self.inner = nn.Linear(embeddings.shape[1], width)
        self.outer = nn.Linear(width, num_labels)
        self.score = nn.Linear(width, 1, bias=False) if learned else None

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        """Compute the logits.

        Args:
            ids: Token ids of shape ``(B, L)``.
            weights: Attention weights of shape ``(B, L)``. A model that learns its own weights
                attends to the tokens with weights above 0, and ignores the values of the weights.

        Returns:
            Logits of shape ``(B, labels)``.
        """
        hidden = torch.tanh(self.inner(F.embedding(ids, self.embeddings)))
        if self.score is not None:
            scores = self.score(hidden)[..., 0].masked_fill(weights <= 0, -torch.inf)
            weights = scores.softmax(-1)
        return self.outer((weights[..., None] * hidden).sum(1))


def inside(examples: Examples) -> Tensor:
    """Return 1.0 at the tokens of each text except its first and last token, and 0.0 elsewhere.

    Args:
        examples: Texts whose first and last tokens are special tokens.

    Returns:
        Tensor of shape ``(N, L)``.

    Raises:
        ValueError: If a text has no other token.
    """
    mask = examples.mask.clone()
    lengths = mask.sum(1)
    if int(lengths.min()) < 3:
        raise ValueError("examples: got a text without tokens, allowed: at least one token")
    mask[torch.arange(len(mask)), lengths - 1] = 0
    mask[:, 0] = 0
    return mask.float()


def on_tokens(weights: Tensor, examples: Examples) -> Tensor:
    """Set the weights of special tokens and padding to 0, and scale the others to the sum 1.

    Args:
        weights: Weights of shape ``(N, L)``.
        examples: The N texts to which the weights belong.

    Returns:
        Tensor of shape ``(N, L)``.
    """
    inner_weights = weights * inside(examples)
    return inner_weights / inner_weights.sum(1, keepdim=True)
