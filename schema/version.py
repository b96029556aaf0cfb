"""The version of client and daemon, which are released together."""

from __future__ import annotations

VERSION = "0.1.0"
