"""The daemon's life after it has taken the lock: bind, serve, keep house, and remove its files."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import resource
import signal
import sys
import time
from typing import TYPE_CHECKING

from pygraphd.daemon import connections
from pygraphd.daemon.binding import WATCH_S, Binding
from pygraphd.daemon.cache import Cache
from pygraphd.daemon.evicting import Limits
from pygraphd.daemon.leases import Leases
from pygraphd.daemon.lock import Activity
from pygraphd.daemon.server import Server
from pygraphd.daemon.store import Store, StoreError
from pygraphd.errors import CommandError
from pygraphd.schema.policy import POLICY_VERSION
from pygraphd.schema.version import VERSION

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from pygraphd.config import Config
    from pygraphd.daemon.lock import DaemonLock
    from pygraphd.daemon.log_file import Log
    from pygraphd.schema.locations import Locations

_log = logging.getLogger(__name__)

_END_S = 10
"""How long an ending daemon may take."""
_SWITCH_S = 0.0002
"""How long one thread of the daemon may keep the interpreter from another: a lookup asks for it some thirty times."""
_UNUSED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""By default they would end the daemon with its socket left behind."""
_M_ARENA_MAX = -8
"""The parameter of glibc's `mallopt`."""
_FILES = 4096
_OTHER_FILES = 64
"""Descriptors kept for the database, the log and the spool."""
_REDERIVING_S = 1.0
"""How long a starting daemon may decide anew before it answers: some ten thousand entries."""


class Settings:
    """The settings in force, and how to read them anew."""

    def __init__(self, config: Config, load: Callable[[], Config], log: Log) -> None:
        self.config = config
        self.log = log
        self._load = load

    def reload(self) -> None:
        """Open the log anew, and read the settings; settings that are not valid leave those before in force."""
        self.log.reopen()
        try:
            self.config = self._load()
        except CommandError as error:
            _log.error("settings stay as they were: %s", error)
            return
        self.log.set_level(self.config.log.value)
        _log.info("settings read anew")


def serve(
    held: DaemonLock, locations: Locations, settings: Settings, inherited: socket.socket | None = None
) -> None:
    """Serve until told to stop, or unused for long; `held` is the lock. Raises CommandError.

    `inherited` is a listening socket at our path that systemd has bound.
    """
    config = settings.config
    sys.setswitchinterval(_SWITCH_S)
    _use_one_arena()
    with Store(locations.database) as store:
        # All this comes before the socket: until there is one, programs find nobody and use the spool, and
        # wait for no check of a large database.
        _rederive_outdated(store)
        with Binding(locations, inherited) as binding:
            cache = Cache(
                locations,
                store,
                Leases(config.lease.value),
                Limits(config.max_size.value, config.max_unused.value),
            )
            asyncio.run(_serve_until_told(held, binding, cache, locations, settings))
    _log.info("stopped")


def _use_one_arena() -> None:
    """Have all threads take memory from one arena of glibc; with one each, what a thread has freed is of no use to the others."""
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def limits_of_process() -> connections.Limits:
    """Raise the soft limit of open files as far as needed and allowed; return limits of connections that fit into it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    default = connections.Limits()
    if soft == resource.RLIM_INFINITY:
        return default
    kept = _OTHER_FILES + connections.MOST_BEYOND
    return connections.Limits(connections=max(min(default.connections, (soft - kept) // 2), 1))


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


async def _serve_until_told(
    held: DaemonLock, binding: Binding, cache: Cache, locations: Locations, settings: Settings
) -> None:
    stop, reloaded = asyncio.Event(), asyncio.Event()
    _handle_signals(stop, reloaded, settings)
    server = Server(cache, settings.config, limits_of_process())
    server.log_problems = settings.log.problems
    await cache.use_team(settings.config.team_url.value)  # or the first records would not be queued
    listener = server.listener()
    await listener.listen(binding.socket)
    held.say(Activity.SERVING)
    _log.info("pygraphd %s listens on %s, database %s", VERSION, locations.socket, locations.database)
    # All that is there now stays. A collection that looks through it holds up lookups for 50 ms.
    gc.collect()
    gc.freeze()
    chores = [
        asyncio.create_task(_keep_house(cache, server, reloaded)),
        asyncio.create_task(_stop_when_idle(server, stop, reloaded)),
        asyncio.create_task(_follow_settings(settings, cache, server, reloaded)),
        asyncio.create_task(_ship(settings, cache, reloaded)),
        asyncio.create_task(binding.watch(listener.listen, stop)),
        asyncio.create_task(_watch_log(settings.log)),
    ]
    await stop.wait()
    # The kernel ends us if all that follows takes longer, whatever it hangs in.
    signal.alarm(_END_S)
    held.say(Activity.ENDING)
    cache.end_long_work()
    for chore in chores:
        chore.cancel()
    await asyncio.gather(*chores, return_exceptions=True)
    await server.metrics_port.close()
    await listener.close()
    await cache.close()


def _handle_signals(stop: asyncio.Event, reloaded: asyncio.Event, settings: Settings) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        loop.add_signal_handler(number, stop.set)
    for number in _UNUSED_SIGNALS:
        loop.add_signal_handler(number, _log.info, "%s means nothing here", number.name)

    def reload() -> None:
        settings.reload()
        # Wakes all that wait for it now.
        reloaded.set()
        reloaded.clear()

    # A terminal that is closed sends it, too, and ends what runs in it.
    loop.add_signal_handler(signal.SIGHUP, stop.set if settings.log.is_terminal else reload)


async def _follow_settings(settings: Settings, cache: Cache, server: Server, reloaded: asyncio.Event) -> None:
    """Hand settings on, now and whenever they were read anew."""
    while True:
        config = settings.config
        server.config = config
        cache.eviction.limits = Limits(config.max_size.value, config.max_unused.value)
        cache.set_lease(config.lease.value)
        await cache.use_team(config.team_url.value)
        await server.metrics_port.listen(config.metrics_port.value)
        if (problem := server.metrics_port.problem) is not None:
            _log.error("%s", problem)
        await reloaded.wait()


async def _ship(settings: Settings, cache: Cache, reloaded: asyncio.Event) -> None:
    """Have the shipped decisions read, now and whenever the settings were read anew."""
    while True:
        await cache.ship(settings.config.shipped.value)
        await reloaded.wait()


async def _watch_log(log: Log) -> None:
    """Begin the log anew where it was removed, though there is nothing to be logged: `pygraphd logs` looks for it."""
    while True:
        log.problems()
        await asyncio.sleep(WATCH_S)


async def _keep_house(cache: Cache, server: Server, reloaded: asyncio.Event) -> None:
    while True:
        try:
            await cache.housekeep()
        except Exception:  # noqa: BLE001 - the next round may fare better, and requests are served meanwhile
            _log.exception("housekeeping")
        await _pause(server.config.housekeeping.value, reloaded)


async def _stop_when_idle(server: Server, stop: asyncio.Event, reloaded: asyncio.Event) -> None:
    while True:
        idle_exit_s = server.config.idle_exit.value
        remaining = server.last_used + idle_exit_s - time.monotonic()
        if idle_exit_s and remaining <= 0:
            _log.info("idle for %g s", idle_exit_s)
            stop.set()
            return
        await _pause(remaining if idle_exit_s else None, reloaded)


async def _pause(seconds: float | None, reloaded: asyncio.Event) -> None:
    """Wait for some time (None: without end), or until the settings were read anew."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await reloaded.wait()
