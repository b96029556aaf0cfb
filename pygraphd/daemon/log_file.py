"""The daemon's log: lines to the terminal, else to a file that is rotated and can be opened anew."""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
import sys
from typing import TYPE_CHECKING

from pygraphd.schema.ownership import open_regular

if TYPE_CHECKING:
    from pathlib import Path

LOG_BYTES = 2**20
"""Size of the file above which it is renamed; one older file is kept."""
_FORMAT = "%(asctime)s %(process)d %(levelname)s %(message)s"


class Log:
    """Where this process logs, from its start to its end."""

    def __init__(self, path: Path, level: str) -> None:
        """Begin to log at `level`; without a file that can be written, nowhere."""
        self.is_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._path = path
        self._handler = self._new_handler()
        root = logging.getLogger()
        root.setLevel(logging.WARNING)
        root.addHandler(self._handler)
        self.set_level(level)

    def set_level(self, level: str) -> None:
        """Log what is at least this severe."""
        logging.getLogger("pygraphd").setLevel(level.upper())

    def reopen(self) -> None:
        """Go on in the file that is now at the path: whoever rotates logs has renamed ours. What Python prints goes there too."""
        before, self._handler = self._handler, self._new_handler()
        root = logging.getLogger()
        root.addHandler(self._handler)
        root.removeHandler(before)
        old, new = _descriptor(before), _descriptor(self._handler)
        if old is not None and new is not None:
            for printed in (1, 2):
                with contextlib.suppress(OSError):
                    if os.path.samestat(os.fstat(printed), os.fstat(old)):
                        os.dup2(new, printed)
        before.close()

    def _new_handler(self) -> logging.Handler:
        handler: logging.Handler
        if self.is_terminal:
            handler = logging.StreamHandler()
        else:
            try:
                os.close(open_regular(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT))
                handler = logging.handlers.RotatingFileHandler(self._path, maxBytes=LOG_BYTES, backupCount=1)
            except OSError:
                handler = logging.NullHandler()
        handler.setFormatter(logging.Formatter(_FORMAT))
        return handler


def _descriptor(handler: logging.Handler) -> int | None:
    stream = handler.stream if isinstance(handler, logging.FileHandler) else None
    return None if stream is None else stream.fileno()
