"""Whatever the umask, what a command makes can be used by its owner, and a script runs under the umask of its user."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from pygraphd.daemon.store import Store
from pygraphd.schema.locations import locate
from tests.support.repository import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pygraphd.schema.messages import RecordRequest

pytestmark = pytest.mark.slow  # Python is started under each umask

NOTHING_ALLOWED = 0o777
REPORT = str(ROOT / "docs" / "report-example.json")


def _pygraphd(home: Path, *words: str) -> str:
    """Return what a command prints that runs under a umask that allows nothing, in a home that it has to make."""
    answer = subprocess.run(
        [sys.executable, "-m", "pygraphd", *words],
        env={**os.environ, "PYGRAPHD_HOME": str(home)},
        cwd=home.parent.parent,
        umask=NOTHING_ALLOWED,
        capture_output=True,
        text=True,
        check=True,
    )
    return answer.stdout


def _not_their_owners(top: Path) -> dict[str, str]:
    """Return the modes of files and folders that their owner may not read and write, or not look into."""
    found = {}
    for path in (top, *top.rglob("*")):
        mode = stat.S_IMODE(path.lstat().st_mode)
        if needed := (0o700 if path.is_dir() else 0o600) & ~mode:
            found[str(path)] = f"{mode:o} lacks {needed:o}"
    return found


def test_files_and_folders_are_their_owners(
    tmp_path: Path, make_request: Callable[..., RecordRequest]
) -> None:
    full = locate({"PYGRAPHD_HOME": str(tmp_path / "full")})
    full.cache.mkdir(mode=0o700)
    with Store(full.database) as store:
        store.record(make_request("a"), uid=0)
    (out := tmp_path / "out").mkdir()
    home = tmp_path / "parent" / "home"

    _pygraphd(full.cache, "cache", "export", str(out / "known.jsonl"))
    _pygraphd(home, "cache", "import", str(out / "known.jsonl"))
    _pygraphd(home, "report", REPORT, "--html", str(out / "page.html"))

    assert _not_their_owners(tmp_path) == {}
    assert locate({"PYGRAPHD_HOME": str(home)}).database.stat().st_mode & 0o077 == 0


@pytest.mark.daemon
def test_a_daemon_and_its_files_are_their_owners(tmp_path: Path) -> None:
    home = tmp_path / "parent" / "home"
    _pygraphd(home, "start")
    try:
        assert _not_their_owners(tmp_path) == {}
    finally:
        _pygraphd(home, "stop")


def test_a_script_has_the_umask_of_its_user_and_a_folder_for_its_summary(tmp_path: Path) -> None:
    script = tmp_path / "tell.py"
    script.write_text("import os; print(os.umask(0), os.environ['PYGRAPH_SUMMARY'])")
    home = tmp_path / "parent" / "home"

    umask, summary = _pygraphd(home, "run", str(script)).split()

    assert int(umask) == NOTHING_ALLOWED
    assert summary.startswith(f"{home}/summaries/")
    assert _not_their_owners(tmp_path) == {}
