"""Compute an embedding for each line of a file, in batches of at most a number of tokens."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastbert.jobs.batch_job import LimitedTokenizer, compute, fingerprint
from fastbert.jobs.reporter import SILENT, Reporter
from fastbert.jobs.texts import Texts, blocks, write_parquet

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fastbert.io.sentence_transformers_folder import SentenceFolder


def read_recipe(
    folder: Path,
    *,
    pooling: str | None = None,
    normalize: bool | None = None,
    max_length: int | None = None,
) -> SentenceFolder:
    """Read the steps that turn the rows of an encoder into an embedding.

    A folder of sentence-transformers states its steps. For any other folder, the embedding is the
    mean of the rows.

    Args:
        folder: Folder of the model.
        pooling: The pooling mode; None keeps the modes of the folder.
        normalize: Whether the last step scales the embedding to length 1; None keeps the steps of
            the folder.
        max_length: Largest number of tokens of a text; None keeps the limit of the folder.

    Returns:
        The steps and the settings of the folder.

    Raises:
        ValueError: If a file is damaged or not supported. The message names the file and the
            reason.
    """
    from fastbert.io import sentence_transformers_folder as stored

    recipe = stored.SentenceFolder(folder, (stored.Pooling(),))
    if stored.is_one(folder):
        recipe = stored.read(folder)
    first, *others = recipe.modules
    if pooling is not None and isinstance(first, stored.Pooling):
        first = replace(first, modes=(pooling,))
    ends_normalised = bool(others) and isinstance(others[-1], stored.Normalize)
    if normalize is True and not ends_normalised:
        others.append(stored.Normalize())
    elif normalize is False and ends_normalised:
        others.pop()
    return replace(recipe, modules=(first, *others), max_length=max_length or recipe.max_length)


def run(
    model: str,
    texts: Texts,
    target: Path,
    *,
    pooling: str | None = None,
    normalize: bool | None = None,
    max_length: int | None = None,
    tokens_per_batch: int = 8192,
    backend: str | None = None,
    reporter: Reporter = SILENT,
) -> dict[str, Any]:
    """Write an embedding of each line to a file.

    Args:
        model: Folder or hub id of a checkpoint.
        texts: The lines of INPUT, one text each.
        target: A .npy or .parquet file. It appears once it is complete.
        pooling: As in `read_recipe`.
        normalize: As in `read_recipe`.
        max_length: As in `read_recipe`.
        tokens_per_batch: Largest number of tokens of a batch, unless a single text is longer.
        backend: Backend of the model; None lets each operation choose.
        reporter: Receives notes and progress.

    Returns:
        The summary of `compute`, the shape of the embeddings, and the options of pooling and
        normalization.

    Raises:
        ValueError: As in `read_recipe` and `compute`, or if the checkpoint cannot be loaded.
    """
    import torch

    from fastbert.io import checkpoint
    from fastbert.jobs.after_encoder import AfterEncoder
    from fastbert.modules import BertModel

    folder = checkpoint.find(model)
    recipe = read_recipe(folder, pooling=pooling, normalize=normalize, max_length=max_length)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with warnings.catch_warnings():
        # A checkpoint without a pooler needs no warning, because nothing reads the pooler's output.
        warnings.filterwarnings("ignore", ".*newly initialized: pooler")
        encoder = BertModel.from_pretrained(recipe.encoder, backend=backend).to(device)
    config = encoder.config
    tokenizer = LimitedTokenizer(recipe, config.max_length)
    after = AfterEncoder(recipe, config.hidden_size, tokenizer.prompt_length()).to(device)
    options = {"pooling": "+".join(after.pooling.modes), "normalize": after.normalised}
    summary = compute(
        texts,
        target,
        tokenizer=tokenizer,
        forward=lambda batch: after(encoder(**batch).last_hidden_state, batch["cu_seqlens"]),
        width=after.width,
        tokens_per_batch=tokens_per_batch,
        device=device,
        fingerprint=fingerprint(
            (folder, recipe.encoder, *after.folders),
            texts,
            command="encode",
            **options,
            max_length=tokenizer.limit,
            tokens_per_batch=tokens_per_batch,
            backend=backend,
        ),
        write=None if target.suffix.lower() == ".npy" else write_embeddings,
        reporter=reporter,
    )
    return {**summary, "shape": (texts.count, after.width), **options}


def write_embeddings(rows: NDArray[np.float32], path: Path) -> None:
    """Write embeddings to a parquet file with the column ``embedding``.

    Args:
        rows: Embeddings, fp32 of shape ``(count, width)``. A value of the column is a list of fp32
            of the fixed size ``width``.
        path: Path of the file.
    """
    import pyarrow as pa

    schema = pa.schema({"embedding": pa.list_(pa.float32(), rows.shape[1])})

    def batches() -> Iterator[Any]:
        for block in blocks(rows):
            column = pa.FixedSizeListArray.from_arrays(pa.array(block.ravel()), rows.shape[1])
            yield pa.record_batch([column], schema=schema)

    write_parquet(path, schema, batches())
