"""For `pytest -p tools.lab.pytest_plugin`: spreads workers over GPUs, and writes each failure to a file at once.

`python -m tools.lab.pytest_plugin FILE` prints the file, which is complete whenever the tests are interrupted.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks.environment import describe_host
from benchmarks.processes import last_error, last_exception
from benchmarks.records import SCHEMA, write_json
from tools.lab.gpu_slots import VISIBLE, gpu_names

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

FILE, GPUS = "BENCHMARK_TESTS", "BENCHMARK_GPUS"
"""Variables: the file to write, and how many GPUs there are for the workers."""
_ERROR = "E   "
_MAX_MISSING = 20
_BY_THEMSELVES = {0, 1, 5}
"""Exit codes of pytest: all did well, some failed, there were none."""


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin, as a worker or as the process that collects from all workers."""
    # pytest-xdist gives this attribute to its workers alone. CUDA reads the variable once, so it is set
    # before any test.
    if (worker := getattr(config, "workerinput", None)) is not None:
        os.environ.update(spread(worker["workerid"], int(os.environ.get(GPUS, "1"))))
    elif file := os.environ.get(FILE):
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that failures are printed all the same
        config.pluginmanager.register(Outcomes(Path(file)))


def spread(worker: str, gpus: int) -> Mapping[str, str]:
    """Return the variables of a worker: each sees all GPUs, and they begin to count at different ones."""
    if gpus == 1:
        return {}
    # All of them in another order, and not one each: some tests need two GPUs.
    names, first = gpu_names(gpus), int(worker.removeprefix("gw")) % gpus
    return {VISIBLE: ",".join([*names[first:], *names[:first]])}


class Outcomes:
    """Counts tests by outcome, with the error of each that failed; writes the file whenever one has."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._environment = describe_host()
        self._counts: Counter[str] = Counter()
        self._failed: dict[str, str] = {}
        self._missing: set[str] = set()
        self._save(ended=False)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note which tests there are."""
        self._missing.update(item.nodeid for item in session.items)
        self._save(ended=False)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Collection[str]) -> None:
        """Note which tests there are for workers, each of which finds all of them, before it runs any."""
        self._missing.update(ids)
        self._save(ended=False)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the outcome of a test's call, or the failure of its setup or teardown."""
        # Not before: the teardown may fail as well, or never be reached.
        if report.when == "teardown":
            self._missing.discard(report.nodeid)
        if report.failed:
            self._note_failure(report)
        # A test that a mark skips has no call: pytest reports it at the setup.
        elif report.when == "call" or report.skipped:
            self._counts[report.outcome] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a failure of collection."""
        if report.failed:
            self._note_failure(report)

    def _note_failure(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        self._failed.setdefault(report.nodeid, error_of(report.longreprtext))
        # A test whose call and teardown fail is reported twice, and has failed once.
        self._counts["failed"] = len(self._failed)
        self._save(ended=False)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write the counts, also when the tests were interrupted."""
        self._save(ended=exitstatus in _BY_THEMSELVES)

    def _save(self, *, ended: bool) -> None:
        failed = [{"test": test, "error": error} for test, error in self._failed.items()]
        missing = [] if ended else sorted(self._missing)
        counts = {"counts": dict(self._counts), "failed": failed, "ended": ended, "missing": missing}
        write_json(self._file, {"schema": SCHEMA, "environment": self._environment, **counts})


def error_of(traceback: str) -> str:
    """Return the most telling line of a failure: the last one that names an exception, or else the first error line."""
    lines = [line[1:].strip() for line in traceback.splitlines() if line.startswith(_ERROR)]
    if not lines:
        return last_error(traceback) or "no traceback"
    return last_exception(lines) or lines[0]


def main(arguments: list[str]) -> int:
    """Print the file of the first argument: a line for each test that failed, and how many there were of each kind."""
    content = json.loads(Path(arguments[0]).read_text())
    for each in content["failed"]:
        print(f"{each['test']}: {each['error']}")
    for each in content["missing"][:_MAX_MISSING]:
        print(f"{each}: not done")
    counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(content["counts"].items()))
    print((counts or "no test ran") + ("" if content["ended"] else "; ended before they were done"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
