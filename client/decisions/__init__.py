"""Knows what was decided before, whether to believe it, and who is to find it out."""
