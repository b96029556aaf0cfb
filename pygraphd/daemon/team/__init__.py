"""The team tier: decisions that daemons share through a PostgreSQL database. Only the daemon and `pygraphd team` talk to it.

`tier` is the interface for the daemon; `worker` runs the thread that talks to PostgreSQL.
"""
