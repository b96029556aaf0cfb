"""A C++ compiler that makes nothing twice, `remember.py ARGUMENT...`: the tests compile the same kernels again and again.

What is asked for is told by the arguments and by what the source contains, wherever it lies; headers must stay as they are,
so whoever starts it names a new folder. Without one, and whatever is no single source, it is the compiler itself.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

COMPILER = os.environ.get("REMEMBERED_COMPILER", "g++")
FOLDER = os.environ.get("REMEMBERED_COMPILATIONS")
SOURCES = (".cpp", ".hpp")


def place_of_output(arguments: list[str]) -> int | None:
    """Return where the name of the one file stands that is made of one source; None: it is asked for something else."""
    sources = [argument for argument in arguments if argument.endswith(SOURCES)]
    lists_headers = any(
        argument.startswith("-M") for argument in arguments
    )  # in a file of its own, for ninja
    is_one = "-o" in arguments[:-1] and len(sources) == 1 and not lists_headers
    return arguments.index("-o") + 1 if is_one else None


def question(arguments: list[str], output: int) -> str:
    """Return a digest of what is asked for, whatever the names of source and output."""
    asked = hashlib.sha256(COMPILER.encode())
    for place, argument in enumerate(arguments):
        is_source = argument.endswith(SOURCES)
        said = Path(argument).read_bytes() if is_source else b"" if place == output else argument.encode()
        asked.update(b"%d %d " % (is_source, len(said)) + said)
    return asked.hexdigest()


def compiled(arguments: list[str]) -> int:
    """Compile, and return the compiler's code."""
    # A third of a kernel's time is linking, of which this linker takes half; not everywhere does it find all libraries.
    if "-shared" in arguments and shutil.which("ld.gold"):
        by_gold = subprocess.run([COMPILER, "-fuse-ld=gold", *arguments], capture_output=True, check=False)
        if by_gold.returncode == 0:
            return 0
    return subprocess.call([COMPILER, *arguments])


def copy(source: Path, target: Path) -> None:
    """Put a copy where nobody ever sees half of one."""
    unfinished = target.with_name(f"{target.name}.{os.getpid()}")
    unfinished.write_bytes(source.read_bytes())
    unfinished.chmod(source.stat().st_mode)
    unfinished.replace(target)


def main(arguments: list[str]) -> int:
    """Answer from memory, or else compile and remember."""
    output = place_of_output(arguments)
    if FOLDER is None or output is None:
        os.execvp(COMPILER, [COMPILER, *arguments])
    made, remembered = Path(arguments[output]), Path(FOLDER) / question(arguments, output)
    if remembered.exists():
        copy(remembered, made)
        return 0
    code = compiled(arguments)
    if code == 0:
        copy(made, remembered)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
