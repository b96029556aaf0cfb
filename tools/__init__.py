"""Programs for those who work on PyGraph; none of them is installed."""
