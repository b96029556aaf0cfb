"""An import looks at the first line before it reads the rest, which may have no end, and takes what comes through a pipe."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from pygraphd.schema.keys import KEY_VERSION
from pygraphd.schema.portable import FORMAT, FORMAT_VERSION, Header
from tests.support.cli_command import locations, pygraphd
from tests.support.shipped_rows import FASTER, KERNELS, row, written

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pygraphd.schema.locations import Locations

__all__ = ["locations"]  # a fixture

_MOST_BYTES = 32 * 2**20
"""What a writer has to say after the first line: far more than a pipe holds."""
HEADER = dataclasses.asdict(Header(FORMAT, FORMAT_VERSION, KEY_VERSION, "0.1.0", 1))


class _Pipe:
    """A pipe into which a thread writes some bytes, and whether it could write all of them."""

    def __init__(self, data: bytes) -> None:
        self.reading, self._writing = os.pipe()
        self.has_all = False
        self._data = data
        self._thread = threading.Thread(target=self._write)
        self._thread.start()

    def _write(self) -> None:
        with os.fdopen(self._writing, "wb") as stream:
            try:
                stream.write(self._data)
                stream.flush()
            except BrokenPipeError:
                return
            self.has_all = True

    def join(self) -> None:
        self._thread.join()


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, bool]]:
    """Return a function that feeds bytes to `cache import`, and returns the exit code and whether all of them were read."""

    def feed(data: bytes, *words: str) -> tuple[int, bool]:
        pipe = _Pipe(data)
        with os.fdopen(pipe.reading, "r") as stream, monkeypatch.context() as within:
            within.setattr(sys, "stdin", stream)
            code = pygraphd("cache", "import", "-", *words)
        pipe.join()
        return code, pipe.has_all

    return feed


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({"format": "tar"}, "is another file, not one that `pygraphd cache export FILE` has written"),
        (HEADER | {"version": FORMAT_VERSION + 1}, f"line 1: version {FORMAT_VERSION + 1} of the format"),
        (HEADER | {"keys": KEY_VERSION + 1}, "was written by pygraphd 0.1.0, which names graphs otherwise"),
        (HEADER | {"entries": -1}, "line 1: entries: -1"),
    ],
)
@pytest.mark.parametrize("words", [(), ("--dry-run",)])
def test_what_follows_a_bad_first_line_is_not_read(
    locations: Locations,
    capsys: pytest.CaptureFixture[str],
    fed: Callable[..., tuple[int, bool]],
    header: dict[str, object],
    said: str,
    words: tuple[str, ...],
) -> None:
    assert fed(json.dumps(header).encode() + b"\n" + bytes(_MOST_BYTES), *words) == (2, False)

    assert capsys.readouterr().err.startswith(f"pygraphd: standard input: {said}")
    assert not locations.database.exists()


def test_a_sound_one_is_read_through_a_pipe(
    locations: Locations, tmp_path: Path, fed: Callable[..., tuple[int, bool]]
) -> None:
    export = written(tmp_path / "exported", *(row(str(number), KERNELS, FASTER) for number in range(200)))

    assert fed(export.read_bytes()) == (0, True)
    assert fed(export.read_bytes()[:-9]) == (2, True)


def test_nothing_at_all_is_said_to_be_empty(
    locations: Locations, capsys: pytest.CaptureFixture[str], fed: Callable[..., tuple[int, bool]]
) -> None:
    assert fed(b"") == (2, True)
    assert capsys.readouterr().err.startswith("pygraphd: standard input: is empty, not one that")
