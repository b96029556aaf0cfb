"""A user's program that loads the artifacts of PyTorch's caches from a file, if there is one, and saves them to another."""

import sys
from pathlib import Path

import torch

load, save = map(Path, sys.argv[1:])
if load.exists():
    loaded = torch.compiler.load_cache_artifacts(load.read_bytes())
    assert loaded is not None
    print(f"loaded {sorted(loaded.artifacts)}")
model = torch.compile(torch.nn.Linear(8, 8, bias=False))  # needs no C++ compiler
for _ in range(4):
    model(torch.ones(4, 8)).sum().backward()
saved = torch.compiler.save_cache_artifacts()
assert saved is not None
save.write_bytes(saved[0])
