"""When the hook starts a daemon by itself, and when it leaves that alone."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from pygraphd.client.decisions import daemon_start
from pygraphd.client.decisions.transport import Transport

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({}, None),
        ({"CI": "true"}, "CI is set"),
        ({"SLURM_JOB_ID": "7"}, "SLURM_JOB_ID is set"),
        ({"KUBERNETES_SERVICE_HOST": "h"}, "KUBERNETES_SERVICE_HOST is set"),
        ({"CI": "true", "PYGRAPHD_AUTOSTART": "1"}, None),
        ({"PYGRAPHD_AUTOSTART": "0"}, "PYGRAPHD_AUTOSTART=0"),
        ({"PYGRAPHD_AUTOSTART": ""}, "PYGRAPHD_AUTOSTART="),
    ],
    ids=range(7),
)
def test_where_it_is_off(environ: dict[str, str], reason: str | None) -> None:
    assert daemon_start.why_not(environ) == reason


def test_nothing_is_started_where_the_caller_forbids_it(tmp_path: Path) -> None:
    reason = daemon_start.ensure(
        Transport(tmp_path / "s"), {"PYGRAPHD_AUTOSTART": "1"}, forbidden="PYGRAPH_READONLY=1"
    )

    assert reason == "not started: PYGRAPH_READONLY=1"
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_started_where_it_is_off(tmp_path: Path) -> None:
    reason = daemon_start.ensure(Transport(tmp_path / "s"), {"PYGRAPHD_AUTOSTART": "0"})

    assert reason == "not started: PYGRAPHD_AUTOSTART=0"
    assert list(tmp_path.iterdir()) == []


def test_a_socket_that_may_not_be_used_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()

    reason = daemon_start.ensure(Transport(tmp_path / "s" / ("x" * 120)), {})

    assert reason is not None
    assert reason.startswith("not started: connection failed")


ADOPTING = """
import ctypes, sys
from pygraphd.client.decisions import daemon_start
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
print(daemon_start.why_not({}), daemon_start.why_not({"PYGRAPHD_AUTOSTART": "1"}), sep="|")
sys.frozen = True
ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)
print(daemon_start.why_not({}))
"""
"""A process that becomes the parent of orphans, as the first one of a container is; and then one of a program with a Python of its own."""


def test_no_daemon_becomes_a_child_of_the_program() -> None:
    run = subprocess.run([sys.executable, "-c", ADOPTING], capture_output=True, text=True, check=True)

    assert run.stdout.splitlines() == [
        "it would become a child of this process|None",
        "this program has a Python of its own, which runs no modules",
    ]
