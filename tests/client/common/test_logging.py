"""Changes of state are logged, and printed only if a user asks for it."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys

import pytest

from pygraphd.client.common import log
from pygraphd.client.common.report import Report
from pygraphd.schema.keys import Environment
from pygraphd.schema.messages import Decision, Deployment, Graph, Kind
from pygraphd.schema.reasons import Reason, ReasonCode
from pygraphd.schema.summary import Source

IMPORTS = "import logging, os, sys\nfrom pygraphd.client.common import log\n"
EVENTS = "log.debug('one'); log.info('%s', 'two'); log.warning('three')\n"
GRAPH = Graph("a" * 64, Kind.BACKWARD, 0, 1, 17, (4, 8))
ENVIRONMENT = Environment("NVIDIA H200", "9.0", 132, 143771, "", "2.13.0", "3.5", "13.0", "580.1", "91400")


def lines(program: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS + program], capture_output=True, text=True, check=True
    )
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_nothing_is_printed_by_default() -> None:
    assert lines(EVENTS) == []


@pytest.mark.parametrize(
    ("level", "expected"),
    [("debug", ["one", "two", "three"]), ("info", ["two", "three"]), ("warning", ["three"])],
)
def test_lines_from_a_level_on(level: str, expected: list[str]) -> None:
    printed = lines(f"log.print_from('{level}'); log.print_from('{level}')\n{EVENTS}")

    assert [each.split()[-1] for each in printed] == expected
    assert all(re.match(r"pygraph: [-\d]+ [:,\d]+ \d+ [A-Z]+ \w+$", each) for each in printed)


@pytest.mark.parametrize("where", ["", "'pygraph'"])
def test_a_program_with_handlers_of_its_own_gets_each_record_once(where: str) -> None:
    handler = (
        f"h = logging.StreamHandler(sys.stderr); h.setFormatter(logging.Formatter('mine %(name)s %(message)s')); "
        f"logging.getLogger({where}).addHandler(h)\n"
    )

    assert lines(f"{handler}log.print_from('info')\n{EVENTS}") == ["mine pygraph two", "mine pygraph three"]
    assert lines(handler + EVENTS) == ["mine pygraph three"]  # the root logger's level


def test_a_program_may_ask_for_a_level_by_logging_alone() -> None:
    program = (
        f"logging.basicConfig(format='%(message)s'); logging.getLogger('pygraph').setLevel('INFO')\n{EVENTS}"
    )

    assert lines(program) == ["two", "three"]


@pytest.mark.parametrize(
    "before",
    ["os.close(2)", "sys.stderr.close()", "sys.stderr = None", "sys.stderr = open('/dev/full', 'w')"],
)
@pytest.mark.parametrize("configured", ["", "logging.basicConfig()\n"])
def test_a_standard_error_that_takes_nothing_is_no_error(before: str, configured: str) -> None:
    program = f"{configured}log.print_from('debug')\n{before}\n{EVENTS}os._exit(0)"

    assert (
        subprocess.run([sys.executable, "-c", IMPORTS + program], check=False, env=os.environ).returncode == 0
    )


def test_a_handler_that_raises_does_not_reach_the_program() -> None:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError(record.getMessage())

    broken = Broken()
    logging.getLogger("pygraph").addHandler(broken)
    try:
        log.warning("anything")
    finally:
        logging.getLogger("pygraph").removeHandler(broken)


def test_the_report_logs_what_it_counts(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "pygraph")
    report = Report()

    report.count_left_to_torch("PYGRAPH_RELOCATE=0")
    for _ in range(2):
        report.count_failure("daemon: no daemon")
    decision = Decision(Deployment.GRAPH, Reason(ReasonCode.FASTER), 1)
    report.record_deployment(GRAPH, ENVIRONMENT, decision, Source.MEASURED)

    assert [(each.levelname, each.getMessage()) for each in caplog.records] == [
        ("INFO", "a graph is left to PyTorch: PYGRAPH_RELOCATE=0"),
        ("WARNING", "daemon: no daemon"),
        ("INFO", "backward aaaaaaaaaaaa at 4,8: deployed as GRAPH: GRAPH is faster (faster, measured)"),
    ]


@pytest.mark.parametrize(("asked", "written"), [("", 1), ("log.print_from('warning'); ", 1)])
def test_what_is_said_unasked_is_not_written_twice(asked: str, written: int) -> None:
    printed = lines(f"{asked}log.warning('it is wrong'); log.say('it is wrong', is_logged=True)")

    assert len([each for each in printed if each.endswith("it is wrong")]) == written
