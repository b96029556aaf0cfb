"""Files that bring decisions of others: whatever lies in the folder costs a miss at most, and several processes write at once."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import multiprocessing
import os
import resource
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pygraphd.client.common.report import Report
from pygraphd.client.decisions import bundle as client_bundle
from pygraphd.client.decisions.bundle import Bundle
from pygraphd.client.decisions.cache import Cache
from pygraphd.daemon import exchange
from pygraphd.daemon.store import Store
from pygraphd.schema import bundle, ownership, shipped
from pygraphd.schema.keys import Environment, entry_id
from pygraphd.schema.locations import Locations, locate
from pygraphd.schema.messages import (
    Decision,
    Deployment,
    Graph,
    Kind,
    Measurement,
    Origin,
    Record,
    RecordRequest,
)
from pygraphd.schema.policy import POLICY_VERSION
from pygraphd.schema.portable import MAX_LINE_BYTES, Portable
from pygraphd.schema.reasons import Reason, ReasonCode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.queues import SimpleQueue
    from multiprocessing.synchronize import Barrier

ENVIRONMENT = Environment("H100", "9.0", 132, 80000, "", "2.13.0", "3.4", "12.8", "570", "9")
OTHER_GPU = dataclasses.replace(ENVIRONMENT, gpu="H200")
GRAPH = Graph("a" * 64, Kind.FORWARD, 0, 1, 3)
DECISION = Decision(Deployment.GRAPH, Reason(ReasonCode.FASTER), POLICY_VERSION)
MEASURED = tuple(Measurement(each, 12, 100.0, 1.5, 90.0, 80.0, 0.25) for each in Deployment)
RECORD = Record(GRAPH, DECISION, MEASURED)
ORIGIN = Origin("host-b", "0.1.0")
ENTRY = Portable(ENVIRONMENT, ORIGIN, RECORD, 1000.0)
NAME = f"{entry_id(*ENTRY.key)}.json"


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    return tmp_path / "shared"


@pytest.fixture
def places(tmp_path: Path) -> Locations:
    return locate({"PYGRAPHD_HOME": str(tmp_path / "home")})


def opened(places: Locations, shared: Path | None) -> tuple[Cache, Report]:
    """Return a process's view of the cache, and its report."""
    report = Report()
    cache = Cache(places, "host-a", report)
    cache.bundle = Bundle(places, report, shared)
    return cache, report


def text_of(entry: Portable) -> bytes:
    return json.dumps(bundle.content(entry)).encode()


def files(shared: Path) -> list[str]:
    """Return the names in the folder but that of the lock."""
    return [file.name for file in shared.iterdir() if file.name != ".writing"]


def complaints(report: Report) -> list[str]:
    return [each for each in report.failures if each.startswith("bundle")]


def test_what_one_process_has_measured_another_one_finds(tmp_path: Path, shared: Path) -> None:
    first, _ = opened(locate({"PYGRAPHD_HOME": str(tmp_path / "one")}), shared)
    first.record(ENVIRONMENT, [RECORD])
    first.bundle.write()
    written = (shared / NAME).stat()

    second, report = opened(locate({"PYGRAPHD_HOME": str(tmp_path / "two")}), shared)
    found = second.lookup(ENVIRONMENT, [GRAPH.digest])[GRAPH.digest]
    second.bundle.write()

    assert (found.decision, found.host, found.uid) == (DECISION, "bundle:host-a", None)
    assert (found.cost_us, found.host_us, found.span_us) == (100.0, 90.0, 80.0)
    assert found.measured_at == pytest.approx(time.time(), abs=600)
    assert report.counts["from_bundle"] == 1
    assert not complaints(report)
    assert second.lookup(OTHER_GPU, [GRAPH.digest]) == {}
    assert files(shared) == [NAME]
    after = (shared / NAME).stat()
    assert (after.st_ino, after.st_mtime_ns) == (written.st_ino, written.st_mtime_ns)  # it has nothing to add


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _link(path: Path) -> None:
    outside = path.parent.parent / "outside.json"
    outside.write_bytes(text_of(ENTRY))
    path.symlink_to(outside)


def _above(path: Path) -> None:
    (path.parent.parent / NAME).write_bytes(text_of(ENTRY))


def _data(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


_VALID = bundle.content(ENTRY)
_DEEP = b'{"format":' + b"[" * 30000
_HOSTILE: dict[str, Callable[[Path], object]] = {
    "pipe": _fifo,
    "folder": Path.mkdir,
    "link": _link,
    "above": _above,
    "huge": _data(text_of(ENTRY) + b" " * MAX_LINE_BYTES),
    "cut off": _data(text_of(ENTRY)[:-10]),
    "empty": _data(b""),
    "no text": _data(b"\xff\xfe\x00"),
    "deep": _data(_DEEP),
    "no object": _data(b"[]"),
    "newer": _data(json.dumps({**_VALID, "version": 4}).encode()),
    "others": _data(json.dumps({**_VALID, "format": "autotune"}).encode()),
    "another GPU": _data(text_of(dataclasses.replace(ENTRY, environment=OTHER_GPU))),
    "another graph": _data(
        text_of(
            dataclasses.replace(
                ENTRY, record=dataclasses.replace(RECORD, graph=dataclasses.replace(GRAPH, digest="b" * 64))
            )
        )
    ),
    "path as digest": _data(text_of(ENTRY).replace(b"a" * 64, b"../" * 21 + b"x")),
    "provisional": _data(text_of(ENTRY).replace(b'"final": true', b'"final": false')),
    "escape codes": _data(text_of(ENTRY).replace(b'"host-b"', b'"\\u001b[2J"')),
}


@pytest.mark.parametrize("kind", _HOSTILE)
def test_whatever_lies_there_is_a_miss_and_is_replaced(places: Locations, shared: Path, kind: str) -> None:
    shared.mkdir()
    _HOSTILE[kind](shared / NAME)
    outside = {file: file.read_bytes() for file in shared.parent.glob("*.json")}

    cache, report = opened(places, shared)
    found = cache.lookup(ENVIRONMENT, [GRAPH.digest])
    cache.record(ENVIRONMENT, [RECORD])
    cache.bundle.write()
    after, _ = opened(places, shared)

    assert found == {}
    assert len(complaints(report)) == {"above": 0, "folder": 2}.get(kind, 1)
    assert bool(after.bundle.find(ENVIRONMENT, [GRAPH.digest])) is (kind != "folder")
    assert {file: file.read_bytes() for file in outside} == outside
    assert files(shared) == [NAME]  # no temporary file


def _end(shared: Path, place: Path, number: int, barrier: Barrier, counts: SimpleQueue[int]) -> None:
    """End as one of several processes with the same entries; whoever writes first is killed after `_KILLED_AFTER` files."""
    cache, _ = opened(locate({"PYGRAPHD_HOME": str(place)}), shared)
    for entry in _entries():
        cache.bundle._add(entry_id(*entry.key), entry)
    written = 0

    def counted(path: Path, data: bytes) -> None:
        nonlocal written
        if written == _KILLED_AFTER:
            with contextlib.suppress(FileExistsError):
                (place / "killed").open("x").close()
                os.kill(os.getpid(), signal.SIGKILL)
        ownership.replace_file(path, data)
        written += 1

    patch = pytest.MonkeyPatch()
    patch.setattr(bundle, "replace_file", counted)
    patch.setattr(bundle, "_POLL_S", 0.001 * (number + 1))
    barrier.wait()
    cache.bundle.write()
    counts.put(written)


_KILLED_AFTER = 20


def _entries() -> list[Portable]:
    graphs = (dataclasses.replace(GRAPH, digest=f"{number:064x}") for number in range(200))
    return [dataclasses.replace(ENTRY, record=dataclasses.replace(RECORD, graph=graph)) for graph in graphs]


def test_of_processes_that_end_at_once_one_writes_and_another_goes_on_if_it_is_killed(
    places: Locations, shared: Path, tmp_path: Path
) -> None:
    context = multiprocessing.get_context("fork")
    barrier, counts = context.Barrier(6), context.SimpleQueue()
    processes = [
        context.Process(target=_end, args=(shared, tmp_path, number, barrier, counts)) for number in range(6)
    ]
    for process in processes:
        process.start()
    reader, report = opened(places, shared)
    while any(process.is_alive() for process in processes):
        reader.bundle.find(ENVIRONMENT, [entry.record.graph.digest for entry in _entries()[-10:]])
    for process in processes:
        process.join()

    assert sorted(process.exitcode or 0 for process in processes) == [-signal.SIGKILL, 0, 0, 0, 0, 0]
    assert sorted(counts.get() for _ in range(5)) == [0, 0, 0, 0, 200 - _KILLED_AFTER]
    assert not complaints(report)  # a file is there as a whole or not at all
    assert len(reader.bundle.find(ENVIRONMENT, [each.record.graph.digest for each in _entries()])) == 200


def test_a_writer_that_hangs_is_not_waited_for_long(
    places: Locations, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "WAITING_S", 0.1)
    cache, report = opened(places, shared)
    cache.record(ENVIRONMENT, [RECORD])
    shared.mkdir()

    with (shared / ".writing").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        cache.bundle.write()

    assert not complaints(report)
    assert files(shared) == [NAME]


@contextlib.contextmanager
def _disk_full() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_disk_that_takes_nothing_is_a_failure_and_leaves_nothing(places: Locations, shared: Path) -> None:
    cache, report = opened(places, shared)
    cache.record(ENVIRONMENT, [RECORD])

    with _disk_full():
        cache.bundle.write()

    assert [each[:15] for each in complaints(report)] == ["bundle: OSError"]
    assert files(shared) == []


def test_a_place_that_is_no_folder_is_a_failure(places: Locations, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/pygraph")):
        cache, report = opened(places, place)
        cache.record(ENVIRONMENT, [RECORD])

        assert Cache.lookup(cache, OTHER_GPU, [GRAPH.digest]) == {}
        cache.bundle.write()

        assert len(complaints(report)) == 1


def test_a_folder_does_not_grow_for_ever(
    places: Locations, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "MAX_BUNDLE_FILES", 1)
    shared.mkdir()
    (shared / "other.json").touch()
    cache, report = opened(places, shared)
    cache.record(ENVIRONMENT, [RECORD])

    cache.bundle.write()

    assert files(shared) == ["other.json"]
    assert "delete the old ones" in complaints(report)[0]


def test_what_a_process_notes_is_bounded(
    places: Locations, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_bundle, "MAX_BUNDLE_ENTRIES", 2)
    cache, _ = opened(places, shared)
    for digest in "abcd":
        graph = dataclasses.replace(GRAPH, digest=digest * 64)
        cache.record(ENVIRONMENT, [dataclasses.replace(RECORD, graph=graph)])

    assert len(cache.bundle.artifacts()) == 2
    assert len(cache.bundle._own) == 2


@pytest.mark.parametrize("spooled", [False, True])
def test_hits_are_passed_on_with_what_they_rest_on(places: Locations, shared: Path, spooled: bool) -> None:
    """As this process was told no more than the decision and its costs."""
    if spooled:
        opened(places, None)[0].record(ENVIRONMENT, [RECORD])
    else:
        places.cache.mkdir(mode=0o700)
        with Store(places.database) as store:
            store.record(RecordRequest(ENVIRONMENT, Origin("host-a", "0.1.0"), (RECORD,)), os.getuid())
    cache, _ = opened(places, shared)
    hit = cache.lookup(ENVIRONMENT, [GRAPH.digest])[GRAPH.digest]
    cache.bundle.add_hit(ENVIRONMENT, GRAPH, hit)

    (artifact,) = cache.bundle.artifacts().items()
    cache.bundle.write()

    assert artifact[0] == f"pygraph/{NAME}"
    assert json.loads(json.dumps(artifact[1])) == json.loads((shared / NAME).read_text())
    (entry,) = opened(places, shared)[0].bundle.find(ENVIRONMENT, [GRAPH.digest])
    assert (entry.record, entry.origin) == (RECORD, Origin("bundle:host-a", "0.1.0"))
    assert entry.measured_at == hit.measured_at


def test_it_ranks_above_what_is_shipped(
    places: Locations, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "exports").mkdir()
    with (tmp_path / "exports" / "H100.jsonl").open("w") as file:
        exchange.write([ENTRY], file)
    monkeypatch.setenv(shipped.VARIABLE, str(tmp_path / "exports"))
    cache, _ = opened(places, shared)
    before = cache.lookup(ENVIRONMENT, [GRAPH.digest])[GRAPH.digest]
    shared.mkdir()
    (shared / NAME).write_bytes(text_of(ENTRY))
    after = cache.lookup(ENVIRONMENT, [GRAPH.digest])[GRAPH.digest]

    assert (before.host, after.host) == ("shipped:host-b", "bundle:host-b")


def test_what_is_provisional_is_not_passed_on(places: Locations, shared: Path) -> None:
    cache, _ = opened(places, shared)
    cache.record(ENVIRONMENT, [Record(GRAPH, dataclasses.replace(DECISION, final=False))])
    cache.bundle.write()

    assert cache.bundle.artifacts() == {}
    assert not shared.exists()


def test_a_clock_that_runs_ahead_elsewhere_does_not_keep_an_entry_from_growing_old(
    places: Locations, shared: Path
) -> None:
    shared.mkdir()
    (shared / NAME).write_bytes(text_of(dataclasses.replace(ENTRY, measured_at=9e11)))

    (entry,) = opened(places, shared)[0].bundle.find(ENVIRONMENT, [GRAPH.digest])

    assert entry.measured_at is not None
    assert entry.measured_at <= time.time()
