"""`python -m tools.load`, from the repository root."""

from __future__ import annotations

import sys

from tools.load.cli import main

sys.exit(main())
