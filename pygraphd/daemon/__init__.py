"""The daemon: one process for each user and host that keeps measurements and decisions in SQLite and serves them."""
