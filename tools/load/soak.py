"""`python -m tools.load soak`: a daemon under the mixed load of many clients that come and go, held to bounds of what it takes."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.daemon import Daemon
from benchmarks.environment import describe_host
from benchmarks.figures import Bound, percentile
from benchmarks.large_cache import OLD, made_home
from benchmarks.records import SCHEMA, check_writable, write_json
from benchmarks.watching import Watched
from pygraphd.daemon import control
from pygraphd.daemon.pruning import PruneRequest
from pygraphd.errors import CommandError
from tools.load.soak_client import LOOKUP, Client, Life

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.process import BaseProcess

    from pygraphd.schema.locations import Locations

PRUNE = "prune"
_MIB = 2**20
_LOOK_S = 0.05
_END_S = 30.0
_LATE = "no answer in time"
_CONFIG = 'max_size = "64MiB"\n'
"""Less than an hour's records take: the limit of size is kept meanwhile, too."""


@dataclass(frozen=True, slots=True)
class Plan:
    """`clients` send `rate` requests a second, all together, for `seconds` to a daemon that begins with `entries` entries.

    Figures are taken each `sample_s` seconds; each `prune_s` seconds one environment's entries are pruned.
    """

    clients: int
    rate: int
    seconds: float
    entries: int = 20_000
    sample_s: float = 10.0
    prune_s: float = 60.0
    longest_life_s: float = 60.0
    """Of a client; the shortest life is a third of it."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What the daemon took at one moment, and the latency of the lookups since the moment before (None: there were none)."""

    resident_bytes: int
    descriptors: int
    wal_bytes: int
    log_bytes: int
    database_bytes: int
    spool_files: int
    cpu_s: float
    p50_us: float | None
    p99_us: float | None


class Soak:
    """The load on one daemon, and what was seen of it."""

    def __init__(self, plan: Plan, locations: Locations) -> None:
        self.plan = plan
        self.samples: list[Sample] = []
        self.answered: Counter[str] = Counter()
        self.unanswered: Counter[str] = Counter()
        self.started = self.killed = 0
        self._locations = locations
        self._daemon = Watched.daemon(locations)
        # Clients inherit the pipe's descriptor, which a process that is spawned would not have.
        self._context = multiprocessing.get_context("fork")
        self._clients: list[BaseProcess] = []
        self._reading, self._report = os.pipe2(os.O_NONBLOCK)
        # The clients' end alone may block: where the pipe is full they wait, rather than lose what they have
        # seen.
        os.set_blocking(self._report, True)
        self._rest = b""
        self._recent_us: list[float] = []

    def run(self) -> None:
        """Apply the load, sample, and end all clients. Raises BenchmarkError if the daemon ends."""
        end = time.monotonic() + self.plan.seconds
        # In a process of its own, since samples are taken while a prune lasts.
        pruner = self._context.Process(target=self._prune, args=(end,))
        pruner.start()
        try:
            next_sample = time.monotonic()
            while (now := time.monotonic()) < end:
                self._keep_clients(end)
                self._read()
                if now >= next_sample:
                    next_sample += self.plan.sample_s
                    self._sample()
                time.sleep(_LOOK_S)
            for process in [*self._clients, pruner]:
                process.join(_END_S)
            self._read()
            self._sample()
        finally:
            for process in [*self._clients, pruner]:
                process.kill()
                process.join()
            os.close(self._reading)
            os.close(self._report)

    def _keep_clients(self, end: float) -> None:
        ended = [each for each in self._clients if each.exitcode is not None]
        # A negative exit code is the number of the signal that ended the process.
        self.killed += sum((each.exitcode or 0) < 0 for each in ended)
        self._clients = [each for each in self._clients if each.exitcode is None]
        while len(self._clients) < self.plan.clients:
            process = self._context.Process(target=self._live, args=(self._next_life(end),))
            process.start()
            self._clients.append(process)

    def _next_life(self, end: float) -> Life:
        number, now = self.started, time.monotonic()
        self.started += 1
        interval_s = self.plan.clients / self.plan.rate
        # Of different lengths, so that clients do not come and go together.
        spread = number * 0.618 % 1.0
        life_s = self.plan.longest_life_s * (1 + 2 * spread) / 3
        return Life(number, now + spread * interval_s, min(now + life_s, end), interval_s, self.plan.entries)

    def _live(self, life: Life) -> None:
        Client(self._locations, life, self._report).run()

    def _prune(self, end: float) -> None:
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(self.plan.prune_s, left))
            started = time.perf_counter()
            try:
                control.prune(self._locations.socket, PruneRequest(gpu=OLD.gpu))
            except CommandError as error:
                line = f"{PRUNE} ! {error}"
            else:
                line = f"{PRUNE} {(time.perf_counter() - started) * 1e6:.1f}"
            os.write(self._report, f"{line[:200]}\n".encode())

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(self._reading, 1 << 16):
                # A piece may end within a line.
                *lines, self._rest = (self._rest + piece).split(b"\n")
                for line in lines:
                    self._take(line.decode())

    def _take(self, line: str) -> None:
        kind, _, rest = line.partition(" ")
        if rest.startswith("! "):
            self.unanswered[f"{kind}: {rest[2:]}"] += 1
            return
        self.answered[kind] += 1
        if kind == LOOKUP:
            self._recent_us.append(float(rest))

    def _sample(self) -> None:
        at, recent = self._locations, self._recent_us
        database, log = at.database, at.log
        self.samples.append(
            Sample(
                resident_bytes=self._daemon.resident_bytes,
                descriptors=self._daemon.descriptors,
                wal_bytes=_bytes_of(database.with_name(f"{database.name}-wal")),
                log_bytes=_bytes_of(log, log.with_name(f"{log.name}.1")),
                database_bytes=_bytes_of(database),
                spool_files=len(list(at.spool.glob("*"))),
                cpu_s=self._daemon.cpu_s,
                p50_us=round(percentile(recent, 50), 1) if recent else None,
                p99_us=round(percentile(recent, 99), 1) if recent else None,
            )
        )
        recent.clear()


def measure_soak(plan: Plan, out: Path) -> tuple[list[str], bool]:
    """Soak a daemon, and write all to `out`; return lines for people, and whether every bound was kept."""
    check_writable(out)
    with tempfile.TemporaryDirectory(prefix="pygraph-bench-") as folder:
        locations = made_home(Path(folder), plan.entries, 0, _CONFIG)
        with Daemon(locations.cache):
            soak = Soak(plan, locations)
            print(f"{plan.clients} clients for {plan.seconds:g} s", file=sys.stderr, flush=True)
            soak.run()
            failed = int(str(control.stats(locations.socket)["failed"]))
        faults = sum(_faults(file) for file in locations.log.parent.glob(f"{locations.log.name}*"))
    bounds = bounds_of(plan, soak.samples, soak.unanswered, failed + faults)
    record = _record(soak, bounds)
    write_json(out, {"schema": SCHEMA, "environment": describe_host(), "records": [record]})
    lines = [f"{name:15} {value}" for name, value in record.items() if name != "bounds"]
    return [*lines, *map(str, bounds)], all(each.is_kept for each in bounds)


def bounds_of(plan: Plan, samples: Sequence[Sample], unanswered: Counter[str], faults: int) -> list[Bound]:
    """Return the bounds with what was seen; `faults` are errors that the daemon itself has counted or logged.

    How long answers take is no bound: beside other work, that says more of the machine.
    """
    late = sum(count for reason, count in unanswered.items() if reason.endswith(_LATE))
    # Medians of quarters, and not two samples: resident memory goes up and down with the load.
    quarter = max(len(samples) // 4, 1)
    second, last = (
        statistics.median(each.resident_bytes for each in some)
        for some in (samples[quarter : 2 * quarter] or samples, samples[-quarter:])
    )
    return [
        Bound("resident memory, MiB", max(each.resident_bytes for each in samples) / _MIB, 192),
        # A database's cache fills, and pools of memory settle, in the first quarter.
        Bound("growth of its median from the second quarter to the last, MiB", (last - second) / _MIB, 8),
        # A client has one connection at a time; the rest is for files and sockets of the daemon's own.
        Bound("descriptors", max(each.descriptors for each in samples), plan.clients + 64),
        Bound("write-ahead log, MiB", max(each.wal_bytes for each in samples) / _MIB, 16),
        # Two files: the daemon renames its log at 1 MiB and keeps one older.
        Bound("log files, MiB", max(each.log_bytes for each in samples) / _MIB, 2.1),
        # The daemon packs the file at once when it is 1.25 times the limit of size: 80 MiB here.
        Bound("database, MiB", max(each.database_bytes for each in samples) / _MIB, 96),
        Bound("files left in the spool", samples[-1].spool_files, plan.clients),
        Bound("requests not answered for another reason", unanswered.total() - late, 0),
        Bound("errors in the daemon", faults, 0),
    ]


def _record(soak: Soak, bounds: Sequence[Bound]) -> dict[str, Any]:
    plan, samples = soak.plan, soak.samples
    figures = {}
    for name in (each.name for each in dataclasses.fields(Sample) if each.name != "cpu_s"):
        values = [value for each in samples if (value := getattr(each, name)) is not None]
        if values:
            median = statistics.median(values)
            figures[name] = {"first": values[0], "median": median, "last": values[-1], "max": max(values)}
    requests = soak.answered.total() + soak.unanswered.total()
    cpu_s = samples[-1].cpu_s - samples[0].cpu_s
    return {
        "clients": plan.clients,
        "seconds": plan.seconds,
        "asked_per_s": plan.rate,
        "samples": len(samples),
        "clients_started": soak.started,
        "clients_killed": soak.killed,
        "answered": dict(soak.answered),
        "unanswered": dict(soak.unanswered),
        "cpu_ms_per_request": round(cpu_s * 1e3 / requests, 3) if requests else None,
        "figures": figures,
        "resident_mib": [round(each.resident_bytes / _MIB, 1) for each in samples],
        "bounds": [each.as_record() for each in bounds],
    }


def _bytes_of(*files: Path) -> int:
    """Return the length of some files together; one that is not there has none."""
    total = 0
    for file in files:
        with contextlib.suppress(OSError):
            total += file.stat().st_size
    return total


def _faults(log: Path) -> int:
    lines = log.read_text(errors="replace").splitlines()
    return sum(" ERROR " in line or line.startswith("Traceback") for line in lines)
