"""What client and daemon agree on: keys, messages, reasons, the policy, and the paths of files. Needs the standard library alone."""
