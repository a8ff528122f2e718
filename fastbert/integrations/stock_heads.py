"""transformers' own heads on an accelerated encoder: for families whose heads we do not have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastbert.integrations.accelerate import accelerate
from fastbert.integrations.stock_models import quiet

try:
    import transformers
except ImportError as error:
    raise ImportError(
        f"a head of this family needs transformers >= 5 ({error}): "
        "pip install 'fastbert[transformers]'"
    ) from error


class StockHead(nn.Module):
    """A model of transformers, ``kind`` "AutoModelForSequenceClassification" or so, in eval mode,
    its encoder accelerated; called with packed input, as our own models are.

    Raises ValueError when the folder's checkpoint has no such head.
    """

    def __init__(self, kind: str, folder: Path) -> None:
        super().__init__()
        try:
            with quiet():
                model, report = getattr(transformers, kind).from_pretrained(
                    folder, output_loading_info=True
                )
        except OSError:
            raise
        except Exception as error:  # a damaged folder makes transformers raise any kind of error
            raise ValueError(f"MODEL: {folder}: transformers cannot load it: {error}") from error
        missing = sorted(report["missing_keys"])
        if missing:
            raise ValueError(f"MODEL: no whole head: {folder} lacks {', '.join(missing)}")
        self.model = accelerate(model.eval())

    def forward(
        self,
        input_ids: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        token_type_ids: Tensor | None = None,
    ) -> Any:
        """input_ids and token_type_ids (T,), cu_seqlens int32 (B + 1,); the output of transformers,
        of (B, max_seqlen), for its heads read padded rows."""
        exists = torch.arange(max_seqlen, device=input_ids.device) < cu_seqlens.diff()[:, None]
        pad = self.model.config.pad_token_id or 0
        padded = {
            "input_ids": input_ids.new_full(exists.shape, pad).masked_scatter(exists, input_ids)
        }
        if token_type_ids is not None:
            zeros = token_type_ids.new_zeros(exists.shape)
            padded["token_type_ids"] = zeros.masked_scatter(exists, token_type_ids)
        return self.model(**padded, attention_mask=exists.long())


def fill_mask(folder: Path, text: str, top_k: int) -> tuple[str, list[dict[str, Any]]]:
    """The mask's name, and for each mask in ``text`` its ``position`` and ``candidates``, as
    ``fastbert fill-mask`` prints them. Raises ValueError for a text that is too long."""
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
    top = logits.float().softmax(-1).topk(min(top_k, logits.shape[-1]), dim=-1)
    special = set(tokenizer.all_special_ids) - {tokenizer.mask_token_id}
    found = []
    for place, values, tokens in zip(
        positions, top.values.tolist(), top.indices.tolist(), strict=True
    ):
        candidates = []
        for probability, token in zip(values, tokens, strict=True):
            filled = [*ids[:place], token, *ids[place + 1 :]]
            kept = [t for i, t in enumerate(filled) if i == place or t not in special]
            candidates.append(
                {
                    "token": tokenizer.convert_ids_to_tokens(token),
                    "id": token,
                    "probability": probability,
                    "sentence": tokenizer.decode(kept),
                }
            )
        found.append({"position": place, "candidates": candidates})
    return mask, found
