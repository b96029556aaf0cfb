"""PyGraph: CUDA Graphs for torch.compile where they pay off and only there, with the answer remembered."""

from __future__ import annotations

from pygraphd.schema import version

__version__ = version.VERSION
__all__ = ["__version__", "disable", "enable"]


def enable() -> None:
    """Switch PyGraph on in this process: it chooses the deployment of each graph that `torch.compile` makes from now on."""
    from pygraphd.client import hook

    hook.enable()


def disable() -> None:
    """Switch PyGraph off for graphs that are compiled from now on. Graphs that are compiled already stay as they are."""
    from pygraphd.client import hook

    hook.disable()
