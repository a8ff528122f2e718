"""The likeliest tokens at the masks of a text, from the scores of a masked-LM head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


def fill_masks(
    logits: Tensor,
    ids: Sequence[int],
    positions: Sequence[int],
    top_k: int,
    *,
    token: Callable[[int], str | None],
    sentence: Callable[[list[int], int], str],
) -> list[dict[str, Any]]:
    """Return the ``top_k`` likeliest tokens for each mask.

    Args:
        logits: Scores of shape ``(M, V)`` at the masks.
        ids: The ids of the text, the masks among them.
        positions: The M places of the masks in ``ids``.
        top_k: Tokens for each mask; at most V are returned.
        token: The text of a token by its id.
        sentence: The text of ``ids`` with one mask filled, which is at the given place.

    Returns:
        For each mask its ``position`` and its ``candidates``, the likeliest first. A candidate has
        ``token``, ``id``, ``probability`` and ``sentence``, in which the other masks stay.
    """
    top = logits.float().softmax(-1).topk(min(top_k, logits.shape[-1]), dim=-1)
    found = []
    for place, values, tokens in zip(
        positions, top.values.tolist(), top.indices.tolist(), strict=True
    ):
        candidates = [
            {
                "token": token(number),
                "id": number,
                "probability": probability,
                "sentence": sentence([*ids[:place], number, *ids[place + 1 :]], place),
            }
            for probability, number in zip(values, tokens, strict=True)
        ]
        found.append({"position": place, "candidates": candidates})
    return found
