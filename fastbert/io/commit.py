"""Replacement of several files of a folder together, even if the writer is killed.

A folder that exists cannot be replaced by one rename, because it may contain files of the user, or
be a mount point or a symbolic link. A writer therefore works in four steps.

1. The writer writes the new files to its own folder, ``.fastbert-staged-*``, and flushes them.
2. It renames this folder to ``.fastbert-committed``. This rename is the commit point.
3. It moves the old files of the same names out, ``config.json`` first. Then it moves the new files
   in, ``config.json`` last. The folder never contains old and new files at the same time.
4. It renames ``.fastbert-committed``, which contains the old files after step 3, to
   ``.fastbert-staged-*``, and deletes this folder.

A folder that does not exist is staged in its parent folder and appears by one rename.

The writer holds a lock on a file in its own folder until it ends. If the lock can be taken, the
writer is dead. The next writer then deletes its staged files, and the next reader or writer
finishes its commit (``settle``).

A reader only moves files inside the folder, and leaves the deletion to the next writer. Readers and
writers never follow a link where the folder of a writer, the lock or one of the two folders of
files should be, because the folder of a model may come from a stranger.
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
# The names of the folders of a writer begin with this prefix.
PREFIX = ".fastbert-"
STAGED = f"{PREFIX}staged-"
COMMITTED = f"{PREFIX}committed"
# The folder of a writer has these three entries.
LOCK, NEW, OLD = "lock", "new", "old"
# A reader waits at most this time, in seconds, for a living writer. A writer needs only
# milliseconds to move the files.
PATIENCE = 10.0
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

Result = TypeVar("Result")


@contextlib.contextmanager
def replacement(folder: Path) -> Iterator[Path]:
    """Yield an empty folder whose files replace the files of `folder` at the end of the block.

    Files of `folder` with other names stay. If the block raises an error, `folder` stays as it was.

    If the process is killed, a reader that calls `settle` finds all old files or all new files. Any
    other reader may find that files are missing, but it never finds old and new files together.
    After a power failure, this holds on file systems that keep the order of renames.

    Args:
        folder: The folder, which is created if it does not exist.

    Yields:
        The empty folder.

    Raises:
        OSError: If a file cannot be written or moved; `folder` stays as it was.
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
        OSError: If the files cannot be moved, if another process moves them for longer than
            ``PATIENCE``, or if no save has made the folder ``.fastbert-committed``.
    """
    deadline = time.monotonic() + PATIENCE
    while _is_committed(folder):
        try:
            lock = _lock(folder / COMMITTED / LOCK)
        except (FileNotFoundError, BlockingIOError) as error:
            # The writer has just finished, or it is alive.
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
    """Delete the staged files of killed writers in `folder`, but not of living writers."""
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

    If a writer replaces the files during the call, `read` is called again.

    Args:
        folder: The folder.
        read: Opens ``config.json`` and other files of `folder`.

    Returns:
        The result of `read`.

    Raises:
        OSError: If writers replace the files during every call for ``PATIENCE``.
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
    """Return the identity of the folder's ``config.json``; None while files are being moved."""
    if _is_committed(folder):
        return None
    try:
        status = os.stat(folder / CONFIG)
    except FileNotFoundError:
        return ()
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _is_committed(folder: Path) -> bool:
    """Return whether `folder` has the folder of a commit; raise OSError if it is not a folder."""
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
    """Make a new folder in `home`; return it and the open file that holds its lock."""
    while True:
        stage = _new_name(home)
        stage.mkdir()
        try:
            return stage, _lock(stage / LOCK)
        except (FileNotFoundError, BlockingIOError):
            # The folder was not locked yet, so another writer concluded that its owner is dead.
            continue
        except OSError as error:
            # Without locks, no writer concludes that another writer is dead.
            if error.errno in NO_LOCKS:
                return stage, os.open(stage / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
            shutil.rmtree(stage, ignore_errors=True)
            raise


def _lock(path: Path) -> int:
    """Take the lock on `path` and return the open file that holds it.

    The lock ends with the process.

    Raises:
        BlockingIOError: If a living process holds the lock.
        FileNotFoundError: If `path` was deleted.
        OSError: If `path` is a link, among other reasons.
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
    """Rename `new` to `folder`; return False if another writer was first."""
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
    # `settle` may have left the folder of a dead writer.
    discard_dead(folder)


def _names(folder: Path) -> list[str]:
    """Return the names of the new files, ``config.json`` first.

    Raises:
        OSError: If there are new files, and a folder of the writer is a link or is missing.
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
    """Move the old files out, or none of them if one cannot be moved."""
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
    """Move the new files in; the folder with the old files becomes `left`, as of a dead writer."""
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
