"""Start and stop a daemon in another process, for `pygraphd start`, `stop` and `restart`."""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pygraphd import folders
from pygraphd.config import flag, load_config
from pygraphd.daemon import control
from pygraphd.daemon.lock import Activity, activity_of_holder, holder, hung_text, is_held, why_unknown
from pygraphd.errors import CommandError, NotRunningError, UsageError
from pygraphd.schema.locations import environ_elsewhere
from pygraphd.schema.ownership import open_regular

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from pygraphd.config import Config
    from pygraphd.schema.locations import Locations
    from pygraphd.schema.messages import Ping

START_S = 10.0
SAY_S = 10.0
STOP_S = 15.0
"""Longer than an ending daemon may take."""
_POLL_S = 0.02
_LAST_BYTES = 4096
_UNTOLD = "***"
"""Stands for a password in what the daemon tells of a URL."""


def start(
    locations: Locations,
    flags: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[Ping, bool]:
    """Return the running daemon and whether it had to be started; `flags` and environment `variables` go to it. Raises CommandError.

    `say` is called once, if that takes long because the database is being checked.
    """
    if running := control.ping(locations.socket):
        return running, False
    folders.prepare_runtime(locations)
    folders.prepare_cache(locations)
    with contextlib.closing(_Log(locations.log)) as log:
        try:
            process = _spawn(log, flags, **(variables or {}))
        except OSError as error:
            raise CommandError(f"{sys.executable}: cannot be run: {error.strerror}") from error
        return _wait_for_answer(locations, process, log, say), True


class _Log:
    """The log that a daemon is started with; where it cannot be written, a file in memory."""

    def __init__(self, path: Path) -> None:
        self._name = f" (log: {path})"
        try:
            # Also to be read: where the start fails, its last line says why.
            self.descriptor = open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        except OSError:
            self.descriptor, self._name = os.memfd_create(path.name), ""
        self._began = os.lseek(self.descriptor, 0, os.SEEK_END)

    def close(self) -> None:
        """Close the descriptor; the daemon has one of its own."""
        os.close(self.descriptor)

    def last_line(self) -> str:
        """Return the last line that was written since, and where the others are."""
        size = os.fstat(self.descriptor).st_size
        # Only what was written since: the last line of an earlier daemon would name another fault.
        written = os.pread(self.descriptor, _LAST_BYTES, max(self._began, size - _LAST_BYTES))
        lines = written.decode(errors="replace").splitlines()
        return (lines[-1].removeprefix("pygraphd: ") if lines else "it said nothing") + self._name


def problems(locations: Locations) -> list[str]:
    """Return what a daemon says is wrong with it; nothing if it cannot be asked, which `pygraphd status` tells."""
    told = _stats(locations).get("problems")
    return list(map(str, told)) if isinstance(told, list) else []


def not_applied(
    locations: Locations, config: Config, flags: Mapping[str, str], hidden: Collection[str] = ()
) -> list[str]:
    """Return the options of a start, as words, that the running daemon does not have: by name of setting `flags`, and those `hidden`.

    A hidden one always counts, as the daemon does not tell all of its value.
    """
    told, wanted = _stats(locations).get("settings"), config.settings()
    has = told if isinstance(told, dict) else {}
    # By value, as the text of one may be 30m and that of the other 1800.
    others = [name for name in flags if not _is_alike(has.get(name), wanted[name])]
    words = [word for name in others for word in (flag(name), shlex.quote(flags[name]))]
    return words + [word for name in hidden for word in (flag(name), "URL")]


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a daemon that runs, for the next one: by name of setting those to keep, and the names of those that cannot be."""

    kept: dict[str, str] = field(default_factory=dict)
    lost: tuple[str, ...] = ()

    def texts(self) -> list[str]:
        """Return a line on each kind, if there are any."""
        kept = " ".join(f"{flag(name)} {shlex.quote(text)}" for name, text in self.kept.items())
        lost = " ".join(f"{flag(name)}=..." for name in self.lost)
        lines = {
            f"kept from the daemon before: {kept}; `pygraphd stop` and then `start` drops it": kept,
            f"not kept, as the daemon does not tell all of it: {lost}; run: pygraphd restart {lost}": lost,
        }
        return [line for line, options in lines.items() if options]


def options_of(locations: Locations, names: Collection[str]) -> Options:
    """Return those of some options with which the running daemon was started; none if no daemon can be asked."""
    told = _stats(locations).get("settings")
    settings = told if isinstance(told, dict) else {}
    # What came from a variable or the file, the next daemon reads there.
    found = [name for name in names if _origin(settings.get(name)) == flag(name)]
    texts = {name: _option_text(settings[name].get("value")) for name in found}
    kept = {name: text for name, text in texts.items() if _is_valid(name, text)}
    return Options(kept, tuple(name for name in found if name not in kept))


def _origin(told: object) -> object:
    return told.get("origin") if isinstance(told, dict) else None


def _option_text(value: object) -> str:
    # Not the "1800.0" that JSON has for half an hour.
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _is_valid(name: str, text: str) -> bool:
    """Return whether a daemon of this version takes the text of an option; of a URL with a password, not all is told."""
    try:
        load_config({}, {name: text})
    except UsageError:
        return False
    return _UNTOLD not in text


def _stats(locations: Locations) -> dict[str, object]:
    try:
        # Asked for remarks alone: a daemon that cannot be asked is no error here.
        return control.stats(locations.socket)
    except CommandError:
        return {}


def _is_alike(told: object, wanted: Mapping[str, object]) -> bool:
    return isinstance(told, dict) and told.get("value") == wanted["value"]


def stop(locations: Locations) -> int:
    """End the daemon, wait until its process is gone, and return its pid; raises NotRunningError, CommandError."""
    # Before anything is asked of it: another user's process may listen there, and name any pid.
    if problem := control.why_untrusted(locations.socket):
        raise UsageError(problem)
    running = control.ping(locations.socket)
    if running is None:
        if unknown := why_unknown(locations):
            raise CommandError(unknown)
        if not is_held(locations):
            raise NotRunningError("pygraphd is not running")
        raise CommandError(hung_text(locations))
    pid = _verified_pid(locations, running)
    if not _ended(pid):
        raise CommandError(f"pygraphd did not end within {STOP_S:g} s: {hung_text(locations)}")
    return pid


def _ended(pid: int) -> bool:
    """Ask a process to end; return whether it has ended within `STOP_S`."""
    try:
        # By a descriptor: the pid may be that of another process by the time that the signal is sent.
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        signal.pidfd_send_signal(process, signal.SIGTERM)
        ended, _, _ = select.select([process], [], [], STOP_S)
        return bool(ended)
    finally:
        os.close(process)


def _verified_pid(locations: Locations, running: Ping) -> int:
    """Return the daemon's pid; raises CommandError if it belongs to another pid namespace, as of a container."""
    peer = control.listener(locations.socket)
    if peer is None or peer.pid != running.pid:
        raise CommandError(f"pygraphd runs as pid {running.pid} of another pid namespace: stop it there")
    return running.pid


def _spawn(log: _Log, flags: Sequence[str], **variables: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "pygraphd", "start", "--foreground", *flags]
    # Nothing of the starter's is kept: no terminal whose Ctrl-C would end it, no mount that could not be
    # unmounted, and no descriptor, as of a pipe whose reader would wait for its end.
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log.descriptor,
        stderr=log.descriptor,
        start_new_session=True,
        close_fds=True,
        cwd="/",
        env={**environ_elsewhere(), **variables},
    )


def _wait_for_answer(
    locations: Locations, process: subprocess.Popen[bytes], log: _Log, say: Callable[[str], None]
) -> Ping:
    began, has_said = time.monotonic(), False
    while True:
        # Asked first: a daemon that begins to serve between the two questions is met by the second one.
        is_starting = activity_of_holder(locations) is Activity.STARTING
        if running := control.ping(locations.socket):
            # It outlives us, so nobody here will ever wait for it.
            process.returncode = 0
            return running
        # 0 is no failure: it has found another daemon, whose answer is waited for.
        if process.poll():
            raise CommandError(f"pygraphd did not start: {log.last_line()}")
        waited_s = time.monotonic() - began
        if is_starting and waited_s >= SAY_S and not has_said:
            say(f"pygraphd checks its database {locations.database}; waiting for it")
            has_said = True
        if waited_s >= START_S and not is_starting:
            # Ours waits for the lock as long as we have waited for it, and has not yet said who holds that.
            late = f"pygraphd did not answer within {START_S:g} s; see {locations.log}"
            why = hung_text(locations) if is_held(locations) else late
            if holder(locations) not in {None, process.pid}:
                # Or it would take the lock as soon as the other process gives it up, after we have said that it failed.
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_S)
            raise CommandError(why)
        time.sleep(_POLL_S)
