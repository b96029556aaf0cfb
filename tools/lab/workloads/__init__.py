"""Workloads with one property each, beside those of benchmarks/workloads."""
