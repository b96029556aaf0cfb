"""`python -m benchmarks`, from the repository root."""

from __future__ import annotations

import sys

from benchmarks.cli import OF_THE_LAB

if sys.argv[1:2] and sys.argv[1] in OF_THE_LAB:
    # They deal processes to GPUs with the lab's tools, which no other module here imports.
    from tools.lab.cli import main
else:
    from benchmarks.cli import main

sys.exit(main())
