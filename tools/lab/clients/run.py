"""A run of `clients` under way: each GPU takes the next client when it is done with one. Its processes compile side by side, and are timed one at a time.

The file is written anew after every process. A later run goes on with what the file lacks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import tempfile
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.environment import TORCH_FIELDS, describe_host
from benchmarks.errors import BenchmarkError
from benchmarks.records import SCHEMA, check_writable, read_result, write_json
from benchmarks.variants import Variant
from tools.lab.clients.catalogue import Client
from tools.lab.clients.process import Job, JobRunner, Settings, Turn, take_turns
from tools.lab.clients.records import ClientRecord, client_records, compared
from tools.lab.gpu_slots import GpuSlot, joined, parts
from tools.lab.processes import as_ended

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


_GRACE_S = 15.0
"""For processes and daemons to end."""
_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
_CONDITIONS = ("NCCL_", "NVSHMEM_", "TORCH_NCCL_", "TORCH_SYMM_MEM_")
"""First letters of the variables that change what is measured on several GPUs."""
_SAME = ("kind", "steps", "tiny", "libraries")
"""Settings that all records of a file have in common."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The request of a run."""

    clients: tuple[Client, ...]
    variants: tuple[Variant, ...]
    repetitions: int
    settings: Settings
    slots: tuple[GpuSlot, ...]
    end_s: float
    out: Path
    libraries: dict[str, str] = field(default_factory=dict)


class ClientsRun:
    """Runs what a plan asks for and its file lacks."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._host = describe_host()
        self._torch: dict[str, str | None] = dict.fromkeys(TORCH_FIELDS)
        self._records: dict[tuple[str, str, int], ClientRecord] = {}
        numbered = list(enumerate(plan.clients))
        # Several threads take from these: a deque's `popleft` needs no lock, as it either removes an item or
        # raises.
        self._waiting = deque(each for each in numbered if each[1].gpus == 1)
        self._waiting_for_several = deque(each for each in numbered if each[1].gpus > 1)
        self._noting = threading.Lock()
        self._stop = threading.Event()
        self._began = time.monotonic()

    def execute(self) -> list[ClientRecord]:
        """Run all that is missing, as far as the time suffices; return all records of the file."""
        check_writable(self.plan.out)
        if self.plan.out.exists():
            self._read()
        timer = threading.Timer(max(0.0, self.left_s - _GRACE_S), self._stop.set)
        timer.daemon = True
        timer.start()
        try:
            with tempfile.TemporaryDirectory(prefix="clients-", ignore_cleanup_errors=True) as folder:
                self._take_slots(JobRunner(Path(folder), self.plan.settings))
        finally:
            timer.cancel()
        self._save()
        return self.records

    @property
    def records(self) -> list[ClientRecord]:
        """The records so far, client by client, compared with each other."""
        clients = {each.name: number for number, each in enumerate(self.plan.clients)}
        variants = {each.name: number for number, each in enumerate(self.plan.variants)}

        def place(record: ClientRecord) -> tuple[int, int, int]:
            return (
                clients.get(record.client, len(clients)),
                variants.get(record.variant, len(variants)),
                record.repetition,
            )

        return compared(sorted(self._records.values(), key=place))

    @property
    def unmeasured(self) -> list[str]:
        """The clients that the next run goes on with."""
        return [
            each.name for number, each in enumerate(self.plan.clients) if any(self._lacking(number, each))
        ]

    @property
    def left_s(self) -> float:
        """Seconds until the run is to have ended."""
        return self._began + self.plan.end_s - time.monotonic()

    # --- measuring ---------------------------------------------------------------------------------

    def _take_slots(self, runner: JobRunner) -> None:
        groups = self._groups()
        with ThreadPoolExecutor(len(groups)) as pool, contextlib.ExitStack() as stack:
            stack.callback(self._stop.set)  # the pool would wait for all of them
            running = [pool.submit(self._take_group, group, runner) for group in groups]
            for done in as_ended(running):
                done.result()
            stack.pop_all()

    def _groups(self) -> list[Sequence[GpuSlot]]:
        """Return slots as they are taken together at first: half of them by clients of several GPUs, or all if there are no others."""
        slots, size = self.plan.slots, max(each.gpus for each in self.plan.clients)
        if size == 1:
            return parts(slots, 1)
        count = len(slots) // size
        alone = len(slots) - size * (max(1, count // 2) if self._waiting else count)
        return [*parts(slots[:alone], 1), *parts(slots[alone:], size)] if alone else parts(slots, size)

    def _take_group(self, group: Sequence[GpuSlot], runner: JobRunner) -> None:
        if len(group) == 1:
            self._take_all(self._waiting, group[0], runner)
            return
        self._take_all(self._waiting_for_several, joined(group), runner)
        with ThreadPoolExecutor(len(group)) as pool:
            for done in [pool.submit(self._take_all, self._waiting, slot, runner) for slot in group]:
                done.result()

    def _take_all(self, waiting: deque[tuple[int, Client]], slot: GpuSlot, runner: JobRunner) -> None:
        slot.enter()
        while not self._stop.is_set():
            try:
                number, client = waiting.popleft()
            except IndexError:
                return
            self._take_client(number, client, slot, runner)

    def _take_client(self, number: int, client: Client, slot: GpuSlot, runner: JobRunner) -> None:
        jobs = list(self._lacking(number, client))
        if client.missing:
            for job in jobs:
                reason = f"{client.missing} is not installed"
                self._note(ClientRecord(client.name, job.variant.name, job.repetition, skipped=reason), {})
            return
        for repetition in range(self.plan.repetitions):
            if side_by_side := [job for job in jobs if job.repetition == repetition]:
                self._take_jobs(side_by_side, slot, runner)

    def _take_jobs(self, jobs: Sequence[Job], slot: GpuSlot, runner: JobRunner) -> None:
        settings = self.plan.settings
        # Each process, and each rank of one, compiles in a pool of processes of its own.
        threads = len(os.sched_getaffinity(0)) // (len(jobs) * jobs[0].client.gpus)
        environ = {_THREADS: os.environ.get(_THREADS) or str(max(1, threads)), **dict(slot.environ)}
        turns = [runner.turn(job) for job in jobs]

        def measure(job: Job, turn: Turn) -> None:
            record, printed = runner.measure(job, turn, environ)
            if not self._stop.is_set():  # it may have been ended with the run
                self._note(record, printed)

        # On Linux, cores are set for one thread, and inherited by what it starts: each thread of the pool has
        # to enter.
        with ThreadPoolExecutor(len(jobs), initializer=slot.enter) as pool:
            running = [pool.submit(measure, *each) for each in zip(jobs, turns, strict=True)]
            try:
                take_turns(turns, self._stop, settings.compile_s, settings.timed_s)
            finally:
                for turn in turns:
                    # Also where an exception ends this: the pool waits for its threads, and these for
                    # processes that wait for a turn.
                    turn.stop.set()
            for done in running:
                done.result()

    def _lacking(self, number: int, client: Client) -> Iterator[Job]:
        """Yield the processes without a record; variants alternate, so that a drift of the machine does not fall on one."""
        variants = self.plan.variants
        for repetition in range(self.plan.repetitions):
            first = (number + repetition) % len(variants)
            for variant in (*variants[first:], *variants[:first]):
                if (client.name, variant.name, repetition) not in self._records:
                    yield Job(client, variant, repetition)

    # --- the file ----------------------------------------------------------------------------------

    def _note(self, record: ClientRecord, printed: dict[str, Any]) -> None:
        # Slots are threads: without the lock, an older state of the records could be written over a newer
        # one.
        with self._noting:
            self._records[record.key] = record
            self._torch.update({name: printed[name] for name in TORCH_FIELDS if printed.get(name)})
            self._save()
            figure = f"{record.step_ms:.3f} ms" if record.step_ms is not None else "no result"
            note = record.raised or record.skipped
            print(f"{record.client} {record.variant}: {figure} {note}".rstrip(), file=sys.stderr, flush=True)

    def _save(self) -> None:
        content = {
            "schema": SCHEMA,
            "environment": {**self._torch, **self._host},
            "settings": self._settings(),
            "records": [dataclasses.asdict(each) for each in self.records],
        }
        write_json(self.plan.out, content)

    def _settings(self) -> dict[str, Any]:
        settings = self.plan.settings
        return {
            "kind": "clients",
            "steps": settings.steps,
            "tiny": settings.tiny,
            "repetitions": self.plan.repetitions,
            "gpus": len(self.plan.slots),
            "libraries": self.plan.libraries,
            "variables": {
                name: value for name, value in sorted(os.environ.items()) if name.startswith(_CONDITIONS)
            },
        }

    def _read(self) -> None:
        content = read_result(self.plan.out)
        settings, records = self._settings(), client_records(content)
        # Variants of one file are compared with each other, which only says something if all else is the
        # same.
        differing = [name for name in _SAME if content["settings"].get(name) != settings[name]]
        differing += ["commit"] if content["environment"].get("commit") != self._host["commit"] else []
        if records is None or differing:
            raise BenchmarkError(
                f"{self.plan.out} was measured with another {', '.join(differing)}: name another file with --out"
            )
        self._records = {each.key: each for each in records}
        self._torch.update({name: content["environment"].get(name) for name in TORCH_FIELDS})
