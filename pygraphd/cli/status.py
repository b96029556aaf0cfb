"""Collect the state for `pygraphd status`: from the daemon if one answers, and from the files."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sqlite3
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pygraphd.cli import status_files
from pygraphd.config import shipped_folder, survey
from pygraphd.daemon import control, database_files, lock, spool
from pygraphd.daemon.team import queue
from pygraphd.daemon.team.state import TeamState
from pygraphd.errors import CommandError
from pygraphd.schema import offline, shipped
from pygraphd.schema.checks import InvalidMessageError, check_digest, check_int, check_number, check_text
from pygraphd.schema.messages import MAX_COUNT, MAX_TIME, read
from pygraphd.schema.version import VERSION

if TYPE_CHECKING:
    from pathlib import Path

    from pygraphd.schema.locations import Locations
    from pygraphd.schema.messages import Ping


@dataclass(frozen=True, slots=True)
class Process:
    """A process that the daemon serves: what it measures and waits for, as numbers of graphs and the first digests.

    `pid` is 0 for all processes of other pid namespaces.
    """

    pid: int
    program: str
    requests: int
    idle_s: float
    measuring: int
    measures: tuple[str, ...]
    waiting: int
    waits_for: tuple[str, ...]

    def __post_init__(self) -> None:
        check_text("program", self.program, maximum=MAX_PROGRAM)
        for name in ("pid", "requests", "measuring", "waiting"):
            check_int(name, getattr(self, name), maximum=MAX_COUNT)
        check_number("idle_s", self.idle_s, maximum=MAX_TIME)
        for graph in (*self.measures, *self.waits_for):
            check_digest("graph", graph)


@dataclass(frozen=True, slots=True)
class Status:
    """The state of one daemon and its files. `problems` is empty if all is well; unknown values are None."""

    running: bool
    socket: str
    database: str
    log: str
    version: str | None = None
    pid: int | None = None
    entries: int | None = None
    uptime_s: float | None = None
    spool_waiting: int = 0
    spool_bad: int = 0
    shipped: int | None = None
    problems: list[str] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    """The running daemon's settings by name: value and origin."""
    processes: list[Process] = field(default_factory=list)
    """The processes that the running daemon serves, the latest to ask first."""
    processes_left_out: int = 0
    team: TeamState | None = None
    """The state of the exchange with a team; None: there is no team, or no daemon that could tell."""
    team_waiting: int = 0
    """The records that wait to be published to a team, as counted without a daemon."""
    team_unpublished: bool = False
    """Whether entries of the cache wait, too, as found without a daemon."""

    def as_json(self) -> dict[str, object]:
        """Return the state as `status --json` has it."""
        return {"schema": 1, **dataclasses.asdict(self)}


MAX_PROGRAM = 80
_COUNTERS = ("lookups", "graphs", "hits", "misses", "records", "spooled", "invalid", "refused", "failed")


def collect(locations: Locations) -> Status:
    """Return the state. Starts nothing, and raises nothing for a daemon with problems."""
    running = control.ping(locations.socket)
    status = _from_files(locations)
    return _with_daemon(status, locations, running) if running else _without_daemon(status, locations)


def _from_files(locations: Locations) -> Status:
    waiting = spool.state(locations.spool)
    return Status(
        running=False,
        socket=str(locations.socket),
        database=str(locations.database),
        log=str(locations.log),
        spool_waiting=waiting.waiting,
        spool_bad=waiting.bad,
        problems=status_files.file_problems(locations, waiting),
    )


def _with_daemon(status: Status, locations: Locations, running: Ping) -> Status:
    problems = list(status.problems)
    if running.version != VERSION:
        problems.append(
            f"the daemon is version {running.version}, this command {VERSION}; run: pygraphd restart"
        )
    try:
        stats = control.stats(locations.socket)
    except CommandError as error:
        # It answers pings, so it runs: what else is the matter is for `status` to list.
        stats = {"problems": [str(error)]}
    told = stats.get("problems")
    return dataclasses.replace(
        status,
        running=True,
        version=running.version,
        pid=running.pid,
        entries=_whole(stats.get("entries")),
        shipped=_whole(stats.get("shipped")),
        uptime_s=_number(stats.get("uptime_s")),
        problems=[*(map(str, told) if isinstance(told, list) else ()), *problems, *_for_the_next_start()],
        counters={name: _whole(stats.get(name)) or 0 for name in _COUNTERS},
        settings=_settings(stats.get("settings")),
        processes=_processes(stats.get("processes")),
        processes_left_out=_whole(stats.get("processes_left_out")) or 0,
        team=_team(stats.get("team")),
    )


def _for_the_next_start() -> list[str]:
    """Return what is not valid in the settings as they are now: the daemon that runs has read others."""
    remedy = (
        "the daemon goes on with the settings that it has, but the next start will fail: correct or remove it"
    )
    return [f"{fault.text}; {remedy}" for fault in survey(os.environ, {}).faults]


def _without_daemon(status: Status, locations: Locations) -> Status:
    problems = list(status.problems)
    if (stranger := control.why_untrusted(locations.socket)) and stranger not in problems:
        problems.insert(0, stranger)
    if read_only := lock.why_read_only(locations):
        problems.append(read_only)
    if lock.is_held(locations):
        problems.insert(0, lock.hung_text(locations))
    entries, problem = _count_entries(locations.database)
    (waiting, has_unpublished), queue_problem = _count_for_team(locations.team_queue)
    read = shipped.load(shipped_folder(os.environ))
    for path, found in ((locations.database, problem), (locations.team_queue, queue_problem)):
        # One line for each file: what its mode tells is the cause of SQLite's error.
        if found and not any(each.startswith(f"{path}: ") for each in problems):
            problems.append(found)
    problems += read.problems
    return dataclasses.replace(
        status,
        entries=entries,
        shipped=len(read.known),
        problems=problems,
        team_waiting=waiting,
        team_unpublished=has_unpublished,
    )


def _count_entries(path: Path) -> tuple[int | None, str | None]:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return 0, None
    except OSError:
        return None, None  # why, is a problem of its folder
    try:
        with contextlib.closing(offline.connect(path)) as connection:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if 0 < version < offline.DATABASE_VERSION:
                return None, database_files.why_unreadable(path, None)
            if not version:
                return _count_without_version(path, connection)
            (entries,) = connection.execute("SELECT count(*) FROM decision").fetchone()
            return int(entries), database_files.why_read_only(path)
    except sqlite3.Error as error:
        return None, database_files.why_unreadable(path, error)


def _count_without_version(path: Path, connection: sqlite3.Connection) -> tuple[int | None, str]:
    (has_tables,) = connection.execute("SELECT EXISTS (SELECT 1 FROM sqlite_schema)").fetchone()
    if has_tables:
        return None, f"{path}: is another program's database; `pygraphd start` sets it aside"
    return 0, f"{path}: is empty; `pygraphd start` makes it anew"


def _count_for_team(path: Path) -> tuple[tuple[int, bool], str | None]:
    try:
        return queue.count_waiting(path), None
    except sqlite3.Error as error:
        why = database_files.with_remedy(path, error)
        return (0, False), f"{path}: the records that wait for a team cannot be counted: {why}"
    except OSError:
        return (0, False), None  # why, is a problem of its folder


def _processes(told: object) -> list[Process]:
    """Return the processes that a daemon tells of; none if it is of another version, or tells nonsense."""
    with contextlib.suppress(InvalidMessageError):
        return [read(Process, each) for each in told] if isinstance(told, list) else []
    return []


def _team(told: object) -> TeamState | None:
    """Return the state of the team that a daemon tells of; None if it tells nonsense."""
    with contextlib.suppress(InvalidMessageError):
        return None if told is None else read(TeamState, told)
    return None


def _settings(told: object) -> dict[str, Any]:
    """Return the settings that can be shown: text for a level of the log, a number for all others."""
    settings = told.items() if isinstance(told, dict) else ()
    return {
        name: {"value": setting["value"], "origin": str(setting.get("origin"))}
        for name, setting in settings
        if isinstance(setting, dict)
        and (isinstance(value := setting.get("value"), str) or _number(value) is not None)
    }


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and _number(value) is not None else None


def _number(value: object) -> float | None:
    """Return a number of those that a daemon may tell, None for any other value."""
    return float(value) if isinstance(value, int | float) and 0 <= value <= MAX_TIME else None
