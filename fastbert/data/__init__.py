"""Documents, tokenizers, pairs, masking, prepared corpora, batches and collators for BERT."""

from fastbert.data.batches import PretrainingBatches
from fastbert.data.collators import (
    PackedCollatorForBiEncoder,
    PackedCollatorForMaskedLM,
    PackedCollatorForPreTraining,
    PackedCollatorForSequenceClassification,
    PackedCollatorForTokenClassification,
)
from fastbert.data.corpus import CorpusWarning, read_documents
from fastbert.data.json_tokenizer import JsonTokenizer, load_tokenizer, model_max_length
from fastbert.data.masking import mask_tokens
from fastbert.data.pairs import Instance, NextSentencePairs
from fastbert.data.prepared.batches import PreparedBatches
from fastbert.data.prepared.corpus import PreparedCorpus, is_prepared
from fastbert.data.prepared.examples import PreparedExamples
from fastbert.data.stories import stories
from fastbert.data.tokenizer import Encoded, WordPieceTokenizer
from fastbert.data.vocabulary import train_tokenizer

__all__ = [
    "CorpusWarning",
    "Encoded",
    "Instance",
    "JsonTokenizer",
    "NextSentencePairs",
    "PackedCollatorForBiEncoder",
    "PackedCollatorForMaskedLM",
    "PackedCollatorForPreTraining",
    "PackedCollatorForSequenceClassification",
    "PackedCollatorForTokenClassification",
    "PreparedBatches",
    "PreparedCorpus",
    "PreparedExamples",
    "PretrainingBatches",
    "WordPieceTokenizer",
    "is_prepared",
    "load_tokenizer",
    "mask_tokens",
    "model_max_length",
    "read_documents",
    "stories",
    "train_tokenizer",
]
