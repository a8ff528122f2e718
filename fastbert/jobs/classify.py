"""The labels of each line of a file, or of one text, with their scores."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastbert import json_file
from fastbert.jobs.batch_job import LimitedTokenizer, compute, fingerprint, pack
from fastbert.jobs.loading import load_whole, refuse_backend
from fastbert.jobs.reporter import SILENT, Reporter
from fastbert.jobs.texts import Texts, blocks, write_parquet

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from fastbert.config import BertConfig


class Classifier:
    """A classification model, its tokenizer, the names of its labels and what scores are."""

    def __init__(self, model: str, *, max_length: int | None, backend: str | None) -> None:
        import torch

        from fastbert.io import checkpoint
        from fastbert.io import sentence_transformers_folder as stored

        self.folder, self.backend = checkpoint.find(model), backend
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        settings = stored.SentenceFolder(self.folder)
        if stored.is_cross_encoder(self.folder):
            settings = stored.read_cross_encoder(self.folder)
        config, _ = checkpoint.read_settings(settings.encoder)
        self.labels = label_names(config)
        self.function = score_function(config, settings.activation)
        self.model = _load(settings.encoder, config, backend).to(self.device)
        settings = replace(settings, max_length=max_length or settings.max_length)
        self.tokenizer = LimitedTokenizer(settings, config.max_length)

    def __call__(self, batch: dict[str, Any]) -> torch.Tensor:
        """The scores (B, labels), float32, of a packed batch."""
        logits = self.model(**batch).logits.float()
        if self.function == "softmax":
            return logits.softmax(-1)
        return logits.sigmoid() if self.function == "sigmoid" else logits


def _load(folder: Path, config: BertConfig, backend: str | None) -> torch.nn.Module:
    if config.model_type != "bert":
        from fastbert.integrations.stock_heads import StockHead

        refuse_backend(backend, config.model_type)
        return StockHead("AutoModelForSequenceClassification", folder)
    from fastbert.modules import BertForSequenceClassification

    parts, head = ("pooler.", "classifier."), "classification head"
    return load_whole(BertForSequenceClassification, folder, backend, parts, head)


def label_names(config: BertConfig) -> list[str]:
    """The names by index, from ``id2label``. Raises ValueError when it is no list of names."""
    named = config.to_dict()["id2label"]
    try:
        names = [str(named[str(index)]) for index in range(config.num_labels)]
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(
            f"MODEL: its id2label is {named!r}, allowed: a name for each of "
            f"0 … {config.num_labels - 1}"
        ) from error
    if len(set(names)) < len(names):
        raise ValueError(f"MODEL: its id2label has the names {names}, allowed: different ones")
    return names


# The names of score functions by the classes of torch.nn that a cross-encoder may name.
FUNCTIONS = {"Sigmoid": "sigmoid", "Identity": "none"}


def score_function(config: BertConfig, activation: str | None = None) -> str:
    """softmax, sigmoid or none: the ``activation`` that a cross-encoder names, there or in its
    config.json, else as transformers' text-classification pipeline chooses.

    Raises ValueError for another activation.
    """
    from fastbert.io.sentence_transformers_folder import activation_name

    own = config.extra.get("sentence_transformers")
    path = own.get("activation_fn") if isinstance(own, dict) else None
    path = path or config.extra.get("sbert_ce_default_activation_function")
    if activation is None and path is not None:
        activation = activation_name("MODEL: the activation function of its scores", path)
    if activation is not None:
        if activation not in FUNCTIONS:
            raise ValueError(
                f"MODEL: the activation function of its scores is {activation!r}, allowed: "
                f"{', '.join(FUNCTIONS)}"
            )
        return FUNCTIONS[activation]
    if config.problem_type == "regression":
        return "none"
    if config.problem_type == "multi_label_classification" or config.num_labels == 1:
        return "sigmoid"
    return "softmax"


def classify_text(
    model: str, text: str, *, max_length: int | None, backend: str | None
) -> dict[str, Any]:
    """``label``, ``score`` and ``scores`` of one text."""
    import torch

    classifier = Classifier(model, max_length=max_length, backend=backend)
    with torch.inference_mode():
        scores = classifier(pack([classifier.tokenizer((text,))], classifier.device))
    return next(results(scores.cpu().numpy(), classifier.labels))


def run(
    classifier: Classifier,
    texts: Texts,
    target: Path,
    *,
    tokens_per_batch: int = 8192,
    reporter: Reporter = SILENT,
) -> dict[str, Any]:
    """Write the label and scores of each line of ``texts`` to ``target``; return the summary."""
    labels = classifier.labels

    def write(rows: NDArray[np.float32], path: Path) -> None:
        writer = write_jsonl if path.suffix.lower() == ".jsonl" else write_table
        writer(rows, labels, path)

    summary = compute(
        texts,
        target,
        tokenizer=classifier.tokenizer,
        forward=classifier,
        width=len(labels),
        tokens_per_batch=tokens_per_batch,
        device=classifier.device,
        fingerprint=fingerprint(
            (classifier.folder, classifier.tokenizer.folder),
            texts,
            command="classify",
            fields=len(texts.fields),
            max_length=classifier.tokenizer.limit,
            tokens_per_batch=tokens_per_batch,
            backend=classifier.backend,
        ),
        write=write,
        reporter=reporter,
    )
    return {**summary, "labels": labels, "function": classifier.function}


def results(rows: NDArray[np.float32], labels: list[str]) -> Iterator[dict[str, Any]]:
    """A record per row of scores (count, labels): the best label, its score, the scores of all."""
    for best, scores in zip(rows.argmax(-1).tolist(), rows.tolist(), strict=True):
        yield {
            "label": labels[best],
            "score": scores[best],
            "scores": dict(zip(labels, scores, strict=True)),
        }


def write_jsonl(rows: NDArray[np.float32], labels: list[str], path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        for block in blocks(rows):
            for result in results(block, labels):
                file.write(json.dumps(json_file.jsonable(result), ensure_ascii=False) + "\n")


def write_table(rows: NDArray[np.float32], labels: list[str], path: Path) -> None:
    """A .parquet; ``scores`` is a struct with a field per label."""
    import pyarrow as pa

    scores = pa.struct({label: pa.float32() for label in labels})
    schema = pa.schema({"label": pa.string(), "score": pa.float32(), "scores": scores})
    batches = (
        pa.RecordBatch.from_pylist(list(results(block, labels)), schema=schema)
        for block in blocks(rows)
    )
    write_parquet(path, schema, batches)
