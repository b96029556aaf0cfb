"""The client's view of the cache: it never raises, gives up on a bad daemon, and loses nothing it measured."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pygraphd.client.common.report import Report
from pygraphd.client.decisions import daemon_start, spool
from pygraphd.client.decisions.service import Cache
from pygraphd.client.decisions.transport import Transport
from pygraphd.client.replay.native import build
from pygraphd.daemon.lock import acquire
from pygraphd.schema import messages, offline
from pygraphd.schema.keys import Environment
from pygraphd.schema.locations import Locations, locate
from pygraphd.schema.messages import (
    Decision,
    Deployment,
    Entry,
    Graph,
    Kind,
    LookupAnswer,
    Measurement,
    Message,
    Record,
    RecordAnswer,
    RecordRequest,
)
from pygraphd.schema.reasons import Reason, ReasonCode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ENVIRONMENT = Environment("none", "", 0, 0, "", "2.13.0", "", "", "", "")
GRAPH = "a" * 64
DECISION = Decision(Deployment.KERNELS, Reason(ReasonCode.NO_DEVICE), 1)
RECORD = Record(Graph(GRAPH, Kind.FORWARD, 0, 1, 3), DECISION)
MINE = Entry(GRAPH, DECISION, os.getuid(), "host")
"""What a client makes of RECORD when it was spooled here."""


@pytest.fixture
def places(tmp_path: Path) -> Locations:
    return locate({"PYGRAPHD_HOME": str(tmp_path)})


class Peer:
    """Answers every request on a real socket with one fixed answer, and keeps what it was sent."""

    def __init__(self, path: Path, answer: bytes) -> None:
        self.requests: list[bytes] = []
        self._answer = answer
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                self.requests.append(connection.recv(1 << 20))
                connection.sendall(self._answer)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def http(message: Message) -> bytes:
    body = messages.encode(message)
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


@pytest.fixture
def peers(places: Locations) -> Iterator[list[Peer]]:
    made: list[Peer] = []
    yield made
    for peer in made:
        peer.close()


def test_a_daemon_is_believed(places: Locations, peers: list[Peer]) -> None:
    entry = Entry(GRAPH, DECISION)
    peers.append(Peer(places.socket, http(LookupAnswer(ENVIRONMENT.digest(), "9.9", (entry,)))))
    report = Report()

    found = Cache(places, "host", report).lookup(ENVIRONMENT, [GRAPH, "b" * 64])

    assert found == {GRAPH: entry}
    assert (report.daemon_version, dict(report.failures)) == ("9.9", {})
    assert report.lookup_ms > 0


def test_an_answer_for_another_environment_or_graph_is_dropped(places: Locations, peers: list[Peer]) -> None:
    stray = Entry("c" * 64, DECISION)
    peers.append(Peer(places.socket, http(LookupAnswer("d" * 64, "9.9", (stray,)))))
    report = Report()

    assert Cache(places, "host", report).lookup(ENVIRONMENT, [GRAPH]) == {}
    assert dict(report.failures) == {"daemon: answered for another environment": 1}


def test_records_reach_the_daemon(places: Locations, peers: list[Peer]) -> None:
    peers.append(Peer(places.socket, http(RecordAnswer(ENVIRONMENT.digest(), "9.9", 1))))
    report = Report()

    Cache(places, "host", report).record(ENVIRONMENT, [RECORD])

    sent = messages.decode(RecordRequest, peers[0].requests[0].partition(b"\r\n\r\n")[2])
    assert (sent.environment, sent.records, sent.origin.host) == (ENVIRONMENT, (RECORD,), "host")
    assert (report.counts["recorded"], report.counts["spooled"]) == (1, 0)


def test_without_a_daemon_records_are_spooled_whole(places: Locations) -> None:
    report = Report()

    Cache(places, "host", report).record(ENVIRONMENT, [RECORD])

    (file,) = places.spool.iterdir()
    assert messages.decode(RecordRequest, file.read_bytes()).records == (RECORD,)
    assert file.stat().st_mode & 0o777 == 0o600
    assert (report.counts["spooled"], dict(report.failures)) == (1, {"daemon: no daemon": 1})


@pytest.mark.parametrize(
    ("variables", "job"),
    [
        ({}, ""),
        ({"SLURM_JOB_ID": "42"}, "42"),
        ({"SLURM_JOB_ID": "", "PBS_JOBID": "7.head"}, "7.head"),
        ({"SLURM_JOB_ID": "\x1b[2J"}, ""),
        ({"SLURM_JOB_ID": "x" * 65}, ""),
    ],
)
def test_records_name_the_job_if_its_name_can_be_stored(
    places: Locations, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], job: str
) -> None:
    for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    Cache(places, "host", Report()).record(ENVIRONMENT, [RECORD])
    [file] = places.spool.iterdir()
    assert messages.decode(RecordRequest, file.read_bytes()).origin.job == job


def test_two_failures_that_cost_time_end_the_asking(places: Locations, peers: list[Peer]) -> None:
    peers.append(Peer(places.socket, b"garbage"))
    cache = Cache(places, "host", report := Report())

    for _ in range(4):
        assert cache.lookup(ENVIRONMENT, [GRAPH]) == {}
    cache.record(ENVIRONMENT, [RECORD])

    assert len(peers[0].requests) == 2
    assert sum(report.failures.values()) == 2
    assert report.counts["spooled"] == 1


def test_a_daemon_that_comes_late_is_found(places: Locations, peers: list[Peer]) -> None:
    cache = Cache(places, "host", Report())
    for _ in range(5):
        cache.lookup(ENVIRONMENT, [GRAPH])
    peers.append(
        Peer(places.socket, http(LookupAnswer(ENVIRONMENT.digest(), "1", (Entry(GRAPH, DECISION),))))
    )

    assert GRAPH in cache.lookup(ENVIRONMENT, [GRAPH])


def test_an_unreadable_database_is_a_reason(places: Locations) -> None:
    places.database.write_bytes(b"not a database" * 100)
    report = Report()

    assert Cache(places, "host", report).lookup(ENVIRONMENT, [GRAPH]) == {}
    assert any(reason.startswith("database: DatabaseError") for reason in report.failures)


def test_a_spool_that_cannot_be_written_is_a_reason(places: Locations) -> None:
    places.spool.write_text("a file where the folder should be")
    report = Report()

    Cache(places, "host", report).record(ENVIRONMENT, [RECORD])

    assert any(reason.startswith("spool: ") for reason in report.failures)


def test_the_spool_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "MAX_FILES", 3)
    for _ in range(3):
        spool.leave(tmp_path / "spool", b"{}")

    with pytest.raises(spool.SpoolFullError):
        spool.leave(tmp_path / "spool", b"{}")
    with pytest.raises(spool.SpoolFullError):
        spool.leave(tmp_path / "other", b" " * (messages.MAX_BODY_BYTES + 1))


def test_what_was_spooled_is_found_by_the_next_process(places: Locations) -> None:
    Cache(places, "host", Report()).record(ENVIRONMENT, [RECORD])

    found = Cache(places, "host", Report()).lookup(ENVIRONMENT, [GRAPH, "b" * 64])

    assert found == {GRAPH: MINE}


def test_what_was_spooled_says_what_it_cost(places: Locations) -> None:
    measurements = tuple(
        Measurement(deployment, 8, median, 0.0, median - 1, median + 1, 0.0)
        for deployment, median in {Deployment.GRAPH: 50.0, Deployment.KERNELS: 70.0}.items()
    )
    Cache(places, "host", Report()).record(
        ENVIRONMENT, [dataclasses.replace(RECORD, measurements=measurements)]
    )

    found = Cache(places, "host", Report()).lookup(ENVIRONMENT, [GRAPH])[GRAPH]

    when = found.measured_at
    assert found == dataclasses.replace(MINE, cost_us=70.0, host_us=69.0, span_us=71.0, measured_at=when)
    (file,) = places.spool.iterdir()
    assert found.measured_at == file.stat().st_mtime


def test_a_process_without_a_daemon_knows_what_it_found_itself(places: Locations) -> None:
    cache = Cache(places, "host", Report())
    assert cache.lookup(ENVIRONMENT, [GRAPH]) == {}
    cache.record(ENVIRONMENT, [RECORD])

    assert cache.lookup(ENVIRONMENT, [GRAPH]) == {GRAPH: MINE}


def test_what_was_spooled_elsewhere_is_not(places: Locations) -> None:
    Cache(places, "host", Report()).record(dataclasses.replace(ENVIRONMENT, torch="2.14.0"), [RECORD])

    assert Cache(places, "host", Report()).lookup(ENVIRONMENT, [GRAPH]) == {}


def test_the_newest_final_decision_in_the_spool_wins(places: Locations) -> None:
    cache = Cache(places, "host", Report())
    older = Decision(Deployment.KERNELS, Reason(ReasonCode.OTHER, "older"), 1)
    newer = Decision(Deployment.GRAPH, Reason(ReasonCode.OTHER, "newer"), 1)
    provisional = Decision(
        Deployment.KERNELS, Reason(ReasonCode.OTHER, "provisional"), 1, final=False, calls=3
    )
    for decision in (older, newer, provisional):
        cache.record(ENVIRONMENT, [dataclasses.replace(RECORD, decision=decision)])

    assert Cache(places, "host", Report()).lookup(ENVIRONMENT, [GRAPH])[GRAPH].decision == newer


def test_bad_files_in_the_spool_are_passed_over(places: Locations, tmp_path: Path) -> None:
    Cache(places, "host", Report()).record(ENVIRONMENT, [RECORD])
    (places.spool / "9-garbage.json").write_bytes(b"\x00garbage")
    (places.spool / "9-folder.json").mkdir()
    (places.spool / "9-link.json").symlink_to(tmp_path / "nowhere")
    os.mkfifo(places.spool / "9-pipe.json")

    assert GRAPH in Cache(places, "host", Report()).lookup(ENVIRONMENT, [GRAPH])


def test_a_daemon_in_a_folder_that_others_can_write_to_is_none_and_says_why(
    places: Locations, peers: list[Peer]
) -> None:
    """Else whoever has made the folder first would answer for it."""
    places.runtime.chmod(0o777)
    peers.append(
        Peer(places.socket, http(LookupAnswer(ENVIRONMENT.digest(), "9.9", (Entry(GRAPH, DECISION),))))
    )
    report = Report()
    cache = Cache(places, "host", report)

    assert cache.lookup(ENVIRONMENT, [GRAPH]) == {}
    assert peers[0].requests == []
    (reason,) = report.failures
    assert (
        reason
        == f"daemon: {places.runtime}: others can write to it (mode 777); run: chmod 700 {places.runtime}"
    )
    assert "not started: " in str(daemon_start.ensure(Transport(places.socket)))


@pytest.mark.usefixtures("patient")
def test_lookup_without_anything_waits_for_nobody(places: Locations) -> None:
    cache = Cache(places, "host", Report())

    assert [cache.lookup(ENVIRONMENT, [GRAPH]) for _ in range(100)] == [{}] * 100


def test_a_daemon_of_an_older_version_is_not_asked_again_what_it_does_not_know(
    places: Locations, peers: list[Peer]
) -> None:
    peers.append(Peer(places.socket, b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"))
    report = Report()
    cache = Cache(places, "host", report)

    assert [cache.lease(ENVIRONMENT, [GRAPH]) for _ in range(5)] == [None] * 5

    assert len(peers[0].requests) == 1
    assert report.failures == {"daemon: of another version; run: pygraphd restart": 1}
    cache.record(ENVIRONMENT, [RECORD])
    assert len(peers[0].requests) == 2  # it is asked what it may know


OLD = '{"environment":"%s","version":"0.1.0","entries":[{"graph":"%s","decision":{"deployment":"%s","reason":{"code":"other"},"policy":4}}]}'
"""How a daemon answered that knew LAUNCH, RELOCATE and TREES."""


@pytest.mark.parametrize("name", ["LAUNCH", "RELOCATE", "TREES"])
def test_a_deployment_of_an_older_daemon_is_a_miss(places: Locations, peers: list[Peer], name: str) -> None:
    body = (OLD % (ENVIRONMENT.digest(), GRAPH, name)).encode()
    peers.append(Peer(places.socket, b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)))
    report = Report()

    assert Cache(places, "host", report).lookup(ENVIRONMENT, [GRAPH]) == {}
    assert report.failures == {"daemon: answer not understood": 1}


def test_an_older_daemon_is_asked_what_it_cannot_misunderstand(places: Locations, peers: list[Peer]) -> None:
    """It would answer 400 to a record with names that it does not know: to a path that it does not know, it answers 404."""
    peers.append(Peer(places.socket, b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"))
    cache = Cache(places, "host", Report())

    cache.lookup(ENVIRONMENT, [GRAPH])
    cache.record(ENVIRONMENT, [RECORD])
    cache.lease(ENVIRONMENT, [GRAPH])

    paths = [request.split(b" ")[1] for request in peers[0].requests]
    assert paths == [b"/v3/lookup", b"/v3/record", b"/v3/lease"]
    assert cache.lookup(ENVIRONMENT, [GRAPH]) == {GRAPH: MINE}  # out of the spool


def test_what_an_older_client_has_spooled_is_passed_over(places: Locations) -> None:
    spool.leave(
        places.spool,
        messages.encode(RecordRequest(ENVIRONMENT, messages.Origin("host", "0.1.0"), (RECORD,))).replace(
            b"KERNELS", b"LAUNCH"
        ),
    )
    report = Report()

    assert Cache(places, "host", report).lookup(ENVIRONMENT, [GRAPH]) == {}
    assert report.failures == {"daemon: no daemon": 1}


# --- a daemon that is just starting ---


@pytest.fixture
def held(places: Locations) -> Iterator[None]:
    """The lock is held as a daemon holds it before it answers."""
    lock = acquire(places)
    assert lock is not None
    with lock:
        yield


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize("content", [None, b"", b"half a database" * 100])
def test_a_daemon_that_is_starting_is_no_failure(places: Locations, content: bytes | None) -> None:
    if content is not None:
        places.database.write_bytes(content)
    cache = Cache(places, "host", report := Report())

    assert cache.lookup(ENVIRONMENT, [GRAPH]) == {}
    assert cache.lease(ENVIRONMENT, [GRAPH]) is None
    cache.record(ENVIRONMENT, [RECORD])

    assert (dict(report.failures), report.counts["spooled"]) == ({}, 1)


@pytest.mark.usefixtures("held")
def test_one_that_takes_too_long_is(places: Locations, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_start, "STARTING_S", 0.0)
    cache = Cache(places, "host", report := Report())

    cache.lookup(ENVIRONMENT, [GRAPH])

    assert report.failures == {"daemon: no daemon": 1}


def test_one_that_has_ended_is(places: Locations) -> None:
    lock = acquire(places)
    assert lock is not None
    lock.close()  # its lock file stays
    cache = Cache(places, "host", report := Report())

    cache.lookup(ENVIRONMENT, [GRAPH])

    assert report.failures == {"daemon: no daemon": 1}


def test_looking_takes_the_lock_from_nobody(places: Locations) -> None:
    places.lock.touch()
    cache = Cache(places, "host", Report())

    cache.lookup(ENVIRONMENT, [GRAPH])

    lock = acquire(places)
    assert lock is not None
    lock.close()


WITHOUT_RIGHTS = """
import os, sys
from pathlib import Path
from pygraphd.client.replay.native import build
from pygraphd.client.decisions.service import Cache
from pygraphd.client.common.report import Report
from pygraphd.schema.locations import locate
from tests.client.decisions.test_service import ENVIRONMENT, GRAPH, RECORD

os.setuid(65534)
places = locate({"HOME": sys.argv[1]})
cache = Cache(places, "host", report := Report())
assert cache.lookup(ENVIRONMENT, [GRAPH]) == {}
assert cache.lease(ENVIRONMENT, [GRAPH]) is None
cache.record(ENVIRONMENT, [RECORD])
assert cache.lookup(ENVIRONMENT, [GRAPH]) == {}
assert build.why_it_failed(places.cache / "compiled" / "x.so") is None
print(*sorted(report.failures), sep="; ")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
def test_a_home_that_may_not_be_searched_is_a_miss_with_a_reason(tmp_path: Path) -> None:
    """As after `sudo -E`, which leaves HOME as it was."""
    (tmp_path / "home").mkdir(mode=0o700)

    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_RIGHTS, tmp_path / "home"], capture_output=True, text=True, check=False
    )

    said = "daemon: no daemon; database: Permission denied; spool: Permission denied"
    assert (done.stdout.strip(), done.stderr) == (said, "")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: Path(path).symlink_to(path)])
def test_a_database_that_is_no_file_is_a_reason(places: Locations, make: Callable[[Path], None]) -> None:
    make(places.database)

    assert Cache(places, "host", report := Report()).lookup(ENVIRONMENT, [GRAPH]) == {}
    assert any(reason.startswith("database: ") for reason in report.failures)


def test_rows_that_are_none_of_ours_are_misses(places: Locations) -> None:
    with contextlib.closing(sqlite3.connect(places.database)) as connection:
        columns = "graph, deployment, reason, detail, against, against_detail, policy, final, calls, uid, host, measured_at, environment"
        connection.execute(f"CREATE TABLE decision ({columns}, cost_us, host_us, span_us)")
        row = (
            GRAPH,
            b"\xff",
            2**62,
            "",
            "x",
            "",
            "x",
            "",
            None,
            None,
            None,
            None,
            ENVIRONMENT.digest(),
            "",
            "",
            "",
        )
        connection.execute(f"INSERT INTO decision VALUES ({','.join('?' * 16)})", row)
        connection.execute(f"PRAGMA user_version={offline.DATABASE_VERSION}")
        connection.commit()

    assert Cache(places, "host", report := Report()).lookup(ENVIRONMENT, [GRAPH]) == {}
    assert dict(report.failures) == {"daemon: no daemon": 1}


def test_a_database_without_tables_is_being_made(places: Locations) -> None:
    with contextlib.closing(sqlite3.connect(places.database)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")

    assert Cache(places, "host", report := Report()).lookup(ENVIRONMENT, [GRAPH]) == {}
    assert dict(report.failures) == {"daemon: no daemon": 1}


def test_nothing_is_written_into_a_folder_that_another_user_has_put_in_a_common_place(tmp_path: Path) -> None:
    """Without a home, what is ours lies under /tmp, by a name that everybody knows."""
    (tmp_path / "common").mkdir()
    (tmp_path / "common").chmod(0o1777)
    (tmp_path / "victim").mkdir()
    home = tmp_path / "common" / "pygraphd-0"
    home.symlink_to(tmp_path / "victim")
    report = Report()

    Cache(locate({"PYGRAPHD_HOME": str(home)}), "host", report).record(ENVIRONMENT, [RECORD])

    assert list((tmp_path / "victim").iterdir()) == []
    assert f"spool: PermissionError: {home} is somebody else's" in report.failures
    with pytest.raises(PermissionError):
        build.compile_once(build.place(home))


def test_a_folder_of_ours_in_a_common_place_is_written_into(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    places = locate({"PYGRAPHD_HOME": str(tmp_path / "pygraphd-0")})
    for _ in range(2):
        Cache(places, "host", report := Report()).record(ENVIRONMENT, [RECORD])

        assert report.counts["spooled"] == 1
