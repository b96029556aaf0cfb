"""Reaches the store of the default process group, and the groups of collectives."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def default_store() -> Any:
    """Return the store of the default process group, which must be there."""
    return _c10d()._get_default_store()


def group_on_gpus(name: str) -> tuple[int, int, float, str]:
    """Return the lowest global rank of a process group, its size, its timeout in seconds, and the class that serves it on GPUs. Raises errors of c10d."""
    group = _c10d()._resolve_process_group(name)
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL this is a wrapper, in which ranks check each other's collectives.
    backend = group._get_backend(torch.device("cuda"))
    lowest = min(torch.distributed.get_process_group_ranks(group))
    return lowest, backend.size(), backend.options._timeout.total_seconds(), type(backend).__name__


def before_groups_end(action: Callable[[str | None], object]) -> Callable[[], None]:
    """Have `action` be called before a process group shuts down or is aborted; return a function that undoes that.

    It gets the name of the group, or None if all groups end: with the default group, or with one whose name is not known.
    `destroy_process_group` itself may have been imported by name already.
    """
    group = torch.distributed.ProcessGroup
    # `destroy_process_group` goes through these; 2.13, for one, has no `_shutdown_backend`.
    owners = [(group, "shutdown"), (group, "abort"), (_c10d(), "_shutdown_backend")]
    undo = [_before(owner, name, action) for owner, name in owners if hasattr(owner, name)]

    def stop() -> None:
        for each in undo:
            each()

    return stop


def _before(owner: Any, name: str, action: Callable[[str | None], object]) -> Callable[[], None]:
    original, before = getattr(owner, name), vars(owner)[name]

    @functools.wraps(original)
    def hooked(*arguments: Any, **named: Any) -> Any:
        # All of these take the group first.
        action(_name_of(next(iter((*arguments, *named.values())), None)))
        return original(*arguments, **named)

    setattr(owner, name, hooked)
    return lambda: setattr(owner, name, before)


def _name_of(group: Any) -> str | None:
    """Return the name by which graphs refer to a process group; None if it is the default group, or has no name."""
    try:
        return None if group is torch.distributed.group.WORLD else str(group.group_name)
    except Exception:  # noqa: BLE001 - a program may have a class of its own, and its group is to end all the same
        return None


def _c10d() -> Any:
    # Imported on use: a torch may be built without `torch.distributed`.
    return importlib.import_module("torch.distributed.distributed_c10d")
