"""Copies the pinned distributions of this environment into another one, which pip then need not install a second time.

`copy_pinned.py FOLDER FILE...` takes those that requirement files name, and PyTorch, into a folder of packages. Others, such as those that
only tests need, stay behind. Scripts do too.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import sys
from pathlib import Path

PIN = re.compile(r"^([\w.-]+)==", re.MULTILINE)


def copy(name: str, folder: Path) -> None:
    for file in importlib.metadata.distribution(name).files or ():
        target = folder / file
        if ".." in file.parts or target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(file.locate(), target)
        except OSError:  # on another file system
            shutil.copy2(file.locate(), target)


if __name__ == "__main__":
    where, *files = map(Path, sys.argv[1:])
    for pinned in ("torch", *(name for file in files for name in PIN.findall(file.read_text()))):
        copy(pinned, where)
