"""The lock on a folder, so that one run at a time writes into the folder."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

# The file descriptors of the locks that this process holds.
_held: set[int] = set()


def lock(folder: Path, argument: str, patience: float = 0.0) -> int:
    """Lock `folder` and return the file descriptor that holds the lock; `unlock` ends the lock.

    The lock ends with the process, even if the process is killed. A forked process, such as a
    worker that prepares batches, does not hold the lock. If the file system has no locks, the
    folder stays unlocked and no error is raised.

    Args:
        folder: The folder, which is created if it does not exist.
        argument: Name of the caller's argument for the folder; the error message begins with it.
        patience: Time to wait for the lock, in seconds.

    Raises:
        OSError: If the folder cannot be created or opened.
        ValueError: If another run holds the lock. The message names the folder.
    """
    import fcntl

    deadline = time.monotonic() + patience
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
        _held.add(handle)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            unlock(handle)
            if time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            raise ValueError(
                f"{argument}: another run is writing into {folder}, allowed: one run at a time, so "
                "another folder, or this folder after the end of that run"
            ) from error
        except OSError:
            # The file system has no locks, so the run goes on without a lock.
            return handle
        if _is(handle, folder):
            return handle
        # Another run has deleted the folder after `os.open`, so the lock is on a deleted folder.
        unlock(handle)


def unlock(handle: int) -> None:
    """End the lock whose file descriptor `lock` returned."""
    _held.discard(handle)
    os.close(handle)


@contextlib.contextmanager
def locked(folder: Path, argument: str, patience: float = 0.0) -> Iterator[None]:
    """Lock a folder during the block; see `lock`.

    If the folder did not exist before the block and is empty after the block, the folder is
    deleted, and so are the parent folders that were created with the folder.
    """
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    handle = lock(folder, argument, patience)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            for path in new:
                path.rmdir()
        unlock(handle)


def _is(handle: int, folder: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(folder))
    except FileNotFoundError:
        return False


def _leave_to_parent() -> None:
    for handle in _held:
        os.close(handle)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
