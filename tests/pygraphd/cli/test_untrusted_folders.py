"""Where another user may have put cache, spool, log and summaries, no command prints them as ours: it refuses in one line, with one exit code."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from pygraphd.cli import summary_files
from pygraphd.client.common.report import Report
from pygraphd.daemon.store import Store
from pygraphd.schema.locations import locate
from tests.support.cli_command import pygraphd

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pygraphd.schema.locations import Locations
    from pygraphd.schema.messages import RecordRequest

COMMANDS = (
    "stats",
    "stats --zero",
    "logs",
    "report",
    "report last",
    "cache inspect",
    "cache inspect --json",
    "cache show GRAPH",
    "cache explain GRAPH",
    "cache explain SUMMARY",
    "cache prune --gpu H200",
    "cache prune --gpu H200 --dry-run",
    "cache delete GRAPH",
    "cache delete GRAPH --dry-run",
    "cache clear --yes",
    "cache clear --dry-run",
    "cache rederive",
    "cache rederive --dry-run",
    "cache export -",
    "cache import FILE",
    "cache import FILE --dry-run",
    "start",
    "stop",
    "restart",
)


@pytest.fixture
def planted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_request: Callable[..., RecordRequest]
) -> Locations:
    """Return folders with a cache, a log and a summary, in a folder where everybody may write."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    monkeypatch.setenv("PYGRAPHD_HOME", str(shared / "home"))
    monkeypatch.setenv("PYGRAPHD_SHIPPED", "0")
    locations = locate()
    for folder in (locations.cache, locations.spool, summary_files.folder(locations)):
        folder.mkdir(mode=0o700)
    with Store(locations.database) as store:
        store.record(make_request("planted"), uid=0)
    locations.log.write_text("planted\n")
    (summary_files.folder(locations) / "7.planted.json").write_text(json.dumps(Report().summary()))
    assert pygraphd("cache", "export", str(tmp_path / "known")) == 0
    return locations


def _words(command: str, locations: Locations, graph: str) -> list[str]:
    named = {
        "GRAPH": graph,
        "SUMMARY": str(summary_files.folder(locations) / "7.planted.json"),
        "FILE": str(locations.cache.parents[1] / "known"),
    }
    return [named.get(word, word) for word in command.split()]


def _refusal(locations: Locations, how: str) -> str:
    """Make the folder another user's in some way; return what is said of it."""
    home = locations.cache
    if how == "others can write":
        home.chmod(0o777)
        return f"{home}: others can write to it (mode 777); run: chmod 700 {home}"
    if how == "a link":
        home.rename(home.parents[1] / "elsewhere")
        home.symlink_to(home.parents[1] / "elsewhere")
        return f"{home}: is a symbolic link; give the folder itself"
    os.chown(home, 12345, -1)
    return f"{home}: belongs to uid 12345, not to you (0); set PYGRAPHD_HOME to a folder of yours"


@pytest.mark.parametrize(
    "how",
    [
        "others can write",
        "a link",
        pytest.param("another's", marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root may chown")),
    ],
)
def test_no_command_reads_what_others_may_have_put_there(
    planted: Locations,
    make_request: Callable[..., RecordRequest],
    capsys: pytest.CaptureFixture[str],
    how: str,
) -> None:
    graph = make_request("planted").records[0].graph.digest
    before, said = planted.database.read_bytes(), _refusal(planted, how)
    capsys.readouterr()

    for command in COMMANDS:
        assert pygraphd(*_words(command, planted, graph)) == 2, command
        printed = capsys.readouterr()
        assert (printed.out, printed.err) == ("", f"pygraphd: {said}\n"), command
    assert planted.database.read_bytes() == before


def test_a_report_on_a_file_says_why_the_cache_is_not_read(
    planted: Locations, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(Report().summary()))
    said = _refusal(planted, "others can write")

    assert pygraphd("report", str(file)) == 0
    assert f"the cache cannot be read: {said}" in capsys.readouterr().out


@pytest.mark.parametrize("kept", ["spool", "summaries"])
def test_each_folder_within_counts(planted: Locations, capsys: pytest.CaptureFixture[str], kept: str) -> None:
    (planted.cache / kept).chmod(0o777)
    capsys.readouterr()

    assert pygraphd(*(["report"] if kept == "summaries" else ["cache", "inspect"])) == 2
    assert f"{kept}: others can write to it" in capsys.readouterr().err


def test_the_doctor_takes_no_summary_from_there(
    planted: Locations, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pygraphd.cli.doctor_probe.probe", dict)
    said = _refusal(planted, "others can write")
    capsys.readouterr()

    assert pygraphd("doctor", "--json") == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["summary"] is None
    assert any(said == check["found"] for check in answer["checks"])
    assert pygraphd("doctor", "last") == 2
    assert capsys.readouterr().err == f"pygraphd: {said}\n"


def test_a_folder_of_ours_in_a_shared_one_is_read(
    planted: Locations, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pygraphd("logs") == 0
    assert "planted" in capsys.readouterr().out
