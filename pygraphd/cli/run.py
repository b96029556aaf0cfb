"""`pygraphd run script.py`: the same Python, with PyGraph switched on. No daemon is needed and none is started."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pygraphd.cli.summary_files import variable_for
from pygraphd.errors import UsageError
from pygraphd.schema.locations import locate

if TYPE_CHECKING:
    from collections.abc import Sequence


_STDIN = "-"
_WITH_VALUE = re.compile(r"-(?:[^-cmWX][^cmWX]*)?([cmWX])(.*)", re.DOTALL)
"""An option of Python's that takes the rest of its word, or else the next word; others without a value may come before it."""
# The only long option of Python's that takes a value.
_LONG_WITH_VALUE = "--check-hash-based-pycs"


def run_program(arguments: Sequence[str]) -> NoReturn:
    """Replace this process by `python ARGUMENTS`, one leading "--" taken off; raises UsageError.

    Unless PYGRAPH_SUMMARY is set, the summary is left where `pygraphd report` and `pygraphd doctor` find it.
    """
    arguments = list(arguments[1:] if arguments[:1] == ["--"] else arguments)
    if not arguments:
        raise UsageError("run: which script? For example: pygraphd run train.py --epochs 3")
    name, is_script = program_of(arguments)
    if is_script and not Path(name).exists():
        raise UsageError(f"run: {name}: no such file; give the path of a script, or -m MODULE")
    # The folder of summaries is for its owner alone, whatever the user's umask is.
    umask = os.umask(0o077)
    kept = variable_for(name, locate(), os.environ)
    os.umask(umask)  # the script's is the user's
    # An exec keeps the pid, which is in the name of the summary.
    os.execvpe(sys.executable, [sys.executable, *arguments], {**os.environ, **kept, "PYGRAPH": "1"})


def program_of(words: Sequence[str]) -> tuple[str, bool]:
    """Return the name of the program that Python runs for some words, and whether it is a script.

    Otherwise it is a module, "-c" for one in the words, or "-" for one that is read from standard input.
    """
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "--":
            word = left[0] if left else _STDIN
            return word, word != _STDIN
        if word == _STDIN or not word.startswith("-"):
            return word, word != _STDIN
        if found := _WITH_VALUE.fullmatch(word):
            letter, value = found[1], found[2] or (left.pop(0) if left else "")
            if letter in "cm":
                return ("-c" if letter == "c" else value or _STDIN), False
        elif word == _LONG_WITH_VALUE:
            del left[:1]
    return _STDIN, False
