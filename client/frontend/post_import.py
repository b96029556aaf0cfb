"""Calls a function once when a module is first imported, so that no heavy module is imported only to be patched."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


def when_imported(name: str, action: Callable[[], None]) -> Callable[[], None]:
    """Call `action` after module `name` is imported, or at once if it was; return a function that cancels this."""
    if name in sys.modules:
        action()
        return lambda: None
    finder = _Finder(name, action)
    sys.meta_path.insert(0, finder)
    return finder.remove


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module through all other finders, and has the action called after the module has run."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name = name
        self._action = action
        self._asking_others = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self._asking_others:
            return None
        self._asking_others = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking_others = False
        if spec is not None and spec.loader is not None:
            self._extend(spec.loader)
        return spec

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def _extend(self, loader: importlib.abc.Loader) -> None:
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return  # an importer of an older kind

        def execute_and_act(module: ModuleType) -> None:
            execute(module)
            self.remove()
            self._action()

        # On the instance, so that everything else about the loader (its source, its resources) stays as it is.
        with contextlib.suppress(AttributeError, TypeError):  # who has a loader of his own does without us
            loader.exec_module = execute_and_act  # type: ignore[method-assign]
