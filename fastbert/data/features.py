"""Checking features, and concatenating them into packed sequences.

A feature is one example: a mapping from names to columns, as tokenizers and datasets return it. A
column is a list, a numpy array or a tensor. A column with one value per token is 1-D.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

Feature = Mapping[str, Any]
LABELS = ("labels", "label", "label_ids")


class Text(NamedTuple):
    """One sequence of a feature.

    Attributes:
        columns: The columns of the feature.
        where: Name of the sequence in error messages, such as ``"example 3"``.
        prefix: Prefix of the column names that belong to the sequence, such as ``"anchor_"``.
    """

    columns: Feature
    where: str
    prefix: str = ""

    def get(self, name: str) -> Any:
        """Return the column ``prefix + name``, or None if the feature has no such column."""
        return self.columns.get(self.prefix + name)

    def wrong(self, name: str, got: str, allowed: str) -> ValueError:
        """Return the error for the column `name`, which has `got` instead of `allowed`."""
        return ValueError(f"{self.prefix}{name} of {self.where}: got {got}, allowed: {allowed}")


class Sequences(NamedTuple):
    """The concatenated sequences of a batch: B sequences with T tokens in total.

    Attributes:
        ids: Ids of the tokens, int64 of shape ``(T,)``.
        token_types: int64 of shape ``(T,)``, or None if the features have no token types.
        labels: Labels of the tokens, int64 of shape ``(T,)``, or None if tokens have no labels.
        cu_seqlens: Cumulative lengths of the sequences, int64 of shape ``(B + 1,)``.
    """

    ids: np.ndarray
    token_types: np.ndarray | None
    labels: np.ndarray | None
    cu_seqlens: np.ndarray


def as_texts(features: Sequence[Feature]) -> list[Text]:
    """Return a `Text` for each feature; errors name a feature by its number in the batch, from 0.

    Raises:
        ValueError: If there is no feature, or if a feature is not a mapping.
    """
    if len(features) == 0:
        raise ValueError("features: got an empty batch, allowed: at least one example")
    for number, feature in enumerate(features):
        if not isinstance(feature, Mapping):
            kind = type(feature).__name__
            raise ValueError(f"features: got {kind} as example {number}, allowed: a mapping")
    return [Text(feature, f"example {number}") for number, feature in enumerate(features)]


def flatten(texts: list[Text], max_length: int | None, labels: str | None = None) -> Sequences:
    """Concatenate ``input_ids``, the column `labels`, and ``token_type_ids`` if present.

    Tokens whose ``attention_mask`` is 0 are dropped from all columns.

    Args:
        texts: The sequences of the batch.
        max_length: Largest number of tokens of a sequence; None allows any number.
        labels: Name of the column with one label per token; None if there is no such column.

    Returns:
        The packed sequences.

    Raises:
        ValueError: If a column is missing or has a shape, dtype or value that is not allowed.
    """
    names = ["input_ids"]
    if _in_all(texts, "token_type_ids"):
        names.append("token_type_ids")
    if labels is not None:
        names.append(labels)
    rows: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for text in texts:
        given = {name: _integers(text, name) for name in names}
        length = len(given["input_ids"])
        for name, values in given.items():
            if len(values) != length:
                allowed = f"{length}, as many as {text.prefix}input_ids"
                raise text.wrong(name, f"{len(values)} values", allowed)
        keep = _mask(text, length)
        real_tokens = length if keep is None else int(keep.sum())
        if real_tokens == 0:
            raise text.wrong("input_ids", "no tokens", "at least one")
        if max_length is not None and real_tokens > max_length:
            raise text.wrong(
                "input_ids", f"{real_tokens} tokens", f"at most max_length = {max_length}"
            )
        for name, values in given.items():
            rows[name].append(values if keep is None else values[keep])
    flat = {name: np.concatenate(parts) for name, parts in rows.items()}
    cu_seqlens = np.cumsum([0, *map(len, rows["input_ids"])])
    ids = flat["input_ids"]
    refuse(texts, cu_seqlens, "input_ids", ids, ids < 0, "0 or more")
    return Sequences(
        ids,
        flat.get("token_type_ids"),
        None if labels is None else flat[labels],
        cu_seqlens,
    )


def refuse(
    texts: list[Text],
    cu_seqlens: np.ndarray,
    name: str,
    values: np.ndarray,
    wrong: np.ndarray,
    allowed: str,
) -> None:
    """Raise ValueError for the first token at which `wrong` is True, if there is one.

    `values` has the column `name` of all tokens. Both `values` and `wrong` have the shape ``(T,)``.
    """
    if wrong.any():
        place = int(wrong.argmax())
        text = texts[int(np.searchsorted(cu_seqlens, place, side="right")) - 1]
        raise text.wrong(name, str(values[place]), allowed)


def label_column(texts: list[Text], names: Sequence[str] = LABELS) -> str | None:
    """Return the one of `names` that is a column of all texts; None if no text has such a column.

    Raises:
        ValueError: If the texts have columns of several names from `names`, or if only some texts
            have the column.
    """
    columns = [name for name in names if any(text.get(name) is not None for text in texts)]
    if len(columns) > 1:
        raise ValueError(f"labels: got the columns {', '.join(columns)}, allowed: one of them")
    return columns[0] if columns and _in_all(texts, columns[0]) else None


def sequence_labels(texts: list[Text], name: str) -> Tensor:
    """Stack the labels of B sequences: int64 or float32 ``(B,)``, or float32 ``(B, C)``."""
    rows = [as_array(text, name) for text in texts]
    for text, row in zip(texts, rows, strict=True):
        if row.ndim > 1 or row.dtype.kind not in ("f" if row.ndim else "biuf"):
            got = f"{row.dtype} of shape {row.shape}"
            raise text.wrong(name, got, "an integer, a float or a vector of floats")
        if row.shape != rows[0].shape:
            raise text.wrong(name, f"shape {row.shape}", f"{rows[0].shape}, as {texts[0].where}")
    stacked = np.stack(rows)
    kind = np.float32 if stacked.dtype.kind == "f" else np.int64
    return torch.from_numpy(stacked.astype(kind))


def as_array(text: Text, name: str) -> np.ndarray:
    """Return a column as an array of numbers of any shape.

    Raises:
        ValueError: If the column is missing or does not hold numbers.
    """
    value = text.get(name)
    if value is None:
        columns = ", ".join(map(str, text.columns)) or "none"
        raise text.wrong(name, f"nothing among the columns ({columns})", "numbers")
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = value.float() if value.dtype == torch.bfloat16 else value
    try:
        array = np.asarray(value)
    except ValueError:
        raise text.wrong(name, "lists of different lengths", "numbers") from None
    if array.dtype.kind not in "biuf":
        raise text.wrong(name, f"{type(value).__name__} of {array.dtype}", "numbers")
    return array


def _integers(text: Text, name: str) -> np.ndarray:
    array = as_array(text, name)
    # numpy makes an array of floats from an empty list.
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        got = f"{array.dtype} of shape {array.shape}"
        raise text.wrong(name, got, "integers of shape (length,)")
    return array.astype(np.int64, copy=False)


def _mask(text: Text, length: int) -> np.ndarray | None:
    """Return where ``attention_mask`` is 1, as a bool array of shape ``(length,)``.

    The result is None if the column is absent or is 1 everywhere.
    """
    if text.get("attention_mask") is None:
        return None
    mask = as_array(text, "attention_mask")
    if mask.shape != (length,):
        allowed = f"({length},), as {text.prefix}input_ids"
        raise text.wrong("attention_mask", f"shape {mask.shape}", allowed)
    keep = mask == 1
    if not (keep | (mask == 0)).all():
        wrong = mask[~(keep | (mask == 0))][0]
        raise text.wrong("attention_mask", f"a value of {wrong}", "0 and 1")
    return None if keep.all() else keep


def _in_all(texts: list[Text], name: str) -> bool:
    """Return whether every text has the column; raise ValueError if only some texts have it."""
    having = [text.get(name) is not None for text in texts]
    if any(having) and not all(having):
        lacking, has = texts[having.index(False)], texts[having.index(True)]
        raise lacking.wrong(name, "nothing", f"a column in every example, as {has.where} has it")
    return all(having)
