"""Training of an encoder–decoder on pairs of texts, and the targets that it writes."""

from fastbert.seq2seq.options import Seq2SeqOptions
from fastbert.seq2seq.predict import Writer, predict
from fastbert.seq2seq.seq2seq import Seq2SeqResult, train

__all__ = ["Seq2SeqOptions", "Seq2SeqResult", "Writer", "predict", "train"]
