"""The prediction of a model's head for one text, and the output whose gradient is shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastbert.viewer.text import PADDING, Tokens

# Largest number of candidates that the page lists for a mask, a text or a token.
MOST = 10


@dataclass(frozen=True)
class Output:
    """A chosen output of a head.

    Attributes:
        label: Id of a token of the vocabulary, number of a class, or position of the first token of
            an answer. None means the likeliest.
        place: Position of a token, counted from 0. For a mask or a classified token, None means the
            first one. For the last token of an answer, None means the likeliest. For a class of a
            text, only None and 0 are allowed.
    """

    label: int | None = None
    place: int | None = None


ANY = Output()


@dataclass
class Prediction:
    """The prediction of a head for one text.

    Attributes:
        kind: ``"mask"``, ``"class"``, ``"tokens"`` or ``"span"``.
        rows: A dictionary for each mask, text or token, with its ``place`` and its ``candidates``,
            the likeliest first. A candidate has a ``label``, the ``name`` and the ``probability``.
            A span has two rows, for its first and its last token, and their ``place`` is None.
        target: The chosen logit, a scalar with a gradient if the model computes one; for a span,
            the sum of the logits of its first and its last token.
        chosen: The label, the place and the name of the chosen output.
    """

    kind: str
    rows: list[dict[str, Any]]
    target: Tensor
    chosen: dict[str, Any]


def predict(outer: nn.Module, out: Any, tokens: Tokens, output: Output) -> Prediction | None:
    """Read the prediction of a head from the output of a model.

    Masked-LM heads predict the tokens at the masks. Heads for sequences predict a class. Heads for
    tokens predict a class of each token. Heads for questions predict the first and the last token
    of the answer.

    Args:
        outer: The model with the head.
        out: The output of `outer` for a batch of one text.
        tokens: The tokens of the text.
        output: The output whose gradient is wanted.

    Returns:
        The prediction, or None if the model has another head, no head, or no mask to fill.

    Raises:
        ValueError: If `output` names an output that does not exist.
    """
    if type(outer).__name__.endswith("QuestionAnswering"):
        return _span(out.start_logits[0].float(), out.end_logits[0].float(), tokens, output)
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
        # A head with a single output is a regression, and the softmax of one output would always be
        # 1.
        shares = logits[row].detach()
        shares = shares.softmax(-1) if width > 1 else shares
        rows.append({"place": row, "candidates": _candidates(shares, name)})
    chosen = {"place": place, "label": label, "name": name(label) or str(label)}
    return Prediction(kind, rows, logits[place, label], chosen)


def _candidates(shares: Tensor, name: Callable[[int], str | None]) -> list[dict[str, Any]]:
    top = torch.topk(shares, min(MOST, len(shares)))
    return [
        {"label": number, "name": name(number) or str(number), "probability": value}
        for value, number in zip(top.values.tolist(), top.indices.tolist(), strict=True)
    ]


def _span(first: Tensor, last: Tensor, tokens: Tokens, output: Output) -> Prediction:
    """Return the prediction of an answer in the last text.

    `output` can choose the first token (its ``label``), the last token (its ``place``) or both. The
    likeliest answer with the chosen tokens is returned.
    """
    inside = [i for i, sentence in enumerate(tokens.sentences) if sentence == max(tokens.sentences)]
    for option, place in (("label", output.label), ("place", output.place)):
        if place is not None and place not in inside:
            raise ValueError(
                f"output: got {option} {place}, allowed: {inside[0]} to {inside[-1]}, the places "
                "of the tokens of the text with the answer"
            )
    if output.label is not None and output.place is not None and output.label > output.place:
        raise ValueError(
            f"output: got place {output.place}, allowed: at least {output.label}, the first token "
            "of the answer"
        )
    starts = inside if output.label is None else [output.label]
    ends = inside if output.place is None else [output.place]
    sums = first.detach()[starts, None] + last.detach()[None, ends]
    backwards = torch.tensor([[i > j for j in ends] for i in starts], device=sums.device)
    best = int(sums.masked_fill(backwards, -torch.inf).argmax())
    start, end = starts[best // len(ends)], ends[best % len(ends)]

    def name(place: int) -> str:
        word = tokens.words[place]
        return f"{tokens.pieces[place] if word is None else tokens.surfaces[word]} ({place})"

    # Padding cannot be an answer, but a special token can: it means that there is no answer.
    exists = torch.tensor([sentence != PADDING for sentence in tokens.sentences])
    rows = []
    for logits in (first, last):
        shares = logits.detach().cpu().masked_fill(~exists, -torch.inf).softmax(-1)
        rows.append({"place": None, "candidates": _candidates(shares, name)})
    words = dict.fromkeys(tokens.words[start : end + 1])
    answer = " ".join(tokens.surfaces[word] for word in words if word is not None)
    chosen = {"place": end, "label": start, "name": answer}
    return Prediction("span", rows, first[start] + last[end], chosen)
