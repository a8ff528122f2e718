"""Hard attention: the value at one position, which is drawn from the weights of soft attention."""

from __future__ import annotations

import torch
from torch import Tensor

from fastbert.modules.alignment.soft import Products, Scores, softmax


def probabilities(
    scores: Scores, mask: Tensor | None, factors: Tensor | None, backend: str | None
) -> Tensor:
    """Compute the probability of each position: ``softmax(scores) · factors``, with the sum 1.

    The arguments are those of ``soft.attend``. The result has the shape ``(B, Lq, Lk)`` and at
    least the dtype fp32, because a probability of 1e-5 has no useful logarithm in fp16. The
    probabilities of a query that attends to no key are 0.
    """
    if isinstance(scores, Products):
        dtype = torch.promote_types(scores.q.dtype, torch.float32)
        scores = Products(scores.q.to(dtype), scores.k.to(dtype), scores.scale)
    device = scores.q.device if isinstance(scores, Products) else scores.device
    with torch.autocast(device.type, enabled=False):
        weights = softmax(scores, mask, backend)
    if factors is None:
        return weights
    weights = weights * factors
    total = weights.sum(dim=-1, keepdim=True)
    return weights / total.masked_fill(total == 0.0, 1.0)


def attend(
    probabilities: Tensor, values: Tensor, draw: bool, generator: torch.Generator | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose a position for each query, and return the value at this position.

    Args:
        probabilities: Probabilities of shape ``(B, Lq, Lk)``; 0 for a query without keys.
        values: Values of shape ``(B, Lk, Dv)``.
        draw: Whether the position is drawn. Otherwise it has the largest probability, and of equal
            ones it is the first.
        generator: Generator on the device of `values`, or None for torch's generator.

    Returns:
        The output of shape ``(B, Lq, Dv)``; the weights of shape ``(B, Lq, Lk)``, which are 1 at
        the position and 0 elsewhere; and the log-probability of the position, of shape
        ``(B, Lq)``. All three are 0 for a query without keys.

    Raises:
        ValueError: If there are no keys.
    """
    if probabilities.shape[-1] == 0:
        raise ValueError("keys: got no keys, allowed: at least one key with attend='hard'")
    known = probabilities.detach()
    if draw:
        # The position that is reached first is drawn with its probability (exponential race). A
        # position of probability 0 is never drawn, because no waiting time is 0.
        times = torch.empty_like(known).exponential_(generator=generator)
        known = known / times.clamp_(min=torch.finfo(times.dtype).tiny)
    position = known.argmax(dim=-1, keepdim=True)
    probability = probabilities.gather(-1, position)
    without_keys = probability == 0.0
    weights = torch.zeros_like(known, dtype=values.dtype).scatter_(-1, position, 1.0)
    output = values.gather(1, position.expand(-1, -1, values.shape[-1]))
    log_probability = probability.masked_fill(without_keys, 1.0).log().squeeze(-1)
    return (
        output.masked_fill(without_keys, 0.0),
        weights.masked_fill(without_keys, 0.0),
        log_probability,
    )
