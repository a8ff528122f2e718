"""The predictions of a fine-tuned model for the examples of a file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastbert.data.records import FORMATS, read_records
from fastbert.data.squad import Question
from fastbert.finetuning import evaluate
from fastbert.finetuning.answer import DEFAULTS, AnswerQuestions, check_answering
from fastbert.finetuning.classify import Classify
from fastbert.finetuning.labels import Labels
from fastbert.finetuning.model import Source
from fastbert.finetuning.multi_label import MultiLabel, check_threshold
from fastbert.finetuning.preparation import encode, fingerprint
from fastbert.finetuning.tag import Tag
from fastbert.finetuning.task import Feature, Task
from fastbert.io.checkpoint import naming_config
from fastbert.jobs import batch_job
from fastbert.jobs.classify import score_function
from fastbert.jobs.partial_output import PartialOutput
from fastbert.jobs.reporter import SILENT, Reporter
from fastbert.jobs.texts import refuse_replacing
from fastbert.json_file import jsonable
from fastbert.modules import BertPreTrainedModel
from fastbert.text_file import content_suffix

# The classes of models, as config.json names them, whose predictions `predict` can write.
CLASSES = tuple(task.kind.__name__ for task in (Classify, Tag, AnswerQuestions))


@dataclass(frozen=True)
class Prediction:
    """The result of `predict`.

    Attributes:
        output: The file of the predictions.
        task: Name of the task, as in `Task`.
        examples: Number of examples.
        sequences: Number of sequences of tokens, into which long examples are divided.
        resumed: Number of these sequences that an earlier run had computed.
        truncated: Number of texts that were cut to `max_length`.
        max_length: Largest number of tokens of a sequence.
    """

    output: Path
    task: str
    examples: int
    sequences: int
    resumed: int
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
    id_field: str | None = None,
    threshold: float | None = None,
    stride: int | None = None,
    longest_answer: int | None = None,
    no_answer_threshold: float | None = None,
    max_length: int | None = None,
    backend: str | None = None,
    reporter: Reporter = SILENT,
) -> Prediction:
    """Write the prediction of a fine-tuned model for each example of a file.

    The class in ``config.json`` decides the task. The data have the format of the training, and
    their labels are not read. The file of the predictions has one JSON object per line, in the
    order of the examples. The file appears when it is complete. Until then, a folder with the name
    of `output` and the suffix ``.partial`` stores the results of the finished sequences. If the
    call is interrupted, the same call continues after these sequences. The objects have these
    entries:

    - ``label``, ``score`` and ``scores`` for a classification, whose scores are a softmax;
    - ``labels`` and ``scores`` for a classification by several labels, or by one label that is
      present or absent, whose scores are sigmoids;
    - ``score`` for a regression, or ``scores`` for a regression with several numbers;
    - ``words``, ``tags`` and, if the tags mark entities, ``entities`` for sentences of words;
    - ``id``, ``answer``, ``score`` and ``no_answer`` for questions;
    - ``id`` for other examples too, if `id_field` is given.

    A file of the predictions with the suffix .json has the layout of SQuAD's ``predictions.json``
    instead: one object with the answer to each question by its id.

    Args:
        model: Folder or hub id of the fine-tuned model, such as ``out/model``.
        data: A file, or a folder of texts with a subfolder for each label.
        output: A .jsonl file; for questions, a .jsonl or a .json file.
        text_field: As in `ClassifyOptions`.
        pair_field: As in `ClassifyOptions`.
        words_field: As in `TagOptions`.
        id_field: Column or field of a .csv, .tsv, .jsonl or .parquet file whose value is the
            ``id`` of a prediction; None writes no ids. Questions always have ids.
        threshold: A label of a multi-label classification is predicted if its score is larger than
            this number; None means 0.5. For other models, only None is allowed.
        stride: As in `AnswerOptions`; None takes the value of the training, from ``config.json``.
        longest_answer: As in `AnswerOptions`; None takes the value of the training.
        no_answer_threshold: As in `AnswerOptions`; None takes the value of the training. A number
            allows empty answers, even if ``config.json`` does not say that questions may have no
            answer.
        max_length: Largest number of tokens of a sequence; None takes the value of the training,
            from ``tokenizer_config.json``.
        backend: Backend that the model asks for; None lets each operation choose.
        reporter: Receives notes and the progress in sequences.

    Returns:
        The path of the predictions, and the numbers of examples and sequences.

    Raises:
        FileNotFoundError: If the model or the data do not exist.
        ValueError: If an option is not allowed, if the model has no head for one of these tasks, if
            `output` is the file of the data, if another run is writing to `output`, or if the data
            are not usable. For data, the message names the file and the line.
    """
    output, data = Path(output), Path(data)
    if output.suffix.lower() not in (".jsonl", ".json"):
        allowed = "a .jsonl file, or for questions a .json file"
        raise ValueError(f"output: got {str(output)!r}, allowed: {allowed}")
    if not data.exists():
        raise FileNotFoundError(f"data: {data} does not exist, allowed: a file or a folder")
    refuse_replacing(output, data, "output", "the data themselves")
    source = Source(model)
    answering = {
        "stride": stride,
        "longest_answer": longest_answer,
        "no_answer_threshold": no_answer_threshold,
    }
    task = _task(source, text_field, pair_field, words_field, answering)
    if output.suffix.lower() == ".json" and not isinstance(task, AnswerQuestions):
        allowed = f"a .jsonl file, because {source.folder} does not answer questions"
        raise ValueError(f"output: got {str(output)!r}, allowed: {allowed}")
    _set_threshold(task, source, threshold)
    with reporter.reading(data):
        examples = task.read(data, labelled=False)
        ids = None if id_field is None else _read_ids(task, data, id_field, len(examples))
    if output.suffix.lower() == ".json":
        _refuse_repeated_ids(examples)
    tokenizer = source.tokenizer(max_length or source.max_length())
    features = encode(task, examples, tokenizer)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    built = source.build(task, backend, whole=True).to(device)
    facts = batch_job.fingerprint(
        (source.folder,),
        _Input(fingerprint({"data": examples})),
        command="predict",
        sequences=[len(features), max(len(feature["input_ids"]) for feature in features)],
        max_length=tokenizer.limit,
        stride=getattr(task, "stride", None),
        backend=backend,
    )

    def write(rows: NDArray[np.float32], path: Path) -> None:
        logits = _logits(task, features, rows)
        answers = task.answers(examples, features, logits)
        if ids is not None:
            answers = [{"id": i, **answer} for i, answer in zip(ids, answers, strict=True)]
        with path.open("w", encoding="utf-8") as file:
            if output.suffix.lower() == ".json":
                by_id = {str(answer["id"]): answer["answer"] for answer in answers}
                json.dump(by_id, file, ensure_ascii=False, indent=1)
                return
            for answer in answers:
                file.write(json.dumps(jsonable(answer), ensure_ascii=False) + "\n")

    count = sum(map(task.size, features))
    with PartialOutput(output, (count, source.config.num_labels), facts, reporter) as partial:
        resumed = _compute(built, task, features, partial, reporter)
        partial.finish(write)
    return Prediction(
        output,
        task.name,
        examples=len(examples),
        sequences=len(features),
        resumed=resumed,
        truncated=tokenizer.truncated,
        max_length=tokenizer.limit,
    )


class _Input(NamedTuple):
    """The digest of the examples, in the form that `batch_job.fingerprint` takes."""

    digest: str


def _compute(
    model: BertPreTrainedModel,
    task: Task,
    features: Sequence[Feature],
    partial: PartialOutput,
    reporter: Reporter,
) -> int:
    """Compute the logits of the sequences that `partial` lacks, and append them to `partial`.

    Returns:
        The number of sequences that an earlier run has computed.
    """
    ends = [0, *accumulate(map(task.size, features))]
    if partial.done not in ends:
        raise ValueError(f"OUT: {partial.folder} is damaged, allowed: an unfinished run, or none")
    resumed = ends.index(partial.done)
    tokens = batch_job.WINDOW_BATCHES * evaluate.TOKENS_PER_BATCH
    with reporter.progress(len(features), resumed) as advance:
        for window in batch_job.windows(
            features[resumed:], tokens, lambda feature: len(feature["input_ids"])
        ):
            rows = evaluate.compute(model, task, window).rows
            partial.append(torch.cat(rows).numpy())
            advance(len(window))
    return resumed


def _logits(task: Task, features: Sequence[Feature], rows: NDArray[np.float32]) -> list[Tensor]:
    """Divide the rows of all sequences into the logits of each sequence."""
    ends = [0, *accumulate(map(task.size, features))]
    # torch needs memory that it may write to, but the rows are read-only, so they are copied.
    return [torch.from_numpy(rows[start:end].copy()) for start, end in pairwise(ends)]


def _read_ids(task: Task, data: Path, field: str, count: int) -> list[Any]:
    """Return the ids of the examples of a file.

    Raises:
        ValueError: If the examples are questions, if the data have no fields, if a row has no such
            field, or if the file has not `count` rows.
    """
    if isinstance(task, AnswerQuestions):
        raise ValueError(f"id_field: got {field!r}, allowed: None for questions, which have ids")
    if data.is_dir() or content_suffix(data) not in FORMATS:
        allowed = f"None for {data}; only {', '.join(FORMATS)} have fields"
        raise ValueError(f"id_field: got {field!r}, allowed: {allowed}")
    ids = [record.values[0] for record in read_records(data, (field,))]
    if len(ids) != count:
        raise ValueError(f"data: {data} changed while it was read, allowed: no change")
    return ids


def _labels(source: Source, least: int = 2) -> Labels:
    names = source.labels()
    with naming_config(source.folder):
        return Labels(names, least=least)


def _set_threshold(task: Task, source: Source, threshold: float | None) -> None:
    """Set the threshold of a multi-label classification, unless it is None.

    Raises:
        ValueError: If the threshold is not in (0, 1), or if the task is not multi-label
            classification.
    """
    if threshold is None:
        return
    check_threshold(threshold)
    if not isinstance(task, Classify) or task.multi is None:
        raise ValueError(
            f"threshold: got {threshold}, allowed: None, because {source.folder} does not classify "
            "by several labels (problem_type multi_label_classification)"
        )
    task.multi = MultiLabel(threshold=threshold)


def _refuse_repeated_ids(questions: Sequence[Question]) -> None:
    """Raise ValueError if an id repeats, because a .json file has one answer for each id."""
    places: dict[str, str] = {}
    for question in questions:
        earlier = places.setdefault(str(question.id), question.place)
        if earlier != question.place:
            raise ValueError(
                f"{question.place}: its id is that of {earlier}, allowed: different ids for a "
                ".json file, or a .jsonl file"
            )


def _task(
    source: Source,
    text_field: str,
    pair_field: str | None,
    words_field: str,
    answering: Mapping[str, Any],
) -> Task:
    """Return the task of a fine-tuned model."""
    classes = source.classes()
    if classes == [AnswerQuestions.kind.__name__]:
        chosen = {name: value for name, value in answering.items() if value is not None}
        check_answering(**{**DEFAULTS, **chosen})
        with naming_config(source.folder):
            return AnswerQuestions.of(source.config, answering)
    for name, value in answering.items():
        if value is not None:
            allowed = f"None, because {source.folder} does not answer questions"
            raise ValueError(f"{name}: got {value!r}, allowed: {allowed}")
    if classes == [Tag.kind.__name__]:
        return Tag(words_field, "tags", _labels(source))
    if classes == [Classify.kind.__name__]:
        fields = (text_field,) if pair_field is None else (text_field, pair_field)
        # The scores are those of the text-classification pipeline of transformers.
        with naming_config(source.folder):
            function = score_function(source.config)
        if function == "none":
            numbers = _labels(source) if source.config.num_labels > 1 else None
            return Classify(fields, "label", numbers, regression=True)
        several = function == "sigmoid"
        labels = _labels(source, 1 if several else 2)
        multi = MultiLabel() if several else None
        return Classify(fields, "label", labels, regression=False, multi=multi)
    raise ValueError(
        f"model: {source.folder} is a {', '.join(classes) or 'model without a class'}, allowed: "
        f"{', '.join(CLASSES)}"
    )
