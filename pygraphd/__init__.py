"""PyGraph: CUDA Graphs for torch.compile where they pay off and only there, with the answer remembered."""

from __future__ import annotations

from pygraphd.schema import version

__version__ = version.VERSION
__all__ = ["__version__", "disable", "enable"]


def enable() -> None:
    """Have PyGraph decide how every graph runs that `torch.compile` makes from now on, in this process."""
    from pygraphd.client import hook

    hook.enable()


def disable() -> None:
    """Leave what is compiled from now on to PyTorch; graphs that are compiled already stay as they are."""
    from pygraphd.client import hook

    hook.disable()
