"""Time, memory and correctness of PyGraph beside plain PyTorch: `python -m benchmarks`; see docs/benchmarks.md.

Not part of the installed package. Only `regions` and `lookup` import PyGraph; everything else uses its environment variables and commands.
"""
