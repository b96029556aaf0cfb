"""Completion in bash, zsh and fish: what each is told, and what it makes of that where it is installed."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from pygraphd.cli import main

if TYPE_CHECKING:
    from pathlib import Path

LINES = {
    "pygraphd sta": {"start", "stats", "status"},
    "pygraphd cache ex": {"explain", "export"},
    "pygraphd cache inspect --w": {"--wide"},
    "pygraphd systemd": {"systemd-units"},
}
HELP = {
    "bash": None,
    "zsh": re.compile(r'"([^"]+)":"'),
    "fish": re.compile(r"^(\S+)\t", re.MULTILINE),
}
"""Where the words stand between their help."""
SHELLS = {
    "bash": """
eval "$(pygraphd_script)"
COMP_WORDS=($LINE) COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
[[ $(complete -p pygraphd) == *_pygraphd_completion* ]] && _pygraphd_completion pygraphd && printf '%s\\n' "${COMPREPLY[@]}"
""",
    # `_arguments` needs a line that is being edited; what it is given has been through the shell's own reading.
    "zsh": """
autoload -Uz compinit; compinit -u -D
eval "$(pygraphd_script)"
_arguments() { print -r -- "$@" }
words=(${=LINE}) CURRENT=$#words
$_comps[pygraphd]
""",
    "fish": """
pygraphd_script | source
complete -C $LINE
""",
}


def _told(capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_gets_its_script(
    shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_PYGRAPHD_COMPLETE", f"source_{shell}")

    script = _told(capsys)

    assert f"_PYGRAPHD_COMPLETE=complete_{shell}" in script
    registers = {"bash": "complete -o default -F _pygraphd_completion", "zsh": "compdef _pygraphd_completion"}
    assert f"{registers.get(shell, 'complete --command')} pygraphd" in script


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("line", LINES)
def test_each_shell_is_told_the_words(
    shell: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_PYGRAPHD_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")

    assert _words(shell, _told(capsys)) == LINES[line]


REQUIRED = "TESTS_REQUIRE_SHELLS"
"""The variable with which a shell that is missing fails its test, instead of having it skipped."""


@pytest.mark.slow
@pytest.mark.parametrize("shell", SHELLS)
def test_the_shell_itself_completes(shell: str, tmp_path: Path) -> None:
    if (program := shutil.which(shell)) is None:
        assert REQUIRED not in os.environ, f"{REQUIRED} is set, and there is no {shell}"
        pytest.skip(f"needs {shell}")
    for name, command in {
        "pygraphd": f'exec {shlex.quote(sys.executable)} -m pygraphd "$@"',
        "pygraphd_script": f"exec env _PYGRAPHD_COMPLETE=source_{shell} pygraphd",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{command}\n")
        (tmp_path / name).chmod(0o700)
    (tmp_path / "script").write_text(SHELLS[shell])
    plain = {"bash": ["--norc", "--noprofile"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]
    environ = {"HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}", "LC_ALL": "C.UTF-8"}

    for line, words in LINES.items():
        done = subprocess.run(
            [program, *plain, tmp_path / "script"],
            env={**environ, "LINE": line},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stderr == ""
        assert _words(shell, done.stdout) == words


def _words(shell: str, told: str) -> set[str]:
    pattern = HELP[shell]
    return set(told.split() if pattern is None else pattern.findall(told))
