"""Extraction of the answers to questions from their contexts."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastbert.config import BertConfig
from fastbert.data import PackedCollatorForSequenceClassification
from fastbert.data.model_tokenizer import ModelTokenizer, Window
from fastbert.data.squad import FORMATS, Answer, Question, read_questions
from fastbert.finetuning.metrics import Figures, exact_match, word_f1
from fastbert.finetuning.options import FinetuneOptions
from fastbert.finetuning.task import Batch, Feature, Judgement, Task
from fastbert.modules import BertForQuestionAnswering
from fastbert.training.options import check, is_count

# The key of config.json that says whether a question may have no answer.
UNANSWERED = "version_2_with_negative"
STRIDE, LONGEST_ANSWER = 128, 30


@dataclass(frozen=True, kw_only=True)
class AnswerOptions(FinetuneOptions):
    """Options of the extraction of answers.

    The data are .json files in the layout of SQuAD 1.1 or 2.0, or .jsonl or .parquet files with the
    fields ``id``, ``question``, ``context`` and ``answers``. The default of `max_length` is 384, or
    the limit of the model if it is smaller.

    Args:
        stride: Number of tokens that two consecutive windows of a long context share; at most a
            third of `max_length` is used.
        longest_answer: Largest number of tokens of an answer that the model gives.
    """

    stride: int = STRIDE
    longest_answer: int = LONGEST_ANSWER

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        stride = self.stride
        sound = is_count(stride) or (stride == 0 and stride is not False)
        check("stride", stride, "an integer >= 0", sound)
        longest = self.longest_answer
        check("longest_answer", longest, "an integer >= 1", is_count(longest))

    def task(self) -> AnswerQuestions:
        """Return the task."""
        return AnswerQuestions(self.stride, self.longest_answer)


class _Span(NamedTuple):
    """The best answer in a window.

    Attributes:
        score: Sum of the logits of its start and its end.
        first: Index of its first token.
        last: Index of its last token.
        none: Sum of the logits that mean that the window has no answer.
    """

    score: float
    first: int
    last: int
    none: float


class AnswerQuestions(Task):
    """The task of `BertForQuestionAnswering` (Devlin et al. 2019, sections 4.2 and 4.3).

    The answer of a window that does not contain it is the token ``[CLS]``.

    Attributes:
        unanswered: Whether a question may have no answer; `learn` takes this from the data.
    """

    name = "qa"
    formats = FORMATS
    kind = BertForQuestionAnswering
    head = ("qa_outputs.",)
    main = ("f1", "F1 of words")
    longest = 384

    def __init__(self, stride: int, longest_answer: int, *, unanswered: bool = False) -> None:
        """Keep the options."""
        self.stride, self.longest_answer, self.unanswered = stride, longest_answer, unanswered
        self._collate = PackedCollatorForSequenceClassification()

    @classmethod
    def of(cls, config: BertConfig) -> AnswerQuestions:
        """Return the task of a fine-tuned model, with the default options."""
        return cls(STRIDE, LONGEST_ANSWER, unanswered=bool(config.extra.get(UNANSWERED)))

    def read(self, path: Path, *, labelled: bool = True) -> list[Question]:
        """Read questions; see `Task.read`."""
        return list(read_questions(path, answered=labelled))

    def learn(self, examples: Sequence[Question]) -> None:
        """Look whether the training part has questions without an answer."""
        self.unanswered = any(not example.answers for example in examples)

    def group(self, example: Question) -> Hashable:
        """Return the context, because the questions about a context are held out together."""
        return example.context

    def settings(self) -> dict[str, Any]:
        """Return the two labels, start and end, and whether a question may have no answer."""
        return {"num_labels": 2, UNANSWERED: self.unanswered}

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
        """Return the logits of start and end of each sequence, of shape ``(2, length)``."""
        both = torch.stack((output.start_logits, output.end_logits), dim=1)
        return [row[:, :length] for row, length in zip(both, lengths, strict=True)]

    def judge(
        self, examples: Sequence[Question], features: Sequence[Feature], rows: Sequence[Tensor]
    ) -> Judgement:
        """Compute exact match and F1 as the script of SQuAD does, as fractions."""
        found = self.answers(examples, features, rows)
        exact = f1 = 0.0
        for example, said in zip(examples, found, strict=True):
            truths = [answer.text for answer in example.answers]
            exact += exact_match(said["answer"], truths)
            f1 += word_f1(said["answer"], truths)
        return Judgement({"exact_match": exact / len(examples), "f1": f1 / len(examples)}, None)

    def answers(
        self, examples: Sequence[Question], features: Sequence[Feature], rows: Sequence[Tensor]
    ) -> list[dict[str, Any]]:
        """Return the answer to each question; an empty answer means that there is none.

        The score of an answer is the sum of the logits of its start and its end. ``no_answer`` is
        the smallest sum of the logits of ``[CLS]`` in a window; the answer is empty if questions
        may have no answer and this number is larger than the score.
        """
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
        found = []
        for example, (score, text), nothing in zip(examples, best, none, strict=True):
            said = "" if self.unanswered and nothing > score else text
            found.append({"id": example.id, "answer": said, "score": score, "no_answer": nothing})
        return found

    def describe(self, figures: Figures) -> str:
        """Format exact match and F1."""
        return f"exact match {figures['exact_match']:.1%}, F1 {figures['f1']:.1%}"


def _tokens(window: Window, answer: Answer | None) -> tuple[int, int]:
    """Return the first and the last token of an answer; (0, 0) if the window lacks a part of it."""
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
    """Return the best span of at most `longest` tokens of the context."""
    places = [index for index, offset in enumerate(offsets) if offset is not None]
    none = float(row[0, 0] + row[1, 0])
    if not places:
        return _Span(-float("inf"), 0, 0, none)
    first, length = places[0], len(places)
    start, end = (part[first : first + length] for part in row)
    sums = start.unsqueeze(1) + end.unsqueeze(0)
    allowed = torch.ones_like(sums, dtype=torch.bool).triu().tril(longest - 1)
    best = int(sums.masked_fill(~allowed, -float("inf")).argmax())
    begins, ends = divmod(best, length)
    return _Span(float(sums[begins, ends]), first + begins, first + ends, none)
