"""Keeps the entries that were set last."""

from __future__ import annotations

from typing import TypeVar

_K = TypeVar("_K")
_V = TypeVar("_V")


class BoundedLRU(dict[_K, _V]):
    """A dict of at most `limit` entries. Beyond that, setting an entry drops the least recently set one.

    Reading an entry is as fast as in a dict, and does not count as its use: for that, set it again.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def __setitem__(self, key: _K, value: _V) -> None:
        self.pop(key, None)
        super().__setitem__(key, value)
        while len(self) > self._limit:
            self.pop(next(iter(self)), None)  # another thread may have been quicker
