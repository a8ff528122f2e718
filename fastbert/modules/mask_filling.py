"""The likeliest tokens at the masks of a text, from the logits of a masked-LM head."""

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
    """Return the likeliest tokens for each mask.

    Args:
        logits: Logits of shape ``(M, V)`` at the masks.
        ids: Token ids of the text, including the masks.
        positions: Indices of the M masks in `ids`.
        top_k: Number of tokens for each mask; at most V are returned.
        token: Function from an id to the text of its token.
        sentence: Function that returns the text of ids. The arguments of the function are the ids,
            in which one mask is filled, and the index of this mask.

    Returns:
        One dictionary for each mask, with its ``position`` and its ``candidates``. The likeliest
        candidate is first. A candidate has ``token``, ``id``, ``probability`` and ``sentence``. In
        the sentence, only this mask is filled.
    """
    top = logits.float().softmax(-1).topk(min(top_k, logits.shape[-1]), dim=-1)
    filled = []
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
        filled.append({"position": place, "candidates": candidates})
    return filled
