"""The daemon's log: lines to the terminal, else to a file.

The file is begun anew where it was removed or replaced, and rotated where it is full. Where it cannot be rotated, it is cut off.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import TYPE_CHECKING

from pygraphd.schema.ownership import open_regular

if TYPE_CHECKING:
    from pathlib import Path

LOG_BYTES = 2**20
"""Size of the file above which it is renamed; one older file is kept."""
MOST_BYTES = 2 * LOG_BYTES
"""Size of a file that cannot be renamed above which it is cut off."""
_FORMAT = "%(asctime)s %(process)d %(levelname)s %(message)s"
_log = logging.getLogger(__name__)


class Log:
    """Where this process logs, from its start to its end."""

    def __init__(self, path: Path, level: str) -> None:
        """Begin to log at `level`; without a file that can be written, nowhere until there can be one."""
        # Python sets `sys.stderr` to None where descriptor 2 is closed.
        self.is_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._file = None if self.is_terminal else LogFile(path)
        handler = self._file or logging.StreamHandler()
        handler.setFormatter(logging.Formatter(_FORMAT))
        root = logging.getLogger()
        root.setLevel(logging.WARNING)
        root.addHandler(handler)
        self.set_level(level)

    def set_level(self, level: str) -> None:
        """Log what is at least this severe."""
        logging.getLogger("pygraphd").setLevel(level.upper())

    def reopen(self) -> None:
        """Go on in the file that is now at the path: whoever rotates logs has renamed ours. What Python prints goes there too."""
        if self._file is not None:
            self._file.look()

    def problems(self) -> list[str]:
        """Look after the file, and return what is wrong with it, as text for `pygraphd status`."""
        return [] if self._file is None else self._file.look()


class LogFile(logging.Handler):
    """Appends each line to the file at a path with one write. A fault of disk or file is kept, and raises nothing."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._older = path.with_name(f"{path.name}.1")
        self._descriptor: int | None = None
        self._faults: dict[str, str] = {}
        """What is wrong now, by what fails: to open, to rotate or to write."""
        self.look()

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line; it is dropped if that is not possible."""
        try:
            self._write(f"{self.format(record)}\n")
        except Exception:  # noqa: BLE001 - what cannot be formatted must not end what wanted to be logged
            self.handleError(record)

    def look(self) -> list[str]:
        """Open the file at the path if that is another one by now, and return what is wrong."""
        with self._held():
            if not self._is_in_place():
                self._open()
            if "rotate" in self._faults:
                self._look_whether_it_rotates()
            return [f"{self._path}: {fault}" for fault in self._faults.values()]

    def close(self) -> None:
        """Write nothing more."""
        with self._held():
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None
        super().close()

    def _held(self) -> contextlib.AbstractContextManager[object]:
        # That which `logging` holds around `emit`: lines come from any thread, and looks from the event loop.
        assert self.lock is not None
        return self.lock

    def _write(self, text: str) -> None:
        # Names of files may hold lone surrogates, which UTF-8 cannot encode.
        line = text.encode(errors="backslashreplace")
        if not self._is_in_place():
            self._open()
        if not self._has_room(len(line)):
            self._rotate(len(line))
        if self._descriptor is None:
            return
        try:
            # One write with O_APPEND: of many processes that start at once, no line is within another's.
            os.write(self._descriptor, line)
        except OSError as error:
            self._faults["write"] = f"cannot be written: {error.strerror}; lines are lost"
        else:
            self._faults.pop("write", None)

    def _is_in_place(self) -> bool:
        if self._descriptor is None:
            return False
        try:
            # lstat, as the log is never opened through a link.
            is_ours = os.path.samestat(self._path.lstat(), os.fstat(self._descriptor))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True  # it may not be looked at, which says nothing of the file
        if is_ours:
            self._faults.pop("open", None)
        return is_ours

    def _has_room(self, more: int) -> bool:
        return self._descriptor is None or os.fstat(self._descriptor).st_size + more <= LOG_BYTES

    def _open(self) -> None:
        """Go on in a file at the path, with what Python prints; if there can be none, in the one before."""
        try:
            opened = open_regular(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        except OSError as error:
            lost = (
                "lines are lost"
                if self._descriptor is None
                else "the log goes on in the file before, which was moved away"
            )
            self._faults["open"] = f"cannot be opened: {error.strerror or error}; {lost}"
            return
        self._faults.pop("open", None)
        before, self._descriptor = self._descriptor, opened
        if before is not None:
            _print_to(opened, instead_of=before)
            os.close(before)

    def _rotate(self, more: int) -> None:
        """Begin a new file; if that is not possible, cut off the one that is too long."""
        assert self._descriptor is not None
        try:
            self._path.replace(self._older)
        except OSError as error:
            fault = f"cannot be renamed to {self._older.name}: {error.strerror}; it is cut off at {MOST_BYTES} bytes"
            is_new = self._faults.get("rotate") != fault
            self._faults["rotate"] = fault
            is_cut = os.fstat(self._descriptor).st_size + more > MOST_BYTES
            with contextlib.suppress(OSError):
                if is_cut:
                    # O_APPEND has all that write here, standard error included, go on at the new end.
                    os.ftruncate(self._descriptor, 0)
                if is_new or is_cut:
                    self._say(fault)
            return
        self._faults.pop("rotate", None)
        self._open()

    def _look_whether_it_rotates(self) -> None:
        if not self._has_room(0):
            self._rotate(0)
        elif not self._older.is_dir() and os.access(self._path.parent, os.W_OK | os.X_OK, effective_ids=True):
            del self._faults["rotate"]  # as far as can be seen while the file, cut off, is short

    def _say(self, fault: str) -> None:
        """Write a line of our own, once."""
        # Not by `_log`: its line would find the file too long, and come back here without end.
        assert self._descriptor is not None
        arguments = (_log.name, logging.ERROR, __file__, 0, "%s: %s", (self._path, fault), None)
        os.write(self._descriptor, f"{self.format(logging.LogRecord(*arguments))}\n".encode())


def _print_to(descriptor: int, *, instead_of: int) -> None:
    """Have what Python prints go where our lines go, if it went where they went before."""
    before = os.fstat(instead_of)
    for printed in (1, 2):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(printed), before):
                os.dup2(descriptor, printed)
