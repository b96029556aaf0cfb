"""Every command ends in order where standard output is full, closed, or read by nobody; and nothing but text is printed."""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer

from pygraphd.cli import main, render
from pygraphd.cli.commands import application
from pygraphd.cli.output import StandardOutput, printable
from pygraphd.client.common.report import Report
from pygraphd.daemon.store import Store
from pygraphd.errors import CommandError
from pygraphd.schema.locations import locate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pygraphd.schema.messages import RecordRequest

HOSTILE = "a\x1b]0;b\x07\x9b31m\ud800\u202e\r\nc"
COMMANDS = {
    "-h": 0,
    "--version": 0,
    "status": 3,
    "stats": 0,
    "logs": 0,
    "config show": 0,
    "systemd-units": 0,
    "report SUMMARY": 0,
    "doctor": 1,
    "doctor SUMMARY": 1,
    "cache inspect": 0,
    "cache inspect --json": 0,
    "cache show GRAPH": 0,
    "cache explain GRAPH": 0,
    "cache prune --gpu H200 --dry-run": 0,
    "cache delete GRAPH --dry-run": 0,
    "cache clear --dry-run": 0,
    "cache import FILE --dry-run": 0,
    "cache rederive": 0,
}
"""Each with its exit code where standard output is in order."""
ELSEWHERE = {
    "start", "stop", "restart", "run", "cache export", "team init",
}  # fmt: skip
"""Commands that act on the daemon (`tests/daemon/test_output.py`) or other servers, the one that becomes a program, and the one
whose output is data: other tests have these."""
LATE = (
    "cli.commands",
    "cli.status",
    "cli.stats",
    "cli.explain",
    "cli.render_explanations",
    "cli.writing",
    "cli.report_html",
    "cli.doctor_text",
    "cli.doctor_probe",
)


@pytest.fixture
def commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_request: Callable[..., RecordRequest]
) -> dict[str, int]:
    for module in LATE:  # once, and not in every fork
        importlib.import_module(f"pygraphd.{module}")
    monkeypatch.setenv("PYGRAPHD_HOME", str(tmp_path))
    (tmp_path / "torch.py").write_text("import os; os._exit(7)")  # the doctor's checks fail, and at once
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Store(locate().database) as store:
        store.record(make_request("a", "b"), uid=0)
    locate().log.write_text("a line\n")
    named = {
        "GRAPH": make_request("a").records[0].graph.digest,
        "SUMMARY": str(tmp_path / "summary.json"),
        "FILE": str(tmp_path / "known.jsonl"),
    }
    Path(named["SUMMARY"]).write_text(json.dumps(Report().summary()))
    with pytest.raises(SystemExit):
        main(["cache", "export", named["FILE"]])
    return {
        " ".join(named.get(word, word) for word in words.split()): code for words, code in COMMANDS.items()
    }


def test_every_command_is_tested() -> None:
    """Here or elsewhere: a new one has to be added."""
    there = {" ".join(words) for words in _commands(typer.main.get_command(application))}
    here = {" ".join(itertools.takewhile(re.compile("[a-z]").match, each.split())) for each in COMMANDS}
    assert there == here - {""} | ELSEWHERE


def _commands(command: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    children = getattr(command, "commands", {})
    if not children:
        yield above
    for word, child in children.items():
        yield from _commands(child, (*above, word))


def _code(words: list[str], number: int, descriptor: int | None, other: Path) -> int:
    """Return the exit code of a command in a fork that has output (1) or errors (2) go to a descriptor, or closed; the other to a file."""
    if (child := os.fork()) == 0:
        code = 120  # as Python's, where the last flush fails
        with contextlib.suppress(BaseException), other.open("w") as beside:
            os.close(number)
            stream = None
            if descriptor is not None:
                os.dup2(descriptor, number)
                stream = os.fdopen(number, "w", errors="strict" if number == 1 else "backslashreplace")
            sys.stdout, sys.stderr = (stream, beside) if number == 1 else (beside, stream)
            try:
                main(words)
            except SystemExit as ended:
                if stream is not None:
                    stream.flush()
                code = ended.code if isinstance(ended.code, int) else 1
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _ended(words: list[str], output: int | None, folder: Path) -> tuple[int, str]:
    """Return exit code and errors of a command in a fork whose standard output is a descriptor, or closed."""
    errors = folder / "errors"
    return _code(words, 1, output, errors), errors.read_text()


@pytest.mark.slow
def test_output_that_is_full_is_one_line(commands: dict[str, int], tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        ended = {words: _ended(words.split(), full.fileno(), tmp_path) for words in commands}

    said = "pygraphd: standard output: cannot be written: No space left on device\n"
    assert ended == dict.fromkeys(commands, (1, said))


@pytest.mark.slow
def test_output_that_nobody_reads_is_no_error_to_speak_of(commands: dict[str, int], tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = {words: _ended(words.split(), writer, tmp_path) for words in commands}
    finally:
        os.close(writer)

    assert ended == dict.fromkeys(commands, (1, ""))


@pytest.mark.slow
def test_output_that_is_closed_is_wanted_by_nobody(commands: dict[str, int], tmp_path: Path) -> None:
    ended = {words: _ended(words.split(), None, tmp_path) for words in commands}

    assert ended == {words: (code, "") for words, code in commands.items()}


@pytest.mark.parametrize("end", [">/dev/full", ">&-", "| :"])
def test_a_program_that_is_run_ends_as_it_does_by_itself(tmp_path: Path, end: str) -> None:
    """Its output is its own: what becomes of it is for Python to say, in the words that it has for it."""
    script = tmp_path / "program.py"
    script.write_text("import time\nfor _ in range(100_000):\n    print('some text')\nraise SystemExit(5)\n")
    environ = {**os.environ, "PYGRAPHD_HOME": str(tmp_path), "PYTHONUNBUFFERED": ""}

    def ended(*words: str) -> tuple[int, str]:
        shell = ["/bin/bash", "-o", "pipefail", "-c", f'"$@" {end}', "bash", sys.executable]
        done = subprocess.run(
            [*shell, *words, str(script)], env=environ, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stderr

    by_itself = ended()
    assert ended("-m", "pygraphd", "run", "--") == by_itself
    assert (by_itself[0] == 5) is (end == ">&-")


@pytest.mark.slow
def test_a_home_that_cannot_be_looked_into_is_one_line(
    commands: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another user's, where `su` and `sudo` have kept HOME; a name that is too long is the same to root."""
    monkeypatch.setenv("PYGRAPHD_HOME", str(tmp_path / ("x" * 300)))
    with Path("/dev/null").open("w") as nowhere:
        ended = {words: _ended(words.split(), nowhere.fileno(), tmp_path) for words in commands}

    assert {words: said for words, said in ended.items() if said[0] == 120} == {}  # a traceback
    assert ended["status"][0] == 2  # the settings lie there, too
    in_its_checks = [ended.pop(words) for words in commands if words.startswith("doctor")]
    assert in_its_checks == [(1, "")] * 2
    assert all(said.count("\n") <= 1 and "long" in said for code, said in ended.values() if code)


def test_a_failure_that_was_caught_is_not_forgotten(tmp_path: Path) -> None:
    """As typer catches it while it finds out what kind of stream it has."""
    with Path("/dev/full").open("wb", buffering=0) as full:
        stream = io.TextIOWrapper(full, write_through=True)
        output = StandardOutput(stream)
        with pytest.raises(CommandError, match="No space left"):
            output.write("text")
        output.write("more")
        with pytest.raises(CommandError, match="No space left"):
            output.flush()
        with pytest.raises(TypeError):
            output.write(b"")  # type: ignore[arg-type]


def test_text_that_a_terminal_might_interpret_is_not_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert printable(HOSTILE) == "a?]0;b??31m??\u202e??c".replace("\u202e", "")
    assert render.pairs([("x", HOSTILE)]).isprintable()
    assert render.table(["X"], [[HOSTILE]]).count("\n") == 1
    monkeypatch.setattr("pygraphd.cli.commands.VERSION", HOSTILE)
    with pytest.raises(SystemExit):
        main(["--version"])
    assert "\x1b" not in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["cache", "explain", f"{tmp_path}\x1b[2J"])
    assert "\x1b" not in capsys.readouterr().err


@pytest.mark.parametrize("end", ["2>/dev/full", "2>&-", "2> >(:)"])
def test_an_error_that_cannot_be_said_changes_no_exit_code(commands: dict[str, int], end: str) -> None:
    shell = ["/bin/bash", "-c", f'"$@" {end}', "bash", sys.executable, "-m", "pygraphd"]

    done = subprocess.run(
        [*shell, "cache", "show", "abc"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False
    )

    assert done.returncode == 2


@pytest.mark.parametrize("end", ["full", "closed", "unread"])
def test_nor_does_it_that_of_any_command(commands: dict[str, int], tmp_path: Path, end: str) -> None:
    locate().log.unlink()
    new = tmp_path / "new.jsonl"
    expected = {
        "cache export NEW": 0,
        "cache export NEW --nonsense": 2,
        "cache prune": 2,
        "cache show abc": 2,
        "logs": 1,
        "config show": 0,
    }
    reader, unread = os.pipe()
    os.close(reader)

    with Path("/dev/full").open("w") as full, os.fdopen(unread, "w"):
        errors = {"full": full.fileno(), "closed": None, "unread": unread}[end]
        codes = {}
        for words in expected:
            codes[words] = _code(words.replace("NEW", str(new)).split(), 2, errors, Path(os.devnull))
            assert new.exists() is (words == "cache export NEW")
            new.unlink(missing_ok=True)

    assert codes == expected
