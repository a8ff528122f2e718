"""Store the rows of an unfinished run beside OUT, so that the same command can resume the run.

OUT is the output file of the command.
"""

from __future__ import annotations

import io
import os
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastbert import json_file
from fastbert.atomic_file import naming
from fastbert.folder_lock import lock, unlock
from fastbert.jobs.reporter import SILENT, Reporter

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ROWS = "rows.npy"
STATE = "state.json"
# OUT is first written to a file with this name and the suffix of OUT, and then renamed, unless
# rows.npy itself becomes OUT.
WHOLE = "whole"
# Every file in the folder of an unfinished run has a name that begins with one of these texts.
OURS = (ROWS, STATE, f".{Path(STATE).stem}.", WHOLE)


class PartialOutput:
    """The rows of an output file, which are written from the first to the last.

    The folder ``OUT.partial`` has the rows as a .npy file, to which rows are appended. It also has
    a ``state.json`` with the fingerprint of the run and the number of valid rows. The state is
    written after the rows are on the disk. Rows of a run with another fingerprint are discarded.

    The object is a context manager. If its block ends before `finish`, with or without an error,
    the valid rows stay in the folder for the next run; without valid rows, the folder is removed.
    The attribute ``done`` is the number of valid rows, and ``totals`` has the sums of the counts
    that were appended with these rows.

    Args:
        target: The path of OUT.
        shape: Number and width of the rows, which are fp32.
        fingerprint: The facts on which the rows depend.
        reporter: Receives notes.

    Raises:
        ValueError: On entry, if another process writes into the folder, or if the folder has a file
            that does not belong to an unfinished run.
    """

    def __init__(
        self,
        target: Path,
        shape: tuple[int, int],
        fingerprint: dict[str, Any],
        reporter: Reporter = SILENT,
    ) -> None:
        """Store the arguments; nothing is read or written yet."""
        self.target, self.shape, self.reporter = target, shape, reporter
        self.fingerprint = json_file.jsonable(fingerprint)
        self.folder = target.with_name(f"{target.name}.partial")
        self.done = 0
        self.totals: Counter[str] = Counter()
        self._removed = False

    def __enter__(self) -> PartialOutput:
        """Lock the folder and continue after the rows of an unfinished run, if there is one."""
        self._lock = lock(self.folder, "OUT")
        try:
            self._resume()
            self._file = self._open()
        except BaseException:
            unlock(self._lock)
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        """Report valid rows, or remove a folder without valid rows, and unlock the folder."""
        # After a write that failed, closing the file may fail too; the buffered rows do not count
        # as valid.
        with suppress(OSError):
            self._file.close()
        if self.done:
            self.reporter.note(
                f"stopped: {self.done:,} of {self.shape[0]:,} rows are kept in {self.folder}; "
                "the same command continues after them"
            )
        elif not self._removed:
            self.discard()
        unlock(self._lock)

    def append(self, rows: NDArray[np.float32], **counts: int) -> None:
        """Append rows, which are on the disk when the call returns.

        Args:
            rows: The next rows, fp32 of shape ``(n, width)``.
            counts: Numbers that are added to ``totals`` and stored with the rows.

        Raises:
            OSError: If the rows cannot be written. The error names the file.
        """
        with naming(self.folder / ROWS):
            self._file.write(rows.tobytes())
            _flush(self._file)
        self.done += len(rows)
        self.totals.update(counts)
        self._write_state()

    def finish(self, write: Callable[[NDArray[np.float32], Path], None] | None) -> None:
        """Write OUT and remove the folder.

        Args:
            write: Called as ``write(rows, path)`` with all rows. None moves the .npy file of the
                rows to OUT.
        """
        import numpy as np

        self._file.close()
        whole = self.folder / ROWS
        if write is not None:
            whole = self.folder / f"{WHOLE}{self.target.suffix}"
            with naming(whole):
                write(np.load(self.folder / ROWS, mmap_mode="r"), whole)
                with whole.open("rb+") as file:
                    _flush(file)
        os.replace(whole, self.target)
        self.discard()

    def discard(self) -> None:
        """Remove the folder with all rows."""
        # Another run may use the name as soon as the folder is deleted, so `__exit__` must not
        # delete the folder again.
        self._removed = True
        shutil.rmtree(self.folder, ignore_errors=True)
        self.done = 0

    def _resume(self) -> None:
        """Continue after the valid rows in the folder if their fingerprint is the same.

        A note tells the user whether the rows are used; without valid rows, there is no note.
        """
        paths = list(self.folder.iterdir())
        foreign = [p.name for p in paths if p.is_symlink() or not p.name.startswith(OURS)]
        if foreign:
            raise ValueError(
                f"OUT: {self.folder} holds {foreign[0]}, allowed: an unfinished run, or no folder"
            )
        try:
            state = json_file.read(self.folder / STATE)
            fingerprint, done, totals = (
                state["fingerprint"],
                state["rows"],
                Counter(state["totals"]),
            )
            if not all(type(n) is int and n >= 0 for n in (done, *totals.values())):
                return
            other = [
                name for name in self.fingerprint if fingerprint[name] != self.fingerprint[name]
            ]
            whole = (self.folder / ROWS).stat().st_size >= self._size(done)
        except (OSError, ValueError, KeyError, TypeError):
            return
        if not done:
            return
        if other or not whole or done > self.shape[0]:
            why = f"of a run with another {', '.join(other)}" if other else "damaged"
            self.reporter.note(f"{self.folder} is {why}: starting from the first row")
            return
        self.reporter.note(
            f"resuming after {done:,} of {self.shape[0]:,} rows, kept in {self.folder}"
        )
        self.done, self.totals = done, totals

    def _open(self) -> Any:
        """Open the .npy file, write its header, and cut the file after the valid rows."""
        self._write_state()
        path = self.folder / ROWS
        file = path.open("rb+" if self.done else "wb+")
        with naming(path):
            file.write(self._header())
            file.truncate(self._size(self.done))
            file.seek(0, os.SEEK_END)
        return file

    def _header(self) -> bytes:
        from numpy.lib import format as npy

        header = io.BytesIO()
        content = {"descr": "<f4", "fortran_order": False, "shape": self.shape}
        npy.write_array_header_1_0(header, content)
        return header.getvalue()

    def _size(self, rows: int) -> int:
        return len(self._header()) + rows * self.shape[1] * 4

    def _write_state(self) -> None:
        content = {"fingerprint": self.fingerprint, "rows": self.done, "totals": self.totals}
        json_file.write(self.folder / STATE, content)


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
