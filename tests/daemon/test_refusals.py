"""Where a running daemon cannot store, a command ends with the line and the exit code that it has without one, and loses nothing."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
from typing import TYPE_CHECKING

import pytest

from pygraphd.daemon.store import Store
from tests.support.shipped_rows import FASTER, KERNELS, row, written

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.daemon_home import Home

pytestmark = [pytest.mark.daemon, pytest.mark.slow]

WORDS = ("cache prune --older-than 1s", "cache rederive", "cache import EXPORT", "stats --zero")


def _newer(database: Path) -> None:
    Store(database).close()
    with contextlib.closing(sqlite3.connect(database)) as connection:
        connection.execute("PRAGMA user_version=99")


def _another_programs(database: Path) -> None:
    with contextlib.closing(sqlite3.connect(database)) as connection:
        connection.execute("CREATE TABLE theirs (x)")
        connection.execute("PRAGMA user_version=75")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_newer, "written by a newer pygraphd (database version 99, this one writes 9); nothing is stored: upgrade"),
        (_another_programs, "is another program's database; nothing is stored: move it to where that program"),
        (os.mkdir, "is not a regular file; nothing is stored: move it away"),
    ],
)  # fmt: skip
def test_a_daemon_changes_neither_the_line_nor_the_exit_code(
    home: Home, tmp_path: Path, spoil: Callable[[Path], None], said: str
) -> None:
    export = written(tmp_path / "exported", row("a", KERNELS, FASTER))
    commands = [words.replace("EXPORT", str(export)).split() for words in WORDS]
    spoil(home.locations.database)

    without = [home.pygraphd(*words) for words in commands]
    home.start()
    ended = [home.pygraphd(*words) for words in commands]

    for before, done in zip(without, ended, strict=True):
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"pygraphd: {home.locations.database}: {said}"), done.args
        assert (done.returncode, done.stderr) == (before.returncode, before.stderr)


@pytest.fixture
def small_disk(home: Home, tmp_path: Path) -> Iterator[Path]:
    """The home's cache on a file system of 8 MiB, the socket elsewhere."""
    cache = tmp_path / "small"
    cache.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m,mode=700", "tmpfs", str(cache)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a file system")
    home.variables = {"PYGRAPHD_HOME": "", "XDG_CACHE_HOME": str(cache), "XDG_RUNTIME_DIR": str(home.path)}
    try:
        yield cache
    finally:
        home.close()
        subprocess.run(["umount", "--lazy", str(cache)], check=True)


@pytest.mark.usefixtures("small_disk")
def test_an_import_that_fills_the_disk_says_what_to_do_and_can_be_repeated(
    home: Home, tmp_path: Path
) -> None:
    export = written(tmp_path / "exported", *(row(str(number), KERNELS, FASTER) for number in range(6000)))
    home.start()

    done = home.pygraphd("cache", "import", str(export))
    stored = home.status()["entries"]

    assert (done.returncode, done.stdout) == (2, "")
    full = "the disk is full, nothing is stored; free some room or run: pygraphd cache prune; "
    assert done.stderr.startswith(f"pygraphd: {home.locations.database}: {full}")
    assert done.stderr.endswith(" of 6000 entries had been gone through: import the file again\n")
    assert 0 < stored < 6000
    small = written(tmp_path / "exported", *(row(str(number), KERNELS, FASTER) for number in range(100)))
    repeated = home.pygraphd("cache", "import", str(small))
    assert "kept          100 that are known here" in repeated.stdout.splitlines(), repeated
    assert home.status()["entries"] == stored
