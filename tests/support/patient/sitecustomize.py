"""Python imports this at its start where this folder is on the path: clients wait long for a daemon; see `patience.py`."""

from pygraphd.client.decisions.transport import Transport

Transport.__init__.__defaults__ = (60.0, 60.0)
