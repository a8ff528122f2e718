"""Replaces files of a folder together: all of them or none, even if the writer is killed.

A folder that exists cannot be replaced by one rename: it may hold files of the user, and it may be
a mount point or a symbolic link. A writer therefore works in four steps.

1. It writes the new files to a folder of its own, ``.fastbert-staged-*``, and flushes them.
2. It renames this folder to ``.fastbert-committed``. This rename is the commit point.
3. It moves the old files of the same names out, ``config.json`` first, and then the new files in,
   ``config.json`` last. The folder never shows old and new files side by side.
4. It deletes ``.fastbert-committed``, which holds the old files by then.

A folder that does not exist yet is staged beside its place and appears by one rename.

The writer holds a lock on a file in its own folder until it ends. A lock that can be taken proves
that the writer is dead: its staged files are deleted by the next writer, and its commit is finished
by the next reader or writer (``settle``).
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

CONFIG = "config.json"
# What the names of our own folders begin with.
PREFIX = ".fastbert-"
STAGED = f"{PREFIX}staged-"
COMMITTED = f"{PREFIX}committed"
# What a folder of ours holds.
LOCK, NEW, OLD = "lock", "new", "old"
# Seconds to wait for a living writer, which moves its files in milliseconds.
PATIENCE = 10.0
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

Result = TypeVar("Result")


@contextlib.contextmanager
def replacement(folder: Path) -> Iterator[Path]:
    """Yields an empty folder whose files, at the end of the block, replace those of ``folder``.

    Files of ``folder`` with other names stay. If the block raises, ``folder`` stays as it was. If
    the process is killed, a reader that calls ``settle`` finds all of the old files or all of the
    new ones, and any other reader may find files missing, but never old files beside new ones.
    After a power failure this holds on file systems that keep the order of renames.

    Raises:
        OSError: If a file cannot be written or moved; ``folder`` stays as it was.
    """
    home = folder if folder.is_dir() else folder.parent
    home.mkdir(parents=True, exist_ok=True)
    for place in (folder.parent, folder):
        discard_dead(place)
    stage, lock = _stage(home)
    try:
        (stage / OLD).mkdir()
        (stage / NEW).mkdir()
        yield stage / NEW
        for path in (stage / NEW).iterdir():
            _sync(path)
        _sync(stage / NEW)
        _sync(stage)
        if home == folder or not _appears(stage / NEW, folder):
            _commit(stage, folder)
    finally:
        shutil.rmtree(stage, ignore_errors=True)
        os.close(lock)


def settle(folder: Path) -> None:
    """Finishes the commit of a writer that died after its commit point.

    Raises:
        OSError: If the files cannot be moved, or another process is moving them for too long.
    """
    deadline = time.monotonic() + PATIENCE
    while (folder / COMMITTED).is_dir():
        try:
            lock = _lock(folder / COMMITTED / LOCK)
        except FileNotFoundError:
            continue  # its writer has just finished
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise OSError(
                    f"{folder}: another process has been saving into this folder for "
                    f"{PATIENCE:.0f} s, allowed: a folder that is at rest"
                ) from error
            time.sleep(0.01)
            continue
        except OSError as error:
            raise _unfinished(folder, error) from error
        try:
            _move_out(folder)
            _move_in(folder)
        except OSError as error:
            raise _unfinished(folder, error) from error
        finally:
            os.close(lock)


def discard_dead(folder: Path) -> None:
    """Deletes what killed writers staged in ``folder``. Staged files of living writers stay."""
    for stage in folder.glob(f"{STAGED}*"):
        with contextlib.suppress(OSError):  # its writer lives, or nobody can tell
            lock = _lock(stage / LOCK)
            try:
                shutil.rmtree(stage)
            finally:
                os.close(lock)


def consistent(folder: Path, read: Callable[[], Result]) -> Result:
    """Returns the result of ``read``, which opens ``config.json`` and other files of ``folder``.

    If a writer replaces the files in the meantime, ``read`` is called again.

    Raises:
        OSError: If writers replace the files again and again.
    """
    deadline = time.monotonic() + PATIENCE
    while True:
        settle(folder)
        before = _version(folder)
        try:
            result = read()
        except Exception:
            if before is not None and before == _version(folder):
                raise
        else:
            if before is not None and before == _version(folder):
                return result
        if time.monotonic() > deadline:
            raise OSError(
                f"{folder}: other processes replaced its files whenever they were read, for "
                f"{PATIENCE:.0f} s, allowed: a folder that is at rest"
            )


def _version(folder: Path) -> tuple[int, ...] | None:
    """Which ``config.json`` the folder holds; None while files are being moved."""
    if (folder / COMMITTED).exists():
        return None
    try:
        status = os.stat(folder / CONFIG)
    except FileNotFoundError:
        return ()
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _stage(home: Path) -> tuple[Path, int]:
    """A new folder in ``home``, and the open file that holds its lock."""
    while True:
        stage = home / f"{STAGED}{secrets.token_hex(8)}"
        stage.mkdir()
        try:
            return stage, _lock(stage / LOCK)
        except (FileNotFoundError, BlockingIOError):
            continue  # another writer took the folder, not locked yet, for a dead writer's
        except OSError as error:
            if error.errno in NO_LOCKS:  # then nothing here is ever taken for a dead writer's
                return stage, os.open(stage / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
            shutil.rmtree(stage, ignore_errors=True)
            raise


def _lock(path: Path) -> int:
    """An open file that holds the lock on ``path``, which ends with the process.

    Raises BlockingIOError when a living process holds it, FileNotFoundError when ``path`` is gone.
    """
    import fcntl

    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(handle), os.stat(path)):
            raise FileNotFoundError(errno.ENOENT, "replaced before it was locked", str(path))
    except BaseException:
        os.close(handle)
        raise
    return handle


def _appears(new: Path, folder: Path) -> bool:
    """Makes ``new`` the folder by one rename; False when another writer was first."""
    try:
        os.rename(new, folder)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    _sync(folder.parent)
    return True


def _commit(stage: Path, folder: Path) -> None:
    for path in (stage / NEW).iterdir():
        if (folder / path.name).is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    while True:
        settle(folder)
        try:
            os.rename(stage, folder / COMMITTED)
            break
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    try:
        _sync(folder)
        _move_out(folder)
    except OSError:
        # The old files are back in their places, so nothing is committed any more.
        os.rename(folder / COMMITTED, stage)
        raise
    _move_in(folder)


def _names(folder: Path) -> list[str]:
    """The new files, ``config.json`` first."""
    try:
        return sorted(os.listdir(folder / COMMITTED / NEW), key=lambda name: name != CONFIG)
    except FileNotFoundError:
        return []


def _move_out(folder: Path) -> None:
    """Moves the old files out, or none of them when one cannot be moved."""
    moved = []
    try:
        for name in _names(folder):
            with contextlib.suppress(FileNotFoundError):
                os.rename(folder / name, folder / COMMITTED / OLD / name)
                moved.append(name)
        _sync(folder)
    except OSError:
        for name in moved:
            os.rename(folder / COMMITTED / OLD / name, folder / name)
        raise


def _move_in(folder: Path) -> None:
    """Moves the new files in and deletes the old ones."""
    committed = folder / COMMITTED
    for name in reversed(_names(folder)):
        os.rename(committed / NEW / name, folder / name)
    _sync(folder)
    for part in (committed / OLD, committed / NEW):
        shutil.rmtree(part, ignore_errors=True)
    (committed / LOCK).unlink()
    with contextlib.suppress(OSError):  # the next writer's commit may have taken its place
        committed.rmdir()


def _sync(path: Path) -> None:
    """Flushes a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems have no such call for folders.
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(handle)


def _unfinished(folder: Path, error: OSError) -> OSError:
    return OSError(
        f"{folder}: a save was stopped after its commit, and its files in {COMMITTED}/{NEW} cannot "
        f"be moved into the folder: {error}; allowed: a folder that can be written and locked"
    )
