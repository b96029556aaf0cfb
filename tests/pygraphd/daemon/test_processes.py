"""The daemon knows the processes that it serves by pid and start, and of each what it measures and waits for."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from pygraphd.daemon import processes as module
from pygraphd.daemon.leases import Holder, Leases
from pygraphd.daemon.peer import Peer
from pygraphd.daemon.processes import Processes, program_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

E, A, B = "e" * 64, "a" * 64, "b" * 64
US = Peer(os.getpid(), 0)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    folder = tmp_path / ("long" * 20)
    folder.mkdir()
    path = folder / "train\n.py"
    path.write_text("input()\n")
    return path


@pytest.fixture
def other(script: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-u", str(script), "--token", "secret"]
    started = subprocess.Popen(command, stdin=subprocess.PIPE)
    yield started
    started.kill()
    started.communicate()


def ask(leases: Leases, processes: Processes, peer: Peer, *graphs: str) -> None:
    processes.note(peer)
    processes.note_lease(peer, E, graphs, leases.ask(E, graphs, Holder.of(str(peer.pid), peer)))


def test_one_measures_and_the_other_waits_until_it_is_known(other: subprocess.Popen[bytes]) -> None:
    leases = Leases(60.0)
    processes, they = Processes(leases), Peer(other.pid, 0)
    ask(leases, processes, they, A)
    ask(leases, processes, US, A, B)

    (we_do, they_do), left_out = processes.describe()

    assert left_out == 0
    assert (we_do["pid"], we_do["measures"], we_do["waits_for"]) == (US.pid, [B], [A])
    assert (they_do["pid"], they_do["measures"], they_do["waits_for"]) == (other.pid, [A], [])
    assert they_do["program"].endswith("train?.py")  # and none of its arguments
    assert len(they_do["program"]) == 80
    leases.recorded(E, [A], [], they)
    assert [each["waits_for"] for each in processes.describe()[0]] == [[], []]


def test_who_has_ended_is_forgotten(other: subprocess.Popen[bytes]) -> None:
    processes = Processes(Leases(60.0))
    processes.note(Peer(other.pid, 0))
    processes.note(US)
    other.kill()
    other.wait()

    assert [each["pid"] for each in processes.describe()[0]] == [US.pid]
    assert program_of(other.pid) == ""


def test_those_that_asked_longest_ago_go_first(
    other: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = Processes(Leases(60.0))
    for peer in (US, Peer(other.pid, 0), US):
        processes.note(peer)
    monkeypatch.setattr(module, "MAX_LISTED", 1)
    (listed,), left_out = processes.describe()
    assert (listed["pid"], listed["requests"], left_out) == (US.pid, 2, 1)

    monkeypatch.setattr(module, "MAX_PROCESSES", 1)
    processes.note(US)
    assert [each["pid"] for each in processes.describe()[0]] == [US.pid]
