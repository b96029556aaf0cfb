"""A real PostgreSQL server of the tests' own, in a temporary folder, on a free port of 127.0.0.1.

The administrator connects over the server's Unix socket without a password; everybody else by TCP with one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, LiteralString, Self

import psycopg
from psycopg import sql

from tests.support.home_daemons import kill
from tests.support.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

REQUIRED = "TESTS_REQUIRE_POSTGRES"
"""With this variable tests fail, instead of being skipped, where no PostgreSQL is installed."""
ADMINISTRATOR = "administrator"
_DEBIAN = Path("/usr/lib/postgresql")
_UNPRIVILEGED = ("postgres", "nobody")
_BEGIN_S = 300.0
_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "fsync": "off",
    "full_page_writes": "off",
    "shared_buffers": "16MB",
    "max_connections": "200",
    "autovacuum": "off",
}


def installed() -> Path | None:
    """Return the folder with `initdb` and `postgres`: of the PATH, or of the newest of Debian's packages; None if there is none."""
    if found := shutil.which("initdb"):
        return Path(found).resolve().parent
    folders = [path.parent for path in _DEBIAN.glob("*/bin/initdb") if path.parent.parent.name.isdigit()]
    return max(folders, key=lambda folder: int(folder.parent.name), default=None)


class Postgres:
    """One server, which runs from the constructor on; `close` ends it and removes its folder."""

    def __init__(self, programs: Path) -> None:
        self._programs = programs
        self._user = _unprivileged_user()
        self.folder = Path(
            tempfile.mkdtemp(prefix="pg-", dir="/tmp")
        )  # short, or the socket's path is too long
        self._data = self.folder / "data"
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.count(1)
        try:
            if self._user is not None:
                shutil.chown(self.folder, self._user)
            self._make_cluster()
            self.start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the server and remove its folder."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def is_running(self) -> bool:
        """Whether the server's first process is alive."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the server, which may have been killed, and return when it takes connections."""
        assert not self.is_running
        self._process = self._spawn("postgres", "-D", str(self._data), stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + _BEGIN_S
        while not self._takes_connections():
            assert self._process.poll() is None, f"PostgreSQL ended at its start: {self._log()}"
            assert time.monotonic() < deadline, f"PostgreSQL takes no connections: {self._log()}"
            time.sleep(0.02)

    def stop(self) -> None:
        """Have the server end: it aborts what runs, hangs up, and writes all to its files."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)
        self._process.wait(_BEGIN_S)

    def kill(self) -> None:
        """Kill all of the server's processes at once, as a crash of its machine does."""
        if self._process is None or not self.is_running:
            return
        children = self._stop_begetting()
        for child in children:
            _kill(child)
        self._process.kill()
        self._process.wait(_BEGIN_S)
        for child in children:  # the next server refuses to begin while one of them has the shared memory
            kill(child)

    def kill_backends(self, database: str) -> int:
        """Kill the processes that serve a database, at whatever they are, and return their number. The server recovers by itself."""
        query = "SELECT pid FROM pg_stat_activity WHERE datname = %s AND backend_type = 'client backend'"
        pids = [row[0] for row in self.execute("postgres", query, database)]
        for pid in pids:
            _kill(pid)
        return len(pids)

    def hang_up(self, database: str) -> None:
        """End all connections to a database."""
        query = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"
        self.execute("postgres", query, database)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Have all of the server's processes stand still within the block: the kernel accepts connections, and nobody answers."""
        assert self._process is not None
        children = self._stop_begetting()
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in (*children, self._process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def _stop_begetting(self) -> list[int]:
        """Have the first process stand still, and return the others, to which it adds none from now on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        # The signal has its effect some time after it was sent.
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        return _children(self._process.pid)

    def make_database(self, template: str = "template1") -> str:
        """Make a database as `template` is, which nobody but the administrator may connect to, and return its name."""
        name = f"test_{next(self._numbers)}"
        new, old = sql.Identifier(name), sql.Identifier(template)
        self._administer(sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(new, old))
        self._administer(sql.SQL("REVOKE ALL ON DATABASE {} FROM PUBLIC").format(new))
        return name

    def keep_as_template(self, name: str) -> None:
        """Keep a database, of which others are copied, until the server ends."""
        self.execute("postgres", "UPDATE pg_database SET datistemplate = true WHERE datname = %s", name)

    def make_role(self, name: str) -> None:
        """Make a role that may connect, with its name reversed as password."""
        made = sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(
            sql.Identifier(name), sql.Literal(name[::-1])
        )
        self._administer(made)

    def admit(self, database: str, *roles: str) -> None:
        """Have roles connect to a database."""
        for role in roles:
            allowed = sql.SQL("GRANT CONNECT ON DATABASE {} TO {}")
            self._administer(allowed.format(sql.Identifier(database), sql.Identifier(role)))

    def drop_databases(self) -> None:
        """Drop the databases that tests have made, but for those that are templates of others."""
        made = "SELECT datname FROM pg_database WHERE datname LIKE 'test\\_%%' AND NOT datistemplate"
        for (name,) in self.execute("postgres", made):
            self._administer(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))

    def execute(self, database: str, statement: LiteralString, *values: object) -> list[tuple[Any, ...]]:
        """Execute a statement as the administrator; return its rows, none if it gives none. A % in it is written twice."""
        with self._connect(database) as connection:
            cursor = connection.execute(statement, values)
            return [] if cursor.description is None else cursor.fetchall()

    def url(self, database: str, role: str, password: str = "", port: int | None = None) -> str:
        """Return the URL by which a role reaches a database, at the server's own port or at a proxy's."""
        word = password or role[::-1]
        return f"postgresql+psycopg://{role}:{word}@127.0.0.1:{port or self.port}/{database}"

    def administrators_url(self, database: str) -> str:
        """Return the URL by which the administrator reaches a database."""
        return f"postgresql+psycopg://{ADMINISTRATOR}@/{database}?host={self.folder}&port={self.port}"

    def psql(self, database: str, script: str) -> None:
        """Execute a script as the administrator, with the commands that psql knows."""
        subprocess.run(
            [self.program("psql"), "-X", "-q", "-v", "ON_ERROR_STOP=1", *self._reached(database)],
            input=script.encode(),
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=_BEGIN_S,
        )

    @property
    def administrator(self) -> dict[str, str]:
        """The variables with which PostgreSQL's programs connect as the administrator."""
        return {"PGHOST": str(self.folder), "PGPORT": str(self.port), "PGUSER": ADMINISTRATOR}

    def _reached(self, database: str) -> list[str]:
        return ["-h", str(self.folder), "-p", str(self.port), "-U", ADMINISTRATOR, "-d", database]

    def program(self, name: str) -> str:
        """Return the path of one of PostgreSQL's programs."""
        return str(self._programs / name)

    def _administer(self, statement: sql.Composed) -> None:
        with self._connect("postgres") as connection:
            connection.execute(statement)

    def _connect(self, database: str) -> psycopg.Connection:
        return psycopg.connect(
            host=str(self.folder), port=self.port, user=ADMINISTRATOR, dbname=database, autocommit=True
        )

    def _takes_connections(self) -> bool:
        try:
            self._connect("postgres").close()
        except psycopg.OperationalError:
            return False
        return True

    def _make_cluster(self) -> None:
        options = ("--auth-local=trust", "--auth-host=scram-sha-256", "--no-sync", "--encoding=UTF8")
        made = self._spawn(
            "initdb",
            "-D",
            str(self._data),
            "-U",
            ADMINISTRATOR,
            "--locale=C",
            *options,
            stdout=subprocess.PIPE,
        )
        output, _ = made.communicate(timeout=_BEGIN_S)
        assert made.returncode == 0, output.decode(errors="replace")
        own = {"port": str(self.port), "unix_socket_directories": str(self.folder), **_SETTINGS}
        with (self._data / "postgresql.conf").open("a") as configuration:
            configuration.writelines(f"{name} = '{value}'\n" for name, value in own.items())

    def _spawn(self, program: str, *words: str, stdout: int) -> subprocess.Popen[bytes]:
        user = None if self._user is None else pwd.getpwnam(self._user)
        with self._log_path.open("ab") as log:
            return subprocess.Popen(
                [self.program(program), *words],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=subprocess.STDOUT if stdout == subprocess.PIPE else log,
                start_new_session=True,
                cwd=self.folder,
                user=None if user is None else user.pw_uid,
                group=None if user is None else user.pw_gid,
                extra_groups=None if user is None else [],
            )

    @property
    def _log_path(self) -> Path:
        return self.folder / "log"

    def _log(self) -> str:
        return self._log_path.read_text(errors="replace")[-4000:]


def _unprivileged_user() -> str | None:
    """Return the user that runs the server if we are root, whom PostgreSQL refuses; None: we do."""
    if os.geteuid() != 0:
        return None
    known = {entry.pw_name for entry in pwd.getpwall()}
    return next(name for name in _UNPRIVILEGED if name in known)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
