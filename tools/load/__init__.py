"""Loads that only those who work on the daemon apply to it: `python -m tools.load`, from the repository root."""

from __future__ import annotations
