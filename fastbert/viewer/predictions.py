"""The prediction of a model's head for one text, and the output whose gradient is shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastbert.viewer.text import Tokens

# Candidates that the page lists for a mask or for the classes.
MOST = 10


@dataclass(frozen=True)
class Output:
    """A chosen output of a head.

    Attributes:
        label: Id of a token of the vocabulary, or number of a class; None means the likeliest.
        place: Place of the mask in the tokens; None means the first mask. Ignored for classes.
    """

    label: int | None = None
    place: int | None = None


ANY = Output()


@dataclass
class Prediction:
    """What a head predicts.

    Attributes:
        kind: ``"mask"``, ``"class"`` or ``"tokens"``.
        rows: For each mask, text or token its ``place`` and ``candidates``, the likeliest first.
            A candidate has a ``label``, the ``name`` and the ``probability``.
        target: The chosen logit, a scalar with a gradient if the model computes one.
        chosen: The place and the name of the chosen output.
    """

    kind: str
    rows: list[dict[str, Any]]
    target: Tensor
    chosen: dict[str, Any]


def predict(outer: nn.Module, out: Any, tokens: Tokens, output: Output) -> Prediction | None:
    """Read the prediction of a head from the output of a model.

    Masked-LM heads predict the tokens at the masks. Heads for sequences predict a class. Heads for
    tokens predict a class of each token.

    Args:
        outer: The model.
        out: Its output for a batch of one text.
        tokens: The tokens of the text.
        output: The output whose gradient is wanted.

    Returns:
        The prediction, or None if the model has another head, no head, or no mask to fill.

    Raises:
        ValueError: If `output` names an output that does not exist.
    """
    logits = getattr(out, "prediction_logits", None)
    logits = getattr(out, "logits", None) if logits is None else logits
    if not isinstance(logits, Tensor):
        return None
    logits = logits[0].float()
    kind = type(outer).__name__
    config: Any = outer.config
    labels = getattr(config, "id2label", None) or getattr(config, "extra", {}).get("id2label", {})

    def name(number: int) -> str | None:
        return labels.get(number, labels.get(str(number)))

    if kind.endswith(("MaskedLM", "PreTraining")) and logits.dim() == 2:
        places = [i for i, number in enumerate(tokens.ids) if number == tokens.mask_id]
        return _prediction("mask", logits, places, output, tokens.piece) if places else None
    if kind.endswith("SequenceClassification") and logits.dim() == 1:
        return _prediction("class", logits[None], [0], output, name)
    if kind.endswith("TokenClassification") and logits.dim() == 2:
        places = [i for i, sentence in enumerate(tokens.sentences) if sentence >= 0]
        return _prediction("tokens", logits, places, output, name)
    return None


def _prediction(
    kind: str,
    logits: Tensor,
    places: list[int],
    output: Output,
    name: Callable[[int], str | None],
) -> Prediction:
    place = places[0] if output.place is None else output.place
    if place not in places:
        raise ValueError(f"output: got place {place}, allowed: one of {places}")
    width = logits.shape[1]
    label = int(logits[place].argmax()) if output.label is None else output.label
    if not 0 <= label < width:
        raise ValueError(f"output: got label {label}, allowed: 0 to {width - 1}")
    rows = []
    for row in places:
        # A lone output is a regression, whose probability would always be 1.
        shares = logits[row].detach()
        shares = shares.softmax(-1) if width > 1 else shares
        top = torch.topk(shares, min(MOST, width))
        candidates = [
            {"label": number, "name": name(number) or str(number), "probability": value}
            for value, number in zip(top.values.tolist(), top.indices.tolist(), strict=True)
        ]
        rows.append({"place": row, "candidates": candidates})
    chosen = {"place": place, "label": label, "name": name(label) or str(label)}
    return Prediction(kind, rows, logits[place, label], chosen)
