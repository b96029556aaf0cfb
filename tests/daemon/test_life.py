"""Starting, stopping, racing, dying."""

from __future__ import annotations

import os
import pty
import shutil
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pygraphd.daemon import control
from pygraphd.schema import ownership
from pygraphd.schema.messages import encode
from tests.support.daemon_home import COMMAND, HANGS_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from pygraphd.schema.messages import RecordRequest
    from tests.support.daemon_home import Home

pytestmark = pytest.mark.daemon

_ARENA = 64 * 2**20


def test_stop_leaves_the_daemon_of_a_stranger_alone(home: Home) -> None:
    home.path.chmod(0o777)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(home.locations.socket))
        listener.listen()

        stopped = home.pygraphd("stop")

    assert (stopped.returncode, stopped.stdout) == (2, "")
    assert stopped.stderr.count("\n") == 1
    assert "others can write to it" in stopped.stderr


@pytest.mark.slow
def test_start_status_stop(home: Home) -> None:
    assert home.pygraphd("status").returncode == 3
    started = home.pygraphd("start")
    assert (started.returncode, started.stderr) == (0, "")
    status = home.status()
    assert status["running"] is True
    assert f"started (pid {status['pid']})" in started.stdout
    assert home.pygraphd("status").returncode == 0
    assert home.pygraphd("start").stdout == f"already running (pid {status['pid']})\n"
    stopped = home.pygraphd("stop")
    assert (stopped.returncode, stopped.stdout) == (0, f"stopped (pid {status['pid']})\n")
    assert home.pygraphd("stop").returncode == 3
    assert not home.locations.socket.exists()
    assert home.locations.lock.exists()
    assert _has_ended(status["pid"])  # at once: that is what stop waits for


def test_a_relative_home_is_the_same_folder_for_the_daemon(home: Home, tmp_path: Path) -> None:
    environ = {**home.environ, "PYGRAPHD_HOME": home.path.name}
    started = subprocess.run(
        [sys.executable, "-m", "pygraphd", "start"],
        env=environ,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert (started.returncode, started.stderr) == (0, "")
    assert home.status()["running"] is True


def test_all_threads_of_a_daemon_take_memory_from_one_arena(
    shared_home: Home, make_request: Callable[..., RecordRequest]
) -> None:
    """Else what one of them has freed stays with it for ever, and another's growth comes on top."""
    pid = shared_home.processes[0].pid
    shared_home.ask("POST", "/v3/record", encode(make_request("a")))
    shared_home.ask("POST", "/v1/prune", b'{"gpu": "H200"}')

    # A further arena of glibc has 64 MiB of addresses at a multiple of that, of which it opens as much as it needs.
    mapped = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    ends = {tuple(int(end, 16) for end in words[0].split("-")): words[1] for words in mapped}
    arenas = [
        start
        for (start, middle), rights in ends.items()
        for (more, end), closed in ends.items()
        if (rights, closed) == ("rw-p", "---p")
        and middle == more
        and end - start == _ARENA
        and start % _ARENA == 0
    ]

    assert len(list(Path(f"/proc/{pid}/task").iterdir())) > 1
    assert arenas == []


def _has_ended(pid: int) -> bool:
    """Return whether a process is gone; one that nobody waited for is as good as gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.slow
def test_restart_is_another_process_with_the_same_cache(
    home: Home, make_request: Callable[..., RecordRequest]
) -> None:
    first = home.start()
    assert home.ask("POST", "/v3/record", encode(make_request("a")))[0] == 200
    assert home.pygraphd("restart").returncode == 0
    status = home.status()
    assert status["pid"] != first
    assert status["entries"] == 1


@pytest.mark.slow
def test_a_restart_keeps_the_options_of_the_daemon_before(home: Home) -> None:
    home.pygraphd("start", "--log", "debug", "--idle-exit", "1h")
    done = home.pygraphd("restart", "--idle-exit", "2h")
    assert done.stderr == (
        "pygraphd: kept from the daemon before: --log debug; `pygraphd stop` and then `start` drops it\n"
    )
    settings = home.status()["settings"]
    assert settings["log"] == {"value": "debug", "origin": "--log"}
    assert settings["idle_exit"] == {"value": 7200.0, "origin": "--idle-exit"}


def test_files_are_ours_alone(shared_home: Home) -> None:
    assert stat.S_IMODE(shared_home.locations.socket.stat().st_mode) == 0o600
    files = [path for path in shared_home.path.rglob("*") if path.is_file()]
    assert {"cache.db", "pygraphd.lock", "pygraphd.log", "pygraphd.pid"} <= {path.name for path in files}
    assert [path for path in files if path.stat().st_mode & 0o077] == []


def test_the_daemon_holds_nothing_of_its_starter(home: Home) -> None:
    read, write = os.pipe()
    try:
        # As a shell's pipe would: inheritable, and open in the command.
        os.set_inheritable(write, True)
        command = [sys.executable, "-m", "pygraphd", "start"]
        subprocess.run(command, env=home.environ, pass_fds=[write], check=True, capture_output=True)
        pid = home.status()["pid"]
        assert Path(f"/proc/{pid}/cwd").readlink() == Path("/")
        pipe = Path(f"/proc/self/fd/{read}").readlink()
        assert pipe not in [fd.readlink() for fd in Path(f"/proc/{pid}/fd").iterdir()]
        assert os.getsid(pid) == pid
    finally:
        os.close(read)
        os.close(write)


def test_no_torch_in_the_daemon(shared_home: Home) -> None:
    pid = shared_home.processes[0].pid
    assert "torch" not in Path(f"/proc/{pid}/maps").read_text().replace(str(shared_home.path), "")


def test_beside_a_running_daemon_a_terminal_gets_a_word(home: Home) -> None:
    home.variables["PYGRAPHD_LOG"] = "warning"
    pid = home.start()
    reader, writer = pty.openpty()
    os.set_blocking(reader, False)
    try:
        command = [*COMMAND, "start", "--foreground"]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=writer, env=home.environ, check=False, timeout=HANGS_S
        )
        assert (done.returncode, done.stdout) == (0, b"")
        assert os.read(reader, 1 << 16).decode().endswith(f"already running (pid {pid})\r\n")
    finally:
        os.close(reader)
        os.close(writer)
    beside = home.spawn()
    assert (beside.communicate(timeout=HANGS_S), beside.returncode) == ((b"", b""), 0)


def test_a_start_beside_a_running_daemon_says_what_it_does_not_apply(home: Home) -> None:
    home.pygraphd("start", "--idle-exit", "1h")

    assert home.pygraphd("start", "--idle-exit=60m").stderr == ""
    said = "not applied, as the daemon runs already: --log debug; run: pygraphd restart --log debug"
    assert home.pygraphd("start", "--idle-exit=1h", "--log=debug").stderr == f"pygraphd: {said}\n"


@pytest.mark.slow
def test_killed_and_started_again(home: Home) -> None:
    pid = home.start()
    os.kill(pid, signal.SIGKILL)
    home.processes[0].wait()
    assert home.locations.socket.exists()
    assert home.pygraphd("status").returncode == 3
    assert home.pygraphd("start").returncode == 0
    assert home.status()["pid"] != pid


@pytest.mark.slow
def test_a_stopped_process_is_named_and_left_alone(home: Home) -> None:
    pid = home.start()
    os.kill(pid, signal.SIGSTOP)
    status = home.pygraphd("status")
    assert status.returncode == 3
    assert f"process {pid} holds the lock but does not answer; end it with: kill -9 {pid}" in status.stdout
    assert home.status()["running"] is False
    stop = home.pygraphd("stop")
    assert stop.returncode == 1
    assert f"kill -9 {pid}" in stop.stderr
    os.kill(pid, signal.SIGCONT)
    home.wait_until(lambda: home.status()["running"])
    assert home.status()["pid"] == pid


@pytest.mark.slow
def test_a_start_beside_a_hung_daemon_fails_and_says_why(home: Home) -> None:
    pid = home.start()
    os.kill(pid, signal.SIGSTOP)
    for limit, *words in (
        ("daemon.process.PATIENCE_S", "start", "--foreground"),
        ("cli.lifecycle.START_S", "start"),
    ):
        second = home.pygraphd_soon(limit, *words)
        assert second.returncode == 1
        assert f"process {pid} holds the lock but does not answer" in second.stderr
        assert home.daemons() == [pid]


def test_a_live_socket_is_never_taken(home: Home) -> None:
    pid = home.start()
    inode = home.locations.socket.stat().st_ino
    home.locations.lock.unlink()
    second = home.spawn()
    assert second.wait(HANGS_S) == 0
    assert home.locations.socket.stat().st_ino == inode
    running = control.ping(home.locations.socket)
    assert running is not None
    assert running.pid == pid


@pytest.mark.slow
def test_what_is_no_socket_is_not_removed(home: Home) -> None:
    home.locations.socket.write_text("precious")
    process = home.spawn()
    assert process.wait(HANGS_S) == 1
    assert b"is in the way and no socket" in process.communicate()[1]
    assert home.locations.socket.read_text() == "precious"
    started = home.pygraphd("start")
    assert started.returncode == 1
    assert "is in the way and no socket" in started.stderr


def test_a_socket_that_is_not_ours_is_not_removed_at_the_end(home: Home) -> None:
    pid = home.start()
    home.locations.socket.unlink()
    home.locations.socket.write_text("somebody else's")
    os.kill(pid, signal.SIGTERM)
    home.processes[0].wait(HANGS_S)
    assert home.locations.socket.read_text() == "somebody else's"


@pytest.mark.slow
def test_a_deleted_socket_is_bound_again(home: Home) -> None:
    pid = home.start()
    home.locations.socket.unlink()
    home.wait_until(home.locations.socket.exists)
    home.wait_until(lambda: control.ping(home.locations.socket) is not None)
    assert home.status()["pid"] == pid
    assert stat.S_IMODE(home.locations.socket.stat().st_mode) == 0o600
    assert home.pygraphd("stop").returncode == 0
    assert not home.locations.socket.exists()


@pytest.mark.slow
def test_a_daemon_without_socket_and_lock_ends_for_the_next_one(home: Home) -> None:
    home.start()
    home.locations.lock.unlink()
    home.locations.socket.unlink()
    assert home.processes[0].wait(HANGS_S) == 0
    assert home.pygraphd("start").returncode == 0


def test_an_idle_connection_does_not_delay_the_end(home: Home) -> None:
    pid = home.start()
    with ownership.connect(home.locations.socket, HANGS_S) as silent:
        silent.sendall(b"GET /v1/ping HTTP/1.1\r\n")
        os.kill(pid, signal.SIGTERM)
        assert home.processes[0].wait(HANGS_S) == 0


def test_it_ends_when_nobody_uses_it(home: Home) -> None:
    home.variables["PYGRAPHD_IDLE_EXIT"] = "1"
    process = home.spawn()  # `start` might look for its answer only when it has ended

    def has_ended() -> bool:
        control.ping(home.locations.socket)  # being asked how it does is no use
        return process.poll() is not None

    home.wait_until(has_ended)
    assert process.returncode == 0
    assert "idle for 1 s" in home.locations.log.read_text()
    assert not home.locations.socket.exists()


@pytest.mark.slow
def test_a_long_path(home: Home) -> None:
    home.path = home.path / ("x" * 120)
    assert home.pygraphd("start").returncode == 0
    assert str(home.locations.socket).startswith("/tmp/pygraphd-")
    assert home.status()["running"] is True
    assert home.pygraphd("stop").returncode == 0


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare (util-linux)")
def test_a_user_without_a_passwd_entry(home: Home) -> None:
    unshare = ["unshare", "--user", "--map-user=54321"]
    if subprocess.run([*unshare, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no user namespaces here")
    home.variables = {"HOME": "/nonexistent"}
    home.spawn(*unshare)
    home.wait_until(lambda: home.locations.socket.exists())
    inside = subprocess.run(
        [*unshare, sys.executable, "-m", "pygraphd", "status"],
        env=home.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "running, pid" in inside.stdout


def test_start_with_closed_output_starts_and_says_nothing(home: Home) -> None:
    """And no file gets the number of standard output, into which somebody might print."""
    closed = [*COMMAND, "start"]
    started = subprocess.run(
        ["/bin/sh", "-c", 'exec "$@" >&- 2>&- <&-', "sh", *closed],
        env=home.environ,
        check=False,
        timeout=HANGS_S,
    )

    assert started.returncode == 0
    assert home.pygraphd("stop").returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
def test_a_signal_to_end_leaves_nothing_behind(home: Home, number: signal.Signals) -> None:
    home.start()

    home.processes[-1].send_signal(number)

    assert home.processes[-1].wait(HANGS_S) == 0
    assert not home.locations.socket.exists()
    assert not home.locations.lock.with_suffix(".pid").exists()
    assert not home.locations.database.with_name("cache.db-wal").exists()
    assert "stopped" in home.locations.log.read_text()


def test_a_signal_without_a_meaning_ends_nothing(home: Home) -> None:
    pid = home.start()

    for number in (signal.SIGUSR1, signal.SIGUSR2):
        os.kill(pid, number)

    home.wait_until(lambda: home.locations.log.read_text().count("means nothing here") == 2)
    log = home.locations.log.read_text()
    assert all(f"{number.name} means nothing here" in log for number in (signal.SIGUSR1, signal.SIGUSR2))
    assert home.status()["pid"] == pid
