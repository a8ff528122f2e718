"""One embedding per line of a file, batched by length under a token budget."""

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
    """What makes an embedding: of a sentence-transformers folder what it says, of any other the
    mean of the rows; each argument that is not None replaces that part.

    Raises ValueError naming the file and what is damaged or not served.
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
    """Write an embedding of each line of ``texts`` to ``target``; return the job's summary.

    Args:
        model: Folder or hub id of a checkpoint.
        texts: The lines of INPUT, one text each.
        target: A .npy or .parquet that appears when it is whole.
        pooling, normalize, max_length: See ``read_recipe``.
        tokens_per_batch: Token budget of a batch.
        backend: Backend of the model; None lets each operation choose.
        reporter: Receives notes and progress.
    """
    import torch

    from fastbert.io import checkpoint
    from fastbert.jobs.after_encoder import AfterEncoder
    from fastbert.modules import BertModel

    folder = checkpoint.find(model)
    recipe = read_recipe(folder, pooling=pooling, normalize=normalize, max_length=max_length)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with warnings.catch_warnings():
        # A checkpoint without a pooler is as good as any here: nothing reads the pooler's output.
        warnings.filterwarnings("ignore", ".*initialised afresh: pooler")
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
    """A .parquet with the column ``embedding``, a fixed-size list of float32."""
    import pyarrow as pa

    schema = pa.schema({"embedding": pa.list_(pa.float32(), rows.shape[1])})

    def batches() -> Iterator[Any]:
        for block in blocks(rows):
            column = pa.FixedSizeListArray.from_arrays(pa.array(block.ravel()), rows.shape[1])
            yield pa.record_batch([column], schema=schema)

    write_parquet(path, schema, batches())
