"""For all tests: an example may take as long as it takes. On a machine that others use, too, its time says nothing; pytest has a limit."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("pygraph", deadline=None)
settings.load_profile("pygraph")
