"""Extraction of the answers to questions from their contexts."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastbert.config import BertConfig
from fastbert.data import PackedCollatorForSequenceClassification
from fastbert.data.model_tokenizer import ModelTokenizer, Window
from fastbert.data.records import NoField
from fastbert.data.squad import FORMATS, Answer, Question, read_questions
from fastbert.finetuning.answer_figures import answer_figures
from fastbert.finetuning.metrics import Figures
from fastbert.finetuning.options import FinetuneOptions
from fastbert.finetuning.task import Batch, Feature, Judgement, Task
from fastbert.modules import BertForQuestionAnswering
from fastbert.training.options import check, is_count, is_number

# These keys of config.json say whether a question may have no answer, and store the options of
# `AnswerOptions`. The example run_qa.py of transformers has options with the same names. The models
# of transformers do not read these keys.
UNANSWERED = "version_2_with_negative"
KEYS = {
    "stride": "doc_stride",
    "longest_answer": "max_answer_length",
    "no_answer_threshold": "null_score_diff_threshold",
}
STRIDE, LONGEST_ANSWER, NO_ANSWER_THRESHOLD = 128, 30, 0.0
DEFAULTS: dict[str, Any] = {
    "stride": STRIDE,
    "longest_answer": LONGEST_ANSWER,
    "no_answer_threshold": NO_ANSWER_THRESHOLD,
}


def check_answering(stride: Any, longest_answer: Any, no_answer_threshold: Any) -> None:
    """Raise ValueError, naming the option, if an option of `AnswerOptions` is not allowed."""
    sound = is_count(stride) or (stride == 0 and stride is not False)
    check("stride", stride, "an integer >= 0", sound)
    check("longest_answer", longest_answer, "an integer >= 1", is_count(longest_answer))
    sound = is_number(no_answer_threshold)
    check("no_answer_threshold", no_answer_threshold, "a finite number", sound)


@dataclass(frozen=True, kw_only=True)
class AnswerOptions(FinetuneOptions):
    """Options of the extraction of answers.

    The data are .json files in the layout of SQuAD 1.1 or 2.0, or .jsonl or .parquet files with the
    fields ``id``, ``question``, ``context`` and ``answers``. The default of `max_length` is 384, or
    the limit of the model if it is smaller.

    Args:
        stride: Number of tokens that two consecutive windows of a long context share. A number
            above a third of `max_length` counts as a third of `max_length`.
        longest_answer: Largest number of tokens of an answer that the model gives.
        no_answer_threshold: The model gives no answer if the score of no answer minus the score of
            the best answer is larger than this number. Each score is a sum of two logits. The
            threshold has no effect if all questions of the training part have an answer.

    The ``config.json`` of the model stores these options.
    """

    stride: int = STRIDE
    longest_answer: int = LONGEST_ANSWER
    no_answer_threshold: float = NO_ANSWER_THRESHOLD

    def __post_init__(self) -> None:
        """Raise ValueError if an option is not allowed."""
        super().__post_init__()
        check_answering(self.stride, self.longest_answer, self.no_answer_threshold)

    def task(self) -> AnswerQuestions:
        """Return the extraction of answers with these options."""
        return AnswerQuestions(
            self.stride, self.longest_answer, no_answer_threshold=self.no_answer_threshold
        )


class _Span(NamedTuple):
    """The best answer in a window.

    Attributes:
        score: Sum of the logit of the answer's start and the logit of the answer's end.
        first: Index of the answer's first token.
        last: Index of the answer's last token.
        none: Score of no answer in this window: the sum of the two logits of ``[CLS]``.
    """

    score: float
    first: int
    last: int
    none: float


class _Candidate(NamedTuple):
    """The best non-empty answer to a question, over all windows of the question's context.

    Attributes:
        text: The text of the answer.
        score: Score of the answer; see `_Span`.
        none: The smallest score of no answer over all windows.
    """

    text: str
    score: float
    none: float


class AnswerQuestions(Task):
    """The task of `BertForQuestionAnswering` (Devlin et al. 2019, sections 4.2 and 4.3).

    If a window does not contain the answer, the start and end targets are the position of
    ``[CLS]``.

    Attributes:
        unanswered: Whether a question may have no answer; `learn` reads this from the data.
    """

    name = "qa"
    formats = FORMATS
    kind = BertForQuestionAnswering
    head = ("qa_outputs.",)
    main = ("f1", "F1 of words")
    longest = 384

    def __init__(
        self,
        stride: int,
        longest_answer: int,
        *,
        no_answer_threshold: float = NO_ANSWER_THRESHOLD,
        unanswered: bool = False,
    ) -> None:
        """Store the options, which `AnswerOptions` describes."""
        self.stride, self.longest_answer, self.unanswered = stride, longest_answer, unanswered
        self.no_answer_threshold = no_answer_threshold
        self._collate = PackedCollatorForSequenceClassification()

    @classmethod
    def of(cls, config: BertConfig, given: Mapping[str, Any]) -> AnswerQuestions:
        """Return the task of a fine-tuned model.

        Args:
            config: The configuration, which may store the options of the training.
            given: Values of options by name, as in `AnswerOptions`. A value replaces the option
                that `config` stores, and None leaves the stored option. If
                ``no_answer_threshold`` is a number, questions may have no answer.

        Raises:
            ValueError: If an option is not allowed.
        """
        stored = {name: config.extra.get(KEYS[name], value) for name, value in DEFAULTS.items()}
        chosen = {name: value for name, value in given.items() if value is not None}
        options = {**stored, **chosen}
        check_answering(**options)
        may_be_empty = bool(config.extra.get(UNANSWERED)) or "no_answer_threshold" in chosen
        return cls(
            options["stride"],
            options["longest_answer"],
            no_answer_threshold=options["no_answer_threshold"],
            unanswered=may_be_empty,
        )

    def read(self, path: Path, *, labelled: bool = True) -> list[Question]:
        """Read questions; see `Task.read`."""
        return list(read_questions(path, answered=labelled))

    def unlabelled(self, path: Path) -> str | None:
        """Return a message if no question in `path` has an answer; see `Task.unlabelled`."""
        try:
            answered = any(question.answers for question in read_questions(path))
        except NoField as error:
            if error.field != "answers":
                raise
            return str(error)
        # If the training part has questions without an answer, "no answer" is a label, too.
        return None if answered or self.unanswered else f"{path}: no question has an answer"

    def learn(self, examples: Sequence[Question]) -> None:
        """Store whether the training part has questions without an answer."""
        self.unanswered = any(not example.answers for example in examples)

    def group(self, example: Question) -> Hashable:
        """Return the context, because all questions about one context are held out together."""
        return example.context

    def settings(self) -> dict[str, Any]:
        """Return the entries of ``config.json``: two labels (start and end), and the options."""
        options = {key: getattr(self, name) for name, key in KEYS.items()}
        return {"num_labels": 2, UNANSWERED: self.unanswered, **options}

    def features(self, example: Question, tokenizer: ModelTokenizer) -> list[Feature]:
        """Encode a question with each window of its context; see `Task.features`."""
        stride = min(self.stride, tokenizer.limit // 3)
        windows = tokenizer.encode_windows(example.text, example.context, stride)
        answer = example.answers[0] if example.answers else None
        features = []
        for window in windows:
            start, end = _tokens(window, answer)
            features.append(
                {
                    "input_ids": window.ids,
                    "token_type_ids": window.token_types,
                    "start_positions": start,
                    "end_positions": end,
                    "offsets": window.offsets,
                }
            )
        return features

    def collate(self, features: Sequence[Feature]) -> Batch:
        """Build a packed batch with the positions of the answers."""
        positions = {
            name: torch.tensor([feature[name] for feature in features])
            for name in ("start_positions", "end_positions")
        }
        return {**self._collate(features), **positions}

    def rows(self, output: Any, lengths: list[int]) -> list[Tensor]:
        """Return, for each sequence, the logits of start and end, of shape ``(length, 2)``."""
        both = torch.stack((output.start_logits, output.end_logits), dim=-1)
        return [row[:length] for row, length in zip(both, lengths, strict=True)]

    def judge(
        self, examples: Sequence[Question], features: Sequence[Feature], rows: Sequence[Tensor]
    ) -> Judgement:
        """Compute the figures of SQuAD's evaluation script; see `answer_figures`."""
        best = self._candidates(examples, features, rows)
        figures = answer_figures(
            [self._said(candidate) for candidate in best],
            [candidate.text for candidate in best],
            [candidate.none - candidate.score for candidate in best],
            [[answer.text for answer in example.answers] for example in examples],
        )
        return Judgement(figures, None)

    def answers(
        self, examples: Sequence[Question], features: Sequence[Feature], rows: Sequence[Tensor]
    ) -> list[dict[str, Any]]:
        """Return the answer to each question; an empty text means that the question has no answer.

        The score of an answer is the sum of the logits of its start and its end. In each window,
        the score of no answer is the sum of the two logits of ``[CLS]``; ``no_answer`` is the
        smallest of these scores. If questions may have no answer, and ``no_answer`` exceeds the
        score of the answer by more than `no_answer_threshold`, the returned answer is empty.
        """
        return [
            {
                "id": example.id,
                "answer": self._said(candidate),
                "score": candidate.score,
                "no_answer": candidate.none,
            }
            for example, candidate in zip(
                examples, self._candidates(examples, features, rows), strict=True
            )
        ]

    def _said(self, candidate: _Candidate) -> str:
        """Return the candidate's text, or an empty text if the scores decide for no answer."""
        difference = candidate.none - candidate.score
        return "" if self.unanswered and difference > self.no_answer_threshold else candidate.text

    def _candidates(
        self, examples: Sequence[Question], features: Sequence[Feature], rows: Sequence[Tensor]
    ) -> list[_Candidate]:
        """Return the best answer to each question; the arguments are as for `judge`."""
        best: list[tuple[float, str]] = [(-float("inf"), "")] * len(examples)
        none = [float("inf")] * len(examples)
        for feature, row in zip(features, rows, strict=True):
            index = feature["example"]
            span = _best_span(row, feature["offsets"], self.longest_answer)
            none[index] = min(none[index], span.none)
            if span.score > best[index][0]:
                start = feature["offsets"][span.first][0]
                end = feature["offsets"][span.last][1]
                best[index] = (span.score, examples[index].context[start:end])
        return [
            _Candidate(text, score, nothing)
            for (score, text), nothing in zip(best, none, strict=True)
        ]

    def describe(self, figures: Figures) -> str:
        """Format exact match and F1, and the figures of questions without an answer."""
        text = f"exact match {figures['exact_match']:.1%}, F1 {figures['f1']:.1%}"
        if "best_f1" not in figures:
            return text
        kinds = (("with an answer", "HasAns_f1"), ("without one", "NoAns_f1"))
        parts = [f"{figures[name]:.1%} {kind}" for kind, name in kinds if name in figures]
        threshold = f"{figures['best_f1']:.1%} at the threshold {figures['best_f1_thresh']:.3g}"
        return f"{text} ({', '.join(parts)}; at best {threshold})"


def _tokens(window: Window, answer: Answer | None) -> tuple[int, int]:
    """Return the indices of the first and last token of an answer in a window.

    The result is (0, 0) if there is no answer, or if the answer is not wholly in the window.
    """
    if answer is None:
        return 0, 0
    start, end = answer.start, answer.start + len(answer.text)
    inside = [
        (index, offset)
        for index, offset in enumerate(window.offsets)
        if offset is not None and offset[0] < end and offset[1] > start
    ]
    spans = [offset for offset in window.offsets if offset is not None]
    whole = spans and spans[0][0] <= start and spans[-1][1] >= end
    if not inside or not whole:
        return 0, 0
    return inside[0][0], inside[-1][0]


def _best_span(row: Tensor, offsets: Sequence[Any], longest: int) -> _Span:
    """Return the best span of at most `longest` tokens of the context, from logits ``(L, 2)``."""
    places = [index for index, offset in enumerate(offsets) if offset is not None]
    none = float(row[0, 0] + row[0, 1])
    if not places:
        return _Span(-float("inf"), 0, 0, none)
    first, length = places[0], len(places)
    start, end = row[first : first + length].unbind(-1)
    sums = start.unsqueeze(1) + end.unsqueeze(0)
    allowed = torch.ones_like(sums, dtype=torch.bool).triu().tril(longest - 1)
    best = int(sums.masked_fill(~allowed, -float("inf")).argmax())
    begins, ends = divmod(best, length)
    return _Span(float(sums[begins, ends]), first + begins, first + ends, none)
