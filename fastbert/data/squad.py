"""Reading questions with their contexts and answers, in the format of SQuAD."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fastbert import json_file
from fastbert.data.records import NoField, read_records
from fastbert.text_file import content_suffix, read_text

FORMATS = (".json", ".jsonl", ".parquet")
FIELDS = ("question", "context")
# A large file may have at most one JSON value per this number of characters, on average; the
# training set of SQuAD 1.1 has one value per 15 characters. A value needs more memory than its
# text, so a file with more values could fill the memory.
BYTES_PER_VALUE = 8


class Answer(NamedTuple):
    """An answer to a question.

    Attributes:
        text: The text of the answer.
        start: Index of the first character of the answer in the context.
    """

    text: str
    start: int


class Question(NamedTuple):
    """A question about a context.

    Attributes:
        place: The file, and the line, row or paragraph, for error messages.
        id: Identifier of the question in the file.
        text: The question.
        context: The text that contains the answers, if there are any.
        answers: The answers; empty if the context has no answer, or if the answers are not read.
    """

    place: str
    id: str | int
    text: str
    context: str
    answers: tuple[Answer, ...]


def read_questions(path: Path, *, answered: bool = True) -> Iterator[Question]:
    """Read the questions of a file.

    A .json file has the layout of SQuAD 1.1 or 2.0 (Rajpurkar et al. 2016, 2018): ``data``,
    ``paragraphs`` and ``qas``. A .jsonl or .parquet file has a row for each question, with the
    fields ``id``, ``question``, ``context`` and ``answers``; the last field is an object with the
    lists ``text`` and ``answer_start``. If ``is_impossible`` is true, the question has no answer,
    and ``answers`` is ignored. A .json or .jsonl file may be compressed; see
    `fastbert.text_file.read_text`.

    Args:
        path: Path of the file.
        answered: Whether the answers are read; if not, ``Question.answers`` is empty.

    Yields:
        The questions in the order of the file.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is damaged, has another suffix or has no question, or if the context
            does not have an answer at its ``answer_start``. The message names the file, and the
            line or the paragraph.
    """
    suffix = content_suffix(path)
    if suffix not in FORMATS:
        raise ValueError(f"{path}: got the suffix {suffix!r}, allowed: {', '.join(FORMATS)}")
    any_question = False
    for question in (_articles if suffix == ".json" else _rows)(path, answered):
        for answer in question.answers:
            _check_answer(question, answer)
        any_question = True
        yield question
    if not any_question:
        raise ValueError(f"{path}: the file has no question, allowed: at least one")


def _articles(path: Path, answered: bool) -> Iterator[Question]:
    text = read_text(path)
    most = max(json_file.MAX_VALUES, len(text) // BYTES_PER_VALUE)
    try:
        content = json_file.parse(text, most)
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    articles = content.get("data") if isinstance(content, dict) else None
    if not isinstance(articles, list):
        raise ValueError(f"{path}: no list 'data', allowed: the layout of SQuAD")
    for a, article in enumerate(articles):
        for p, paragraph in enumerate(_of(path, f"data {a}", article, "paragraphs", list)):
            place = f"data {a}, paragraph {p}"
            context = _of(path, place, paragraph, "context", str)
            for q, entry in enumerate(_of(path, place, paragraph, "qas", list)):
                where = f"{place}, question {q}"
                answers: tuple[Answer, ...] = ()
                identifier = _identifier(f"{path}, {where}", entry)
                if answered and not _impossible(f"{path}, {where}", entry):
                    answers = tuple(
                        Answer(
                            _of(path, where, answer, "text", str),
                            _of(path, where, answer, "answer_start", int),
                        )
                        for answer in _of(path, where, entry, "answers", list)
                    )
                yield Question(
                    f"{path}, {where} (id {identifier})",
                    identifier,
                    _of(path, where, entry, "question", str),
                    context,
                    answers,
                )


def _identifier(place: str, entry: Any) -> str | int:
    value = entry.get("id") if isinstance(entry, dict) else None
    if not isinstance(value, (str, int)) or isinstance(value, bool):
        got = "nothing" if value is None else f"a {type(value).__name__}"
        raise ValueError(f"{place}: id: got {got}, allowed: a string or an integer")
    return value


def _impossible(place: str, entry: Any) -> bool:
    """Return whether ``is_impossible`` marks a question as having no answer."""
    value = entry.get("is_impossible")
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{place}: is_impossible: got {value!r:.100}, allowed: true or false")
    return bool(value)


def _of(path: Path, where: str, content: Any, name: str, kind: type) -> Any:
    """Return ``content[name]``; raise ValueError if it is absent or not of the type `kind`."""
    value = content.get(name) if isinstance(content, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        got = "nothing" if value is None else f"a {type(value).__name__}"
        message = f"{path}, {where}: {name}: got {got}, allowed: a {kind.__name__}"
        raise NoField(message, name) if value is None else ValueError(message)
    return value


def _rows(path: Path, answered: bool) -> Iterator[Question]:
    fields = ("id", *FIELDS, *(("answers",) if answered else ()))
    for place, values in read_records(path, fields, ("is_impossible",)):
        entry = dict(zip((*fields, "is_impossible"), values, strict=True))
        identifier = _identifier(place, entry)
        for field in FIELDS:
            if not isinstance(entry[field], str):
                got = type(entry[field]).__name__
                raise ValueError(f"{place}: {field}: got a {got}, allowed: a string")
        impossible = _impossible(place, entry)
        answers = _answers(place, entry["answers"]) if answered and not impossible else ()
        where = f"{place} (id {identifier})"
        yield Question(where, identifier, entry["question"], entry["context"], answers)


def _answers(place: str, content: Any) -> tuple[Answer, ...]:
    texts = content.get("text") if isinstance(content, dict) else None
    starts = content.get("answer_start") if isinstance(content, dict) else None
    if (
        not isinstance(texts, list)
        or not isinstance(starts, list)
        or len(texts) != len(starts)
        or not all(isinstance(text, str) for text in texts)
        or not all(isinstance(start, int) for start in starts)
    ):
        raise ValueError(
            f"{place}: answers: got {content!r:.200}, allowed: an object with the lists text and "
            "answer_start of the same length"
        )
    return tuple(map(Answer, texts, starts))


def _check_answer(question: Question, answer: Answer) -> None:
    text, start = answer
    there = question.context[start : start + len(text)] if start >= 0 else ""
    if not text or there != text:
        raise ValueError(
            f"{question.place}: the answer {text!r:.100} is not in its context at the character "
            f"{start}, where the context has {there!r:.100}"
        )
