from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import sqlite3
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from pygraphd import __version__
from pygraphd.cli import main, writing
from pygraphd.daemon import control, exchange
from pygraphd.daemon.exchange import ImportAnswer
from pygraphd.daemon.store import Store
from pygraphd.errors import CommandError
from pygraphd.schema.messages import Ping, encode
from pygraphd.schema.version import VERSION
from tests.support.cli_command import locations, pygraphd

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import TextIO

    from pygraphd.schema.locations import Locations
    from pygraphd.schema.messages import RecordRequest
    from pygraphd.schema.portable import ImportRequest


__all__ = ["locations"]  # a fixture


@pytest.fixture
def filled(locations: Locations, make_request: Callable[..., RecordRequest]) -> Locations:
    with Store(locations.database) as store:
        store.record(make_request("a", "b"), uid=0)
        store.record(make_request("c", gpu="NVIDIA A100"), uid=0)
    return locations


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert pygraphd("--version") == 0
    assert capsys.readouterr().out == f"pygraphd {VERSION}\n"
    assert __version__ == VERSION


@pytest.mark.parametrize(
    "words",
    [
        ("--nonsense",),
        ("nonsense",),
        ("cache", "nonsense"),
        ("cache", "show"),
        ("cache", "rederive", "everything"),
        ("cache", "rederive", "--gpu", "H200"),
        ("cache", "explain"),
        ("cache", "export"),
        ("cache", "import"),
        ("cache", "import", "a", "b"),
        ("status", "--xml"),
        ("start", "now"),
    ],
)
def test_what_is_not_understood_is_a_usage_error(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert pygraphd(*words) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("words", [(), ("cache",)])
def test_no_command_prints_help(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert pygraphd(*words) == 2
    captured = capsys.readouterr()
    assert "Usage: pygraphd" in captured.out + captured.err


@pytest.mark.parametrize(
    "words",
    [
        ("start",),
        ("cache",),
        ("cache", "prune"),
        ("cache", "explain"),
        ("cache", "rederive"),
        ("run",),
        ("status",),
    ],
)
def test_each_command_has_help(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert pygraphd(*words, "--help") == 0
    assert "Usage: pygraphd" in capsys.readouterr().out


@pytest.mark.parametrize("words", [(), ("run",), ("cache", "prune"), ("config", "show")])
def test_h_is_help(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert pygraphd(*words, "-h") == 0
    assert "Usage: pygraphd" in capsys.readouterr().out


def test_a_shell_completes_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (
        ("_PYGRAPHD_COMPLETE", "complete_bash"),
        ("COMP_WORDS", "pygraphd cache ex"),
        ("COMP_CWORD", "2"),
    ):
        monkeypatch.setenv(name, value)
    assert pygraphd() == 0
    assert capsys.readouterr().out.split() == ["explain", "export"]


def test_not_running_is_code_3(locations: Locations, capsys: pytest.CaptureFixture[str]) -> None:
    assert pygraphd("status", "--json") == 3
    status = json.loads(capsys.readouterr().out)
    expected: dict[str, object] = {
        "schema": 1,
        "running": False,
        "version": None,
        "pid": None,
        "entries": 0,
        "uptime_s": None,
        "problems": [],
    }
    assert expected.items() <= status.items()
    assert (status["socket"], status["database"]) == (str(locations.socket), str(locations.database))
    assert pygraphd("stop") == 3
    assert capsys.readouterr().err == "pygraphd: pygraphd is not running\n"


def test_inspect(filled: Locations, capsys: pytest.CaptureFixture[str]) -> None:
    assert pygraphd("cache", "inspect") == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert pygraphd("cache", "inspect", "--json", "--gpu", "a100") == 0
    listing = json.loads(capsys.readouterr().out)
    assert [entry["gpu"] for entry in listing["entries"]] == ["NVIDIA A100"]
    assert listing["schema"] == 1


@pytest.mark.slow
def test_a_terminal_gets_lines_that_fit_and_with_wide_those_of_a_pipe(filled: Locations) -> None:
    environ = {**os.environ, "COLUMNS": "80"}

    def listed(*words: str, terminal: bool = True) -> list[str]:
        reader, writer = pty.openpty() if terminal else os.pipe()
        try:
            command = [sys.executable, "-m", "pygraphd", "cache", "inspect", *words]
            assert subprocess.run(command, stdout=writer, env=environ, check=False).returncode == 0
            return os.read(reader, 1 << 16).decode().splitlines()  # few lines, so they fit the buffer
        finally:
            os.close(reader)
            os.close(writer)

    narrow = listed()
    assert len(narrow) == 1 + 2 * 3  # a header, and two lines for each entry
    assert max(map(len, narrow)) <= 80
    wide = listed("--wide")
    assert len(wide) == 1 + 3
    assert min(map(len, wide)) > 80
    assert {"PART", "SIZES", "REASON"} <= set(wide[0].split()) - set(narrow[0].split())
    for other in (listed("-w"), listed(terminal=False), listed("--wide", terminal=False)):
        assert list(map(_without_ages, other)) == list(map(_without_ages, wide))


def _without_ages(line: str) -> list[str]:
    return [re.sub(r"^\d+(\.\d+)?[smhd]+", "AGE", word) for word in line.split()]


def test_inspect_of_nothing(locations: Locations, capsys: pytest.CaptureFixture[str]) -> None:
    assert pygraphd("cache", "inspect") == 0
    assert "does not exist yet" in capsys.readouterr().out
    assert pygraphd("cache", "inspect", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"schema": 1, "entries": []}
    assert not locations.database.exists()


def _ids(capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    """Return the ids of the entries by GPU."""
    assert pygraphd("cache", "inspect", "--json") == 0
    ids: dict[str, list[str]] = {}
    for entry in json.loads(capsys.readouterr().out)["entries"]:
        ids.setdefault(entry["gpu"], []).append(entry["id"])
    return ids


def test_delete_takes_the_entries_named_and_no_other(
    filled: Locations, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = _ids(capsys)
    (first, kept), (other,) = ids["NVIDIA H200"], ids["NVIDIA A100"]
    assert pygraphd("cache", "delete", first[:20], "--dry-run") == 0
    assert capsys.readouterr().out == "would delete 1 entry and 2 measurements\n"
    for bad in ("", "zz", "0" * 64):
        assert pygraphd("cache", "delete", first, bad) == 2
        assert capsys.readouterr().err
    assert sum(map(len, _ids(capsys).values())) == 3
    assert pygraphd("cache", "delete", first[:20], other, first) == 0
    assert "deleted 2 entries and 4 measurements" in capsys.readouterr().out
    assert _ids(capsys) == {"NVIDIA H200": [kept]}


def test_clear_asks_and_leaves_nothing_behind_that_would_come_back(
    filled: Locations,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    make_request: Callable[..., RecordRequest],
) -> None:
    filled.spool.mkdir()
    (filled.spool / "1.json").write_bytes(encode(make_request("waits")))
    assert pygraphd("cache", "clear") == 2
    assert "to delete 4 entries and 8 measurements, which is all in " in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", _Answering("n\n"))
    assert pygraphd("cache", "clear") == 1
    assert "nothing was deleted" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", _Answering("y\n"))
    assert pygraphd("cache", "clear") == 0
    captured = capsys.readouterr()
    assert "delete 4 entries and 8 measurements, which is all in" in captured.err
    assert captured.out.startswith("deleted 4 entries and 8 measurements")
    assert _ids(capsys) == {}
    assert list(filled.spool.iterdir()) == []
    for arguments in ((), ("--yes",)):
        assert pygraphd("cache", "clear", *arguments) == 0
        assert capsys.readouterr().out.startswith("deleted 0 entries")


class _Answering(io.StringIO):
    """A terminal at which a person answers."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("command", ["show", "explain"])
def test_what_can_be_in_no_cache_is_a_usage_error_also_without_one(
    locations: Locations, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    for word in ("zzz", "/no/such/file"):
        assert pygraphd("cache", command, word) == 2
        assert f"{word}: " in (said := capsys.readouterr().err)
        assert (
            "no id or graph begins so: each has 64 digits of 0-9 and a-f; see: pygraphd cache inspect" in said
        )
    assert pygraphd("cache", command, "abc") == 1
    assert "there is no cache yet" in capsys.readouterr().err
    assert not locations.database.exists()


def test_show(filled: Locations, capsys: pytest.CaptureFixture[str]) -> None:
    pygraphd("cache", "inspect", "--json")
    entry = json.loads(capsys.readouterr().out)["entries"][0]
    assert pygraphd("cache", "show", entry["id"][:10], "--json") == 0
    assert json.loads(capsys.readouterr().out)["graph"] == entry["graph"]
    assert pygraphd("cache", "show", entry["graph"][:10]) == 0
    assert entry["id"] in capsys.readouterr().out
    assert pygraphd("cache", "show", "00000") == 2
    assert "no entry has an id or graph" in capsys.readouterr().err


def test_explain(filled: Locations, capsys: pytest.CaptureFixture[str]) -> None:
    pygraphd("cache", "inspect", "--json", "--gpu", "a100")
    graph = json.loads(capsys.readouterr().out)["entries"][0]["graph"]
    assert pygraphd("cache", "explain", graph[:10], "--json") == 0
    assert [each["graph"] for each in json.loads(capsys.readouterr().out)["graphs"]] == [graph]
    assert pygraphd("cache", "explain", graph[:10]) == 0
    assert "GRAPH            12  100.0 ±1.5     90.0    80.0  25%" in capsys.readouterr().out
    assert pygraphd("cache", "explain", __file__) == 2
    assert "test_cli.py: is not a summary: it is another file" in capsys.readouterr().err


@pytest.mark.timeout(30)  # it would be waited for
def test_explain_of_a_pipe(locations: Locations, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = locations.database.with_name("pipe")
    os.mkfifo(pipe)

    assert pygraphd("cache", "explain", str(pipe)) == 2
    assert "pipe: is a pipe, not a summary; a program run by `pygraphd run`" in capsys.readouterr().err


def test_explain_of_nothing(locations: Locations, capsys: pytest.CaptureFixture[str]) -> None:
    assert pygraphd("cache", "explain", "ab") == 1
    assert "there is no cache yet" in capsys.readouterr().err
    assert not locations.database.exists()


def test_prune_without_a_filter_is_refused(filled: Locations, capsys: pytest.CaptureFixture[str]) -> None:
    assert pygraphd("cache", "prune") == 2
    assert "give --older-than 30d, --gpu NAME, or both" in capsys.readouterr().err
    assert pygraphd("cache", "prune", "--older-than", "soon") == 2
    assert "--older-than: 'soon' is no length of time" in capsys.readouterr().err


def test_prune_without_a_daemon(filled: Locations, capsys: pytest.CaptureFixture[str]) -> None:
    assert pygraphd("cache", "prune", "--gpu", "H200", "--dry-run", "--json") == 0
    dry = json.loads(capsys.readouterr().out)
    assert dry == {"schema": 1, "entries": 2, "measurements": 4, "freed_bytes": 0, "dry_run": True}
    assert pygraphd("cache", "prune", "--gpu", "H200") == 0
    assert "deleted 2 entries and 4 measurements" in capsys.readouterr().out
    pygraphd("cache", "inspect", "--json")
    assert len(json.loads(capsys.readouterr().out)["entries"]) == 1


def test_prune_of_nothing_makes_nothing(locations: Locations, capsys: pytest.CaptureFixture[str]) -> None:
    assert pygraphd("cache", "prune", "--gpu", "H200") == 1
    assert "there is no cache yet" in capsys.readouterr().err
    assert not locations.database.exists()


@pytest.mark.parametrize("words", [(), ("--yes",), ("--dry-run",)])
def test_clear_of_nothing_is_done_at_once_and_makes_nothing(
    locations: Locations, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert pygraphd("cache", "clear", *words) == 0
    assert capsys.readouterr().out == "nothing to delete\n"
    assert pygraphd("cache", "clear", *words, "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["entries"], answer["dry_run"]) == (0, "--dry-run" in words)
    assert not locations.database.exists()


def test_rederive_without_a_daemon(filled: Locations, capsys: pytest.CaptureFixture[str]) -> None:
    # GRAPH took as long as KERNELS in all of them.
    assert pygraphd("cache", "rederive", "--dry-run", "--json") == 0
    dry = json.loads(capsys.readouterr().out)
    assert dry["changed"] == [{"before": "GRAPH", "after": "KERNELS", "entries": 3}]
    assert (dry["schema"], dry["entries"], dry["dry_run"]) == (1, 3, True)
    assert pygraphd("cache", "rederive") == 0
    assert "GRAPH -> KERNELS  3" in capsys.readouterr().out
    assert pygraphd("cache", "rederive") == 0
    assert "unchanged   3" in capsys.readouterr().out


def test_rederive_of_nothing_makes_nothing(locations: Locations, capsys: pytest.CaptureFixture[str]) -> None:
    assert pygraphd("cache", "rederive") == 1
    assert "there is no cache yet, so there is nothing to derive anew" in capsys.readouterr().err
    assert not locations.database.exists()


def test_a_database_of_a_newer_version_is_not_derived_anew(
    filled: Locations, capsys: pytest.CaptureFixture[str]
) -> None:
    connection = sqlite3.connect(filled.database)
    connection.execute("PRAGMA user_version=99")
    connection.close()
    content = filled.database.read_bytes()
    assert pygraphd("cache", "rederive") == 2
    assert "upgrade pygraphd" in capsys.readouterr().err
    assert filled.database.read_bytes() == content


def test_a_daemon_that_cannot_import_is_named(
    filled: Locations, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "known.jsonl"
    assert pygraphd("cache", "export", str(file)) == 0
    older = Ping("pygraphd", "0.0.9", 1, 1, ("lookup", "record", "rederive", "import"))
    monkeypatch.setattr(control, "ping", lambda path: older)
    capsys.readouterr()
    assert pygraphd("cache", "import", str(file)) == 1
    assert capsys.readouterr().err == (
        "pygraphd: the daemon is version 0.0.9, which cannot import for this one; run: pygraphd restart\n"
    )


def test_a_lock_that_cannot_be_made_is_told(
    filled: Locations, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing, "acquire", full)
    assert pygraphd("cache", "rederive") == 1
    assert capsys.readouterr().err == (
        f"pygraphd: {filled.lock}: cannot be locked: No space left on device; set PYGRAPHD_HOME to a folder of yours\n"
    )


def test_a_daemon_that_cannot_derive_is_named(
    filled: Locations, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    older = Ping("pygraphd", "0.0.9", 1, 1, ("lookup", "record", "rederive", "import"))
    monkeypatch.setattr(control, "ping", lambda path: older)
    assert pygraphd("cache", "rederive") == 1
    assert capsys.readouterr().err == (
        "pygraphd: the daemon is version 0.0.9, which cannot derive decisions anew for this one; run: pygraphd restart\n"
    )


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", "empty"),
        (b"# PyGraph\n", "another file"),
        (b"\x7fELF\xff\n", "another file"),
        (b'{"schema": 2}\n', "another file"),
        (b"[" * 60_000 + b"\n", "another file"),
        (b"x" * 100_000, "another file"),
    ],
    ids=["empty", "text", "binary", "JSON", "deep", "long"],
)
def test_an_import_of_another_file_says_what_is_read(
    locations: Locations, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, kind: str
) -> None:
    (file := tmp_path / "file").write_bytes(content)
    assert pygraphd("cache", "import", str(file)) == 2
    said = f"is {kind}, not one that `pygraphd cache export FILE` has written; nothing was imported\n"
    assert capsys.readouterr().err == f"pygraphd: {file}: {said}"
    assert pygraphd("cache", "import", str(tmp_path)) == 2
    assert f"{tmp_path}: is a folder, not one that `pygraphd cache export FILE`" in capsys.readouterr().err
    assert not locations.database.exists()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_half_an_export_is_taken_away(
    filled: Locations, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: BaseException
) -> None:
    def failing(_: object, stream: TextIO) -> None:
        stream.write("half")
        raise error

    monkeypatch.setattr(exchange, "write", failing)
    file = tmp_path / "known.jsonl"
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        main(["cache", "export", str(file)])
    assert not file.exists()


class _FullAfterOne:
    """Stores one request."""

    requests = 0

    def add_imported(self, request: ImportRequest) -> ImportAnswer:
        self.requests += 1
        if self.requests > 1:
            raise CommandError("the disk is full")
        return ImportAnswer(added=len(request.entries))


def test_an_import_that_ends_early_says_how_far_it_came(
    filled: Locations,
    make_request: Callable[..., RecordRequest],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    with Store(filled.database) as store:
        store.record(make_request(*map(str, range(80))), uid=0)
    file = tmp_path / "known.jsonl"
    assert pygraphd("cache", "export", str(file)) == 0
    monkeypatch.setattr(writing, "writing", lambda _: contextlib.nullcontext(_FullAfterOne()))
    assert pygraphd("cache", "import", str(file)) == 1
    assert capsys.readouterr().err.splitlines() == [
        "wrote 83 entries",
        "pygraphd: the disk is full; 64 of 83 entries had been gone through: import the file again",
    ]


@pytest.mark.parametrize(("words", "code"), [(("export", "-"), 1), (("import", "-"), 2)])
def test_a_closed_stream_is_told(
    filled: Locations,
    words: tuple[str, ...],
    code: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdout" if code == 1 else "stdin", None)
    assert pygraphd("cache", *words) == code
    assert " is closed" in capsys.readouterr().err
