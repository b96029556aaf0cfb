"""The rules in real compilations without a GPU: what has two dimensions or more is taken to lie on one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.client.placement.with_rules import with_rules

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch.fx import Node

    from pygraphd.client.report import Report


def _lies_elsewhere(node: Node) -> bool:
    import torch

    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() > 1


def _why_not_captured(_: Any, node: Any) -> str | None:
    """Say what Inductor would of a node that runs on the CPU, or of ours."""
    sizes = [output.node.maybe_get_size() for output in node.get_outputs()]
    return None if any(size is not None and len(size) > 1 for size in sizes) else "it has few numbers"


@pytest.fixture(autouse=True)
def for_a_few_numbers(request: pytest.FixtureRequest) -> None:
    """Have the rule for inputs apply to a few numbers, too, as its tests have no more."""
    if "torch" in request.keywords:
        from pygraphd.client.placement import inputs

        request.getfixturevalue("monkeypatch").setattr(inputs, "FEW_NUMBERS", 0)


@pytest.fixture
def matrices_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Report]:
    """Have the rules, and Inductor split graphs, as if matrices lay on a GPU; return what the rules report to."""
    from torch._inductor.scheduler import Scheduler

    from pygraphd.client.placement import nodes

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(nodes, "lies_elsewhere", _lies_elsewhere)
    monkeypatch.setattr(
        nodes, "is_on_cpu", lambda node: not _lies_elsewhere(node) and nodes.device(node) is not None
    )
    monkeypatch.setattr(Scheduler, "should_partition", _why_not_captured)
    with with_rules() as report:
        yield report
