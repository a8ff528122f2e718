"""Generated data for the fine-tuning tests, and functions that write it into files and use it."""

from __future__ import annotations

import csv
import io
import json
import random
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet
from rich.console import Console

from fastbert.finetuning import FinetuneOptions, FinetuneResult, finetune

NAMES = ("dog", "cat", "fox", "hen", "owl")
PLACES = ("mill", "barn", "river", "wood", "hill")
OTHERS = ("old", "the", "saw", "ran", "and", "new")


def reviews(count: int, seed: int) -> list[dict]:
    """Return texts labelled ``animal`` or ``place`` by the kind of a text's first word."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        label = draw.choice(("animal", "place"))
        first = draw.choice(NAMES if label == "animal" else PLACES)
        rest = draw.choices(OTHERS, k=draw.randint(2, 6))
        rows.append({"text": " ".join([first, *rest]), "label": label})
    return rows


def write_rows(path: Path, rows: list[dict]) -> Path:
    """Write rows to a .csv, .tsv, .jsonl or .parquet file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix in (".csv", ".tsv"):
        delimiter = "," if path.suffix == ".csv" else "\t"
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0].keys(), delimiter=delimiter)
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".jsonl":
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        path.write_text("".join(lines), encoding="utf-8")
    else:
        parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


def run(options: FinetuneOptions) -> tuple[FinetuneResult, str]:
    """Fine-tune and return the result with the text of the console."""
    console = Console(file=io.StringIO(), width=500)
    result = finetune(options, console=console)
    return result, console.file.getvalue()
