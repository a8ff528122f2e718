"""Compute the embeddings of many text files on a Ray cluster, with one output file for each.

One Ray data set has the texts of all files, so that each worker loads the model only once. The
rows come back in the order of the texts, and this process writes each file while its rows arrive.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fastbert import atomic_file, json_file
from fastbert.jobs.batch_job import digest_of_model
from fastbert.jobs.encode import facts_of, write_parts
from fastbert.jobs.reporter import SILENT, Reporter
from fastbert.jobs.texts import FORMATS, Texts
from fastbert.text_file import content_name, content_suffix
from fastbert.version import __version__

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MANIFEST = "manifest.json"
# Number of texts in a batch of Ray. If a worker dies, the work on its current batch is lost.
BATCH_TEXTS = 256
# Number of cores of a worker without a GPU. Several small workers are faster than one large worker.
WORKER_CORES = 2


class Shard(NamedTuple):
    """A file of texts: its path, the fields to read, the number of texts and their digest.

    The digest is ``Texts.digest``, which includes the ids if there is a field of ids.
    """

    path: Path
    fields: tuple[str, ...]
    texts: int
    digest: str

    @classmethod
    def of(cls, texts: Texts) -> Shard:
        """Return the shard of a file that `texts` has read and checked."""
        return cls(texts.path.resolve(), texts.fields, texts.count, texts.digest)


def run(
    model: str,
    source: Path,
    target: Path,
    *,
    address: str = "auto",
    field: str = "text",
    id_field: str | None = None,
    reporter: Reporter = SILENT,
    **options: Any,
) -> dict[str, Any]:
    """Write the embeddings of each file of a folder to a .parquet file of the same name.

    A file of embeddings appears when it is complete. The same call after a stop computes only the
    files that are missing.

    Args:
        model: Folder or hub id of a checkpoint, which every machine of the cluster can read.
        source: A folder of .txt, .jsonl, .csv, .tsv and .parquet files, which every machine can
            read.
        target: The folder of the embeddings, and of manifest.json with the model and the options.
        address: The address of a cluster. ``auto`` uses the running cluster, or starts a cluster on
            this machine if there is none.
        field: Name of the field or column that has the text.
        id_field: Name of the field or column of the ids, which the files of embeddings then have in
            the column ``id``; None writes no ids.
        reporter: Receives notes and progress.
        options: The keyword arguments of `fastbert.inference.Embedder`.

    Returns:
        The summary: the numbers of files, texts and workers, the duration in seconds, and other
        entries.

    Raises:
        ImportError: If Ray is not installed.
        ConnectionError: If there is no cluster at `address`.
        ValueError: If a file has an error or changes while it is read, if two files differ in the
            suffix only, or if `target` was begun with another model, options or texts.
    """
    ray = _require_ray()
    from fastbert.inference import Embedder

    texts = _texts(source, field, id_field, reporter)
    shards = {name: Shard.of(part) for name, part in texts.items()}
    # The model is loaded here so that a wrong model or option raises an error before any work
    # starts. Each worker loads its own copy of the model.
    embedder = Embedder(model, **options)
    width, folders = embedder.width, embedder.folders
    facts = facts_of(embedder, options.get("backend"))
    del embedder
    _begin(
        target,
        {
            "fastbert": __version__,
            "model": [digest_of_model(folder) for folder in dict.fromkeys(folders)],
            "field": field,
            "id_field": id_field,
            **facts,
            "texts": {name: shard.digest for name, shard in shards.items()},
        },
    )
    missing = {n: shard for n, shard in shards.items() if not (target / f"{n}.parquet").exists()}
    finished = len(shards) - len(missing)
    if finished:
        reporter.note(f"{finished:,} of {len(shards):,} files in {target} are complete and stay")
    total = sum(shard.texts for shard in shards.values())
    left = sum(shard.texts for shard in missing.values())
    start, workers = time.perf_counter(), 0
    if missing:
        with _cluster(ray, address), reporter.progress(total, total - left) as advance:
            workers, resources = _workers(ray)
            reserved = ", ".join(f"{name}={count}" for name, count in resources.items())
            reporter.note(
                f"{workers} workers of Ray with {reserved} load the model; Ray gives them a low "
                "priority (niceness 15, unless RAY_worker_niceness is set), so that the first "
                "texts may take minutes while other programs use the cores"
            )
            # Ray's iterator of the batches must end before the connection to the cluster does.
            with closing(
                _embeddings(ray, missing, (model, field), id_field, options, workers, resources)
            ) as batches:
                rows = Rows(batches)
                for name, shard in missing.items():
                    parts = rows.take(shard.texts, advance)
                    path = target / f"{name}.parquet"
                    ids = texts[name] if id_field else None
                    atomic_file.write_atomically(path, _write(parts, width, ids))
    seconds = time.perf_counter() - start
    return {
        "output": target,
        "files": len(shards),
        "resumed": finished,
        "texts": total,
        "width": width,
        "workers": workers,
        "seconds": seconds,
        "texts_per_second": left / seconds,
    }


class Rows:
    """Consecutive embeddings that arrive in batches and are taken in parts of other sizes.

    Args:
        batches: Arrays of embeddings, each fp32 of shape ``(n, width)`` for n embeddings.
    """

    def __init__(self, batches: Iterator[NDArray[np.float32]]) -> None:
        """Start at the first batch."""
        self.batches = batches
        self.held: NDArray[np.float32] | None = None

    def take(self, count: int, advance: Callable[[int], None]) -> Iterator[NDArray[np.float32]]:
        """Yield the next `count` rows in parts.

        Args:
            count: Number of rows, at least 1.
            advance: Called with the number of rows of each part.

        Yields:
            The parts, fp32 of shape ``(n, width)``.

        Raises:
            ValueError: If fewer than `count` rows are left.
        """
        while count:
            rows = (
                self.held if self.held is not None and len(self.held) else next(self.batches, None)
            )
            if rows is None:
                raise ValueError(f"INPUT: {count:,} embeddings are missing at the end, allowed: 0")
            part, self.held = rows[:count], rows[count:]
            count -= len(part)
            yield part
            advance(len(part))


def _write(
    parts: Iterator[NDArray[np.float32]], width: int, ids: Texts | None
) -> Callable[[Path], None]:
    return lambda path: write_parts(parts, width, path, ids)


def _require_ray() -> Any:
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise ImportError("--ray: needs Ray Data; install fastbert's extra 'ray'") from error
    return ray


def _texts(source: Path, field: str, id_field: str | None, reporter: Reporter) -> dict[str, Texts]:
    """Return the checked texts of each file of INPUT by its name without suffixes, sorted."""
    if not source.is_dir():
        raise ValueError(f"INPUT: got {str(source)!r}, allowed with --ray: a folder of files")
    texts: dict[str, Texts] = {}
    for path in sorted(source.iterdir()):
        suffix, stem = content_suffix(path), Path(content_name(path)).stem
        if suffix not in FORMATS or path.name.startswith("."):
            continue
        if stem in texts:
            raise ValueError(
                f"INPUT: got {texts[stem].path.name} and {path.name} in {source}, allowed: "
                "names that differ without their suffixes, because each becomes a .parquet"
            )
        fields = ("text",) if suffix == ".txt" else (field,)
        texts[stem] = Texts(path, fields, reporter, id_field)
    if not texts:
        raise ValueError(
            f"INPUT: {str(source)!r} has no {', '.join(FORMATS)} file, allowed: at least one"
        )
    return texts


def _begin(target: Path, facts: dict[str, Any]) -> None:
    """Write the facts of a run into a new folder, or compare them with those of an earlier run."""
    facts, manifest = json_file.jsonable(facts), target / MANIFEST
    if not manifest.exists():
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ValueError(
                f"OUT: got {str(target)!r}, allowed with --ray: a new or empty folder, or the "
                "folder of the same command"
            )
        json_file.write(manifest, facts)
        return
    recorded = json_file.read(manifest)
    if changed := [name for name in facts if recorded.get(name) != facts[name]]:
        raise ValueError(
            f"OUT: {target} was begun with another {', '.join(changed)}, allowed: the same, or "
            "another folder"
        )


@contextmanager
def _cluster(ray: Any, address: str) -> Iterator[None]:
    """Connect this process to a cluster for the block, unless the process is connected already."""
    if ray.is_initialized():
        yield
        return
    quietly = {"log_to_driver": False, "logging_level": "error"}
    try:
        ray.init(address=address, **quietly)
    except ConnectionError:
        if address != "auto":
            raise
        ray.init(**quietly)
    try:
        yield
    finally:
        ray.shutdown()


def _workers(ray: Any) -> tuple[int, dict[str, int]]:
    """Return the number of workers, and the resources that Ray reserves for each worker."""
    resources = ray.cluster_resources()
    if gpus := int(resources.get("GPU", 0)):
        return gpus, {"num_gpus": 1}
    cores = max(1, int(resources.get("CPU", 1)))
    each = WORKER_CORES if cores >= 2 * WORKER_CORES else 1
    return cores // each, {"num_cpus": each}


def read_shards(batch: dict[str, Any], id_field: str | None = None) -> Iterator[dict[str, Any]]:
    """Read the texts of some shards, in a process of the cluster.

    Args:
        batch: Columns with the values of `Shard`, and a column ``field`` with the name that the
            column of the texts gets.
        id_field: As in `run`; the digests then cover the texts together with these ids.

    Yields:
        Batches with the column of the texts.

    Raises:
        ValueError: If a file has changed since `run` counted its texts.
    """
    for path, fields, field, digest in zip(
        batch["path"], batch["fields"], batch["field"], batch["digest"], strict=True
    ):
        texts = Texts(Path(path), tuple(fields), id_field=id_field)
        if texts.digest != digest:
            raise ValueError(f"INPUT: {path} changed while it was read, allowed: no change")
        held: list[str] = []
        for (text,) in texts:
            held.append(text)
            if len(held) == BATCH_TEXTS:
                yield {field: held}
                held = []
        if held:
            yield {field: held}


def _embeddings(
    ray: Any,
    shards: dict[str, Shard],
    arguments: tuple[str, str],
    id_field: str | None,
    options: dict[str, Any],
    workers: int,
    resources: dict[str, int],
) -> Generator[NDArray[np.float32], None, None]:
    """Yield the embeddings of all texts of all shards in order, in batches."""
    from fastbert.integrations.ray import Embed

    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    items = [
        {**shard._asdict(), "path": str(shard.path), "field": arguments[1]}
        for shard in shards.values()
    ]
    texts = ray.data.from_items(items, override_num_blocks=len(items))
    embedded = texts.map_batches(
        # Reading reserves no core, because the workers have reserved all of them.
        read_shards,
        fn_kwargs={"id_field": id_field},
        batch_size=1,
        num_cpus=0,
    ).map_batches(
        Embed,
        batch_size=BATCH_TEXTS,
        fn_constructor_args=arguments,
        fn_constructor_kwargs=options,
        compute=ray.data.ActorPoolStrategy(size=workers),
        **resources,
    )
    try:
        for batch in embedded.iter_batches(batch_size=BATCH_TEXTS, prefetch_batches=1):
            yield batch["embedding"]
    except ray.exceptions.RayTaskError as error:
        raise own_error(error) from error


def own_error(error: Exception) -> Exception:
    """Make the ValueError of a worker again from its text in an error of Ray.

    Args:
        error: An error that Ray raised in this process.

    Returns:
        A ValueError with the message of the worker's ValueError, or `error` itself if its text
        contains no ValueError.
    """
    mistake = re.search(r"^ValueError: (.+)$", str(error), re.MULTILINE)
    return ValueError(mistake[1]) if mistake else error
