"""Heads of transformers on an accelerated encoder, for families whose heads fastbert lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastbert.integrations.accelerate import accelerate
from fastbert.integrations.stock_models import quiet
from fastbert.modules.mask_filling import fill_masks

try:
    import transformers
except ImportError as error:
    raise ImportError(
        f"a head of this family needs transformers >= 5 ({error}): "
        "pip install 'fastbert[transformers]'"
    ) from error


class StockHead(nn.Module):
    """A model of transformers with a head, in eval mode and with an accelerated encoder.

    The model takes packed input, as the models of fastbert do.

    Args:
        kind: Name of a class of transformers, such as ``"AutoModelForSequenceClassification"``.
        folder: Folder of the checkpoint.

    Raises:
        ValueError: If transformers cannot load the folder, if the checkpoint lacks a part of the
            head, or if the encoder cannot be accelerated.
        OSError: If a file cannot be read.
    """

    def __init__(self, kind: str, folder: Path) -> None:
        """Load the model and accelerate its encoder."""
        super().__init__()
        self.model = accelerate(_load(getattr(transformers, kind), folder))

    def forward(
        self,
        input_ids: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        token_type_ids: Tensor | None = None,
    ) -> Any:
        """Pad a packed batch and call the model.

        The batch is padded because the heads of transformers read padded rows.

        Args:
            input_ids: Token ids, integer of shape ``(T,)``.
            cu_seqlens: Cumulative lengths of the sequences from 0, int32 of shape ``(B + 1,)``.
            max_seqlen: Length of the longest sequence.
            token_type_ids: Token types of shape ``(T,)``.

        Returns:
            The output of the model of transformers for a batch of shape ``(B, max_seqlen)``.
        """
        exists = torch.arange(max_seqlen, device=input_ids.device) < cu_seqlens.diff()[:, None]
        pad = self.model.config.pad_token_id or 0
        padded = {
            "input_ids": input_ids.new_full(exists.shape, pad).masked_scatter(exists, input_ids)
        }
        if token_type_ids is not None:
            zeros = token_type_ids.new_zeros(exists.shape)
            padded["token_type_ids"] = zeros.masked_scatter(exists, token_type_ids)
        return self.model(**padded, attention_mask=exists.long())


def _load(kind: Any, folder: Path) -> Any:
    """Load a model of transformers in eval mode; raise ValueError if the folder lacks weights."""
    try:
        with quiet():
            model, report = kind.from_pretrained(folder, output_loading_info=True)
    except OSError:
        raise
    except Exception as error:
        # A damaged folder makes transformers raise any kind of error.
        raise ValueError(f"MODEL: {folder}: transformers cannot load it: {error}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ValueError(f"MODEL: the head is incomplete: {folder} lacks {', '.join(missing)}")
    return model.eval()


def as_saved(folder: Path, architectures: list[str]) -> tuple[Any, Any]:
    """Load a model with the head that it was saved with, and its tokenizer.

    Args:
        folder: Folder of the checkpoint.
        architectures: Class names in the ``config.json`` of the checkpoint.

    Returns:
        The model of transformers in eval mode, and its tokenizer. The model has no head if no name
        in `architectures` is a class of transformers.

    Raises:
        ValueError: If transformers cannot load the folder, or if the checkpoint lacks a part of
            the model.
        OSError: If a file cannot be read.
    """
    classes = (getattr(transformers, name, None) for name in architectures)
    kind = next((each for each in classes if each is not None), transformers.AutoModel)
    return _load(kind, folder), transformers.AutoTokenizer.from_pretrained(folder)


def fill_mask(folder: Path, text: str, top_k: int) -> tuple[str, list[dict[str, Any]]]:
    """Predict the likeliest tokens for each mask of a text, for ``fastbert fill-mask``.

    Args:
        folder: Folder of a checkpoint with a masked-LM head.
        text: The text, in which the tokenizer's mask token stands for each unknown token.
        top_k: Number of candidates per mask.

    Returns:
        The mask token, and a list with one dictionary for each mask in `text`. The dictionary has
        the keys ``position`` and ``candidates``, as the command prints them.

    Raises:
        ValueError: If the text is too long, or if the checkpoint cannot be loaded or has no
            masked-LM head.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    mask = str(tokenizer.mask_token)
    ids = tokenizer(text)["input_ids"]
    positions = [i for i, token in enumerate(ids) if token == tokenizer.mask_token_id]
    if not positions:
        return mask, []
    model = StockHead("AutoModelForMaskedLM", folder)
    rows, ends = torch.tensor(ids), torch.tensor([0, len(ids)], dtype=torch.int32)
    with torch.inference_mode():
        logits = model(rows, ends, len(ids)).logits[0, positions]
    special = set(tokenizer.all_special_ids) - {tokenizer.mask_token_id}

    def sentence(filled: list[int], place: int) -> str:
        shown = [t for i, t in enumerate(filled) if i == place or t not in special]
        return tokenizer.decode(shown)

    token = tokenizer.convert_ids_to_tokens
    return mask, fill_masks(logits, ids, positions, top_k, token=token, sentence=sentence)
