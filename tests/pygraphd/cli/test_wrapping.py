"""No command writes a line that is wider than the terminal, and what is no terminal gets each line as it is."""

from __future__ import annotations

import contextlib
import os
import pty
import sqlite3
import sys
import threading
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pygraphd.cli.wrapping import folded, paragraph, wrapped
from pygraphd.daemon.store import Store
from tests.support.cli_command import locations, pygraphd
from tests.support.repository import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pygraphd.schema.locations import Locations
    from pygraphd.schema.messages import RecordRequest

__all__ = ["locations"]  # a fixture

WIDTH = 80
REPORT = str(ROOT / "docs" / "report-example.json")


@pytest.mark.parametrize(
    ("line", "indent", "pieces"),
    [
        ("name  " + "value " * 3, 6, ["name  value value", "      value "]),
        ("name  a /a/path/of/19/chars b", 6, ["name  a", " /a/path/of/19/chars", "      b"]),
        ("name  /a/path/of/18/char", 6, ["name", "  /a/path/of/18/char"]),
        ("name  " + "x" * 45, 6, ["name", "x" * 20, "  " + "x" * 18, "  " + "x" * 7]),
        ("/a/path/of/19/chars: what", 2, ["/a/path/of/19/chars:", "  what"]),
        ("short", 2, ["short"]),
    ],
)
def test_a_line_is_continued_behind_its_name(line: str, indent: int, pieces: list[str]) -> None:
    assert list(folded(line, indent, 20)) == pieces


@given(st.text("ab ", max_size=200), st.integers(0, 20), st.integers(40, 80))
def test_pieces_have_all_words_and_fit(line: str, indent: int, width: int) -> None:
    pieces = list(folded(line, indent, width))

    assert max(map(len, pieces)) <= width
    assert "".join("".join(pieces).split()) == "".join(line.split())


def test_what_is_no_terminal_gets_lines_as_they_are() -> None:
    line = "word " * 50
    assert wrapped(line, 4) == line
    assert paragraph(f"{line}\n{line}") == f"{line}\n{line}"


@pytest.fixture
def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Return a function with the lines that a command writes to a terminal."""
    monkeypatch.setenv("COLUMNS", str(WIDTH))

    def run(*words: str) -> list[str]:
        ours, theirs = pty.openpty()
        read: list[bytes] = []

        def take() -> None:
            with contextlib.suppress(OSError):  # the end of a terminal
                while some := os.read(ours, 4096):
                    read.append(some)

        taking = threading.Thread(target=take)
        taking.start()
        with os.fdopen(theirs, "w") as terminal, monkeypatch.context() as within:
            within.setattr(sys, "stdout", terminal)
            assert pygraphd(*words) in {0, 1, 3}
        taking.join()
        os.close(ours)
        return b"".join(read).decode().replace("\r\n", "\n").splitlines()

    return run


@pytest.fixture
def filled(locations: Locations, make_request: Callable[..., RecordRequest]) -> str:
    """Return the graph of an entry with long times, from a host with a long name."""
    request = make_request("a", median_us=12345.6)
    with Store(locations.database) as store:
        store.record(request, uid=100000)
    with contextlib.closing(sqlite3.connect(locations.database)) as connection, connection:
        connection.execute("UPDATE measurement SET host = ?, host_mad_us = 1.5", ("node-17." + "x" * 60,))
    return request.records[0].graph.digest


def test_measurements_have_two_lines_each_that_are_whole(
    filled: str, on_terminal: Callable[..., list[str]]
) -> None:
    lines = on_terminal("cache", "show", filled)

    assert max(map(len, lines)) <= WIDTH
    table = lines[lines.index("") + 1 :]
    table = table[table.index("") + 1 :]
    assert table[0].split() == ["DEPLOYMENT", "SAMPLES", "COST", "us", "HOST", "us", "GPU", "us"]
    figures = [line for line in table if line.startswith(("GRAPH", "KERNELS"))]
    assert [line.split()[1:] for line in figures] == [["12", "12345.6", "±1.5", "90.0", "±1.5", "80.0"]] * 2
    assert len({line.rindex("80.0") for line in figures}) == 1
    below = " ".join(" ".join(table[2:]).split())
    assert below.count(f" ago on node-17.{'x' * 60}, pygraphd 0.1.0, uid 100000") == 2
    assert below.startswith("GPU busy 25%, ")


@pytest.mark.parametrize("words", ["inspect", "show GRAPH", "explain GRAPH"])
def test_each_listing_fits(filled: str, on_terminal: Callable[..., list[str]], words: str) -> None:
    lines = on_terminal("cache", *words.replace("GRAPH", filled).split())

    assert max(map(len, lines)) <= WIDTH
    assert any("12345.6" in line for line in lines)


@pytest.mark.parametrize(
    "words",
    ["report SUMMARY", "doctor SUMMARY", "cache explain SUMMARY", "status", "stats", "config show"],
)
def test_each_report_fits(
    locations: Locations,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    on_terminal: Callable[..., list[str]],
    words: str,
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('broken')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (locations.cache / "config.toml").write_text("metrics_port = 9\nshipped = false\n")

    lines = on_terminal(*(word.replace("SUMMARY", REPORT) for word in words.split()))

    assert max(map(len, lines)) <= WIDTH
    assert all(lines[0].split())
