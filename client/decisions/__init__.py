"""Decisions of earlier runs: looked up, trusted or rejected, leased and recorded; and agreement between ranks."""
