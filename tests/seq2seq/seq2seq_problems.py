"""Small data and options for the seq2seq tests, and functions that use them."""

from __future__ import annotations

import io
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console

from fastbert.seq2seq import Seq2SeqOptions, Seq2SeqResult, train

# A model so small that a step takes a few milliseconds. With 64 pairs, 13 of them held out, an
# epoch has 4 steps.
SIZES = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "dropout": 0.1,
    "init_std": 0.1,
}
SMALL: dict[str, Any] = {
    "config": SIZES,
    "merges": 0,
    "max_length": 8,
    "held_out": 0.2,
    "epochs": 2,
    "batch_size": 14,
    "log_every": 3,
}


def words(letters: str) -> list[str]:
    """Return all words of three letters."""
    return ["".join(word) for word in product(letters, repeat=3)]


def write_pairs(path: Path, letters: str) -> Path:
    """Write a .tsv file with all words of three letters and the reversed words."""
    lines = [f"{word}\t{word[::-1]}" for word in words(letters)]
    path.write_text("\n".join(["source\ttarget", *lines]) + "\n", encoding="utf-8")
    return path


def run(options: Seq2SeqOptions) -> tuple[Seq2SeqResult, str]:
    """Train and return the result with the text of the console."""
    console = Console(file=io.StringIO(), width=500)
    result = train(options, console=console)
    return result, console.file.getvalue()
