"""`pygraphd run`, then `report` and `doctor` without a word about files: they find the run, its modules, lines and obstacles.

The run is without dashes, whose arguments must reach the program and whose exit code must be the program's; see `test_doors.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.sandbox import PROGRAM, RUN_TIMEOUT_S

if TYPE_CHECKING:
    from tests.support.sandbox import Outcome, Sandbox

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def test_a_run_is_reported_by_name_only(sandbox: Sandbox, plain: Outcome) -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "pygraphd", "run", str(PROGRAM), "--mode", "default", "--exit", "7"],
        env=sandbox.environment(CUDA_VISIBLE_DEVICES=""),
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    assert (finished.returncode, finished.stdout) == (7, plain.stdout), finished.stderr
    assert "pygraph" not in finished.stderr

    report = json.loads(sandbox.pygraphd("report", "--json").stdout)
    text = sandbox.pygraphd("report", "last").stdout
    doctor = json.loads(sandbox.pygraphd("doctor", str(PROGRAM), "--json").stdout)

    assert report["graphs"]
    assert report["program"] == str(PROGRAM)
    assert all(any(PROGRAM.name in place for place in each["places"]) for each in report["graphs"])
    assert text.startswith(f"coverage  none of {len(report['graphs'])} compiled graph")
    assert {"graph breaks", "no GPU"} <= {each["name"] for each in doctor["patterns"]}
    assert next(each for each in doctor["checks"] if each["name"] == "hook")["ok"]
