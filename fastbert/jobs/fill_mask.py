"""The likeliest tokens for each mask of a text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastbert.jobs.loading import load_whole, refuse_backend

if TYPE_CHECKING:
    from fastbert.config import BertConfig


def predict(model: str, text: str, *, top_k: int, backend: str | None) -> list[dict[str, Any]]:
    """One entry per [MASK]: its ``position`` in tokens and the ``candidates`` for it.

    Other masks stay in the sentence. Raises ValueError without any [MASK], for a text that is too
    long, and for a model without a masked-LM head.
    """
    import torch

    from fastbert.data import WordPieceTokenizer
    from fastbert.io import checkpoint
    from fastbert.modules import BertForMaskedLM

    folder = checkpoint.find(model)
    config, _ = checkpoint.read_settings(folder)
    if config.model_type != "bert":
        return _predict_by_transformers(folder, text, config, top_k=top_k, backend=backend)
    tokenizer = WordPieceTokenizer.load(folder)
    ids = tokenizer.encode(text)
    positions = [i for i, token in enumerate(ids) if token == tokenizer.mask_id]
    mask = tokenizer.special["mask_token"]
    if not positions:
        raise ValueError(f"TEXT: got {text!r}, allowed: text with at least one {mask}")
    masked_lm = load_whole(
        BertForMaskedLM, folder, backend, ("cls.predictions.",), "masked-LM head"
    )
    limit = masked_lm.config.max_position_embeddings
    if len(ids) > limit:
        raise ValueError(f"TEXT: got {len(ids)} tokens, allowed: at most {limit}")
    with torch.inference_mode():
        logits = masked_lm(input_ids=torch.tensor([ids])).logits[0, positions]
    top = logits.float().softmax(-1).topk(min(top_k, logits.shape[-1]), dim=-1)
    return [
        {
            "position": position,
            "candidates": _candidates(tokenizer, ids, position, values.tolist(), tokens.tolist()),
        }
        for position, values, tokens in zip(positions, top.values, top.indices, strict=True)
    ]


def _predict_by_transformers(
    folder: Path, text: str, config: BertConfig, *, top_k: int, backend: str | None
) -> list[dict[str, Any]]:
    """Of a family whose head we do not have."""
    from fastbert.integrations.stock_heads import fill_mask as fill

    refuse_backend(backend, config.model_type)
    mask, found = fill(folder, text, top_k)
    if not found:
        raise ValueError(f"TEXT: got {text!r}, allowed: text with at least one {mask}")
    return found


def _candidates(
    tokenizer: Any, ids: list[int], position: int, values: list[float], tokens: list[int]
) -> list[dict[str, Any]]:
    rows = []
    for probability, token in zip(values, tokens, strict=True):
        filled = [*ids[1:position], token, *ids[position + 1 : -1]]  # without [CLS] and [SEP]
        rows.append(
            {
                "token": tokenizer.id_to_token(token),
                "id": token,
                "probability": probability,
                "sentence": tokenizer.decode(filled, skip_special_tokens=False),
            }
        )
    return rows
