"""The commands show shipped decisions as such, below the user's own, and never change them."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

import pytest

from pygraphd.cli import main
from pygraphd.daemon import exchange
from pygraphd.daemon.store import Store
from pygraphd.schema.locations import Locations, locate
from pygraphd.schema.policy import POLICY_VERSION
from pygraphd.schema.portable import Portable
from tests.support.cli_command import pygraphd
from tests.support.shipped_rows import FASTER, H100, KERNELS, row, written

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pygraphd.schema.messages import RecordRequest

SHIPPED = row("shipped", KERNELS, FASTER)


@pytest.fixture
def locations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Locations:
    monkeypatch.setenv("PYGRAPHD_HOME", str(tmp_path))
    monkeypatch.setenv("PYGRAPHD_SHIPPED", str(tmp_path / "exports"))
    written(tmp_path / "exports", SHIPPED)
    return locate()


@pytest.fixture
def filled(locations: Locations, make_request: Callable[..., RecordRequest]) -> Locations:
    with Store(locations.database) as store:
        store.record(make_request("a", "b"), uid=0)
    return locations


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*words: str) -> str:
        with contextlib.suppress(SystemExit):
            main(words)
        return capsys.readouterr().out

    return run


def listed(text: str) -> list[tuple[str, bool]]:
    return [(each["graph"], each["shipped"]) for each in json.loads(text)["entries"]]


@pytest.mark.usefixtures("filled")
def test_they_are_listed_below_the_users_own(said: Callable[..., str]) -> None:
    graph = SHIPPED.record.graph.digest

    assert [is_shipped for _, is_shipped in listed(said("cache", "inspect", "--json"))] == [
        False,
        False,
        True,
    ]
    assert listed(said("cache", "inspect", "--json", "--gpu", "H100")) == [(graph, True)]
    assert len(listed(said("cache", "inspect", "--json", "--most", "2"))) == 2
    *own, last = said("cache", "inspect").splitlines()[1:]
    assert "/shipped  GRAPH" in last
    assert "shipped" not in "".join(own)


@pytest.mark.usefixtures("locations")
def test_they_are_there_where_no_daemon_has_run(
    said: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = SHIPPED.record.graph.digest

    assert listed(said("cache", "inspect", "--json")) == [(graph, True)]
    assert "entries   0, and 1 shipped" in said("status")
    monkeypatch.setenv("PYGRAPHD_SHIPPED", "0")
    assert "no entries" in said("cache", "inspect")
    assert "entries   0\n" in said("status")


@pytest.mark.usefixtures("filled")
def test_one_is_shown_and_explained_as_shipped(said: Callable[..., str]) -> None:
    graph = SHIPPED.record.graph.digest[:20]

    shown, explained = said("cache", "show", graph), said("cache", "explain", graph)

    assert f"decided     shipped, policy {POLICY_VERSION}\n" in shown
    assert "hits        shipped\n" in shown
    assert "shipped      GRAPH: GRAPH is faster\n" in explained
    assert "ago on shipped:lab, pygraphd 0.1.0\n" in explained


@pytest.mark.usefixtures("filled")
def test_nothing_deletes_or_exports_them(said: Callable[..., str], tmp_path: Path) -> None:
    before = (tmp_path / "exports" / "h100.jsonl").read_bytes()
    (graph, _) = listed(said("cache", "inspect", "--json", "--gpu", "H100"))[0]

    said("cache", "export", str(tmp_path / "mine.jsonl"))
    said("cache", "delete", graph)
    said("cache", "prune", "--gpu", "H100")
    said("cache", "clear", "--yes")

    assert listed(said("cache", "inspect", "--json")) == [(graph, True)]
    assert (tmp_path / "exports" / "h100.jsonl").read_bytes() == before
    with (tmp_path / "mine.jsonl").open("rb") as stream:
        exported: list[Any] = list(exchange.read_file(stream, "mine"))
    assert [each.environment.gpu for each in exported if isinstance(each, Portable)] == ["NVIDIA H200"] * 2


def test_who_deletes_all_is_told_that_they_stay(filled: Locations, said: Callable[..., str]) -> None:
    stays = "; 1 shipped decision stays: PYGRAPHD_SHIPPED=0 leaves them out\n"

    assert said("cache", "clear", "--dry-run").endswith(f"measurements{stays}")
    assert said("cache", "clear", "--yes").endswith(f"KiB freed{stays}")
    filled.database.unlink()
    assert said("cache", "clear") == f"nothing to delete{stays}"


def test_who_deletes_one_is_told_how_to_leave_it_out(
    filled: Locations, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    graph = SHIPPED.record.graph.digest
    said = (
        f"pygraphd: {graph}: is shipped in {tmp_path}/exports, and not deleted; "
        "PYGRAPHD_SHIPPED=0 leaves all of these out\n"
    )
    assert pygraphd("cache", "delete", graph) == 2
    assert capsys.readouterr().err == said
    filled.database.unlink()
    assert pygraphd("cache", "delete", graph) == 2
    assert capsys.readouterr().err == said
    assert pygraphd("cache", "delete", "0" * 64) == 1
    assert "there is no cache yet" in capsys.readouterr().err


@pytest.mark.usefixtures("locations")
def test_one_of_the_package_is_told_to_be(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYGRAPHD_SHIPPED")
    pygraphd("cache", "inspect", "--json", "--most", "1")
    ((graph, _),) = listed(capsys.readouterr().out)
    assert pygraphd("cache", "delete", graph) == 2
    assert f"{graph}: is shipped with the package" in capsys.readouterr().err
    monkeypatch.setenv("PYGRAPHD_SHIPPED", "0")
    assert pygraphd("cache", "delete", graph) == 1
    assert "shipped" not in capsys.readouterr().err


@pytest.mark.usefixtures("filled")
def test_a_file_that_is_refused_is_a_problem_of_status(said: Callable[..., str], tmp_path: Path) -> None:
    bad = tmp_path / "exports" / "bad.jsonl"
    bad.write_text("{}\n")

    assert f"problem   {bad}: " in said("status")
    assert listed(said("cache", "inspect", "--json", "--gpu", H100.gpu)) != []
