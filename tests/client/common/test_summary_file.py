"""A summary replaces files only; devices, pipes and what others have made stay what they are."""

from __future__ import annotations

import os
import secrets
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pygraphd.client.common import summary_file

DATA = b'{"schema": 1}\n' * 10_000
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")


def names(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir()}


def test_a_new_file(tmp_path: Path) -> None:
    summary_file.write(tmp_path / "s", DATA)

    assert (tmp_path / "s").read_bytes() == DATA
    assert names(tmp_path) == {"s"}


def test_a_file_is_replaced_as_a_whole_and_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "s").write_bytes(b"old")
    (tmp_path / "s").chmod(0o600)
    other = tmp_path / "other"
    other.hardlink_to(tmp_path / "s")

    summary_file.write(tmp_path / "s", DATA)

    assert (tmp_path / "s").read_bytes() == DATA
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600
    assert other.read_bytes() == b"old"


@pytest.mark.parametrize("device", ["null", "full", "zero"])
def test_a_device_stays_one(device: str) -> None:
    path = Path("/dev") / device
    before = path.stat()
    if device == "full":
        with pytest.raises(OSError, match="No space"):
            summary_file.write(path, DATA, ".1")
    else:
        summary_file.write(path, DATA, ".1")

    assert (path.stat().st_rdev, path.stat().st_mode) == (before.st_rdev, before.st_mode)
    assert not path.with_name(f"{device}.1").exists()


def test_a_link_of_ours_leads_to_a_file_that_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "s").symlink_to("folder/file")
    for _ in range(2):  # where there is no file yet, and where there is
        summary_file.write(tmp_path / "s", DATA)

        assert (tmp_path / "s").is_symlink()
        assert (tmp_path / "folder" / "file").read_bytes() == DATA


def test_a_link_to_itself_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "s").symlink_to("s")

    with pytest.raises(OSError, match="link"):
        summary_file.write(tmp_path / "s", DATA)


@needs_root
def test_another_user_s_link_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"precious")
    (tmp_path / "s").symlink_to("victim")
    os.lchown(tmp_path / "s", NOBODY, NOBODY)

    summary_file.write(tmp_path / "s", DATA)

    assert (tmp_path / "victim").read_bytes() == b"precious"
    assert (tmp_path / "s").read_bytes() == DATA


@pytest.mark.parametrize(
    "name", [f".s.{os.getpid()}", "s.tmp", ".s"], ids=["with the process id", "tmp", "hidden"]
)
def test_a_link_that_was_planted_under_a_likely_name_is_not_written_through(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "victim").write_bytes(b"precious")
    (tmp_path / name).symlink_to("victim")

    summary_file.write(tmp_path / "s", DATA)

    assert (tmp_path / "victim").read_bytes() == b"precious"
    assert (tmp_path / name).is_symlink()


def test_even_a_name_that_was_guessed_is_not_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda _: "guessed")
    (tmp_path / "victim").write_bytes(b"precious")
    (tmp_path / ".pygraph-guessed").symlink_to("victim")

    with pytest.raises(FileExistsError):
        summary_file.write(tmp_path / "s", DATA)

    assert (tmp_path / "victim").read_bytes() == b"precious"


def test_a_pipe_with_a_reader_gets_all(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "s")
    read: list[bytes] = []
    descriptor = os.open(tmp_path / "s", os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)

    def drain() -> None:
        with os.fdopen(descriptor, "rb") as file:
            read.append(file.read())

    writer = os.open(tmp_path / "s", os.O_WRONLY)  # or the reader could see an end before the beginning
    reader = threading.Thread(target=drain)
    reader.start()
    summary_file.write(tmp_path / "s", DATA)
    os.close(writer)
    reader.join()

    assert read == [DATA]
    assert stat.S_ISFIFO((tmp_path / "s").stat().st_mode)


def test_a_pipe_without_a_reader_is_an_error_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "s")

    with pytest.raises(OSError, match="No such device or address"):
        summary_file.write(tmp_path / "s", DATA)

    assert stat.S_ISFIFO((tmp_path / "s").stat().st_mode)


def test_a_pipe_whose_reader_sleeps_is_an_error_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summary_file, "WAIT_S", 0.05)
    os.mkfifo(tmp_path / "s")
    descriptor = os.open(tmp_path / "s", os.O_RDONLY | os.O_NONBLOCK)

    with pytest.raises(TimeoutError):
        summary_file.write(tmp_path / "s", DATA)

    os.close(descriptor)


def test_a_socket_stays_one(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        with pytest.raises(OSError, match="No such device or address"):
            summary_file.write(tmp_path / "s", DATA)

    assert stat.S_ISSOCK((tmp_path / "s").stat().st_mode)


def test_a_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        summary_file.write(tmp_path, DATA, ".1")

    assert names(tmp_path) == set()


def test_a_folder_that_is_not_there_is_an_error_and_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        summary_file.write(tmp_path / "missing" / "s", DATA)

    assert names(tmp_path) == set()


WRITE = "import sys, os; from pathlib import Path; from pygraphd.client.common import summary_file; "


@needs_root
def test_without_permission_it_is_an_error_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "s").write_bytes(b"old")
    program = f"{WRITE}os.setuid({NOBODY}); summary_file.write(Path(sys.argv[1]), b'new')"

    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "s"], capture_output=True, text=True, check=False
    )

    assert "PermissionError" in done.stderr
    assert (tmp_path / "s").read_bytes() == b"old"
    assert names(tmp_path) == {"s"}


TO_STDOUT = f"{WRITE}print('before'); summary_file.write(Path(sys.argv[1]), b'summary\\n'); print('after')"


@pytest.mark.parametrize("path", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_standard_output_gets_it_in_its_turn(path: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", TO_STDOUT, path]
    before = Path("/dev/stdout").readlink()

    piped = subprocess.run(command, capture_output=True, check=True).stdout
    with (tmp_path / "out").open("wb") as file:
        subprocess.run(command, stdout=file, check=True)

    assert piped == (tmp_path / "out").read_bytes() == b"before\nsummary\nafter\n"
    assert names(tmp_path) == {"out"}
    assert Path("/dev/stdout").readlink() == before


def test_standard_output_that_is_closed_is_an_error() -> None:
    program = f"{WRITE}summary_file.write(Path('/dev/stdout'), b'summary')"

    done = subprocess.run(
        [sys.executable, "-c", program],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        preexec_fn=lambda: os.close(1),
    )

    assert "Error" in done.stderr
