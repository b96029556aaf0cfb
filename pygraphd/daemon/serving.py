"""The daemon's life once it is the daemon: bind, serve, keep house, and leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import stat
import time
from typing import TYPE_CHECKING

from pygraphd.daemon.cache import Cache
from pygraphd.daemon.database_files import identity
from pygraphd.daemon.leases import Leases
from pygraphd.daemon.server import Server
from pygraphd.daemon.store import Store, StoreError
from pygraphd.errors import CommandError
from pygraphd.schema.policy import POLICY_VERSION
from pygraphd.schema.version import VERSION

if TYPE_CHECKING:
    from pygraphd.config import Config
    from pygraphd.schema.locations import Locations

_log = logging.getLogger(__name__)

_END_S = 10
"""How long an ending daemon may take."""
_REDERIVING_S = 1.0
"""How long a starting daemon may decide anew before it answers: some ten thousand entries."""


def serve(locations: Locations, config: Config) -> None:
    """Serve until told to stop, or unused for long; the caller holds the lock. Raises CommandError."""
    with Store(locations.database) as store:
        _rederive_outdated(store)
        bound = _bind(locations)
        ours = identity(locations.socket)
        try:
            cache = Cache(locations, store, Leases(config.lease.value))
            asyncio.run(_serve_until_told(bound, cache, locations, config))
        finally:
            bound.close()
            if identity(locations.socket) == ours:
                locations.socket.unlink(missing_ok=True)
    _log.info("stopped")


def _rederive_outdated(store: Store) -> None:
    """Derive anew the decisions of older policies, which clients of this version would measure again."""
    try:
        done, left = store.rederive_outdated(_REDERIVING_S)
    except StoreError as error:
        _log.warning("nothing is decided anew: %s", error)
        return
    if done:
        _log.info("policy %d: %d entries looked at anew", POLICY_VERSION, done)
    if left:
        _log.warning("%d entries of an older policy are left; run: pygraphd cache rederive", left)


def _bind(locations: Locations) -> socket.socket:
    """Return a socket bound to our path, mode 0600. A socket that a killed daemon left there is removed. Raises CommandError."""
    path = locations.socket
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise CommandError(f"{path}: is in the way and no socket; move it away")
        path.unlink()
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    umask = os.umask(0o177)
    try:
        bound.bind(str(path))
    except OSError as error:
        bound.close()
        raise CommandError(f"{path}: cannot be bound: {error.strerror or error}") from error
    finally:
        os.umask(umask)
    return bound


async def _serve_until_told(bound: socket.socket, cache: Cache, locations: Locations, config: Config) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = Server(cache, config)
    runner = await server.listen(bound)
    _log.info("pygraphd %s listens on %s, database %s", VERSION, locations.socket, locations.database)
    chores = [
        asyncio.create_task(_keep_house(cache, config.housekeeping.value)),
        asyncio.create_task(_stop_when_idle(server, config.idle_exit.value, stop)),
    ]
    await stop.wait()
    # The kernel ends us if all that follows takes longer, whatever it hangs in.
    signal.alarm(_END_S)
    for chore in chores:
        chore.cancel()
    await asyncio.gather(*chores, return_exceptions=True)
    await runner.cleanup()
    await cache.close()


async def _keep_house(cache: Cache, interval_s: float) -> None:
    while True:
        try:
            await cache.housekeep()
        except Exception:  # noqa: BLE001 - the next round may fare better, and requests are served meanwhile
            _log.exception("housekeeping")
        await asyncio.sleep(interval_s)


async def _stop_when_idle(server: Server, idle_exit_s: float, stop: asyncio.Event) -> None:
    while idle_exit_s:
        remaining = server.last_used + idle_exit_s - time.monotonic()
        if remaining <= 0:
            _log.info("idle for %g s", idle_exit_s)
            stop.set()
            return
        await asyncio.sleep(remaining)
