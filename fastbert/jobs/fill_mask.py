"""Predict the likeliest tokens for each mask of a text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastbert.config import OWN_TYPES
from fastbert.jobs.loading import load_whole, refuse_backend

if TYPE_CHECKING:
    from fastbert.config import BertConfig


def predict(model: str, text: str, *, top_k: int, backend: str | None) -> list[dict[str, Any]]:
    """Predict the likeliest tokens for each mask of a text.

    Args:
        model: Folder or hub id of a checkpoint.
        text: A text with at least one mask token, for example ``[MASK]``.
        top_k: Number of candidates for each mask.
        backend: Backend of the model; None lets each operation choose.

    Returns:
        A dict for each mask, with its ``position`` in tokens and its ``candidates``, the likeliest
        first. The sentence of a candidate fills only the mask of the candidate.

    Raises:
        ValueError: If the text has no mask or is too long, if the model has no masked-LM head, or
            if `backend` is not None and the head is a class of transformers.
    """
    import torch

    from fastbert.data import WordPieceTokenizer
    from fastbert.io import checkpoint
    from fastbert.modules import BertForMaskedLM
    from fastbert.modules.mask_filling import fill_masks

    folder = checkpoint.find(model)
    config, _ = checkpoint.read_settings(folder)
    if config.model_type not in OWN_TYPES:
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
    return fill_masks(
        logits,
        ids,
        positions,
        top_k,
        token=tokenizer.id_to_token,
        # The sentence does not show [CLS] and [SEP].
        sentence=lambda filled, _: tokenizer.decode(filled[1:-1], skip_special_tokens=False),
    )


def _predict_by_transformers(
    folder: Path, text: str, config: BertConfig, *, top_k: int, backend: str | None
) -> list[dict[str, Any]]:
    """Predict with the head of transformers, for a model family whose head fastbert lacks."""
    from fastbert.integrations.stock_heads import fill_mask as fill

    refuse_backend(backend, config.model_type)
    mask, predictions = fill(folder, text, top_k)
    if not predictions:
        raise ValueError(f"TEXT: got {text!r}, allowed: text with at least one {mask}")
    return predictions
