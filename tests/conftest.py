"""For all tests: an example may take as long as it takes, and what has been compiled once is not compiled again.

On a machine that others use, too, an example's time says nothing; pytest has a limit.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests.support import patience
from tests.support.warm_python import WarmPython

if TYPE_CHECKING:
    from collections.abc import Iterator

COMPILER = Path(__file__).with_name("compiler") / "g++"
_FOLDER = "REMEMBERED_COMPILATIONS"

# A machine for GPU tests has the packages of others, and need not have psycopg; `.ci/run` must have it.
collect_ignore = (
    [] if importlib.util.find_spec("psycopg") or "TESTS_REQUIRE_POSTGRES" in os.environ else ["team"]
)

settings.register_profile("pygraph", deadline=None)
settings.load_profile("pygraph")


def pytest_configure(config: pytest.Config) -> None:
    """Have torch compile through `tests/compiler`, in every process that is started from here; workers inherit that.

    Nor does any of them find what the package ships, whatever that is: a test that wants shipped decisions brings its own.
    """
    os.environ["PYGRAPHD_SHIPPED"] = "0"
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # with it, each process would compile all of our modules
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # or kernels wait for threads that have no core
    compiler = os.environ.get("CXX", "g++")
    if _FOLDER in os.environ or len(shlex.split(compiler)) != 1 or "g++" not in compiler:
        return
    if not os.access(COMPILER, os.X_OK):  # a copy may have lost that
        return
    folder = tempfile.mkdtemp(prefix="compiled-")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.environ |= {_FOLDER: folder, "CXX": str(COMPILER), "REMEMBERED_COMPILER": compiler}
    # Or each process asks compiler and linker for every instruction set the CPU names, before its first kernel.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")


@pytest.fixture(scope="session")
def warm_python() -> Iterator[WarmPython]:
    """Return what runs programs that have PyTorch imported already."""
    started = WarmPython()
    yield started
    started.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process's clients wait for a daemon as long as that takes; see `patience`."""
    patience.be_patient(monkeypatch)
