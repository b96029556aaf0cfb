"""What becomes of answers that a running daemon has, by who gave them and by what the user asks for.

The clock stands in for the GPU's, as in `test_plan`; the daemon is a process of its own, and all goes over its socket.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pygraphd.cli.catalogue import Catalogue
from pygraphd.cli.exporting import Export
from pygraphd.client.decisions.decision_service import DISPUTED
from pygraphd.client.frontend import settings
from pygraphd.client.frontend.runtime import Runtime
from pygraphd.daemon import control, exchange
from pygraphd.daemon.exchange import ImportAnswer
from pygraphd.daemon.store import Store
from pygraphd.schema.locations import locate
from pygraphd.schema.messages import Deployment, RecordRequest, decode
from pygraphd.schema.portable import ImportRequest
from tests.support.clock import Clock
from tests.support.compiled import (
    ENOUGH,
    relocating,
    session,
    sources,
    trained,
)
from tests.support.daemon_home import Home

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pygraphd.schema.portable import Portable

__all__ = ["relocating", "session"]  # fixtures

pytestmark = [pytest.mark.torch, pytest.mark.daemon, pytest.mark.usefixtures("patient"), pytest.mark.slow]

AS_KERNELS, CAPTURED = (["kernels"] * 2, ["kernels"]), (["relocated"] * 2, ["relocated"])
SLOW = {Deployment.KERNELS: 50.0, Deployment.GRAPH: 100.0}
GRAPHS = 3
OTHER_UID = 12345
AS_OTHER = ("setpriv", f"--reuid={OTHER_UID}", f"--regid={OTHER_UID}", "--clear-groups")
RECORD = """
import http.client, socket, sys
connection = http.client.HTTPConnection("pygraphd")
connection.sock = socket.socket(socket.AF_UNIX)
connection.sock.connect(sys.argv[1])
connection.request("POST", "/v3/record", sys.stdin.buffer.read())
assert connection.getresponse().status == 200
"""


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    """Return the session's home; no daemon is started yet."""
    opened = Home(tmp_path)
    try:
        yield opened
    finally:
        opened.close()


def spooled(home: Home) -> list[Path]:
    return sorted(home.locations.spool.glob("*"))


def bodies_for(home: Home, told: Runtime) -> list[bytes]:
    """Train without a daemon, and return what is to be recorded; nothing of it stays."""
    trained(told, ENOUGH)
    files = spooled(home)
    bodies = [file.read_bytes() for file in files]
    for file in files:
        file.unlink()
    assert sum(len(decode(RecordRequest, body).records) for body in bodies) == GRAPHS
    return bodies


def recorded(database: Path, bodies: list[bytes], uid: int) -> None:
    """Record what is told in a database, as somebody's."""
    with Store(database) as store:
        for body in bodies:
            store.record(decode(RecordRequest, body), uid)


def start_with_answers(home: Home, told: Runtime, by: str) -> None:
    """Start a daemon that has the answers of another host, or user, or our own, or our own by way of a file."""
    if by == "other-user":
        recorded(home.locations.database, bodies_for(home, told), os.geteuid() + 1)
        home.start()
    elif by in {"import", "shipped"}:
        with tempfile.TemporaryDirectory() as folder:
            known = Path(folder) / "cache.db"
            recorded(known, bodies_for(home, told), os.geteuid())
            with Catalogue(known) as catalogue:
                entries = (*Export(catalogue),)
        if by == "shipped":
            ship(home, entries)
            return
        home.start()
        answer = control.add_imported(home.locations.socket, ImportRequest(entries))
        assert answer == ImportAnswer(added=GRAPHS)
    else:
        home.start()
        trained(told, ENOUGH, "elsewhere" if by == "other-host" else None)
    assert stats(home)["entries"] == GRAPHS
    assert spooled(home) == []


def ship(home: Home, entries: Sequence[Portable]) -> None:
    """Start a daemon that finds entries beside the package's code, as if they had come with it."""
    folder = home.path / "shipped"
    folder.mkdir()
    with (folder / "gpu.jsonl").open("w") as stream:
        exchange.write(entries, stream)
    home.variables["PYGRAPHD_SHIPPED"] = str(folder)
    home.start()
    home.wait_until(lambda: stats(home)["shipped"] == GRAPHS)


def stats(home: Home) -> dict[str, Any]:
    status, answer = home.ask("GET", "/v1/stats")
    assert status == 200
    return answer


def counts(told: Runtime, *names: str) -> tuple[int, ...]:
    summary = told.report.summary()
    return tuple(summary[name] for name in names)


@pytest.fixture(
    params=["other-host", "other-user", "import", pytest.param("shipped", marks=pytest.mark.slow)]
)
def foreign(request: pytest.FixtureRequest, home: Home, session: Runtime) -> Home:
    start_with_answers(home, session, request.param)
    return home


@pytest.mark.parametrize(("trust", "validated"), [("validate", GRAPHS), ("all", 0)])
def test_what_another_has_decided_is_used_at_once(
    foreign: Home,
    session: Runtime,
    monkeypatch: pytest.MonkeyPatch,
    trust: str,
    validated: int,
) -> None:
    monkeypatch.setenv(settings.TRUST, trust)
    before = stats(foreign)

    told, steps = trained(session, ENOUGH)
    told.close()

    assert steps == [CAPTURED] * ENOUGH
    assert counts(told, "hits", "misses", "measured", "recorded", "waited") == (GRAPHS, 0, 0, 0, 0)
    assert counts(told, "validated", "disputed") == (validated, 0)
    assert told.report.summary()["deployed"] == {"KERNELS": 0, "GRAPH": GRAPHS}
    assert sources(told) == {("GRAPH", "cache")}
    assert told.report.failures == {}
    after = stats(foreign)
    assert (after["hits"] - before["hits"], after["records"] - before["records"]) == (GRAPHS, 0)


def test_what_another_has_decided_is_not_used_where_only_our_own_is_trusted(
    foreign: Home,
    session: Runtime,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(settings.TRUST, "local")

    told, steps = trained(session, ENOUGH)
    again, steps_again = trained(session, 3)

    assert (steps[0], steps[-1]) == (AS_KERNELS, CAPTURED)
    assert counts(told, "hits", "misses", "measured", "recorded") == (0, GRAPHS, GRAPHS, GRAPHS)
    assert counts(told, "validated", "adopted", "waited") == (0, 0, 0)
    assert sources(told) == {("GRAPH", "measured")}
    # What it found out itself has taken the place of what it did not trust.
    assert (counts(again, "hits", "measured"), steps_again) == ((GRAPHS, 0), [CAPTURED] * 3)
    assert told.report.failures == again.report.failures == {}
    assert stats(foreign)["entries"] == GRAPHS


def test_what_another_has_decided_and_does_not_hold_is_measured_anew(
    foreign: Home,
    session: Runtime,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Clock, "times_us", SLOW)

    told, steps = trained(session, 2 * ENOUGH)
    again, steps_again = trained(session, ENOUGH)

    assert (steps[0], steps[-1]) == (CAPTURED, AS_KERNELS)
    assert counts(told, "hits", "validated", "disputed", "measured", "recorded") == (GRAPHS,) * 5
    assert told.report.fallbacks == {DISPUTED: GRAPHS}
    assert counts(again, "hits", "validated", "measured") == (GRAPHS, 0, 0)
    assert steps_again == [AS_KERNELS] * ENOUGH
    assert told.report.failures == again.report.failures == {}
    assert stats(foreign)["entries"] == GRAPHS


@pytest.mark.parametrize("by", ["other-host", "other-user", "import"])
@pytest.mark.parametrize(("span_us", "disputed"), [(4000.0, GRAPHS), (425.0, 0)])
def test_a_slower_gpu_is_seen_behind_a_host_that_is_as_quick(
    home: Home, session: Runtime, monkeypatch: pytest.MonkeyPatch, by: str, span_us: float, disputed: int
) -> None:
    times = {Deployment.KERNELS: 500.0, Deployment.GRAPH: 17.0}
    spans = {Deployment.KERNELS: 500.0, Deployment.GRAPH: 411.0}
    monkeypatch.setattr(Clock, "times_us", times)
    monkeypatch.setattr(Clock, "spans_us", spans)
    start_with_answers(home, session, by)
    monkeypatch.setattr(Clock, "spans_us", {**spans, Deployment.GRAPH: span_us})

    told, steps = trained(session, 2 * ENOUGH)

    assert (steps[0], steps[-1]) == (CAPTURED, AS_KERNELS if disputed else CAPTURED)
    assert counts(told, "hits", "validated", "disputed") == (GRAPHS, GRAPHS, disputed)
    assert told.report.failures == {}


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="only root can become somebody else"
)
def test_the_daemon_of_another_user_is_none(
    home: Home, session: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever rows it has for us, nobody knows who forged them; it is not even asked."""
    if subprocess.run([*AS_OTHER, sys.executable, "-c", "import pygraphd"], check=False, cwd="/").returncode:
        pytest.skip("nobody else may run this Python")
    monkeypatch.setenv(settings.TRUST, "all")
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, OTHER_UID, OTHER_UID)
        theirs = Home(Path(folder))
        try:
            process = theirs.spawn(*AS_OTHER)
            theirs.wait_until(theirs.locations.socket.exists)
            for body in bodies_for(home, session):
                record = [*AS_OTHER, sys.executable, "-c", RECORD, str(theirs.locations.socket)]
                subprocess.run(record, input=body, check=True, timeout=60, cwd="/")
            told, steps = trained(Runtime(locate({"PYGRAPHD_HOME": folder})), ENOUGH)
        finally:
            process.kill()
            theirs.close()

    assert (steps[0], steps[-1]) == (AS_KERNELS, CAPTURED)
    assert counts(told, "hits", "measured") == (0, GRAPHS)
    (reason,) = (each for each in told.report.failures if each.startswith("daemon"))
    assert f"belongs to uid {OTHER_UID}, not to you (0); set PYGRAPHD_HOME to a folder of yours" in reason


@pytest.mark.parametrize("by", ["ourselves", "other-host", "other-user"])
def test_a_cache_that_is_only_read_is_used_and_stays_as_it_is(
    home: Home,
    session: Runtime,
    monkeypatch: pytest.MonkeyPatch,
    by: str,
) -> None:
    start_with_answers(home, session, by)
    monkeypatch.setenv(settings.READONLY, "1")
    before = stats(home)

    told, steps = trained(session, ENOUGH)
    told.close()

    assert steps == [CAPTURED] * ENOUGH
    assert counts(told, "hits", "measured", "recorded", "spooled", "withheld") == (GRAPHS, 0, 0, 0, 0)
    assert told.report.summary()["deployed"]["GRAPH"] == GRAPHS
    assert told.report.failures == {}
    after = stats(home)
    assert after["hits"] - before["hits"] == GRAPHS
    assert [after[name] for name in ("records", "leases")] == [before[name] for name in ("records", "leases")]
    assert spooled(home) == []


def test_what_is_found_out_where_the_cache_is_only_read_is_told_to_nobody(
    home: Home,
    session: Runtime,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    home.start()
    monkeypatch.setenv(settings.READONLY, "1")

    finished, steps = trained(session, ENOUGH)
    unfinished, _ = trained(session, 5)
    for each in (finished, unfinished):
        each.close()

    assert steps[-1] == CAPTURED
    assert counts(finished, "misses", "measured", "recorded", "spooled", "withheld") == (3, 3, 0, 0, 3)
    assert counts(unfinished, "misses", "measured", "recorded", "spooled", "withheld") == (3, 0, 0, 0, 3)
    assert [stats(home)[name] for name in ("entries", "records", "leases")] == [0, 0, 0]
    assert spooled(home) == []


@pytest.mark.parametrize("trust", ["all", "validate", "local"])
@pytest.mark.parametrize("by", ["ourselves", "other-host", "other-user"])
def test_what_is_refreshed_is_measured_anew_whoever_knows_it(
    home: Home,
    session: Runtime,
    monkeypatch: pytest.MonkeyPatch,
    by: str,
    trust: str,
) -> None:
    start_with_answers(home, session, by)
    monkeypatch.setenv(settings.TRUST, trust)
    monkeypatch.setattr(Clock, "times_us", SLOW)
    with monkeypatch.context() as refreshing:
        refreshing.setenv(settings.REFRESH, "1")

        anew, steps = trained(session, ENOUGH)

    again, steps_again = trained(session, 3)
    assert (steps[0], steps[-1]) == (AS_KERNELS, AS_KERNELS)
    assert counts(anew, "hits", "misses", "measured", "recorded") == (0, GRAPHS, GRAPHS, GRAPHS)
    assert counts(anew, "validated", "adopted", "waited") == (0, 0, 0)
    assert sources(anew) == {("KERNELS", "measured")}
    assert (counts(again, "hits", "validated"), steps_again) == ((GRAPHS, 0), [AS_KERNELS] * 3)
    assert anew.report.failures == again.report.failures == {}


def test_what_is_refreshed_where_the_cache_is_only_read_replaces_nothing(
    home: Home,
    session: Runtime,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start_with_answers(home, session, "ourselves")
    before = stats(home)
    monkeypatch.setattr(Clock, "times_us", SLOW)
    with monkeypatch.context() as refreshing:
        refreshing.setenv(settings.REFRESH, "1")
        refreshing.setenv(settings.READONLY, "1")

        anew, steps = trained(session, ENOUGH)

    again, steps_again = trained(session, 3)
    assert steps[-1] == AS_KERNELS
    assert counts(anew, "hits", "measured", "recorded", "withheld") == (0, GRAPHS, 0, GRAPHS)
    assert (counts(again, "hits"), steps_again) == ((GRAPHS,), [CAPTURED] * 3)
    assert stats(home)["records"] == before["records"]
    assert spooled(home) == []
