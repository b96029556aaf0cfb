"""The part of PyGraph that runs inside a training or serving process; `hook` has its entry points."""
