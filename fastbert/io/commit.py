"""Replacement of several files of a folder together, even if the writer is killed.

A folder that exists cannot be replaced by one rename, because it may contain files of the user, or
be a mount point or a symbolic link. A writer therefore works in four steps.

1. The writer writes the new files to its own subfolder, ``.fastbert-staged-*``, and flushes them.
2. It renames this subfolder to ``.fastbert-committed``. This rename is the commit point.
3. It moves the old files of the same names into ``.fastbert-committed``, ``config.json`` first.
   Then it moves the new files into the folder, ``config.json`` last. The folder itself never
   contains old and new files at the same time.
4. It renames ``.fastbert-committed``, which now contains the old files, back to
   ``.fastbert-staged-*``, and deletes it.

If the folder does not exist, the writer makes ``.fastbert-staged-*`` in the parent folder, and
creates the folder with one rename.

The writer holds a lock on a file in its own subfolder until the writer ends. If another process can
take the lock, the writer is dead. The next writer then deletes the files that a dead writer has
staged, and the next reader or writer finishes the commit of a dead writer (``settle``).

A reader only moves files inside the folder, and leaves the deletion to the next writer. Because the
folder of a model may come from an untrusted source, readers and writers never follow a symbolic
link in place of a writer's subfolder, of its lock or of the two folders in it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

CONFIG = "config.json"
# The name of every folder that a writer makes for itself begins with this prefix.
PREFIX = ".fastbert-"
STAGED = f"{PREFIX}staged-"
COMMITTED = f"{PREFIX}committed"
# The entries of a writer's folder: the lock, the new files and the old files.
LOCK, NEW, OLD = "lock", "new", "old"
# A reader waits at most this time, in seconds, for a living writer. A writer needs only
# milliseconds to move the files.
PATIENCE = 10.0
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

Result = TypeVar("Result")


@contextlib.contextmanager
def replacement(folder: Path) -> Iterator[Path]:
    """Yield an empty folder whose files replace those of `folder` at the end of the with block.

    Files of `folder` with other names stay. If the with block raises an error, `folder` does not
    change.

    If the process is killed, a reader that calls `settle` finds all old files or all new files. Any
    other reader may find that files are missing, but it never finds old and new files together.
    After a power failure, both statements hold on file systems that keep the order of renames.

    Args:
        folder: The folder, which is created if it does not exist.

    Yields:
        The empty folder.

    Raises:
        OSError: If a file cannot be written or moved. `folder` stays as it was, unless the error
            occurs while the new files are moved into `folder`. `settle` then moves the rest.
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
    """Finish the commit of a writer that died after its commit point.

    Files are moved inside `folder` only, and no file is deleted.

    Args:
        folder: The folder that the writer wrote to.

    Raises:
        OSError: If the files cannot be moved, if another process is still moving them after
            ``PATIENCE`` seconds, or if ``.fastbert-committed`` is not the folder of a save.
    """
    deadline = time.monotonic() + PATIENCE
    while _is_committed(folder):
        try:
            lock = _lock(folder / COMMITTED / LOCK)
        except (FileNotFoundError, BlockingIOError) as error:
            # The writer has just finished, or it is alive and holds the lock.
            if time.monotonic() > deadline:
                raise OSError(
                    f"{folder}: another process has been saving into this folder for "
                    f"{PATIENCE:.0f} s, allowed: a folder without another writer"
                ) from error
            time.sleep(0.01)
            continue
        except OSError as error:
            raise _unfinished(folder, error) from error
        try:
            _move_out(folder)
            _move_in(folder, _new_name(folder))
        except OSError as error:
            raise _unfinished(folder, error) from error
        finally:
            os.close(lock)


def discard_dead(folder: Path) -> None:
    """Delete the files that killed writers have staged in `folder`; living writers keep theirs."""
    for stage in folder.glob(f"{STAGED}*"):
        if stage.is_symlink() or not stage.is_dir():
            continue
        # An OSError means that the writer is alive, or that its state is unknown.
        with contextlib.suppress(OSError):
            lock = _lock(stage / LOCK)
            try:
                shutil.rmtree(stage)
            finally:
                os.close(lock)


def consistent(folder: Path, read: Callable[[], Result]) -> Result:
    """Call `read`, and return its result once all files that it read come from the same save.

    If a writer replaces the files during the call, `read` is called again, also if it raised an
    error.

    Args:
        folder: The folder.
        read: Function that reads ``config.json`` and other files of `folder`.

    Returns:
        The result of `read`.

    Raises:
        OSError: If writers replace the files during every call for ``PATIENCE`` seconds.
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
                f"{folder}: other processes replaced its files during every read for "
                f"{PATIENCE:.0f} s, allowed: a folder without another writer"
            )


def _version(folder: Path) -> tuple[int, ...] | None:
    """Return device, inode and time of ``config.json``, or None while a writer moves files.

    The result is an empty tuple if there is no ``config.json``.
    """
    if _is_committed(folder):
        return None
    try:
        status = os.stat(folder / CONFIG)
    except FileNotFoundError:
        return ()
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _is_committed(folder: Path) -> bool:
    """Return whether `folder` contains ``.fastbert-committed``.

    Raises:
        OSError: If ``.fastbert-committed`` is a link or a file.
    """
    try:
        mode = os.lstat(folder / COMMITTED).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    if not stat.S_ISDIR(mode):
        raise OSError(
            f"{folder / COMMITTED}: got a link or a file, allowed: no such name, or the folder of "
            "a save that was stopped"
        )
    return True


def _new_name(home: Path) -> Path:
    return home / f"{STAGED}{secrets.token_hex(8)}"


def _stage(home: Path) -> tuple[Path, int]:
    """Make a new folder in `home`; return its path and the file descriptor that holds its lock."""
    while True:
        stage = _new_name(home)
        stage.mkdir()
        try:
            return stage, _lock(stage / LOCK)
        except (FileNotFoundError, BlockingIOError):
            # Before the lock was taken, another writer treated the folder as that of a dead writer.
            continue
        except OSError as error:
            # On a file system without locks, no writer ever treats another writer as dead.
            if error.errno in NO_LOCKS:
                return stage, os.open(stage / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
            shutil.rmtree(stage, ignore_errors=True)
            raise


def _lock(path: Path) -> int:
    """Take the lock on `path`, and return the file descriptor that holds the lock.

    The operating system releases the lock when the process ends.

    Raises:
        BlockingIOError: If a living process holds the lock.
        FileNotFoundError: If `path` was deleted.
        OSError: If `path` is a link, or cannot be opened or locked for another reason.
    """
    import fcntl

    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(handle), os.lstat(path)):
            raise FileNotFoundError(errno.ENOENT, "replaced before it was locked", str(path))
    except BaseException:
        os.close(handle)
        raise
    return handle


def _appears(new: Path, folder: Path) -> bool:
    """Rename `new` to `folder`; return False if another writer has created `folder` first."""
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
        # _move_out has restored the old files, so the commit is undone.
        os.rename(folder / COMMITTED, stage)
        raise
    _move_in(folder, stage)
    # `settle` finishes the commit of a dead writer, but does not delete the folder of that writer.
    discard_dead(folder)


def _names(folder: Path) -> list[str]:
    """Return the names of the new files, ``config.json`` first.

    Raises:
        OSError: If the folder of the new or the old files is a link, or if there are new files but
            no folder for the old files.
    """
    places = [folder / COMMITTED / part for part in (NEW, OLD)]
    for place in places:
        if place.is_symlink():
            raise OSError(f"{place}: got a link, allowed: a folder")
    try:
        names = sorted(os.listdir(places[0]), key=lambda name: name != CONFIG)
    except FileNotFoundError:
        return []
    if names and not places[1].is_dir():
        raise OSError(f"{places[1]}: got no folder, allowed: a folder for the old files")
    return names


def _move_out(folder: Path) -> None:
    """Move the old files out of `folder`; if a move fails, restore all of them and raise OSError.

    The old files are those with the names of new files.
    """
    moved = []
    try:
        for name in _names(folder):
            old = folder / COMMITTED / OLD / name
            if not os.path.lexists(folder / name):
                continue
            if os.path.lexists(old):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(old))
            with contextlib.suppress(FileNotFoundError):
                os.rename(folder / name, old)
                moved.append(name)
        _sync(folder)
    except OSError:
        for name in moved:
            os.rename(folder / COMMITTED / OLD / name, folder / name)
        raise


def _move_in(folder: Path, left: Path) -> None:
    """Move the new files into `folder`, and rename the folder with the old files to `left`.

    The caller or the next writer deletes `left`.
    """
    for name in reversed(_names(folder)):
        os.rename(folder / COMMITTED / NEW / name, folder / name)
    _sync(folder)
    os.rename(folder / COMMITTED, left)


def _sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems do not support fsync for folders.
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(handle)


def _unfinished(folder: Path, error: OSError) -> OSError:
    return OSError(
        f"{folder}: a save was stopped after its commit, and its files in {COMMITTED}/{NEW} cannot "
        f"be moved into the folder: {error}; allowed: a folder that can be written and locked"
    )
