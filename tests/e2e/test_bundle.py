"""Decisions in PyTorch's cache artifacts, and in the folder of `PYGRAPH_BUNDLE`, between processes with homes and caches of their own."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.sandbox import PROGRAM, RUN_TIMEOUT_S

if TYPE_CHECKING:
    from tests.support.sandbox import Sandbox

pytestmark = [pytest.mark.torch, pytest.mark.slow]

KEY = base64.b64encode(b"pygrap")
"""How the keys of our artifacts begin in what torch saves."""
WITHOUT_PYGRAPH = """
import runpy, sys
assert not [name for name in sys.modules if name.partition(".")[0] == "pygraphd"]
sys.modules["pygraphd"] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a program where nothing of PyGraph has been imported, and nothing can be."""


def run(sandbox: Sandbox, home: Path, *arguments: Path, pygraph: bool = True, **more: str) -> dict[str, Any]:
    """Run the program with a home and an Inductor cache of its own; return its summary, empty `without` PyGraph."""
    program = PROGRAM.with_name("artifacts.py")
    environ = sandbox.environment(
        PYGRAPH="1" if pygraph else "",
        PYGRAPHD_HOME=str(home),
        PYGRAPH_SUMMARY=str(home / "summary.json"),
        TORCHINDUCTOR_CACHE_DIR=str(home / "inductor"),
        TORCH_DEVICE_BACKEND_AUTOLOAD=str(int(pygraph)),
        **more,
    )
    home.mkdir(mode=0o700, exist_ok=True)
    start = [] if pygraph else ["-c", WITHOUT_PYGRAPH]
    ended = sandbox.python.run([*start, program, *arguments], environ, Path.cwd(), RUN_TIMEOUT_S)
    assert ended.returncode == 0, ended.stderr
    if not pygraph:
        assert not (home / "summary.json").exists()
        return {}
    summary: dict[str, Any] = json.loads((home / "summary.json").read_text())
    return summary


def test_artifacts_go_through_a_python_without_pygraph(sandbox: Sandbox, tmp_path: Path) -> None:
    first, second, third, fourth = (tmp_path / name for name in ("one", "two", "three", "four"))
    saved, saved_without, saved_again = (tmp_path / name for name in ("first", "second", "third"))

    cold = run(sandbox, first, tmp_path / "none", saved)
    run(sandbox, second, saved, saved_without, pygraph=False)
    files = {file.name for file in (second / "inductor" / "pygraph").iterdir()}
    # What Inductor's folder has goes with the folder, and what a program uses with its artifacts.
    (second / "inductor").rename(tmp_path / "inductor")
    third.mkdir(mode=0o700)
    (tmp_path / "inductor").rename(third / "inductor")
    known = run(sandbox, third, saved_without, saved_again)
    known_again = run(sandbox, fourth, saved_again, tmp_path / "last")

    # A program without PyGraph brings them to its folder, and cannot put them among what it saves.
    carried = [KEY in file.read_bytes() for file in (saved, saved_without, saved_again)]
    assert carried == [True, False, True]
    assert (cold["hits"], cold["misses"]) == (0, 2)
    assert len(files) == 2
    for each in (known, known_again):
        assert (each["hits"], each["misses"], each["from_bundle"], each["measured"]) == (2, 0, 2, 0)
        assert not any(failure.startswith("bundle") for failure in each["failures"])


def test_a_folder_that_all_processes_share(sandbox: Sandbox, tmp_path: Path) -> None:
    shared = tmp_path / "not" / "there yet"
    none = tmp_path / "none"

    first = run(sandbox, tmp_path / "one", none, tmp_path / "a", PYGRAPH_BUNDLE=str(shared))
    second = run(sandbox, tmp_path / "two", none, tmp_path / "b", PYGRAPH_BUNDLE=str(shared))

    assert (first["hits"], first["from_bundle"]) == (0, 0)
    assert (second["hits"], second["from_bundle"]) == (2, 2)
    assert len(list(shared.glob("*.json"))) == 2
