"""Inputs are copied for as long as any part may be launched, and whatever is put in place meanwhile."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from pygraphd.client import _torch
from pygraphd.client.aligning import Alignment

pytestmark = pytest.mark.torch


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what is read and set of a graph in one piece; copying shows in the result."""
    monkeypatch.setattr(_torch, "aligned", lambda compiled, run: lambda inputs: ["copied", *run(inputs)])
    runner = SimpleNamespace(partitions=None)
    return SimpleNamespace(current_callable=lambda inputs: ["captured"], compiled_fn_runner=runner)


def runs(compiled: Any) -> list[str]:
    result: list[str] = compiled.current_callable([])
    return result


ENDS = {"begin": "end", "begin_look": "end_look"}


@pytest.mark.parametrize("order", set(itertools.permutations(["begin", "begin_look", "begin_look"])))
@pytest.mark.parametrize("ending", set(itertools.permutations(["end", "end_look", "end_look"])))
def test_inputs_are_copied_until_the_last_one_ends(
    compiled: Any, order: tuple[str, ...], ending: tuple[str, ...]
) -> None:
    alignment, before = Alignment(), compiled.current_callable
    for name in order:
        getattr(alignment, name)(*[compiled] * (name != "begin"))
    assert runs(compiled) == ["copied", "captured"]

    for name in ending[:-1]:
        getattr(alignment, name)(compiled)
        assert runs(compiled) == ["copied", "captured"]
    getattr(alignment, ending[-1])(compiled)

    assert compiled.current_callable is before


def test_where_a_part_is_launched_for_good_inputs_are_copied_for_good(compiled: Any) -> None:
    alignment = Alignment()
    alignment.begin_look(compiled)
    alignment.launches = True
    alignment.end_look(compiled)
    alignment.begin_look(compiled)
    alignment.end_look(compiled)

    assert runs(compiled) == ["copied", "captured"]


def test_what_takes_the_place_of_another_is_given_copies_as_well(compiled: Any) -> None:
    alignment, before = Alignment(), compiled.current_callable
    alignment.begin_look(compiled)

    def other(inputs: Any) -> list[str]:
        return ["other"]

    assert not alignment.replaced(compiled, other, before)
    assert alignment.replaced(compiled, before, other)
    assert runs(compiled) == ["copied", "other"]
    alignment.end_look(compiled)
    assert compiled.current_callable is other


def test_what_is_gone_or_not_complete_yet_is_left_alone() -> None:
    alignment = Alignment()
    alignment.begin()
    alignment.begin_look(None)
    assert not alignment.replaced(None, 1, 2)
    alignment.end_look(None)
    alignment.end(None)

    assert alignment.undecided == 0


def test_a_copying_that_cannot_be_had_leaves_all_as_it_was(
    compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise AttributeError("torch has changed")

    alignment, before = Alignment(), compiled.current_callable
    with monkeypatch.context() as broken:
        broken.setattr(_torch, "aligned", fail)
        with pytest.raises(AttributeError):
            alignment.begin_look(compiled)

    alignment.begin()
    alignment.end(compiled)
    assert compiled.current_callable is before
