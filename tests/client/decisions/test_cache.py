"""The client's view of the cache: it never raises, gives up on a bad daemon, and loses nothing it measured."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

import pytest

from pygraphd.client.common.report import Report
from pygraphd.client.decisions import daemon_start, spool
from pygraphd.client.decisions.cache import Cache
from pygraphd.client.decisions.transport import Transport
from pygraphd.schema import messages
from pygraphd.schema.messages import (
    MAX_REQUEST_GRAPHS,
    Decision,
    Deployment,
    Entry,
    LeaseAnswer,
    LookupAnswer,
    Measurement,
    Message,
    RecordAnswer,
    RecordRequest,
)
from pygraphd.schema.reasons import Reason, ReasonCode
from tests.support.answering import Answering
from tests.support.cache_case import DECISION, ENVIRONMENT, GRAPH, RECORD, places

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pygraphd.schema.locations import Locations

__all__ = ["places"]  # a fixture

MINE = Entry(GRAPH, DECISION, os.getuid(), "host")
"""What a client makes of RECORD when it was spooled here."""


class Peer(Answering):
    """Gives the same answer to each request."""

    def __init__(self, path: Path, answer: bytes) -> None:
        super().__init__(path, lambda _: answer)


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


def test_an_acknowledgement_for_another_environment_is_none(places: Locations, peers: list[Peer]) -> None:
    peers.append(Peer(places.socket, http(RecordAnswer("d" * 64, "9.9", 1))))
    report = Report()

    Cache(places, "host", report).record(ENVIRONMENT, [RECORD])

    assert (report.counts["recorded"], report.counts["spooled"]) == (0, 1)
    assert dict(report.failures) == {"daemon: answered for another environment": 1}


def test_a_lease_for_another_environment_is_none(places: Locations, peers: list[Peer]) -> None:
    peers.append(Peer(places.socket, http(LeaseAnswer("d" * 64, "9.9", (GRAPH,), 5.0))))
    report = Report()

    assert Cache(places, "host", report).lease(ENVIRONMENT, [GRAPH]) is None
    assert dict(report.failures) == {"daemon: answered for another environment": 1}


def test_records_reach_the_daemon(places: Locations, peers: list[Peer]) -> None:
    peers.append(Peer(places.socket, http(RecordAnswer(ENVIRONMENT.digest(), "9.9", 1))))
    report = Report()

    Cache(places, "host", report).record(ENVIRONMENT, [RECORD])

    sent = messages.decode(RecordRequest, peers[0].requests[0].partition(b"\r\n\r\n")[2])
    assert (sent.environment, sent.records, sent.origin.host) == (ENVIRONMENT, (RECORD,), "host")
    assert (report.counts["recorded"], report.counts["spooled"]) == (1, 0)


def test_more_than_a_request_holds_goes_in_several(places: Locations, peers: list[Peer]) -> None:
    """As of a process that ends with many graphs undecided."""
    digests = [f"{at:064x}" for at in range(MAX_REQUEST_GRAPHS + 1)]
    records = [
        dataclasses.replace(RECORD, graph=dataclasses.replace(RECORD.graph, digest=digest))
        for digest in digests
    ]
    without = Report()
    cache = Cache(places, "host", without)
    cache.record(ENVIRONMENT, records)
    assert without.counts["spooled"] == len(digests)
    assert cache.lookup(ENVIRONMENT, digests).keys() == {*digests}

    report = Report()
    peers.append(Peer(places.socket, http(RecordAnswer(ENVIRONMENT.digest(), "9.9", 1))))
    Cache(places, "host", report).record(ENVIRONMENT, records)
    sent = [
        messages.decode(RecordRequest, each.partition(b"\r\n\r\n")[2]).records for each in peers[0].requests
    ]
    assert [len(each) for each in sent] == [MAX_REQUEST_GRAPHS, 1]
    assert [each.graph.digest for some in sent for each in some] == digests
    assert not report.failures


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
    monkeypatch.setattr(spool, "MAX_WAITING_FILES", 3)
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
    shared, remedy = places.runtime, f"run: chmod 700 {places.runtime}"
    assert set(report.failures) == {
        f"daemon: {shared}: others can write to it (mode 777); {remedy}",
        f"database: PermissionError: others can write to {shared}; {remedy}",
    }
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
