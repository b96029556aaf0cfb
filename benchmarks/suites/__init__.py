"""The models of PyTorch's performance dashboard as workloads: HuggingFace, TIMM and TorchBench."""

from __future__ import annotations
