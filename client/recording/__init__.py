"""Turns one call of a partition into a verified, relocatable CUDA graph."""
