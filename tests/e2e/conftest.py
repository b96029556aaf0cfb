"""A home for each end-to-end test, and what the program does without PyGraph; compiled code is kept from test to test."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.sandbox import Outcome, Sandbox

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.warm_python import WarmPython


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inductor's cache, kept from test to test, and shared by pytest's workers: most tests are not about compiling."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    return folder / "inductor-of-programs"


@pytest.fixture
def sandbox(compiled: Path, warm_python: WarmPython) -> Iterator[Sandbox]:
    """An empty home. It lies directly under the temporary folder: a socket's path has to be short."""
    made = Sandbox(Path(tempfile.mkdtemp(prefix="pygraphd-")), compiled, warm_python)
    try:
        yield made
    finally:
        made.close()


def without_pygraph(sandbox: Sandbox, *arguments: str) -> Outcome:
    try:
        outcome = sandbox.run(*arguments, hook=False)
    finally:
        sandbox.close()
    assert outcome.code == 0, outcome.stderr
    assert outcome.summary is None
    return outcome


@pytest.fixture(scope="session")
def plain(compiled: Path, warm_python: WarmPython) -> Outcome:
    """The program without PyGraph: what every other run is compared with."""
    made = Sandbox(Path(tempfile.mkdtemp(prefix="pygraphd-")), compiled, warm_python)
    return without_pygraph(made)


@pytest.fixture(scope="session")
def brief(compiled: Path, warm_python: WarmPython) -> Outcome:
    """The same of the brief program, for what asks no more of a program than a few graphs."""
    made = Sandbox(Path(tempfile.mkdtemp(prefix="pygraphd-")), compiled, warm_python)
    return without_pygraph(made, "--brief")
