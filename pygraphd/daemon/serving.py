"""The daemon's life once it is the daemon: bind, serve, keep house, and leave nothing behind."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from typing import TYPE_CHECKING

from pygraphd.daemon.binding import Binding
from pygraphd.daemon.cache import Cache
from pygraphd.daemon.connections import limits_of_process
from pygraphd.daemon.evicting import Limits
from pygraphd.daemon.leases import Leases
from pygraphd.daemon.lock import Activity
from pygraphd.daemon.server import Server
from pygraphd.daemon.store import Store, StoreError
from pygraphd.schema.policy import POLICY_VERSION
from pygraphd.schema.version import VERSION

if TYPE_CHECKING:
    from pygraphd.config import Config
    from pygraphd.daemon.lock import DaemonLock
    from pygraphd.schema.locations import Locations

_log = logging.getLogger(__name__)

_END_S = 10
"""How long an ending daemon may take."""
_REDERIVING_S = 1.0
"""How long a starting daemon may decide anew before it answers: some ten thousand entries."""


def serve(held: DaemonLock, locations: Locations, config: Config) -> None:
    """Serve until told to stop, or unused for long; `held` is the lock. Raises CommandError."""
    with Store(locations.database) as store:
        _rederive_outdated(store)
        with Binding(locations) as binding:
            cache = Cache(
                locations,
                store,
                Leases(config.lease.value),
                Limits(config.max_size.value, config.max_unused.value),
            )
            asyncio.run(_serve_until_told(held, binding, cache, locations, config))
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


async def _serve_until_told(
    held: DaemonLock, binding: Binding, cache: Cache, locations: Locations, config: Config
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = Server(cache, config, limits_of_process())
    listener = server.listener()
    await listener.listen(binding.socket)
    held.say(Activity.SERVING)
    _log.info("pygraphd %s listens on %s, database %s", VERSION, locations.socket, locations.database)
    chores = [
        asyncio.create_task(_keep_house(cache, config.housekeeping.value)),
        asyncio.create_task(_stop_when_idle(server, config.idle_exit.value, stop)),
        asyncio.create_task(binding.watch(listener.listen, stop)),
    ]
    await stop.wait()
    # The kernel ends us if all that follows takes longer, whatever it hangs in.
    signal.alarm(_END_S)
    held.say(Activity.ENDING)
    cache.end_long_work()
    for chore in chores:
        chore.cancel()
    await asyncio.gather(*chores, return_exceptions=True)
    await listener.close()
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
