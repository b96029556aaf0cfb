"""Reads facts from the printed FX graph; imports no torch."""
