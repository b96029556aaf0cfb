"""Decides which callable runs each partition of a compiled graph."""
