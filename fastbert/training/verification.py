"""The check of the shards of a prepared corpus before a run reads from them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from fastbert.data.prepared.corpus import PreparedCorpus
from fastbert.ops.backend import processes_here

if TYPE_CHECKING:
    from accelerate import Accelerator


def verify(corpus: PreparedCorpus, accelerator: Accelerator, console: Console) -> None:
    """Compare the checksums of all shards with the manifest; local processes share the work.

    Args:
        corpus: The corpus.
        accelerator: accelerate's `Accelerator` of the run, whose processes must all call this
            function.
        console: Where the progress of this process is shown.

    Raises:
        OSError: If a file cannot be read.
        ValueError: If a shard is damaged. The message names the file.
    """
    begun = time.perf_counter()
    # Launchers other than torchrun do not say how many processes run on this machine, so each of
    # their processes compares all shards.
    count = processes_here()
    index = accelerator.local_process_index if count > 1 else 0
    size = sum(shard.bytes() for shard in corpus.shards)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task("comparing checksums", total=size / count)
        corpus.verify(lambda read: bar.advance(task, read), (index, count))
    accelerator.wait_for_everyone()
    console.print(
        f"{len(corpus.shards):,} shards of {size / 1e6:,.1f} MB verified in "
        f"{time.perf_counter() - begun:.1f} s",
        highlight=False,
        soft_wrap=True,
    )
