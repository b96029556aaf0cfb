"""How fast, how large and how right PyGraph is beside PyTorch's own ways: `python -m benchmarks`; see docs/benchmarks.md.

Not part of the installed package. The product is used as a black box, through its environment variables and commands only.
"""
