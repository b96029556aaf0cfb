"""The connection to a team's PostgreSQL database, with a limit on each call, and its errors sorted by their consequence.

psycopg waits for an answer without end, and a server's own limits do not cover the network. So a timer shuts the socket down.
"""

from __future__ import annotations

import contextlib
import enum
import os
import socket
import threading
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.pool import NullPool

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

    from pygraphd.team_url import TeamUrl

CONNECT_S = 5
"""How long one attempt to connect may take; a name with several addresses has one attempt for each."""
LIMIT_S = 10.0
"""How long one transaction may take, from its first statement to the answer to its last."""
_MAX_ERROR = 300
_OPTIONS: dict[str, str | int] = {
    "application_name": "pygraphd",
    "client_encoding": "utf8",
    "connect_timeout": CONNECT_S,
    # The kernel notices a dead peer in about a minute, where it would take hours by default (tcp(7)).
    "keepalives": 1,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": int(LIMIT_S * 1000),
}
"""Parameters of libpq that the URL may set otherwise."""


class Fault(enum.Enum):
    """What follows from an error."""

    UNREACHABLE = enum.auto()
    """The server cannot be reached, or has hung up: try again later."""
    SLOW = enum.auto()
    """It did not answer in time: try again later."""
    RIGHTS = enum.auto()
    """The role may not do this, or no role may, as on a standby."""
    SCHEMA = enum.auto()
    """A table, or a column of one, is not there."""
    VERSION = enum.auto()
    """The tables are of another version."""
    DATA = enum.auto()
    """It refuses one of the rows."""
    DRIVER = enum.auto()
    """psycopg is not installed."""


# PostgreSQL's names of these: insufficient_privilege, read_only_sql_transaction, undefined_table,
# undefined_column, invalid_schema_name, query_canceled, lock_not_available.
_BY_STATE = {
    "42501": Fault.RIGHTS,
    "25006": Fault.RIGHTS,
    "42P01": Fault.SCHEMA,
    "42703": Fault.SCHEMA,
    "3F000": Fault.SCHEMA,
    "57014": Fault.SLOW,
    "55P03": Fault.SLOW,
}
# Data exceptions, and violations of constraints.
_BY_CLASS = {"22": Fault.DATA, "23": Fault.DATA}
"""Faults by SQLSTATE, and by its first two characters."""


class TeamError(Exception):
    """The database could not be used; the text is one line without a password."""

    def __init__(self, fault: Fault, text: str) -> None:
        super().__init__(text)
        self.fault = fault


class Database:
    """One connection, opened when it is needed. For one thread; `hang_up` may be called by others."""

    def __init__(self, url: TeamUrl, limit_s: float = LIMIT_S) -> None:
        """Connect to nothing yet. Raises TeamError without psycopg."""
        self._url = url
        self._limit_s = limit_s
        self._connection: sa.Connection | None = None
        self._socket: socket.socket | None = None
        self._is_late = False
        self._engine = self._make_engine()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; the next transaction opens another."""
        connection, self._connection = self._connection, None
        ours, self._socket = self._socket, None
        with contextlib.suppress(sa.exc.SQLAlchemyError, OSError):
            if connection is not None:
                connection.close()
        if ours is not None:
            ours.close()

    @property
    def is_open(self) -> bool:
        """Whether there is a connection, as far as is known."""
        return self._connection is not None

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sa.Connection]:
        """Yield the connection in one transaction; raises TeamError, and then has closed the connection."""
        self._is_late = False
        timer = threading.Timer(self._limit_s + (0 if self.is_open else CONNECT_S), self._cut_off)
        # A process that ends would wait for any other thread.
        timer.daemon = True
        timer.start()
        try:
            connection = self._connected()
            with connection.begin():
                # Beside our timer: else statements that we gave up would wait on at the server, and pile up.
                connection.execute(_LIMITS, {"limit": str(int(self._limit_s * 1000))})
                yield connection
        except sa.exc.SQLAlchemyError as error:
            self.close()
            raise self._translated(error) from error
        except BaseException:
            self.close()
            raise
        finally:
            timer.cancel()

    def hang_up(self) -> None:
        """Have the call that runs fail, if there is one; psycopg notices at once."""
        ours = self._socket
        with contextlib.suppress(OSError):
            if ours is not None:
                ours.shutdown(socket.SHUT_RDWR)

    def _cut_off(self) -> None:
        self._is_late = True
        self.hang_up()

    def _connected(self) -> sa.Connection:
        if self._connection is None:
            self._connection = self._engine.connect()
        return self._connection

    def _make_engine(self) -> sa.Engine:
        try:
            url = sa.make_url(self._url.secret).set(drivername="postgresql+psycopg")
            # NullPool: a pool would keep the connection that `close` is to end. About hstore, which no table
            # has, SQLAlchemy would ask the server. With parameters, an error's text would hold whole rows.
            return sa.create_engine(
                url, creator=self._connect, poolclass=NullPool, use_native_hstore=False, hide_parameters=True
            )
        except ImportError as error:
            raise TeamError(
                Fault.DRIVER, "psycopg is not installed; run: pip install 'pygraphd[team]'"
            ) from error
        except (sa.exc.SQLAlchemyError, ValueError) as error:
            raise TeamError(Fault.UNREACHABLE, self._line(error)) from error

    def _connect(self) -> Any:
        import psycopg

        words, given = self._engine.dialect.create_connect_args(self._engine.url)
        # Prepared statements do not survive a pooler that gives each transaction another connection.
        connection = psycopg.connect(*words, prepare_threshold=None, **{**_OPTIONS, **given})
        # A descriptor of our own: that of the connection may be another file's by the time that it is shut down.
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        return connection

    def _translated(self, error: sa.exc.SQLAlchemyError) -> TeamError:
        # First, as a socket that was shut down looks like a server that has hung up.
        if self._is_late:
            return TeamError(Fault.SLOW, f"no answer within {self._limit_s:g} s")
        cause = error.orig if isinstance(error, sa.exc.DBAPIError) else error
        state = str(getattr(cause, "sqlstate", None) or "")
        fault = _BY_STATE.get(state) or _BY_CLASS.get(state[:2]) or Fault.UNREACHABLE
        return TeamError(fault, self._line(cause))

    def _line(self, error: object) -> str:
        """Return the first line of an error's text, without passwords."""
        text = self._url.hidden_in(str(error).strip()) or type(error).__name__
        line = text.splitlines()[0]
        return "".join(each if each.isprintable() else " " for each in line)[:_MAX_ERROR]


# Of this transaction only: behind a pooler, the next one on this connection may be somebody else's.
_LIMITS = sa.text(
    "SELECT set_config('statement_timeout', :limit, true), set_config('lock_timeout', :limit, true),"
    " set_config('idle_in_transaction_session_timeout', :limit, true)"
)
