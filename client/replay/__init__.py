"""Launches a recording on any addresses: the hot path, which imports nothing that decides."""
