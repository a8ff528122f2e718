"""Compute labels with their scores, for each line of a file or for one text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastbert import json_file
from fastbert.config import OWN_TYPES
from fastbert.jobs.batch_job import compute, fingerprint
from fastbert.jobs.loading import load_whole, refuse_backend
from fastbert.jobs.reporter import SILENT, Reporter
from fastbert.jobs.texts import Id, Texts, blocks, id_column, write_parquet

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from fastbert.config import BertConfig


class Classifier:
    """A classification model with its tokenizer, the names of its labels and its score function.

    Args:
        model: Folder or hub id of a checkpoint.
        max_length: Largest number of tokens of a text; None is the limit of the model folder.
        backend: Backend of the model; None lets each operation choose.

    Raises:
        ValueError: If the checkpoint has no classification head or has a setting that is not
            supported, or if `max_length` exceeds the number of positions of the model.
    """

    def __init__(
        self, model: str, *, max_length: int | None = None, backend: str | None = None
    ) -> None:
        """Find and load the model, on a CUDA device if there is one."""
        import torch

        from fastbert.inference.text_batches import LimitedTokenizer
        from fastbert.io import checkpoint
        from fastbert.io import sentence_transformers_folder as stored

        self.folder, self.backend = checkpoint.find(model), backend
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        settings = stored.SentenceFolder(self.folder)
        if stored.is_cross_encoder(self.folder):
            settings = stored.read_cross_encoder(self.folder)
        config, _ = checkpoint.read_settings(settings.encoder)
        with checkpoint.naming_config(settings.encoder):
            self.labels = label_names(config)
        self.function = score_function(config, settings.activation)
        self.model = _load(settings.encoder, config, backend).to(self.device)
        self.tokenizer = LimitedTokenizer(settings, config.max_length, max_length)

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        """Return the scores of a packed batch, fp32 of shape ``(B, labels)``."""
        logits = self.model(**batch).logits.float()
        if self.function == "softmax":
            return logits.softmax(-1)
        return logits.sigmoid() if self.function == "sigmoid" else logits


def _load(folder: Path, config: BertConfig, backend: str | None) -> torch.nn.Module:
    if config.model_type not in OWN_TYPES:
        from fastbert.integrations.stock_heads import StockHead

        refuse_backend(backend, config.model_type)
        return StockHead("AutoModelForSequenceClassification", folder)
    from fastbert.modules import BertForSequenceClassification

    parts, head = ("pooler.", "classifier."), "classification head"
    return load_whole(BertForSequenceClassification, folder, backend, parts, head)


def label_names(config: BertConfig) -> list[str]:
    """Return the names of the labels by index.

    Args:
        config: The configuration, with ``id2label``.

    Returns:
        The names.

    Raises:
        ValueError: If ``id2label`` lacks an index or repeats a name.
    """
    named = config.to_dict()["id2label"]
    try:
        names = [str(named[str(index)]) for index in range(config.num_labels)]
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(
            f"MODEL: its id2label is {named!r}, allowed: a name for each of "
            f"0 … {config.num_labels - 1}"
        ) from error
    if len(set(names)) < len(names):
        raise ValueError(f"MODEL: its id2label has the names {names}, allowed: different names")
    return names


# The keys are the classes of torch.nn that a cross-encoder may name as its activation. The values
# are the names of the score functions.
FUNCTIONS = {"Sigmoid": "sigmoid", "Identity": "none"}


def score_function(config: BertConfig, activation: str | None = None) -> str:
    """Return the function that turns logits into scores: "softmax", "sigmoid" or "none".

    Args:
        config: The configuration. Its ``config.json`` may name the activation of a cross-encoder.
        activation: The activation in the settings of a cross-encoder; None takes the activation in
            `config`. If neither names an activation, the function is that of the
            text-classification pipeline of transformers.

    Returns:
        The name of the function.

    Raises:
        ValueError: If the activation is not supported.
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
    """Classify one text.

    Args:
        model: Folder or hub id of a checkpoint.
        text: The text to classify.
        max_length: As in `Classifier`.
        backend: As in `Classifier`.

    Returns:
        ``label``, ``score`` and ``scores``, as in `results`.

    Raises:
        ValueError: As in `Classifier` and `LimitedTokenizer`.
    """
    import torch

    from fastbert.inference.text_batches import pack

    classifier = Classifier(model, max_length=max_length, backend=backend)
    with torch.inference_mode():
        scores = classifier.forward(pack([classifier.tokenizer((text,))], classifier.device))
    return next(results(scores.cpu().numpy(), classifier.labels))


def run(
    classifier: Classifier,
    texts: Texts,
    target: Path,
    *,
    tokens_per_batch: int = 8192,
    reporter: Reporter = SILENT,
) -> dict[str, Any]:
    """Write the label and the scores of each line to a file.

    Args:
        classifier: The model that computes the scores.
        texts: The lines of INPUT, with one text or two.
        target: Path of OUT, the file that the job writes. The format is JSON lines for the suffix
            .jsonl, and parquet for any other suffix. The file appears once it is complete.
        tokens_per_batch: Largest number of tokens of a batch, unless a single line is longer.
        reporter: Receives notes and progress.

    Returns:
        The summary of `compute`, the labels and the score function.

    Raises:
        ValueError: As in `compute`.
    """
    labels = classifier.labels

    def write(rows: NDArray[np.float32], path: Path) -> None:
        writer = write_jsonl if path.suffix.lower() == ".jsonl" else write_table
        writer(rows, labels, path, texts if texts.id_field else None)

    summary = compute(
        texts,
        target,
        tokenizer=classifier.tokenizer,
        forward=classifier.forward,
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


def results(
    rows: NDArray[np.float32], labels: list[str], ids: Iterator[Id] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield a dict with the label and the scores of each row.

    Args:
        rows: Scores, fp32 of shape ``(count, labels)``.
        labels: The names of the labels.
        ids: An iterator whose next elements are the ids of these rows; None gives no ids.

    Yields:
        The ``id`` if there are ids, the best ``label``, its ``score``, and the ``scores`` of all
        labels by name.

    Examples:
        >>> import numpy as np
        >>> from fastbert.jobs.classify import results
        >>> next(results(np.array([[0.25, 0.75]], np.float32), ["bad", "good"]))
        {'label': 'good', 'score': 0.75, 'scores': {'bad': 0.25, 'good': 0.75}}
    """
    for best, scores in zip(rows.argmax(-1).tolist(), rows.tolist(), strict=True):
        yield {
            **({} if ids is None else {"id": next(ids)}),
            "label": labels[best],
            "score": scores[best],
            "scores": dict(zip(labels, scores, strict=True)),
        }


def write_jsonl(
    rows: NDArray[np.float32], labels: list[str], path: Path, ids: Texts | None = None
) -> None:
    """Write a .jsonl file whose lines are the dicts that `results` yields.

    Args:
        rows: Scores, fp32 of shape ``(count, labels)``.
        labels: The names of the labels.
        path: Path of the file.
        ids: The texts with the ids of the rows; None writes no ids.
    """
    with path.open("w", encoding="utf-8") as file:
        for block in _results_of(rows, labels, ids):
            for result in block:
                file.write(json.dumps(json_file.jsonable(result), ensure_ascii=False) + "\n")


def write_table(
    rows: NDArray[np.float32], labels: list[str], path: Path, ids: Texts | None = None
) -> None:
    """Write a parquet file whose rows are the dicts that `results` yields.

    The column ``scores`` is a struct with a field for each label. The arguments are the same as in
    `write_jsonl`.
    """
    import pyarrow as pa

    scores = pa.struct({label: pa.float32() for label in labels})
    rest = {"label": pa.string(), "score": pa.float32(), "scores": scores}
    schema = pa.schema({**id_column(ids), **rest})
    batches = (
        pa.RecordBatch.from_pylist(list(block), schema=schema)
        for block in _results_of(rows, labels, ids)
    )
    write_parquet(path, schema, batches)


def _results_of(
    rows: NDArray[np.float32], labels: list[str], texts: Texts | None
) -> Iterator[Iterator[dict[str, Any]]]:
    """Yield the iterator that `results` returns for each block of rows."""
    ids = None if texts is None else texts.ids()
    for block in blocks(rows):
        yield results(block, labels, ids)
    # The iterator of the ids checks at its end whether the file of the texts has changed.
    for _ in ids or ():
        raise AssertionError("each row has an id")
