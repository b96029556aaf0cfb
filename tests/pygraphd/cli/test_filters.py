"""Filters that match nothing: those that cannot, those that might, and what is said of the GPUs that there are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from pygraphd.daemon.store import Store
from tests.support.cli_command import locations, pygraphd

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pygraphd.schema.locations import Locations
    from pygraphd.schema.messages import RecordRequest

__all__ = ["locations"]  # a fixture

MODELS = "there are entries of NVIDIA A100, NVIDIA H200"
FEWER = "give fewer digits, or see: pygraphd cache inspect"
LISTINGS = [("inspect",), ("inspect", "--wide"), ("inspect", "--most", "1"), ("export", "-")]


@pytest.fixture(autouse=True)
def _without_shipped_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYGRAPHD_SHIPPED", "0")


@pytest.fixture
def filled(locations: Locations, make_request: Callable[..., RecordRequest]) -> Locations:
    with Store(locations.database) as store:
        store.record(make_request("a", "b"), uid=0)
        store.record(make_request("c", gpu="NVIDIA A100"), uid=0)
    return locations


@pytest.mark.parametrize("command", LISTINGS)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--gpu zzz", f"--gpu zzz; {MODELS}"),
        ("--graph 00000", f"--graph 00000; {FEWER}"),
        ("--gpu h200 --graph 00000", f"--gpu h200 --graph 00000; {FEWER} --gpu h200"),
        ("--gpu zzz --graph 00000", f"--gpu zzz --graph 00000; {MODELS}"),
    ],
)
@pytest.mark.usefixtures("filled")
def test_a_filter_that_matches_nothing_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str], command: tuple[str, ...], words: str, said: str
) -> None:
    assert pygraphd("cache", *command, *words.split()) == 2

    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", f"pygraphd: no entry matches {said}\n")


@pytest.mark.usefixtures("filled")
def test_json_of_nothing_is_valid(capsys: pytest.CaptureFixture[str]) -> None:
    assert pygraphd("cache", "inspect", "--gpu", "zzz", "--json") == 2

    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"schema": 1, "entries": []}
    assert printed.err == f"pygraphd: no entry matches --gpu zzz; {MODELS}\n"


@pytest.mark.parametrize("command", LISTINGS)
@pytest.mark.parametrize(
    ("option", "text", "said"),
    [
        ("--graph", "ZZ!", "--graph 'ZZ!': no id or graph begins so: each has 64 digits of 0-9 and a-f"),
        ("--graph", "a" * 65, "no id or graph begins so"),
        ("--gpu", "\x1b[2J", "--gpu: control characters are not allowed; give a part of a name"),
        ("--gpu", "x" * 300, "--gpu: 300 characters, at most 256 allowed"),
    ],
)
@pytest.mark.usefixtures("locations")
def test_a_filter_that_nothing_can_match_is_bad_input_also_without_a_cache(
    capsys: pytest.CaptureFixture[str], command: tuple[str, ...], option: str, text: str, said: str
) -> None:
    assert pygraphd("cache", *command, option, text) == 2

    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err
    assert "pygraphd cache inspect" in printed.err
    assert len(printed.err.splitlines()) == 1


@pytest.mark.parametrize("command", ["show", "explain", "delete"])
@pytest.mark.parametrize("key", ["zz", "a" * 65])
@pytest.mark.usefixtures("filled")
def test_an_id_that_none_can_be_is_told_apart_from_an_unknown_one(
    capsys: pytest.CaptureFixture[str], command: str, key: str
) -> None:
    assert pygraphd("cache", command, key) == 2
    assert "no id or graph begins so: each has 64 digits of 0-9 and a-f" in capsys.readouterr().err
    assert pygraphd("cache", command, "00000") == 2
    assert "no entry has an id or graph that begins so" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("--gpu", "h200"), ("--gpu", "H200", "--most", "1"), ()])
@pytest.mark.usefixtures("filled")
def test_a_filter_that_matches_lists_as_before(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert pygraphd("cache", "inspect", *words) == 0
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 1 + {0: 3, 2: 2, 4: 1}[len(words)]
    assert printed.err == ""


@pytest.mark.usefixtures("locations")
def test_without_a_cache_a_filter_says_that_there_are_no_entries(capsys: pytest.CaptureFixture[str]) -> None:
    assert pygraphd("cache", "inspect", "--gpu", "zzz") == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == (
        "",
        "pygraphd: no entry matches --gpu zzz; there are no entries yet: a program run by `pygraphd run` makes some\n",
    )


def test_an_empty_cache_is_no_error_without_a_filter(
    locations: Locations, capsys: pytest.CaptureFixture[str]
) -> None:
    Store(locations.database).close()
    assert pygraphd("cache", "inspect") == 0
    assert capsys.readouterr().out == "no entries\n"
    assert pygraphd("cache", "export", "-") == 0
    assert '"entries":0' in capsys.readouterr().out


@pytest.mark.usefixtures("filled")
def test_an_export_that_would_be_empty_makes_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "known.jsonl"
    assert pygraphd("cache", "export", str(file), "--gpu", "zzz") == 2
    assert capsys.readouterr().err == f"pygraphd: no entry matches --gpu zzz; {MODELS}\n"
    assert not file.exists()


def test_a_prune_names_the_gpus_that_there_are_but_is_no_error(
    filled: Locations, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in ((), ("--dry-run",), ("--json",), ("--older-than", "30d")):
        assert pygraphd("cache", "prune", "--gpu", "zzz", *words) == 0
        printed = capsys.readouterr()
        assert printed.err == f"pygraphd: no entry matches --gpu zzz; {MODELS}\n"
        assert printed.out
    # The GPU is known, and nothing is that old.
    assert pygraphd("cache", "prune", "--gpu", "h200", "--older-than", "30d") == 0
    assert capsys.readouterr().err == ""
    assert pygraphd("cache", "prune", "--gpu", "\x1b") == 2


def test_many_models_are_cut_off(
    locations: Locations, make_request: Callable[..., RecordRequest], capsys: pytest.CaptureFixture[str]
) -> None:
    with Store(locations.database) as store:
        for number in range(10):
            store.record(make_request("a", gpu=f"GPU {number}"), uid=0)

    assert pygraphd("cache", "inspect", "--gpu", "zzz") == 2
    assert capsys.readouterr().err.endswith("GPU 6, GPU 7 and 2 more\n")


@pytest.mark.usefixtures("filled")
def test_a_reader_that_is_gone_hears_nothing() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        command = [sys.executable, "-m", "pygraphd", "cache", "inspect", "--gpu", "zzz", "--json"]
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("inspect", "--gpu"),
        ("inspect", "--graph"),
        ("export -", "--gpu"),
        ("export -", "--graph"),
        ("prune", "--gpu"),
        ("prune --older-than 1s", "--gpu"),
        ("prune --older-than 1s --dry-run", "--gpu"),
    ],
)
def test_an_empty_filter_is_refused_and_selects_not_all(
    filled: Locations, capsys: pytest.CaptureFixture[str], command: str, option: str
) -> None:
    """As of a variable of the shell that is not set."""
    assert pygraphd("cache", *command.split(), option, "") == 2

    printed = capsys.readouterr()
    said = f"{option}: is empty, which would select all entries; give a text, or leave {option} out"
    assert (printed.out, printed.err) == ("", f"pygraphd: {said}\n")
    with Store(filled.database) as store:
        assert store.count_entries() == 3


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("cache show", "an ID is empty, which would name any entry"),
        ("cache delete", "an ID is empty, which would name any entry"),
        ("cache explain", "GRAPH is empty, which would name any graph"),
        ("cache export", "FILE is empty; give the name of a file, or - for a pipe"),
        ("cache import", "FILE is empty; give the name of a file, or - for a pipe"),
        ("report", "the name of the summary is empty; give a file, a pid or 'last'"),
    ],
)
@pytest.mark.usefixtures("filled")
def test_an_empty_argument_is_refused(capsys: pytest.CaptureFixture[str], command: str, said: str) -> None:
    assert pygraphd(*command.split(), "") == 2

    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"pygraphd: {said}")


@pytest.mark.parametrize("words", [(), ("--gpu", "A100"), ("--dry-run",), ("--gpu", "A100", "--dry-run")])
@pytest.mark.parametrize(
    ("age", "said"),
    [
        ("0s", "every entry is older than that; name an age, as 30d, or leave it out and name a GPU. All"),
        ("0", "every entry is older than that; name an age, as 30d, or leave it out and name a GPU. All"),
        ("9999w", "no entry is that old; name an age below a century, as 30d\n"),
    ],
)
def test_an_age_that_selects_all_or_none_is_refused(
    filled: Locations, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], age: str, said: str
) -> None:
    assert pygraphd("cache", "prune", "--older-than", age, *words) == 2
    assert capsys.readouterr().err.startswith(f"pygraphd: --older-than {age}: {said}")
    with Store(filled.database) as store:
        assert store.count_entries() == 3
