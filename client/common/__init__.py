"""Parts that every room may use: the report, logs, guards, back-offs and bounded dicts."""
