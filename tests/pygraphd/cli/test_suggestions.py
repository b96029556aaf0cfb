"""What is said of a command or an option that there is none of."""

from __future__ import annotations

import pytest

from tests.support.cli_command import pygraphd


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("inspct", "pygraphd cache inspect"),
        ("inspect --gpu x", "pygraphd cache inspect"),
        ("cache inpsect", "pygraphd cache inspect"),
        ("cach inspect", "pygraphd cache"),
        ("cache stats", "pygraphd stats"),
        ("show", "pygraphd cache show, pygraphd config show"),
        ("config show_", "pygraphd config show, pygraphd cache show"),
        ("strat", "pygraphd start"),
        ("team int", "pygraphd team init"),
    ],
)
def test_a_command_that_is_spelled_alike_is_named(
    capsys: pytest.CaptureFixture[str], words: str, meant: str
) -> None:
    assert pygraphd(*words.split()) == 2
    assert meant in capsys.readouterr().err.partition("Did you mean: ")[2]


@pytest.mark.parametrize("words", ["xyzzy", "cache xyzzy"])
def test_where_nothing_is_alike_nothing_is_named(capsys: pytest.CaptureFixture[str], words: str) -> None:
    assert pygraphd(*words.split()) == 2
    assert capsys.readouterr().err.endswith("Error: No such command 'xyzzy'.\n")


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("cache inspect --graf x", "--graph"),
        ("start --foregroud", "--foreground"),
        ("--versoin", "--version"),
    ],
)
def test_an_option_that_is_spelled_alike_is_named(
    capsys: pytest.CaptureFixture[str], words: str, meant: str
) -> None:
    """This is the library's own doing, and might end with a version of it."""
    assert pygraphd(*words.split()) == 2
    assert meant in capsys.readouterr().err.partition("No such option: ")[2]
