"""An action runs once, after the module, and the module is what it would have been."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING

import pytest

from pygraphd.client.frontend.post_import import when_imported

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "late_module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "late_module", raising=False)
    return "late_module"


def test_the_action_runs_after_the_first_import_only(module: str) -> None:
    seen: list[int] = []
    finders = list(sys.meta_path)
    when_imported(module, lambda: seen.append(sys.modules[module].value))
    assert seen == []

    imported = importlib.import_module(module)
    importlib.import_module(module)

    assert seen == [1]
    assert sys.meta_path == finders
    assert imported.__loader__ is imported.__spec__.loader  # type: ignore[union-attr]


def test_the_action_runs_at_once_if_the_module_is_there(module: str) -> None:
    importlib.import_module(module)
    seen: list[int] = []

    when_imported(module, lambda: seen.append(1))

    assert seen == [1]


def test_it_can_be_called_off(module: str) -> None:
    seen: list[int] = []
    finders = list(sys.meta_path)

    when_imported(module, lambda: seen.append(1))()
    importlib.import_module(module)

    assert (seen, sys.meta_path) == ([], finders)


def test_a_mere_look_for_the_module_does_not_use_it_up(module: str) -> None:
    seen: list[int] = []
    when_imported(module, lambda: seen.append(1))

    assert importlib.util.find_spec(module) is not None
    importlib.import_module(module)

    assert seen == [1]


def test_an_import_that_failed_may_be_tried_again(module: str, tmp_path: Path) -> None:
    seen: list[int] = []
    (tmp_path / "late_module.py").write_text("raise ImportError('not yet')\n")
    when_imported(module, lambda: seen.append(1))
    with pytest.raises(ImportError):
        importlib.import_module(module)
    (tmp_path / "late_module.py").write_text("value = 2  # now it works, and is longer\n")
    importlib.invalidate_caches()
    importlib.import_module(module)

    assert seen == [1]


def test_other_modules_are_left_alone(module: str) -> None:
    call_off = when_imported("no_such_module_at_all", lambda: None)

    assert importlib.import_module(module).value == 1
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_module_at_all")
    call_off()
