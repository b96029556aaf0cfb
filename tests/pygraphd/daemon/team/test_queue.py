from __future__ import annotations

import contextlib
import dataclasses
import os
import sqlite3
from typing import TYPE_CHECKING

import pytest

from pygraphd.daemon.team.queue import Queue, Unpublished, publications
from pygraphd.schema.messages import Deployment, Origin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pygraphd.daemon.team.queue import Publication
    from pygraphd.schema.messages import RecordRequest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "team.db"


@pytest.fixture
def queue(path: Path) -> Iterator[Queue]:
    opened = Queue(path, most=3)
    yield opened
    opened.close()


@pytest.fixture
def make(make_request: Callable[..., RecordRequest]) -> Callable[..., list[Publication]]:
    return lambda *names: publications(make_request(*names), 7, 5.0)


def _ids(found: list[Publication]) -> list[str]:
    return [each.id for each in found]


def test_records_survive_the_process_and_come_in_their_order(
    queue: Queue, path: Path, make: Callable[..., list[Publication]]
) -> None:
    queue.put(make("a", "b"))
    queue.put(make("b", "c"))
    queue.close()
    again = Queue(path)
    assert len(again) == 3
    assert again.first(9) == make("a", "b", "c")
    again.remove(_ids(make("a", "c")))
    assert again.first(9) == make("b")
    assert len(again) == 1
    again.close()


def test_beyond_the_bound_the_oldest_are_left_to_the_cache(
    queue: Queue, path: Path, make_request: Callable[..., RecordRequest]
) -> None:
    for time_s, name in enumerate("abcde"):
        queue.put(publications(make_request(name), 7, float(time_s)))
    left = [each.entry.measured_at for each in queue.first(9)]
    assert (left, len(queue), queue.dropped) == ([2.0, 3.0, 4.0], 3, 0)
    assert queue.unpublished == Unpublished(0.0, 1.0)
    queue.close()
    again = Queue(path)
    assert again.unpublished == Unpublished(0.0, 1.0)
    again.close()


def test_what_is_queued_of_the_cache_is_not_looked_for_again_but_after_more_was_left_to_it(
    queue: Queue, path: Path, make: Callable[..., list[Publication]]
) -> None:
    queue.note_team(9.0)
    whole = Unpublished(0.0, 9.0)
    assert queue.unpublished == whole
    queue.put_older(make("a"), whole, "place")
    queue.close()
    again = Queue(path, most=3)
    again.note_team(99.0)
    rest = Unpublished(0.0, 9.0, "place")
    assert (again.unpublished, _ids(again.first(9))) == (rest, _ids(make("a")))

    again.put(make("b", "c", "d"))
    again.put_older([], rest, None)
    assert again.unpublished == whole, "a was left to it, wherever that is"

    again.put_older([], whole, None)
    again.close()
    last = Queue(path)
    last.note_team(99.0)
    assert last.unpublished is None
    last.close()


def test_a_file_of_before_says_what_was_left_to_do(path: Path) -> None:
    for is_queued, expected in ((0, Unpublished(0.0, 5.0)), (1, None)):
        path.unlink(missing_ok=True)
        Queue(path).close()
        with sqlite3.connect(path) as other:
            other.executescript(f"DROP TABLE unpublished; INSERT INTO before_team VALUES (5.0, {is_queued})")
        other.close()
        queue = Queue(path)
        queue.note_team(99.0)
        assert queue.unpublished == expected
        queue.close()


def test_the_same_measurement_has_the_same_id_whenever_it_comes_and_another_has_another(
    make_request: Callable[..., RecordRequest],
) -> None:
    def id_of(request: RecordRequest, uid: int = 7, now: float = 1.0) -> str:
        return publications(request, uid, now)[0].id

    request = make_request("a")
    later = dataclasses.replace(request, origin=Origin("host-a", "0.1.0", "job 9"))
    assert id_of(request) == id_of(later, now=2.0)
    others = [
        id_of(make_request("b")),
        id_of(make_request("a", median_us=101.0)),
        id_of(make_request("a", gpu="NVIDIA H100")),
        id_of(request, uid=8),
        id_of(dataclasses.replace(request, origin=Origin("host-b", "0.1.0"))),
    ]
    assert len({id_of(request), *others}) == 6


def test_only_what_rests_on_a_measurement_of_its_deployment_is_published(
    make_request: Callable[..., RecordRequest],
) -> None:
    assert publications(make_request("a", final=False), 7, 1.0) == []
    request = make_request("a")
    [record] = request.records
    kernels = tuple(each for each in record.measurements if each.deployment is Deployment.KERNELS)
    for measured in ((), kernels):
        other = dataclasses.replace(record, measurements=measured)
        assert publications(dataclasses.replace(request, records=(other,)), 7, 1.0) == []


def test_a_damaged_file_is_set_aside_and_a_new_queue_begun(
    path: Path, make: Callable[..., list[Publication]]
) -> None:
    path.write_bytes(b"no database at all" * 500)
    queue = Queue(path)
    before = queue.problem
    queue.put(make("a"))
    assert len(queue) == 1
    assert (before is None, queue.problem is None) == (False, True)
    assert list(path.parent.glob("team.db.corrupt-*"))
    queue.close()


def test_a_queue_that_lacks_a_column_says_what_to_do(
    path: Path, make: Callable[..., list[Publication]]
) -> None:
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE waiting (place INTEGER PRIMARY KEY)")
    queue = Queue(path)
    queue.put(make("a"))
    assert queue.problem is not None
    assert queue.problem.startswith(f"{path}: what is recorded now is not published: ")
    assert queue.problem.endswith("; move it away, and `pygraphd start` begins a new one")
    queue.close()


def test_a_pipe_in_its_place_is_not_waited_for(path: Path, make: Callable[..., list[Publication]]) -> None:
    os.mkfifo(path)
    queue = Queue(path)
    queue.put(make("a", "b"))
    assert (queue.first(9), len(queue), queue.dropped) == ([], 0, 2)
    assert str(queue.problem).endswith(f": {path} is not a regular file; move it away")
    queue.close()


def test_a_row_that_cannot_be_read_hides_no_other(
    queue: Queue, path: Path, make: Callable[..., list[Publication]]
) -> None:
    queue.put(make("a", "b"))
    other = sqlite3.connect(path)
    other.execute("UPDATE waiting SET entry = '{' WHERE id = ?", _ids(make("a")))
    other.commit()
    other.close()
    assert queue.first(9) == make("b")
    assert (len(queue), queue.dropped) == (1, 1)


def test_a_file_that_was_removed_is_begun_anew(
    queue: Queue, path: Path, make: Callable[..., list[Publication]], caplog: pytest.LogCaptureFixture
) -> None:
    queue.put(make("a"))
    path.unlink()
    queue.put(make("b"))
    assert (queue.first(9), len(queue), queue.problem) == (make("b"), 1, None)
    note = f"{path}: was removed or replaced while in use; 1 records that waited in it are not published"
    assert queue.note == note
    assert caplog.text.count(note) == 1
    queue.close()
    again = Queue(path)
    assert (again.first(9), again.note) == (make("b"), None)
    again.close()
