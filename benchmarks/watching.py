"""What a running daemon takes of the machine: memory, descriptors and processor time."""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from benchmarks.errors import BenchmarkError
from pygraphd.daemon import control

if TYPE_CHECKING:
    from pygraphd.schema.locations import Locations

_TICKS = os.sysconf("SC_CLK_TCK")
_MACHINE = Path("/proc/stat")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Watched:
    """One process, by pid. Every figure raises BenchmarkError once it has ended."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._folder = Path(f"/proc/{pid}")

    @classmethod
    def daemon(cls, locations: Locations) -> Self:
        """Return the process that listens on a daemon's socket; raises BenchmarkError if there is none."""
        peer = control.listener(locations.socket)
        if peer is None:
            raise BenchmarkError(f"nobody listens on {locations.socket}")
        return cls(peer.pid)

    @property
    def cpu_s(self) -> float:
        """Processor time of all its threads so far, in seconds; the kernel counts hundredths."""
        return _cpu_s(self._read("stat"))

    @property
    def main_cpu_s(self) -> float:
        """Processor time of its main thread, which of a daemon answers lookups and does nothing for a prune."""
        return _cpu_s(self._read(f"task/{self.pid}/stat"))

    @property
    def main_awaited_s(self) -> float:
        """Time for which its main thread was ready to run so far, and waited for a core, in seconds."""
        return int(self._read(f"task/{self.pid}/schedstat").split()[1]) / 1e9

    @property
    def resident_bytes(self) -> int:
        """Resident memory, files mapped into it included."""
        return int(self._read("statm").split()[1]) * _PAGE

    @property
    def descriptors(self) -> int:
        """The number of open descriptors."""
        try:
            return len(os.listdir(self._folder / "fd"))  # noqa: PTH208 - names are all that is needed
        except OSError as error:
            raise BenchmarkError(f"process {self.pid} has ended") from error

    def _read(self, name: str) -> str:
        try:
            return (self._folder / name).read_text()
        except OSError as error:
            raise BenchmarkError(f"process {self.pid} has ended") from error


def _cpu_s(stat: str) -> float:
    # Behind the name of the program, which may hold spaces.
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


@dataclass(frozen=True, slots=True)
class Cores:
    """How many cores the daemon, our ended child processes, and other programs took for some time.

    `awaited`: the share of that time in which the daemon's main thread was ready to run, and waited for a core.
    """

    daemon: float
    clients: float
    others: float
    awaited: float


class CoresWatch:
    """Counts the processor time of all programs of this machine from now on."""

    def __init__(self, daemon: Watched) -> None:
        self._daemon = daemon
        self._began, self._times = time.monotonic(), self._now()

    def cores(self) -> Cores:
        """Return the means since the beginning."""
        seconds = time.monotonic() - self._began
        daemon, clients, machine, awaited = (
            (now - before) / seconds for now, before in zip(self._now(), self._times, strict=True)
        )
        # The kernel counts in hundredths of a second, so that the difference of small figures may be
        # negative.
        others = max(machine - daemon - clients, 0.0)
        return Cores(*(round(each, 2) for each in (daemon, clients, others, awaited)))

    def _now(self) -> tuple[float, float, float, float]:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        # The first line sums up all cores. Behind its seventh number are stolen time, in which nothing of
        # this machine ran, and guests' time, which is in `user`, too.
        user, nice, system, _idle, _waiting, *interrupts = map(
            int, _MACHINE.read_text().split("\n", 1)[0].split()[1:8]
        )
        machine_s = (user + nice + system + sum(interrupts)) / _TICKS
        clients_s = children.ru_utime + children.ru_stime
        return self._daemon.cpu_s, clients_s, machine_s, self._daemon.main_awaited_s
