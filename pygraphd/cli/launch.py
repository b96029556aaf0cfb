"""`pygraphd run script.py`: the same Python, with PyGraph switched on. No daemon is needed and none is started."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pygraphd.cli.summary_files import variable_for
from pygraphd.errors import UsageError
from pygraphd.schema.locations import locate

if TYPE_CHECKING:
    from collections.abc import Sequence


def launch(arguments: Sequence[str]) -> NoReturn:
    """Replace this process by `python ARGUMENTS`, one leading "--" taken off; raises UsageError.

    Unless PYGRAPH_SUMMARY is set, the summary is left where `pygraphd report` and `pygraphd doctor` find it.
    """
    arguments = list(arguments[1:] if arguments[:1] == ["--"] else arguments)
    if not arguments:
        raise UsageError("run: which script? For example: pygraphd run train.py --epochs 3")
    if problem := _why_not_runnable(arguments[0]):
        raise UsageError(problem)
    kept = variable_for(arguments[0], locate(), os.environ)
    os.execvpe(sys.executable, [sys.executable, *arguments], {**os.environ, **kept, "PYGRAPH": "1"})


def _why_not_runnable(script: str) -> str | None:
    # Python's own options (-m, -c, -) are for Python to judge.
    if script.startswith("-") or Path(script).exists():
        return None
    return f"run: {script}: no such file"
