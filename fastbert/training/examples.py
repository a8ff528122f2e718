"""Examples of masked words in held-out text, with the predictions of the trained model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fastbert.data import WordPieceTokenizer
from fastbert.modules import BertForPreTraining
from fastbert.modules.mask_filling import fill_masks

GUESSES = 3


@dataclass(frozen=True)
class Example:
    """A text with one ``[MASK]``.

    Attributes:
        text: The text.
        truth: The original word.
        guesses: Predictions of the model, the most probable first.
    """

    text: str
    truth: str
    guesses: list[str]


@torch.no_grad()
def predict_words(
    checkpoint: Path, documents: Sequence[Sequence[str]], max_length: int
) -> list[Example]:
    """Mask one word of each document and predict it with the model of a checkpoint.

    A text is cut to `max_length` tokens. The word is a single piece of at least four letters in the
    second half of the text. A document without such a word is skipped.

    Args:
        checkpoint: Folder of the checkpoint.
        documents: Documents, each a list of sentences.
        max_length: Largest number of tokens of a text.

    Returns:
        One example per document that has such a word.
    """
    tokenizer = WordPieceTokenizer.load(checkpoint)
    model = BertForPreTraining.from_pretrained(checkpoint).eval()

    def sentence(ids: list[int], _: int) -> str:
        return tokenizer.decode(ids[1:-1], skip_special_tokens=False)

    examples = []
    for index, document in enumerate(documents):
        ids = tokenizer.encode(" ".join(document), max_length=max_length)
        pieces = [tokenizer.id_to_token(i) or "" for i in ids]
        # The words are in the second half of the text, so that the first half helps to predict
        # them.
        words = [
            i
            for i in range(len(ids) // 2, len(ids) - 2)
            if len(pieces[i]) > 3 and pieces[i].isalpha() and not pieces[i + 1].startswith("##")
        ]
        if not words:
            continue
        place = random.Random(index).choice(words)
        truth, ids[place] = pieces[place], tokenizer.mask_id
        logits = model(input_ids=torch.tensor([ids])).prediction_logits[0, [place]]
        (mask,) = fill_masks(
            logits, ids, [place], GUESSES, token=tokenizer.id_to_token, sentence=sentence
        )
        guesses = [candidate["token"] or "" for candidate in mask["candidates"]]
        examples.append(Example(sentence(ids, place), truth, guesses))
    return examples
