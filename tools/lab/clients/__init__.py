"""`python -m benchmarks clients`: the programs in `examples/clients`, plainly and with PyGraph, each in a process of its own."""
