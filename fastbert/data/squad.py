"""Reading questions with their contexts and answers, in the format of SQuAD."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fastbert import json_file
from fastbert.data.records import read_records

FORMATS = (".json", ".jsonl", ".parquet")
FIELDS = ("id", "question", "context")


class Answer(NamedTuple):
    """An answer to a question.

    Attributes:
        text: The text of the answer.
        start: Index of its first character in the context.
    """

    text: str
    start: int


class Question(NamedTuple):
    """A question about a context.

    Attributes:
        place: The file, and the line or the paragraph, for error messages.
        id: Identifier of the question.
        text: The question.
        context: The text in which the answer is.
        answers: The answers; empty if the context has no answer.
    """

    place: str
    id: str
    text: str
    context: str
    answers: tuple[Answer, ...]


def read_questions(path: Path, *, answered: bool = True) -> Iterator[Question]:
    """Read the questions of a file.

    A .json file has the layout of SQuAD 1.1 or 2.0 (Rajpurkar et al. 2016, 2018): ``data``,
    ``paragraphs`` and ``qas``. A .jsonl or .parquet file has a row for each question, with the
    fields ``id``, ``question``, ``context`` and ``answers``; the last one is an object with the
    lists ``text`` and ``answer_start``.

    Args:
        path: Path of the file.
        answered: Whether the questions have answers that are read; if not, `answers` is empty.

    Yields:
        The questions in the order of the file.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is damaged, has another suffix or has no question, or if an answer
            is not at its place in the context. The message names the file, and the line or the
            paragraph.
    """
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise ValueError(f"{path}: got the suffix {suffix!r}, allowed: {', '.join(FORMATS)}")
    found = False
    for question in (_articles if suffix == ".json" else _rows)(path, answered):
        for answer in question.answers:
            _check_answer(question, answer)
        found = True
        yield question
    if not found:
        raise ValueError(f"{path}: the file has no question, allowed: at least one")


def _articles(path: Path, answered: bool) -> Iterator[Question]:
    articles = json_file.read(path, most=json_file.MAX_DATA_BYTES).get("data")
    if not isinstance(articles, list):
        raise ValueError(f"{path}: no list 'data', allowed: the layout of SQuAD")
    for a, article in enumerate(articles):
        for p, paragraph in enumerate(_of(path, f"data {a}", article, "paragraphs", list)):
            place = f"data {a}, paragraph {p}"
            context = _of(path, place, paragraph, "context", str)
            for q, entry in enumerate(_of(path, place, paragraph, "qas", list)):
                where = f"{place}, question {q}"
                identifier = _of(path, where, entry, "id", str)
                answers: tuple[Answer, ...] = ()
                if answered and not entry.get("is_impossible"):
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


def _of(path: Path, where: str, content: Any, name: str, kind: type) -> Any:
    """Return the entry `name` of an object; raise ValueError if it is absent or of another type."""
    value = content.get(name) if isinstance(content, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        got = "nothing" if value is None else f"a {type(value).__name__}"
        raise ValueError(f"{path}, {where}: {name}: got {got}, allowed: a {kind.__name__}")
    return value


def _rows(path: Path, answered: bool) -> Iterator[Question]:
    fields = (*FIELDS, "answers") if answered else FIELDS
    for place, values in read_records(path, fields):
        for field, value in zip(FIELDS, values, strict=False):
            if not isinstance(value, str):
                got = type(value).__name__
                raise ValueError(f"{place}: {field}: got a {got}, allowed: a string")
        identifier, question, context = values[:3]
        answers = _answers(place, values[3]) if answered else ()
        yield Question(f"{place} (id {identifier})", identifier, question, context, answers)


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
