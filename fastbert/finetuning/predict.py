"""What a fine-tuned model says about each example of a file."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from fastbert.atomic_file import write_atomically
from fastbert.finetuning import evaluate
from fastbert.finetuning.answer import AnswerQuestions
from fastbert.finetuning.classify import Classify
from fastbert.finetuning.labels import Labels
from fastbert.finetuning.model import Source
from fastbert.finetuning.preparation import encode
from fastbert.finetuning.tag import Tag
from fastbert.finetuning.task import Task
from fastbert.io.checkpoint import naming_config
from fastbert.json_file import jsonable

# The classes in config.json whose models can predict.
CLASSES = tuple(task.kind.__name__ for task in (Classify, Tag, AnswerQuestions))


@dataclass(frozen=True)
class Prediction:
    """The result of `predict`.

    Attributes:
        output: The file of the predictions.
        task: Name of the task.
        examples: Number of examples.
        truncated: Number of texts that were cut.
        max_length: Largest number of tokens of a sequence.
    """

    output: Path
    task: str
    examples: int
    truncated: int
    max_length: int


def predict(
    model: str | os.PathLike[str],
    data: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    text_field: str = "text",
    pair_field: str | None = None,
    words_field: str = "tokens",
    max_length: int | None = None,
    backend: str | None = None,
) -> Prediction:
    """Write what a fine-tuned model says about each example of a file.

    The class in ``config.json`` decides the task. The data have the format of the training, and
    their labels are not read. The file of the predictions has one JSON object per line, in the
    order of the examples. It appears complete or not at all. The objects have these entries:

    - ``label``, ``score`` and ``scores`` for a classification, and ``score`` for a regression;
    - ``words``, ``tags`` and, if the tags mark entities, ``entities`` for sentences of words;
    - ``id``, ``answer``, ``score`` and ``no_answer`` for questions.

    Args:
        model: Folder or hub id of the fine-tuned model, such as ``out/model``.
        data: A file, or a folder of texts with a subfolder for each label.
        output: A .jsonl file.
        text_field: As in `ClassifyOptions`.
        pair_field: As in `ClassifyOptions`.
        words_field: As in `TagOptions`.
        max_length: Largest number of tokens of a sequence; None takes that of the training, from
            ``tokenizer_config.json``.
        backend: Backend of every operation; None lets each operation choose.

    Returns:
        The path and the numbers.

    Raises:
        FileNotFoundError: If the model or the data do not exist.
        ValueError: If the model has no such head, or if the data are not usable. The message names
            the file and the line.
    """
    output, data = Path(output), Path(data)
    if output.suffix.lower() != ".jsonl":
        raise ValueError(f"output: got {str(output)!r}, allowed: a .jsonl file")
    if not data.exists():
        raise FileNotFoundError(f"data: {data} does not exist, allowed: a file or a folder")
    source = Source(model)
    task = _task(source, text_field, pair_field, words_field)
    examples = task.read(data, labelled=False)
    tokenizer = source.tokenizer(max_length or source.max_length())
    features = encode(task, examples, tokenizer)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    built = source.build(task, backend, whole=True).to(device)
    rows = evaluate.compute(built, task, features).rows
    lines = [
        json.dumps(jsonable(answer), ensure_ascii=False) + "\n"
        for answer in task.answers(examples, features, rows)
    ]
    text = "".join(lines)
    write_atomically(output, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    return Prediction(output, task.name, len(examples), tokenizer.truncated, tokenizer.limit)


def _labels(source: Source) -> Labels:
    names = source.labels()
    with naming_config(source.folder):
        return Labels(names)


def _task(source: Source, text_field: str, pair_field: str | None, words_field: str) -> Task:
    """Return the task of a fine-tuned model."""
    found = source.classes()
    if found == [AnswerQuestions.kind.__name__]:
        return AnswerQuestions.of(source.config)
    if found == [Tag.kind.__name__]:
        return Tag(words_field, "tags", _labels(source))
    if found == [Classify.kind.__name__]:
        fields = (text_field,) if pair_field is None else (text_field, pair_field)
        regression = source.config.problem_type == "regression"
        names = None if regression else _labels(source)
        return Classify(fields, "label", names, regression=regression)
    raise ValueError(
        f"model: {source.folder} is a {', '.join(found) or 'model without a class'}, allowed: "
        f"{', '.join(CLASSES)}"
    )
