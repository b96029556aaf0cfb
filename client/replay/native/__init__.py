"""Contains the compiled helper: its sources in C, how it is built, and how it is called."""
