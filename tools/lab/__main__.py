"""`python -m tools.lab`, from the repository root."""

from __future__ import annotations

import sys

from tools.lab.cli import main

sys.exit(main())
