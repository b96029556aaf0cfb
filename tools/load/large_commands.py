"""`python -m tools.load large`: what commands take on a large cache, and what a prune has a record and a lookup wait for."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.daemon import Daemon, without_product
from benchmarks.environment import describe_host
from benchmarks.errors import BenchmarkError
from benchmarks.figures import percentile
from benchmarks.large_cache import KNOWN, OLD, OLD_SHARE, digest, made_home
from benchmarks.records import SCHEMA, check_writable, write_json
from pygraphd.client.decisions.transport import Transport, TransportError
from pygraphd.schema.messages import LOOKUP_PATH, RECORD_PATH, LookupRequest, Origin, RecordRequest, encode
from tools.load.soak_client import record_of

if TYPE_CHECKING:
    from collections.abc import Sequence

_INTERVAL_S = 0.02
"""From one request beside the prune to the next."""
_LISTINGS = (
    "inspect --most 50",
    "inspect",
    "inspect --json",
    "inspect --graph GRAPH",
    "show GRAPH",
    "export --graph GRAPH FILE",
    "export FILE",
)


@dataclass(frozen=True, slots=True)
class _Ended:
    """A command that has ended: its time, its largest memory, and the bytes that it has printed."""

    seconds: float
    resident_mib: float
    printed: int


def measure_commands(entries: int, out: Path) -> list[str]:
    """Run listings and a prune on a cache with so many entries; return lines for people, write all to `out`."""
    check_writable(out)
    with tempfile.TemporaryDirectory(prefix="pygraph-bench-") as folder:
        locations = made_home(Path(folder), entries, entries // OLD_SHARE)
        home = locations.cache
        with Daemon(home):
            records = [_listing(words, home, entries) for words in _LISTINGS]
            records.append(_prune(home, locations.socket, entries))
    write_json(out, {"schema": SCHEMA, "environment": describe_host(), "records": records})
    return ["; ".join(f"{name} {value}" for name, value in record.items()) for record in records]


def _listing(words: str, home: Path, entries: int) -> dict[str, Any]:
    file = home / "exported.jsonl"
    given = words.replace("GRAPH", digest(entries // 2)).replace("FILE", str(file)).split()
    ended = _Running(given, home).wait()
    written = None
    if file.exists():
        with file.open("rb") as lines:
            written = sum(1 for _ in lines) - 1  # the first one is the header
        file.unlink()
    facts = {"seconds": ended.seconds, "resident_mib": ended.resident_mib, "printed_bytes": ended.printed}
    return {"command": f"cache {words}", "entries": entries, **facts, "exported_entries": written}


def _prune(home: Path, socket: Path, entries: int) -> dict[str, Any]:
    """Have a prune delete a fifth, and meanwhile send a record and a lookup of a missing graph in turn."""
    transport, numbers = Transport(socket), random.Random(0)
    times: dict[str, list[float]] = {"record": [], "missing lookup": []}
    process = _Running(["prune", "--gpu", OLD.gpu], home)
    # New graphs: to record a known one again takes the daemon less.
    for number in range(entries, 2 * entries):
        if process.poll() is not None:
            break
        new = RecordRequest(KNOWN, Origin("host", "1"), (record_of(digest(number), numbers),))
        # Entries count from 0, so that no negative number is stored.
        missing = LookupRequest(KNOWN.digest(), (digest(-1 - number),))
        for name, target, body in (
            ("record", RECORD_PATH, encode(new)),
            ("missing lookup", LOOKUP_PATH, encode(missing)),
        ):
            times[name].append(_request_ms(transport, target, body))
        time.sleep(_INTERVAL_S)
    ended = process.wait()
    beside = {name: _latencies(each) for name, each in times.items()}
    return {"command": "cache prune --gpu", "entries": entries, "seconds": ended.seconds, "beside": beside}


def _latencies(times_ms: Sequence[float]) -> dict[str, float]:
    if not times_ms:
        raise BenchmarkError("the prune was over before anything was asked: name more --entries")
    figures = {"p50_ms": 50, "p99_ms": 99, "max_ms": 100}
    return {"requests": len(times_ms)} | {
        name: round(percentile(times_ms, each), 2) for name, each in figures.items()
    }


def _request_ms(transport: Transport, target: str, body: bytes) -> float:
    began = time.perf_counter()
    try:
        transport.request("POST", target, body)
    except TransportError as error:
        raise BenchmarkError(f"{target} beside a prune: {error}") from error
    return (time.perf_counter() - began) * 1e3


class _Running:
    """A command under way, whose output goes to a file."""

    def __init__(self, words: Sequence[str], home: Path) -> None:
        # A file and no pipe: nobody reads until the command has ended, and a full pipe would keep it from
        # ending.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `wait`
        # Without the decisions that the package ships, which would be listed beside the entries.
        environ = {**without_product(os.environ), "PYGRAPHD_HOME": str(home), "PYGRAPHD_SHIPPED": "0"}
        self._began = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pygraphd", "cache", *words],
            env=environ,
            cwd=home,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )
        self._ended: tuple[float, int, Any] | None = None

    def poll(self) -> int | None:
        """Return the exit status; None: it still runs."""
        return self._look(os.WNOHANG)

    def wait(self) -> _Ended:
        """Wait for its end; raises BenchmarkError if it fails."""
        status = self._look(0)
        assert self._ended is not None
        seconds, _, usage = self._ended
        with self._output as output:
            printed = output.seek(0, os.SEEK_END)
            output.seek(max(0, printed - 300))
            if status:
                raise BenchmarkError(f"{self._process.args!r}: {output.read().decode(errors='replace')}")
        # Linux gives `ru_maxrss` in KiB.
        return _Ended(round(seconds, 2), round(usage.ru_maxrss / 1024, 1), printed)

    def _look(self, options: int) -> int | None:
        if self._ended is None:
            # `Popen.wait` says nothing of memory, and getrusage only knows the largest of all children.
            pid, status, usage = os.wait4(self._process.pid, options)
            if pid:
                self._ended = time.perf_counter() - self._began, os.waitstatus_to_exitcode(status), usage
                # Else Popen would not know that the process has been waited for, and warn that it still runs.
                self._process.returncode = self._ended[1]
        return None if self._ended is None else self._ended[1]
