"""Gets PyGraph into a program, and owns the state of the process."""
