"""The daemon's log: one line for each change of state, more or fewer by `PYGRAPHD_LOG`, never larger than two files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pygraphd.schema.messages import LOOKUP_PATH, RECORD_PATH, LookupRequest, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from pygraphd.schema.messages import RecordRequest
    from tests.support.daemon_home import Home

pytestmark = pytest.mark.daemon


def logged(home: Home, make_request: Callable[..., RecordRequest], level: str | None) -> str:
    """Record and look up one graph with a daemon that logs at `level`; return its log when it has ended."""
    if level is not None:
        home.variables["PYGRAPHD_LOG"] = level
    home.start()
    request = make_request("a")
    assert home.ask("POST", RECORD_PATH, encode(request))[0] == 200
    lookup = LookupRequest(request.environment.digest(), (request.records[0].graph.digest,))
    assert home.ask("POST", LOOKUP_PATH, encode(lookup))[0] == 200
    assert home.ask("POST", LOOKUP_PATH, b"{}")[0] == 400
    assert home.pygraphd("stop").returncode == 0
    return home.locations.log.read_text()


@pytest.mark.parametrize(("level", "states", "details"), [("info", 1, 0), ("debug", 1, 1), ("warning", 0, 0)])
def test_each_change_of_state_is_one_line(
    home: Home, make_request: Callable[..., RecordRequest], level: str, states: int, details: int
) -> None:
    _assert_told(logged(home, make_request, level), states, details)


def _assert_told(text: str, states: int, details: int) -> None:
    for line in ("listens on", "recorded 1 decisions", "stopped"):
        assert text.count(line) == states, text
    assert text.count("1 of 1 known") == details, text
    assert text.count(f"{LOOKUP_PATH} refused: LookupRequest: environment is missing") == 1


def test_a_full_log_makes_room(home: Home, make_request: Callable[..., RecordRequest]) -> None:
    """With the level that is the default."""
    home.locations.log.write_text("old\n" * 2**18)

    text = logged(home, make_request, None)

    assert "old" not in text
    _assert_told(text, states=1, details=0)
    assert home.locations.log.with_name("pygraphd.log.1").read_text().startswith("old\n")


def test_a_level_that_is_none_is_refused_before_anything_is_done(home: Home) -> None:
    home.variables["PYGRAPHD_LOG"] = "loud"

    done = home.pygraphd("start")

    assert done.returncode == 2
    assert done.stderr == "pygraphd: PYGRAPHD_LOG: expected one of debug, info, warning, got 'loud'\n"
    assert not home.locations.log.exists()


@pytest.mark.slow
def test_a_log_that_was_removed_is_begun_anew(home: Home) -> None:
    home.start()
    home.locations.log.unlink()

    home.wait_until(home.locations.log.exists)

    assert home.pygraphd("logs").returncode == 0
    assert home.pygraphd("stop").returncode == 0
    assert home.locations.log.read_text().count("stopped") == 1


def test_a_log_that_cannot_be_rotated_is_a_problem(home: Home) -> None:
    home.locations.log.write_text("old\n" * 2**18)
    older = home.locations.log.with_name("pygraphd.log.1")
    older.mkdir()
    home.start()

    problems = home.status()["problems"]

    assert any("cannot be renamed to pygraphd.log.1" in each for each in problems), problems
    text = home.locations.log.read_text()
    assert (text.count("cannot be renamed"), "Traceback" in text) == (1, False)
    older.rmdir()
    assert home.pygraphd("stop").returncode == 0
    assert older.read_text().startswith("old\n")


def test_a_spool_that_keeps_its_files_is_a_problem(home: Home) -> None:
    (home.locations.spool / "x.json").mkdir(parents=True)
    (home.locations.spool / "x.bad" / "full").mkdir(parents=True)
    home.locations.spool.chmod(0o700)
    home.start()
    home.wait_until(lambda: "nor set aside" in home.locations.log.read_text())

    problems = home.status()["problems"]

    assert (
        f"{home.locations.spool}/x.json: cannot be read or set aside: Directory not empty; delete it"
        in problems
    )
