"""The rules in real compilations without a GPU: what has two dimensions or more is taken to lie on one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support.placement.with_rules import with_rules

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch.fx import Graph, Node

    from pygraphd.client.common.report import Report


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

        request.getfixturevalue("monkeypatch").setattr(inputs, "FEW_SCALARS", 0)


@pytest.fixture
def standing_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the rules, once they are there, and Inductor take it that matrices lie on a GPU."""
    from torch._inductor.scheduler import Scheduler

    from pygraphd.client.placement import fx_utils

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(fx_utils, "is_on_gpu", _lies_elsewhere)
    monkeypatch.setattr(
        fx_utils, "is_on_cpu", lambda node: not _lies_elsewhere(node) and fx_utils.device(node) is not None
    )
    monkeypatch.setattr(Scheduler, "should_partition", _why_not_captured)


@pytest.fixture
def matrices_elsewhere(standing_in: None) -> Iterator[Report]:
    """Have the rules, and Inductor split graphs, as if matrices lay on a GPU; return what the rules report to."""
    with with_rules() as report:
        yield report


@pytest.fixture
def for_all_rules(standing_in: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have all of the rules find something to do, once they are there.

    Copies to the GPU are clones of what has one dimension, and constants of one dimension that are only added.
    """
    import torch

    from pygraphd.client.backend import torch_private
    from pygraphd.client.placement import fx_utils

    def make_copies(graph: Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default):
            if fx_utils.fake(node).dim() == 1:
                node.target, node.args, node.kwargs = fx_utils.COPY, (node.args[0], torch.device("cpu")), {}

        for node in list(graph.find_nodes(op="call_function", target=fx_utils.FRESH)):
            if fx_utils.fake(node).dim() == 1 and all(
                user.target is torch.ops.aten.add.Tensor for user in node.users
            ):
                with graph.inserting_after(node):
                    copy = graph.call_function(fx_utils.COPY, (node, torch.device("cpu")))
                copy.meta = dict(node.meta)
                node.replace_all_uses_with(copy, lambda user, copy=copy: user is not copy)

    def lies_elsewhere(node: Node) -> bool:
        return node.target is fx_utils.COPY or _lies_elsewhere(node)

    monkeypatch.setattr(fx_utils, "is_gpu", lambda device: True)
    monkeypatch.setattr(fx_utils, "is_on_gpu", lies_elsewhere)
    monkeypatch.setattr(
        fx_utils, "is_on_cpu", lambda node: not lies_elsewhere(node) and fx_utils.device(node) is not None
    )
    remove = torch_private.add_pass(make_copies, (__file__,))
    yield
    remove()
