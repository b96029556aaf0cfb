"""Adds to the artifacts that `torch.compiler.save_cache_artifacts` returns."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

from pygraphd.client.backend.torch_private.requirements import missing_for

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Add = Callable[[Mapping[str, object]], None]


def add_to_artifacts(before_saving: Callable[[Add], None]) -> Callable[[], None]:
    """Call `before_saving(add)` whenever artifacts are saved; return a function that ends this. Raises RuntimeError if torch lacks names.

    `add` takes JSON objects by key. They go as type "autotune", which every torch knows: loading an artifact writes its object to the
    file that its key names in Inductor's cache folder. Where a type is not known, nothing at all is loaded.
    """
    if reason := missing_for("artifacts"):
        raise RuntimeError(reason)
    manager: Any = importlib.import_module("torch.compiler._cache").CacheArtifactManager
    serialize, theirs = manager.serialize, vars(manager)["serialize"]
    seen = manager._seen_artifacts

    def hooked(cls: Any) -> Any:
        if (
            cls._seen_artifacts is seen
        ):  # else those of one graph are being saved, as `standalone_compile` does
            before_saving(functools.partial(_add, cls))
        return serialize()

    def remove() -> None:
        if vars(manager)["serialize"] is ours:
            manager.serialize = theirs

    ours = manager.serialize = classmethod(hooked)
    return remove


def _add(manager: Any, contents: Mapping[str, object]) -> None:
    kind = "autotune"
    for key, content in contents.items():
        manager.record_artifact(kind, key, content)
    if contents and manager._new_cache_artifacts.get(kind):
        # Of two lists of a type, as two saves leave them, a load takes the second alone. So that one has to have all.
        manager._new_cache_artifacts[kind] = [each for each in manager._seen_artifacts if each.type() == kind]
