"""One of four ranks of a gloo group: plans and calls the same graphs as the others, and writes down what ran and was reported.

Every case has graphs of its own. The clock stands in for the GPU's, and relocatable graphs are functions that say so; the group, its
store, the caches and the daemon are real. The ranks are forks of one process, which imports PyTorch once. Arguments: port, folder.
"""

from __future__ import annotations

import ctypes
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist
from torch._inductor.cudagraph_utils import BoxedDeviceIndex

from pygraphd.client.decisions.ranks.process_group import Groups
from pygraphd.client.decisions.transport import Transport, TransportError
from pygraphd.client.frontend.runtime import Runtime
from pygraphd.schema.locations import locate
from pygraphd.schema.messages import Deployment
from tests.support.clock import Clock
from tests.support.compiled import (
    ENOUGH,
    Compiled,
    compile_once,
    pretend_there_is_a_gpu,
    run,
)
from tests.support.patience import be_patient

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

PORT, FOLDER = int(sys.argv[1]), Path(sys.argv[2])
STEPS = 120  # more than what is decided takes to be run
WORLD = 4
HANGS_S = 120
FAST = {Deployment.KERNELS: 100.0, Deployment.GRAPH: 50.0}
SLOW = {Deployment.KERNELS: 50.0, Deployment.GRAPH: 100.0}
PR_SET_PDEATHSIG = 1
Pair = tuple[Compiled, Compiled]


def become_a_rank() -> int:
    """Return in a fork for each rank, with its number; the process that has forked ends when all of them have, by its status."""
    ranks = []
    for rank in range(WORLD):
        process = os.fork()
        if process == 0:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            return rank
        ranks.append(process)
    failed = False
    for process in ranks:
        failed |= os.waitpid(process, 0)[1] != 0
    sys.exit(failed)


RANK = become_a_rank()


class Case:
    """One case on one rank: a session in a home of its own (or that of all), and the graphs named after the case."""

    def __init__(
        self, name: str, home: str = "", times: Mapping[Deployment, float] = FAST, **limits: Any
    ) -> None:
        Clock.times_us = dict(times)
        folder = FOLDER / (home or f"{name}{RANK}")
        folder.mkdir(mode=0o700, exist_ok=True)
        self.name = name
        self.session = Runtime(locate({"PYGRAPHD_HOME": str(folder)}))
        self.session.groups = Groups(self.session.report, **limits)
        self.steps: list[str] = []

    def compile(self, suffix: str = "") -> Pair:
        box = BoxedDeviceIndex(0)
        text = f"  a = torch.ops.aten.{self.name}{suffix}.default(b)"
        forward = compile_once(self.session, 1, backward=False, box=box, text=text)
        return forward, compile_once(self.session, 1, backward=True, box=box, text=text)

    def step(self, pair: Pair, times: int = 1) -> None:
        for (ahead,), (behind,) in run(*pair, times):
            self.steps.append(ahead if ahead == behind else "apart")

    def train(self, *pairs: Pair) -> None:
        """Make steps in which all ranks meet, as they do where gradients are reduced, until all have decided and one more."""
        decided = [False] * WORLD
        while not all(decided):
            for pair in pairs:
                self.step(pair)
            deployed = self.session.report.summary()["deployed"]
            dist.all_gather_object(decided, sum(deployed.values()) == 2 * len(pairs))
        for pair in pairs:
            self.step(pair)

    def end(self) -> None:
        """Write down how it went."""
        self.session.close()
        outcome = {"first": self.steps[0], "last": self.steps[-1], **self.session.report.summary()}
        (FOLDER / f"{self.name}.{RANK}.json").write_text(json.dumps(outcome))


def one_at_a_time(first: int, action: Callable[[], Pair]) -> Pair:
    """Have `first` do something, and the others when it has."""
    result = action() if first == RANK else None
    dist.barrier()
    return result or action()


def find_out_alone(name: str, home: str = "", **options: Any) -> None:
    """Measure a case's graphs without a group, and leave the answer in its home."""
    case = Case(name, home, **options)
    for suffix in ("", "_more"):
        run(*case.compile(suffix), ENOUGH)
    case.session.close()


def hit_on_the_leader() -> None:
    case = Case("known_to_leader", times=SLOW)
    case.train(one_at_a_time(2, case.compile))
    case.end()


def hit_on_another_rank() -> None:
    case = Case("known_to_another", times=SLOW if RANK == 0 else FAST)
    case.train(one_at_a_time(0, case.compile))
    case.end()


def nobody_knows() -> None:
    case = Case("unknown")
    case.train(case.compile())
    case.end()


def daemon_dies(daemon: subprocess.Popen[bytes] | None) -> None:
    case = Case("daemon", "shared")

    def ask_and_kill() -> Pair:
        pair = case.compile()
        if daemon is not None:
            daemon.kill()
            daemon.wait()
            case.session.locations.database.unlink()
        return pair

    known = one_at_a_time(0, ask_and_kill)
    case.train(known, one_at_a_time(1, lambda: case.compile("_more")))
    case.end()


def late_rank() -> None:
    case = Case("late_rank")
    if RANK != 3:
        pair = one_at_a_time(0, case.compile)
        while case.session.report.summary()["deployed"]["GRAPH"] < 2:
            case.step(pair)
            time.sleep(0.001)
        dist.barrier()
    else:
        dist.barrier()
        dist.barrier()
        pair = case.compile()
    case.step(pair)
    case.end()


def late_leader() -> None:
    case = Case("late_leader", wait_limit_s=0.3)
    pair = one_at_a_time(0, case.compile)
    if RANK != 0:
        while case.session.report.summary()["deployed"]["KERNELS"] < 2:
            case.step(pair)
            time.sleep(0.001)
    dist.barrier()
    case.step(pair, ENOUGH)
    case.end()


def store_hangs(first_pid: int) -> None:
    """Rank 0, which serves the store, is stopped while the others ask."""
    case = Case("store_hangs", operation_s=0.3)
    if RANK == 1:
        os.kill(first_pid, signal.SIGSTOP)
    if RANK != 0:
        wait_until(lambda: is_in_state("T", first_pid))
        case.step(case.compile(), 5)
        case.end()
        (FOLDER / f"asked.{RANK}").touch()
    if RANK == 1:
        wait_until(lambda: len(list(FOLDER.glob("asked.*"))) == 3)
        os.kill(first_pid, signal.SIGCONT)
    dist.barrier()


def store_goes(first_pid: int) -> None:
    """Rank 0 dies between a leader's claim and its decision."""
    case = Case("store_goes")
    pair = one_at_a_time(1, case.compile)
    dist.barrier()
    if RANK == 0:
        os._exit(0)
    wait_until(lambda: is_in_state("Z", first_pid))
    case.step(pair, STEPS)
    case.end()


def is_in_state(letter: str, pid: int) -> bool:
    """Return whether a process is stopped (T) or a zombie (Z); also whether it has been waited for.

    That may happen between opening its file and reading it.
    """
    try:
        return f"\nState:\t{letter}" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANGS_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def start_daemon() -> subprocess.Popen[bytes]:
    locations = locate({"PYGRAPHD_HOME": str(FOLDER / "shared")})
    locations.socket.parent.mkdir(mode=0o700, exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "pygraphd", "start", "--foreground"],
        env={**os.environ, "PYGRAPHD_HOME": str(FOLDER / "shared")},
        stdout=subprocess.DEVNULL,
    )

    def answers() -> bool:
        try:
            return bool(Transport(locations.socket).request("GET", "/v1/ping"))
        except TransportError:
            return False

    wait_until(answers)
    return process


def main() -> None:
    import torch._inductor.config as inductor_config

    patch = pytest.MonkeyPatch()
    pretend_there_is_a_gpu(patch)
    be_patient(patch)
    with ExitStack() as stack:
        stack.enter_context(inductor_config.patch({"triton.cudagraphs": True}))
        daemon = start_daemon() if RANK == 0 else None
        if daemon is not None:
            stack.callback(daemon.kill)
            find_out_alone("daemon", "shared")
        if RANK == 2:
            find_out_alone("known_to_leader")
            find_out_alone("known_to_another")
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{PORT}",
            rank=RANK,
            world_size=WORLD,
            timeout=datetime.timedelta(seconds=HANGS_S),
        )
        pids: list[Any] = [None] * WORLD
        dist.all_gather_object(pids, os.getpid())
        for case in (hit_on_the_leader, hit_on_another_rank, nobody_knows, late_rank, late_leader):
            case()
            dist.barrier()
        daemon_dies(daemon)
        store_hangs(pids[0])
        store_goes(pids[0])


if __name__ == "__main__":
    main()
