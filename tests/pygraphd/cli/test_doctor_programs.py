"""The doctor finds each pattern in the summary that a process wrote, with Dynamo's own words for graph breaks. The GPU is emulated."""

# ruff: noqa: F811 - fixtures of another file
from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pygraphd.cli.doctor_patterns import Finding, findings
from pygraphd.cli.summaries import read_summary
from pygraphd.client.dispatch import shapes
from tests.support.compiled import (  # noqa: F401 - fixtures
    REFUSING,
    Compiled,
    compile_once,
    compile_whole,
    default_mode,
    relocating,
    session,
)

if TYPE_CHECKING:
    from pygraphd.client.frontend.runtime import Runtime

pytestmark = pytest.mark.torch

SIZED = 'def forward(self, arg0_1: "Sym(s77)", arg1_1):\n  a = torch.ops.aten.sin.default(b)'
CUSTOM = "  # File: model.py:7 in forward, code: x = rope(x)\n  c = torch.ops.mine.rope.default(a)"
BETWEEN = "class Runner:\n    def call(self, args):\n        torch.ops.mine.rope.default(a)\n"


@pytest.fixture(autouse=True)
def _no_breaks_before() -> None:
    torch._dynamo.reset()


def found_in(session: Runtime, file: Path) -> dict[str, Finding]:
    """Close a session, and return the patterns in its summary by name."""
    session.close()
    file.write_text(json.dumps(session.report.summary()))
    made = {each.name: each for each in findings(read_summary(file))}
    assert all(each.remedy for each in made.values())
    return made


def reads(x: torch.Tensor) -> Any:
    y = x.sum().item()
    if x.sum() > 0:
        x = x + 1
    some = x.nonzero()
    print("a line")  # noqa: T201
    return x * y + some.sum()


def test_host_reads_are_told_from_other_graph_breaks_each_with_its_line(
    session: Runtime, tmp_path: Path
) -> None:
    torch.compile(reads, backend="eager")(torch.ones(3))

    found = found_in(session, tmp_path / "summary.json")

    first = reads.__code__.co_firstlineno
    lines = {
        name: {int(text.rpartition(":")[2].rstrip(")")) - first for text, _ in each.seen}
        for name, each in found.items()
    }
    assert lines == {"host reads": {1, 2, 4}, "graph breaks": {5}}
    assert any(text.startswith("branch on the value of a tensor (") for text, _ in found["host reads"].seen)
    assert all(Path(__file__).name in text for each in found.values() for text, _ in each.seen)


@pytest.mark.usefixtures("default_mode")
def test_operators_and_devices_have_theirs(session: Runtime, tmp_path: Path) -> None:
    whole: dict[str, Any] = {"backward": False, "box": None}
    compile_whole(session, **whole, inductor_post_grad_graph_str=CUSTOM)
    compile_whole(session, **whole, device_types={"cpu"}, device_idxs=set())
    compile_whole(session, **whole, device_types={"cpu", "cuda"})
    split = Compiled(2)
    split.inductor_post_grad_graph_str, split.source_code = CUSTOM, BETWEEN
    kwargs = {"is_backward": False, "cudagraphs": False, "boxed_forward_device_index": None}
    plan = session.compiled_graph(split, kwargs)
    assert plan is not None
    plan.complete(split)

    found = found_in(session, tmp_path / "summary.json")

    operators = [text for text, _ in found["unvouched operators"].seen]
    assert "mine::rope" in operators  # it runs between the parts, which are graphs
    assert any("custom operators" in text and "(model.py:7 in forward)" in text for text in operators)
    assert len(found["CPU tensors"].seen) == 2


def test_sizes_are_a_pattern_only_if_they_do_not_come_back(session: Runtime, tmp_path: Path) -> None:
    def sizes_of(found: dict[str, Finding]) -> set[str]:
        return {text for each in found.values() if "sizes" in each.name for text, _ in each.seen}

    x = torch.ones(1)
    model = compile_once(session, 1, backward=False, box=None, text=SIZED)
    for _ in range(4):
        model.current_callable([x, 8])
    assert sizes_of(found_in(session, tmp_path / "summary.json")) == set()

    for size in range(100, 140):
        model.current_callable([x, size])
    assert shapes.NOT_OFTEN_ENOUGH in sizes_of(found_in(session, tmp_path / "summary.json"))


def test_a_refusal_has_the_remedy_of_its_reason(session: Runtime, tmp_path: Path) -> None:
    REFUSING.add(0)
    model = compile_once(session, 1, backward=False, box=None)
    for _ in range(12):
        model.current_callable([torch.ones(1)])

    found = found_in(session, tmp_path / "summary.json")

    assert "results that differ" in found
