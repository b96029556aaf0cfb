"""A summary is read as its program wrote it, and any other file is refused with what it is."""

from __future__ import annotations

import copy
import json
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pygraphd.cli import summaries
from pygraphd.errors import Exit, UsageError
from pygraphd.schema.keys import Environment
from pygraphd.schema.messages import Deployment, Kind
from pygraphd.schema.reasons import Reason, ReasonCode
from pygraphd.schema.summary import Deployed, Source

if TYPE_CHECKING:
    from collections.abc import Callable

ENVIRONMENT = Environment("NVIDIA H200", "9.0", 132, 143771, "", "2.13.0", "3.5", "13.0", "580.1", "91400")
KEY = ENVIRONMENT.digest()
DECISION = {
    "graph": "a" * 64, "kind": "forward", "environment": KEY, "deployment": "GRAPH", "reason": {"code": "faster"},
    "final": True, "source": "measured",
}  # fmt: skip
SUMMARY = {
    "schema": 2,
    "graphs": 1,
    "environments": {KEY: ENVIRONMENT.factors()},
    "decisions": [DECISION],
    "decisions_left_out": 3,
}


def test_a_summary_is_read(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text(json.dumps(SUMMARY))

    summary = summaries.read_summary(path)

    assert summary.environments == {KEY: ENVIRONMENT}
    ran = Deployed(
        "a" * 64, Kind.FORWARD, KEY, Deployment.GRAPH, Reason(ReasonCode.FASTER), True, Source.MEASURED
    )
    assert (summary.decisions, summary.left_out) == ((ran,), 3)
    assert summary.notes == {name: {} for name in summaries.NOTES}  # of an older version


def test_it_says_why_a_stored_decision_was_not_used(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text(changed(decisions=[DECISION | {"because": {"code": "refresh_asked"}}, DECISION]))

    decisions = summaries.read_summary(path).decisions

    assert [each.because for each in decisions] == [Reason(ReasonCode.REFRESH_ASKED), None]


def test_what_it_says_beside_its_graphs_is_read_as_a_terminal_may_show_it(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text(
        changed(graph_breaks={"print (a.py:1)": 2}, failures={"no\x1b[2Jfile": 1, "no\x07[2Jfile": 3})
    )

    notes = summaries.read_summary(path).notes

    assert (notes["graph_breaks"], notes["failures"]) == ({"print (a.py:1)": 2}, {"no?[2Jfile": 4})


def changed(**changes: Any) -> str:
    value = copy.deepcopy(SUMMARY)
    for name, change in changes.items():
        value[name] = change
    return json.dumps(value)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "it is empty"),
        (" \n", "it is empty"),
        ("# PyGraph", "it is another file, or only a part of one; "),
        ("{\xff}", "it is another file"),
        ("[" * 100_000, "it is another file"),
        ("[]", "expected an object with schema 2"),
        ('{"schema": 1}', "expected an object with schema 2"),
        ('{"schema": 2, "graphs": 3}', "it lists no decisions"),
        (changed(environments={}), f"the environment {KEY} is missing"),
        (changed(environments={KEY: {"gpu": "x"}}), "capability is missing"),
        (changed(decisions=[1]), "expected an object, got int"),
        (changed(decisions=[DECISION | {"source": "hearsay"}]), "expected one of cache, measured"),
        (
            changed(decisions=[DECISION | {"reason": "GRAPH is faster"}]),
            "reason: expected an object, got str",
        ),
        (
            changed(decisions=[DECISION | {"reason": {"code": "other", "detail": "\x1b[2J"}}]),
            "detail: control characters",
        ),
        (changed(decisions=[DECISION | {"reason": {"code": 1}}]), "code: expected one of"),
        (changed(decisions=[DECISION | {"because": 1}]), "because: expected an object, got int"),
        (changed(decisions=[DECISION | {"graph": "a"}]), "graph: expected 64 hex digits"),
        (changed(decisions_left_out=-1), "decisions_left_out: -1 is outside"),
        (changed(graph_breaks=[]), "graph_breaks: expected an object"),
        (changed(left_on_cpu={"why": "often"}), "left_on_cpu: expected an integer"),
    ],
    ids=lambda value: value[:30] if len(value) < 60 else "",
)
def test_another_file_is_refused_with_a_reason(tmp_path: Path, content: str, problem: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content.encode("latin-1"))

    with pytest.raises(UsageError, match=f"{path}: is not a summary: .*{problem}") as caught:
        summaries.read_summary(path)

    assert caught.value.exit_code == Exit.USAGE
    assert str(caught.value).endswith(f"; {summaries.HOW}")
    assert "PYGRAPH_SUMMARY=FILE" in summaries.HOW


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summaries, "MAX_SUMMARY_BYTES", 10)
    (tmp_path / "file").write_text(json.dumps(SUMMARY))

    with pytest.raises(UsageError, match="more than 10 bytes"):
        summaries.read_summary(tmp_path / "file")


def test_what_vanishes_before_it_is_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        summaries.read_summary(tmp_path / "gone")


def test_only_a_file_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")

    assert summaries.is_file(str(tmp_path / "file"))
    assert summaries.is_file("link")
    for word in (str(tmp_path / "none"), "", "a" * 5000, "a\0b", "file/none"):
        assert not summaries.is_file(word)


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


MAKERS: dict[str, Callable[[Path], object]] = {
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
    "a socket": a_socket,
    "a device": lambda path: path.symlink_to("/dev/null"),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_what_is_no_file_is_said_to_be_none_and_hides_no_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path has to be short
    for name in ("it", "ab12"):
        MAKERS[kind](Path(name))

    with pytest.raises(UsageError, match=f"^it: is {kind}, not a summary; {summaries.HOW}") as caught:
        summaries.is_file("it")
    assert caught.value.exit_code == Exit.USAGE
    assert not summaries.is_file("ab12")
    with pytest.raises(UsageError):
        summaries.is_file("./ab12")
