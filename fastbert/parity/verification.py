"""Verify a user's own model: stock code against accelerated code on the user's own machine."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from rich.console import Console

from fastbert.integrations.accelerate import obstacles
from fastbert.parity import batches
from fastbert.parity.comparison import ALL_OUTPUTS, GRADIENTS, INFERENCE, Pass
from fastbert.parity.report import LeftOut, Report, Row
from fastbert.parity.subject import Subject, sides_of

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
MODES = (INFERENCE, ALL_OUTPUTS, GRADIENTS)
# At most this many other batches are judged jointly with a batch whose result fails narrowly.
MORE = 7


def verify(
    model: Any,
    batch: Mapping[str, Any] | None = None,
    *,
    texts: Sequence[Any] | None = None,
    tokenizer: Any = None,
    dtypes: Iterable[str] = ("float32", "bfloat16"),
    seed: int = 0,
) -> Report:
    """Compare a model as `accelerate` runs it with the same model in stock code.

    Copies of the model run in eval mode, which has no dropout, on the device of the model: in
    inference, in inference with hidden states and attention weights, and with gradients. The
    reference is the stock copy in float64 with eager attention. The tolerance rule judges every
    floating-point field of the output and every gradient. It allows twice the error of the stock
    copy in the same dtype, or three times its error for gradients. The model, its gradients, its
    mode and the state of torch's random numbers do not change.

    Args:
        model: A model that `accelerate` takes: a model of transformers with any head or with none,
            a ``SentenceTransformer``, a ``CrossEncoder``, a ``SparseEncoder``, a pipeline, or a
            module of your own around an encoder. The model may be accelerated already.
        batch: The keyword arguments of the model, padded, as a mapping of names to tensors. With
            labels, the loss is compared, too. Without `batch` and `texts`, batches of random tokens
            are generated: full, padded right, padded left, and of one token.
        texts: Texts, or pairs of texts, that the model's tokenizer reads 16 at a time.
        tokenizer: The tokenizer that reads `texts`; None takes the tokenizer of the model.
        dtypes: Names of the dtypes: "float32", "bfloat16" and "float16".
        seed: Seed of the generated batches.

    Returns:
        The report: ``rows``, ``passed``, ``to_json()`` and a table as ``str``.

    Raises:
        TypeError: If the type of an argument is not allowed.
        ValueError: If the model cannot be copied or accelerated, if the stock model cannot be
            called with the batch, or if an argument is not allowed. The message names the argument.

    Examples:
        ```python
        report = fastbert.verify(model, texts=["A cat.", "The dog ran home."])
        print(report)
        assert report.passed
        ```
    """
    rows: list[Row] = []
    left_out: list[LeftOut] = []
    with Console(stderr=True).status("verify") as status:
        results = findings(
            model, batch, texts=texts, tokenizer=tokenizer, dtypes=dtypes, seed=seed,
            notify=lambda text: status.update(f"verify {text}"),
        )  # fmt: skip
        for each in results:
            if isinstance(each, Row):
                rows.append(each)
            else:
                left_out.append(each)
    return Report(type(model).__name__, tuple(rows), tuple(left_out))


def findings(
    model: Any,
    batch: Mapping[str, Any] | None = None,
    *,
    texts: Sequence[Any] | None = None,
    tokenizer: Any = None,
    dtypes: Iterable[str] = ("float32", "bfloat16"),
    seed: int = 0,
    notify: Callable[[str], None] = lambda text: None,
) -> Iterator[Row | LeftOut]:
    """Yield the results of `verify`, each as soon as it is known.

    Args:
        model: As in `verify`.
        batch: As in `verify`.
        texts: As in `verify`.
        tokenizer: As in `verify`.
        dtypes: As in `verify`.
        seed: As in `verify`.
        notify: Function that gets a text with the dtype, the batch and the mode before each
            comparison.

    Yields:
        A `Row` for each comparison, and a `LeftOut` for each result that is not compared.

    Raises:
        TypeError: As in `verify`.
        ValueError: As in `verify`.
    """
    chosen = _chosen(dtypes)
    if batch is not None and texts is not None:
        raise ValueError("texts: got texts with a batch, allowed: one of the two")
    if tokenizer is not None and texts is None:
        raise ValueError("tokenizer: got a tokenizer without texts, allowed: a tokenizer and texts")
    subject = Subject.of(model, tokenizer)
    own = None if batch is None else batches.given(batch)
    for name in chosen:
        yield from _in_one_dtype(subject, own, texts, name, seed, notify)


def _chosen(dtypes: Iterable[str]) -> list[str]:
    names = [dtypes] if isinstance(dtypes, str) else list(dtypes)
    for name in names:
        if name not in DTYPES:
            raise ValueError(f"dtypes: got {name!r}, allowed: {', '.join(DTYPES)}")
    if not names:
        raise ValueError(f"dtypes: got none, allowed: some of {', '.join(DTYPES)}")
    return names


def _in_one_dtype(
    subject: Subject,
    own: batches.Batch | None,
    texts: Sequence[Any] | None,
    name: str,
    seed: int,
    notify: Callable[[str], None],
) -> Iterator[Row | LeftOut]:
    """Yield the findings of one dtype; the copies in this dtype are freed at the end."""
    notify(f"{name}: copying {subject.name}")
    # A generator runs in the context of its caller after each yield, so the context is entered
    # again for each step.
    with _plain_context():
        sides = sides_of(subject.module, DTYPES[name])
        serving = obstacles(sides.fast)
        hf_models = [sides.fast.get_submodule(encoder) for encoder in serving]
        chosen = _batches(subject, own, texts, hf_models, seed)
    for encoder, reason in serving.items():
        if reason is not None:
            path = encoder or subject.name
            told = f"{path} runs its own code, padded: {reason}"
            yield Row("all", name, "serving", path, math.nan, math.nan, False, told)
    if all(reason is not None for reason in serving.values()):
        return  # No encoder is accelerated, so stock code would be compared with itself.

    def pass_of(batch: batches.Batch) -> Pass:
        return Pass(subject, sides, serving, batch, DTYPES[name])

    def others(batch: batches.Batch) -> list[Pass]:
        if own is not None:
            return []
        if texts is not None:
            return [pass_of(other) for other in chosen if other is not batch][:MORE]
        seeds = range(seed + 1, seed + 1 + MORE)
        more = [each for s in seeds for each in batches.generated(subject, hf_models, s)]
        return [pass_of(other) for other in more if other.name == batch.name]

    for batch in chosen:
        step = pass_of(batch)
        for mode in MODES if subject.has_options else (INFERENCE, GRADIENTS):
            notify(f"{name}: {batch.name}, {mode}")
            with _plain_context():
                rows = step.findings(mode, functools.partial(others, batch))
            yield from rows


def _batches(
    subject: Subject,
    own: batches.Batch | None,
    texts: Sequence[Any] | None,
    hf_models: list[Any],
    seed: int,
) -> list[batches.Batch]:
    if own is not None:
        return [own]
    if texts is not None:
        return list(batches.of_texts(subject, texts, hf_models))
    return list(batches.generated(subject, hf_models, seed))


@contextlib.contextmanager
def _plain_context() -> Iterator[None]:
    """Let autograd record the operations of the block, even if the caller has disabled it."""
    with torch.inference_mode(False), torch.enable_grad():
        yield
