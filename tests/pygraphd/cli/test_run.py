from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

_TELL = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ.get('PYGRAPH'), os.getpid()]))"

_TELL_NAME = "import os; print(os.path.basename(os.environ['PYGRAPH_SUMMARY']))"


def _run(*words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pygraphd", "run", *words]
    environ = {name: value for name, value in os.environ.items() if name != "PYGRAPH"}
    environ |= {"PYGRAPHD_HOME": str(cwd / "home"), **variables}
    return subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("separator", [[], ["--"]])
def test_everything_reaches_the_script(tmp_path: Path, separator: list[str]) -> None:
    (tmp_path / "tell.py").write_text(_TELL)
    words = ["--help", "--json", "-m", "x", "--", "run", "", "a b"]
    answer = _run(*separator, "tell.py", *words, cwd=tmp_path)
    assert answer.stderr == ""
    assert json.loads(answer.stdout)[:2] == [words, "1"]


def test_pythons_own_options_are_pythons(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(_TELL)
    assert json.loads(_run("-m", "module", "--x", cwd=tmp_path).stdout)[0] == ["--x"]
    assert json.loads(_run("-c", _TELL, "y", cwd=tmp_path).stdout)[0] == ["y"]


def test_the_exit_code_is_the_scripts(tmp_path: Path) -> None:
    assert _run("-c", "raise SystemExit(42)", cwd=tmp_path).returncode == 42


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "which script"),
        (["--"], "which script"),
        (["none.py"], "none.py: no such file"),
        (["-u", "none.py"], "none.py: no such file; give"),
    ],
)
def test_a_missing_script_is_a_usage_error(tmp_path: Path, words: list[str], message: str) -> None:
    answer = _run(*words, cwd=tmp_path)
    assert answer.returncode == 2
    assert message in answer.stderr
    assert "Traceback" not in answer.stderr


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["-u", "tell.py"], "tell.py"),
        (["-W", "ignore", "-Xdev", "-uB", "tell.py", "-m", "x"], "tell.py"),
        (["--check-hash-based-pycs", "never", "-Wignore", "--", "tell.py"], "tell.py"),
        (["-m", "tell"], "tell"),
        (["-um", "tell", "other.py"], "tell"),
        (["-umtell"], "tell"),
        (["-uc", _TELL_NAME, "other.py"], "-c"),
        (["."], "FOLDER"),
    ],
)
def test_the_summary_is_named_after_what_python_runs(tmp_path: Path, words: list[str], name: str) -> None:
    for file in ("tell.py", "__main__.py"):
        (tmp_path / file).write_text(_TELL_NAME)

    answer = _run(*words, cwd=tmp_path)

    assert answer.stderr == ""
    expected = name.replace("FOLDER", tmp_path.name)
    assert re.fullmatch(rf"\d+\.[0-9a-f]{{8}}\.{re.escape(expected)}\.json\n", answer.stdout)


@pytest.mark.parametrize("why", ["read-only", "link", "asked for"])
def test_a_program_that_leaves_no_summary_is_said_to_leave_none(tmp_path: Path, why: str) -> None:
    code = "import os; print(os.environ.get('PYGRAPH_SUMMARY'))"
    variables = {"read-only": {"PYGRAPH_READONLY": "1"}, "asked for": {"PYGRAPH_SUMMARY": "s.json"}}
    if why == "link":
        (tmp_path / "home").symlink_to(tmp_path)

    answer = _run("-c", code, cwd=tmp_path, **variables.get(why, {}))

    link = f"{tmp_path / 'home'}: is a symbolic link; give the folder itself"
    causes = {"read-only": "PYGRAPH_READONLY=1", "link": link}
    said = (
        "pygraphd: run: no summary is kept for `pygraphd report`: {}; to have one, set PYGRAPH_SUMMARY=FILE\n"
    )
    assert answer.stderr == (said.format(causes[why]) if why in causes else "")
    assert (answer.returncode, answer.stdout) == (0, "None\n" if why in causes else "s.json\n")


def test_nothing_heavy_is_imported_on_the_way(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pygraphd.cli import main\ntry:\n    main(['run'])\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('typer', 'rich', 'sqlalchemy', 'torch') if name in sys.modules])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert answer.stdout == "[]\n"
