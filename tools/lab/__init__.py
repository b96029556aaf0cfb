"""Measurements for those who work on PyGraph, on machines that are lent for minutes: `python -m tools.lab`, from the repository root.

`benchmarks/` holds what a user runs and knows nothing of this package.
"""
