"""`python -m pygraphd`: the same as the `pygraphd` command, for when it is not on the PATH."""

from __future__ import annotations

from pygraphd.cli import main

if __name__ == "__main__":
    main()
