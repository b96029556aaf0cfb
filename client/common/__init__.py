"""Holds what every room may use and what knows nothing of graphs."""
