"""Definitions that client and daemon share: keys, messages, reasons, the policy, file paths. Needs the standard library alone."""
