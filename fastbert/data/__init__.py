"""Text to batches: documents, sentences, WordPiece, next-sentence pairs, masking, token budgets,
packed collators."""

from fastbert.data.batches import PretrainingBatches
from fastbert.data.collators import (
    PackedCollatorForBiEncoder,
    PackedCollatorForMaskedLM,
    PackedCollatorForPreTraining,
    PackedCollatorForSequenceClassification,
    PackedCollatorForTokenClassification,
)
from fastbert.data.corpus import CorpusWarning, read_documents
from fastbert.data.masking import mask_tokens
from fastbert.data.pairs import Instance, NextSentencePairs
from fastbert.data.stories import stories
from fastbert.data.tokenizer import WordPieceTokenizer
from fastbert.data.vocabulary import train_tokenizer

__all__ = [
    "CorpusWarning",
    "Instance",
    "NextSentencePairs",
    "PackedCollatorForBiEncoder",
    "PackedCollatorForMaskedLM",
    "PackedCollatorForPreTraining",
    "PackedCollatorForSequenceClassification",
    "PackedCollatorForTokenClassification",
    "PretrainingBatches",
    "WordPieceTokenizer",
    "mask_tokens",
    "read_documents",
    "stories",
    "train_tokenizer",
]
