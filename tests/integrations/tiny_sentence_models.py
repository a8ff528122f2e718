"""Small checkpoints with a tokenizer of words, for tests with sentence-transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import fastbert

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = (*SPECIAL, *(f"w{i}" for i in range(92)))
TEXTS = [
    "w1 w2 w3",
    "w5",
    " ".join(f"w{i}" for i in range(30)),
    "w7 w8 unknown w10 w11",
    "",
    *(f"w{i} w{i + 1} w{2 * i}" for i in range(12)),
]
SIZES: dict[str, Any] = {
    "vocab_size": len(WORDS), "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3,
    "intermediate_size": 80, "max_position_embeddings": 44, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0, "pad_token_id": 0,
}  # fmt: skip
MODERN = {
    "global_attn_every_n_layers": 2,
    "local_attention": 80,
    **{f"{name}_token_id": None for name in ("bos", "eos", "cls", "sep")},
}
DISTIL = {
    "dim": 48, "n_layers": 2, "n_heads": 3, "hidden_dim": 80, "max_position_embeddings": 44,
    "dropout": 0.0, "attention_dropout": 0.0, "vocab_size": len(WORDS), "pad_token_id": 0,
}  # fmt: skip
DEBERTA = {"relative_attention": True, "pos_att_type": "p2c|c2p", "type_vocab_size": 0}


def config(family: str, **changes: Any) -> Any:
    """Return the configuration of a small model without dropout."""
    own = {
        "DistilBert": DISTIL,
        "ModernBert": SIZES | MODERN,
        "DebertaV2": SIZES | DEBERTA,
    }.get(family, SIZES)
    return getattr(transformers, f"{family}Config")(**own | changes)


def tokenizer(side: str = "right") -> Any:
    """Return a tokenizer with one token per word, for texts and for pairs of texts.

    Args:
        side: Side of the padding, "right" or "left".
    """
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, model_max_length=40, padding_side=side,
        **dict(zip(names, SPECIAL, strict=True)),
    )  # fmt: skip


def save(folder: Path, kind: str, settings: Any, side: str = "right") -> Path:
    """Save a model of transformers with random nonzero weights, and its tokenizer.

    Args:
        folder: The folder of the checkpoint.
        kind: Name of the class of the model.
        settings: Configuration of the model.
        side: Side of the padding.
    """
    torch.manual_seed(0)
    model = getattr(transformers, kind)(settings)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.3 if parameter.dim() == 1 else 0.1
            parameter.add_(scale * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokenizer(side).save_pretrained(folder)
    return folder


def checkpoints(factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that returns the folder of a family's encoder; each is saved once."""
    made: dict[tuple[str, str], Path] = {}

    def folder(family: str = "Bert", side: str = "right") -> Path:
        if (family, side) not in made:
            path = factory.mktemp(f"{family}-{side}")
            made[family, side] = save(path, f"{family}Model", config(family), side)
        return made[family, side]

    return folder


def sides(stock: Any, dtype: torch.dtype = torch.float32) -> tuple[Any, Any, Any]:
    """Return an accelerated copy of a model, the oracle in float64, and the model in `dtype`."""
    stock = stock.to(dtype)
    fast = copy.deepcopy(stock)
    assert fastbert.accelerate(fast) is fast
    return fast, copy.deepcopy(stock).double(), stock
