"""Has the ranks of a process group agree on decisions."""
