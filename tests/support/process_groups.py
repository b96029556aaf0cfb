"""Process groups of which this process is the first rank, and the others are nowhere."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist

from pygraphd.client.backend import torch_private
from pygraphd.client.decisions.ranks.process_group import GRAPH_REGISTER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def init() -> Iterator[Callable[[dist.Store], None]]:
    """Return what makes a group of two ranks of which this process is the first, and the second nowhere."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")

    def start(store: dist.Store, ranks: int = 2) -> None:
        dist.init_process_group("fake", store=store, rank=0, world_size=ranks)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def nccl(init: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Have a group whose collectives NCCL seems to serve, with settings under which they can be captured; return what it seems to be."""
    init(dist.HashStore())
    group = {"lowest": 0, "size": 2, "timeout_s": 600.0, "kind": "ProcessGroupNCCL"}
    monkeypatch.setattr(torch_private, "group_on_gpus", lambda _: tuple(group.values()))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    monkeypatch.setenv(GRAPH_REGISTER, "0")
    for name in ("NCCL_NVLS_ENABLE", "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"):
        monkeypatch.delenv(name, raising=False)
    return group
