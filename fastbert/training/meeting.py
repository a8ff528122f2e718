"""The process group of the processes that torchrun or ``accelerate launch`` starts."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as distributed

if TYPE_CHECKING:
    from accelerate import Accelerator

# Time between two reads of the store that the processes share, in seconds.
PAUSE = 0.01
# The name of this process in the store of its job.
OWN = secrets.token_hex(16)


def start_processes(purpose: str, folder: Path, *, tracker: str | None = None) -> Accelerator:
    """Return accelerate's `Accelerator`, which joins all processes of a launcher if there is one.

    Args:
        purpose: Name of the kind of run, for error messages.
        folder: Folder of the run.
        tracker: Name of the tracker that accelerate opens, if there is one.

    Raises:
        ImportError: If accelerate or matplotlib is not installed.
    """
    try:
        # matplotlib draws the curves at the end of the run; its absence is reported at the start.
        import matplotlib  # noqa: F401
        from accelerate import Accelerator
    except ImportError as error:
        message = f"{purpose} needs {error.name}: pip install 'fastbert[train]'"
        raise ImportError(message) from error
    join_processes()
    # The loop calls autocast itself, because the precision of accelerate applies to the whole
    # process and cannot change. Without cpu=True, accelerate ignores torchrun on a machine that has
    # no accelerator.
    return Accelerator(
        mixed_precision="no",
        cpu=not torch.accelerator.is_available(),
        log_with=tracker,
        project_dir=folder,
    )


def join_processes() -> None:
    """Join the group of the processes that torchrun has started; without torchrun, do nothing.

    After a failure, torchrun starts the processes again, and the attempts of a job share a store
    (torch 2.13). A process of the second attempt could read the address of a dead process of the
    first attempt in this store, and wait for that process forever. The processes therefore agree on
    a prefix that no earlier attempt has used, and put it before their keys. The count of restarts
    cannot be this prefix, because two machines can count differently.
    """
    if not distributed.is_available() or not distributed.is_torchelastic_launched():
        return
    if distributed.is_initialized():
        return
    store, rank, size = next(distributed.rendezvous("env://"))
    if size > 1:
        prefix = agree(distributed.PrefixStore("meeting", store), rank, size)
        attempt = distributed.PrefixStore(prefix, store)
        distributed.init_process_group(store=attempt, rank=rank, world_size=size)


def begin(folder: Path) -> None:
    """Note in the store of this torchrun job that the run in `folder` has begun."""
    store = _store_of_the_job()
    if store is not None:
        store.set(_begun(folder), OWN)


def begun_before(folder: Path) -> bool:
    """Return whether an earlier attempt of this torchrun job has begun the run in `folder`."""
    store, key = _store_of_the_job(), _begun(folder)
    return store is not None and store.check([key]) and store.get(key).decode() != OWN


def _begun(folder: Path) -> str:
    return f"fastbert/begun/{folder.resolve()}"


def _store_of_the_job() -> distributed.Store | None:
    """Return the store of the attempts of a job, or None without torchrun."""
    if not distributed.is_available() or not distributed.is_torchelastic_launched():
        return None
    return next(distributed.rendezvous("env://"))[0]


def agree(store: distributed.Store, rank: int, size: int) -> str:
    """Return a random text that is the same in all processes of an attempt and new in each attempt.

    Each process except the first writes a random number into the store. The first process answers
    each number that it reads, until all processes have confirmed its answer. An answer to the
    number of a dead process is never read.

    Args:
        store: A store that may have entries of earlier attempts, whose processes have ended.
        rank: Number of this process, from 0.
        size: Number of processes.
    """
    own = secrets.token_hex(16)
    if rank > 0:
        store.set(f"question/{rank}", own)
        answer: str = store.get(f"answer/{own}").decode()
        store.set(f"confirmed/{answer}/{rank}", "")
        return answer
    missing = set(range(1, size))
    while missing:
        for other in tuple(missing):
            if store.check([f"confirmed/{own}/{other}"]):
                missing.remove(other)
            elif store.check([f"question/{other}"]):
                store.set(f"answer/{store.get(f'question/{other}').decode()}", own)
        time.sleep(PAUSE)
    return own
