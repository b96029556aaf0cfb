"""Wraps private torch and the CUDA driver; nothing else may name either."""
