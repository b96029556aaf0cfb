from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from pygraphd.daemon import spool
from pygraphd.daemon.spool import Intake, SpoolState, ingest_file, records
from pygraphd.daemon.store import DiskFullError, Store
from pygraphd.schema.messages import MAX_BODY_BYTES, RecordRequest, encode

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def _leave(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def _ingest(folder: Path, store: Callable[[RecordRequest, int], int]) -> int:
    return sum(ingest_file(folder / name, store) for name in records(folder))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "spool").mkdir()
    return tmp_path / "spool"


def test_stores_and_deletes_what_is_valid(
    folder: Path, store: Store, make_request: Callable[..., RecordRequest]
) -> None:
    _leave(folder, "1.json", encode(make_request("a", "b")))
    _leave(folder, "2.json", encode(make_request("c")))
    assert _ingest(folder, store.record) == 3
    assert store.count_entries() == 3
    assert list(folder.iterdir()) == []


def test_the_owner_is_the_rows_uid(folder: Path, make_request: Callable[..., RecordRequest]) -> None:
    path = _leave(folder, "1.json", encode(make_request("a")))
    seen: list[int] = []

    def see(_request: RecordRequest, uid: int) -> int:
        seen.append(uid)
        return 1

    assert _ingest(folder, see) == 1
    assert seen == [os.geteuid()]
    assert not path.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\x00",
        b"[]",
        b"{}",
        b"[" * 100000,
        json.dumps({"environment": {}}).encode(),
        b"0" * (MAX_BODY_BYTES + 1),
    ],
    ids=["empty", "bytes", "list", "object", "deep", "incomplete", "huge"],
)
def test_sets_aside_what_is_invalid_and_goes_on(
    folder: Path, store: Store, make_request: Callable[..., RecordRequest], content: bytes
) -> None:
    _leave(folder, "1.json", content)
    _leave(folder, "2.json", encode(make_request("a")))
    assert _ingest(folder, store.record) == 1
    assert [path.name for path in folder.iterdir()] == ["1.bad"]
    assert spool.state(folder) == SpoolState(waiting=0, bad=1)


def test_a_number_beyond_any_float_is_invalid(
    folder: Path, store: Store, make_request: Callable[..., RecordRequest]
) -> None:
    content = encode(make_request("a")).replace(b'"median_us":100.0', b'"median_us":1' + b"0" * 400)
    assert b"0" * 400 in content
    _leave(folder, "1.json", content)
    assert _ingest(folder, store.record) == 0
    assert (folder / "1.bad").exists()


def test_links_and_pipes_are_not_followed(
    folder: Path, store: Store, make_request: Callable[..., RecordRequest], tmp_path: Path
) -> None:
    secret = _leave(tmp_path, "elsewhere.json", encode(make_request("a")))
    (folder / "link.json").symlink_to(secret)
    os.mkfifo(folder / "pipe.json")
    (folder / "folder.json").mkdir()
    assert _ingest(folder, store.record) == 0
    assert spool.state(folder).bad == 3
    assert secret.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_strangers_file_is_not_believed(
    folder: Path, store: Store, make_request: Callable[..., RecordRequest]
) -> None:
    os.chown(_leave(folder, "1.json", encode(make_request("a"))), 12345, -1)
    assert _ingest(folder, store.record) == 0
    assert spool.state(folder).bad == 1


def test_what_waits_can_be_read_and_stays(folder: Path, make_request: Callable[..., RecordRequest]) -> None:
    for name in ("1.json", "2.json"):
        os.utime(_leave(folder, name, encode(make_request(name))), (0, 7.5))
    _leave(folder, "0.json", b"nothing")
    os.mkfifo(folder / "3.json")

    found = list(spool.waiting(folder))

    assert [file.request for file in found] == [make_request("1.json"), make_request("2.json")]
    assert {(file.uid, file.left_at) for file in found} == {(os.geteuid(), 7.5)}
    assert spool.state(folder) == SpoolState(waiting=4, bad=0)


def test_unfinished_files_are_left_alone(folder: Path, store: Store) -> None:
    _leave(folder, ".1.json", b"half")
    _leave(folder, "note.txt", b"")
    assert _ingest(folder, store.record) == 0
    assert spool.state(folder) == SpoolState(0, 0)
    assert len(list(folder.iterdir())) == 2


def test_files_stay_while_they_cannot_be_stored(
    folder: Path, make_request: Callable[..., RecordRequest]
) -> None:
    def full(_request: RecordRequest, _uid: int) -> int:
        raise DiskFullError("full")

    _leave(folder, "1.json", encode(make_request("a")))
    with pytest.raises(DiskFullError):
        _ingest(folder, full)
    assert spool.state(folder) == SpoolState(waiting=1, bad=0)


def test_one_pass_is_bounded(
    folder: Path, store: Store, make_request: Callable[..., RecordRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "MAX_PASS_FILES", 2)
    for number in range(3):
        _leave(folder, f"{number}.json", encode(make_request(str(number))))
    assert _ingest(folder, store.record) == 2
    assert [path.name for path in folder.iterdir()] == ["2.json"]


def test_a_missing_folder_is_empty(tmp_path: Path, store: Store) -> None:
    assert _ingest(tmp_path / "none", store.record) == 0
    assert spool.state(tmp_path / "none") == SpoolState(0, 0)


def _take_in(intake: Intake, store: Callable[[RecordRequest, int], int]) -> int:
    return sum(intake.ingest(name, store) for name in intake.records())


def test_what_cannot_be_removed_is_stored_once(
    folder: Path,
    make_request: Callable[..., RecordRequest],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*_arguments: object, **_named: object) -> None:
        raise PermissionError(13, "Permission denied")

    for name in ("1.json", "2.json"):
        _leave(folder, name, encode(make_request(name)))
    intake = Intake(folder)
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        assert [_take_in(intake, lambda _request, _uid: 1) for _ in range(3)] == [2, 0, 0]
        assert not intake.is_any_waiting()
        assert intake.problems() == [
            f"{folder}: 2 files were stored but cannot be removed: Permission denied; give the daemon the right to write there"
        ]
        _leave(folder, "2.json", encode(make_request("other", "more")))
        assert _take_in(intake, lambda _request, _uid: 1) == 1
    assert caplog.text.count("cannot be removed") == 1

    assert _take_in(intake, lambda _request, _uid: 1) == 0
    assert list(folder.iterdir()) == []
    assert intake.problems() == []


def test_what_cannot_be_set_aside_is_said_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "x.json").mkdir()
    (folder / "x.bad" / "full").mkdir(parents=True)
    intake = Intake(folder)

    assert [_take_in(intake, lambda _request, _uid: 1) for _ in range(3)] == [0, 0, 0]

    assert not intake.is_any_waiting()
    assert caplog.text.count("nor set aside") == 1
    assert intake.problems() == [
        f"{folder}/x.json: cannot be read or set aside: Directory not empty; delete it"
    ]
    (folder / "x.bad" / "full").rmdir()
    assert intake.records() == []
    assert intake.problems() == []
    assert not (folder / "x.json").exists()
