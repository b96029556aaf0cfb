"""The part of PyGraph that runs inside a training or serving process; see `hook` for where it begins."""
