"""The compiler that the tests have torch compile with: what it remembers is what would have been made, and nothing else."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

COMPILER = Path(__file__).with_name("g++")
# Makes of a source, its second argument, the first argument and the text in capitals; its last is where to.
REAL = """#!/bin/sh
echo "$@" >>"$(dirname "$0")/asked"
for last; do :; done
test "$1" != --fail || exit 3
test "$1" != --version || exit 0
{ echo "$1"; tr a-z A-Z <"$2"; } >"$last"
chmod 750 "$last"
"""


class Compiler:
    """The compiler with a real one behind it that can be asked how often it was asked."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "memory").mkdir()
        real = folder / "real"
        real.write_text(REAL)
        real.chmod(0o700)
        self.variables = {
            "REMEMBERED_COMPILER": str(real),
            "REMEMBERED_COMPILATIONS": str(folder / "memory"),
        }

    def run(self, *arguments: object, **variables: str) -> int:
        environ = {**os.environ, **self.variables, **variables}
        return subprocess.run([COMPILER, *map(str, arguments)], env=environ, check=False).returncode

    def make(self, text: str, where: str, flag: str = "-O1") -> tuple[int, Path]:
        """Compile a text that lies in a folder of that name; return the exit status and where the result should be."""
        folder = self._folder / where
        folder.mkdir(exist_ok=True)
        (folder / f"{where}.cpp").write_text(text)
        return self.run(flag, folder / f"{where}.cpp", "-o", folder / "made"), folder / "made"

    def asked(self) -> int:
        asked = self._folder / "asked"
        return len(asked.read_text().splitlines()) if asked.exists() else 0


@pytest.fixture
def compiler(tmp_path: Path) -> Compiler:
    return Compiler(tmp_path)


def test_one_text_is_compiled_once_wherever_it_lies(compiler: Compiler) -> None:
    made = [compiler.make("text", where) for where in ("here", "there")]

    assert compiler.asked() == 1
    for code, result in made:
        assert (code, result.read_text()) == (0, "-O1\nTEXT")
        assert result.stat().st_mode & 0o777 == 0o750
        assert {path.suffix for path in result.parent.iterdir()} == {"", ".cpp"}  # no unfinished copy


@pytest.mark.parametrize(("text", "flag"), [("other", "-O1"), ("text", "-O2")])
def test_another_text_and_other_arguments_are_compiled(compiler: Compiler, text: str, flag: str) -> None:
    compiler.make("text", "here")

    _, result = compiler.make(text, "here", flag)

    assert compiler.asked() == 2
    assert result.read_text() == f"{flag}\n{text.upper()}"


def test_a_failure_is_passed_on_and_not_remembered(compiler: Compiler) -> None:
    assert [compiler.make("text", "here", "--fail")[0] for _ in range(2)] == [3, 3]
    assert compiler.asked() == 2


def test_what_makes_no_file_of_a_source_is_the_compilers_own(compiler: Compiler) -> None:
    assert [compiler.run("--version") for _ in range(2)] == [0, 0]
    assert compiler.run("--fail", "-o", "nothing") == 3
    assert compiler.asked() == 3


def test_what_is_to_be_listed_is_asked_for_each_time(compiler: Compiler) -> None:
    """A list of headers, as ninja wants it, is a second file."""
    for _ in range(2):
        assert compiler.make("text", "here", "-MMD")[0] == 0
    assert compiler.asked() == 2


def test_another_compiler_is_asked_itself(compiler: Compiler, tmp_path: Path) -> None:
    compiler.make("text", "here")
    other = tmp_path / "other"
    other.write_text("#!/bin/sh\nexit 5\n")
    other.chmod(0o700)

    source, made = tmp_path / "here" / "here.cpp", tmp_path / "here" / "made"

    assert compiler.run("-O1", source, "-o", made, REMEMBERED_COMPILER=str(other)) == 5
