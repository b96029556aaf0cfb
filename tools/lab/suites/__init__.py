"""Measures the models of `benchmarks.suites` in pieces, side by side, and sums them up as PyTorch's performance dashboard does."""

from __future__ import annotations
