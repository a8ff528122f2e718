"""Compute an embedding for each line of a file, in batches with a limited number of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastbert.jobs.batch_job import compute, fingerprint
from fastbert.jobs.reporter import SILENT, Reporter
from fastbert.jobs.texts import Texts, blocks, id_column, write_parquet

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fastbert.inference import Embedder


def run(
    model: str,
    texts: Texts,
    target: Path,
    *,
    reporter: Reporter = SILENT,
    **options: Any,
) -> dict[str, Any]:
    """Write an embedding of each line to a file.

    Args:
        model: Folder or hub id of a checkpoint.
        texts: The lines of INPUT, one text each.
        target: A .npy or .parquet file. The file appears once it is complete. A .parquet file has
            the column ``id`` if the texts have ids.
        reporter: Receives notes and progress.
        options: The keyword arguments of `fastbert.inference.Embedder`.

    Returns:
        The summary of `compute`, the shape of the embeddings, and the options of the layers,
        pooling and normalization.

    Raises:
        ValueError: As in `fastbert.inference.Embedder` and `compute`.
    """
    from fastbert.inference import Embedder

    embedder = Embedder(model, **options)
    facts = facts_of(embedder, options.get("backend"))

    def write(rows: NDArray[np.float32], path: Path) -> None:
        write_embeddings(rows, path, texts if texts.id_field else None)

    summary = compute(
        texts,
        target,
        tokenizer=embedder.tokenizer,
        forward=embedder.forward,
        width=embedder.width,
        tokens_per_batch=embedder.tokens_per_batch,
        device=embedder.device,
        fingerprint=fingerprint(
            embedder.folders,
            texts,
            command="encode",
            **facts,
        ),
        write=None if target.suffix.lower() == ".npy" else write,
        reporter=reporter,
    )
    told = {name: facts[name] for name in ("layers", "combine", "pooling", "normalize")}
    return {**summary, "shape": (texts.count, embedder.width), **told}


def facts_of(embedder: Embedder, backend: str | None) -> dict[str, Any]:
    """Return the options on which embeddings depend, each with the value that is in effect.

    Equivalent options give the same value. For example, the layer -1 gives the number of the last
    layer, and an option that is left out gives its default.

    Args:
        embedder: The model with its options.
        backend: The value of the option ``backend``.
    """
    return {
        "layers": embedder.states.numbers,
        "combine": embedder.states.combine,
        "pooling": "+".join(embedder.after.pooling.modes),
        "normalize": embedder.after.normalised,
        "max_length": embedder.tokenizer.limit,
        "tokens_per_batch": embedder.tokens_per_batch,
        "backend": backend,
    }


def write_embeddings(rows: NDArray[np.float32], path: Path, ids: Texts | None = None) -> None:
    """Write embeddings to the column ``embedding`` of a parquet file, and ids to the column ``id``.

    Args:
        rows: Embeddings, fp32 of shape ``(count, width)``. A value of the column ``embedding`` is a
            list of fp32 of the fixed size ``width``.
        path: Path of the file.
        ids: The texts with the ids of the rows; None writes no ids.
    """
    write_parts(blocks(rows), rows.shape[1], path, ids)


def write_parts(
    parts: Iterable[NDArray[np.float32]], width: int, path: Path, ids: Texts | None = None
) -> None:
    """Write embeddings as `write_embeddings` does, one part after another.

    Args:
        parts: Arrays of consecutive embeddings, each fp32 of shape ``(n, width)`` for n embeddings.
        width: Number of values of an embedding.
        path: Path of the file.
        ids: As in `write_embeddings`.
    """
    import pyarrow as pa

    named = id_column(ids)
    schema = pa.schema({**named, "embedding": pa.list_(pa.float32(), width)})

    def batches() -> Iterator[Any]:
        own = ids.ids() if ids is not None else iter(())
        for part in parts:
            columns = [pa.array(list(islice(own, len(part))), kind) for kind in named.values()]
            columns.append(pa.FixedSizeListArray.from_arrays(pa.array(part.ravel()), width))
            yield pa.record_batch(columns, schema=schema)
        # The iterator of the ids checks at its end whether the file of the texts has changed.
        for _ in own:
            raise AssertionError("each embedding has an id")

    write_parquet(path, schema, batches())
