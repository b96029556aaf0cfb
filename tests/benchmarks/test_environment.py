from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from benchmarks.environment import commit, describe_host

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_commit_says_whether_the_tree_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BENCHMARK_COMMIT", raising=False)
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "first")
    revision = git(tmp_path, "rev-parse", "HEAD")
    assert commit(tmp_path) == revision
    (tmp_path / "new").write_text("")
    assert commit(tmp_path) == f"{revision}-dirty"
    monkeypatch.setenv("BENCHMARK_COMMIT", "abc123")
    assert commit(tmp_path) == "abc123"


def test_without_git_it_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.delenv("BENCHMARK_COMMIT", raising=False)
    assert commit(tmp_path) == "unknown"


def test_host_has_its_fields() -> None:
    host = describe_host()
    assert {"driver", "cpu", "commit"} <= set(host)
    assert str(host["cpu"]).endswith(" cores")
