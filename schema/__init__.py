"""What client and daemon agree on: keys, messages, places and, for the daemon alone, tables."""
