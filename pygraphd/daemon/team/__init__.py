"""The team tier: what daemons share through a PostgreSQL database. Only the daemon and `pygraphd team` talk to it.

`tier` is what the daemon uses; `worker` runs the thread that talks to PostgreSQL.
"""
