"""Training with memory-efficient attention: recorded where it is understood what it hands over."""

# ruff: noqa: F811 - fixtures of another file
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from torch._inductor.cudagraph_utils import BoxedDeviceIndex

from pygraphd.client.analysis.attention_rng import RngState
from pygraphd.client.frontend.devices import Devices
from pygraphd.client.frontend.runtime import Runtime
from pygraphd.schema.messages import Deployment
from tests.support.clock import Clock
from tests.support.compiled import (  # noqa: F401 - fixtures
    ENOUGH,
    Compiled,
    Relocating,
    compile_once,
    compile_whole,
    relocating,
    run,
    session,
)

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.torch

OPERATOR = "_scaled_dot_product_efficient_attention"
FORWARD = f"""
def forward(self, q: "f32[2][1]cuda:0", k: "f32[2][1]cuda:0", v: "f32[2][1]cuda:0"):
        {OPERATOR} = torch.ops.aten.{OPERATOR}.default(q, k, v, None, True, 0.1)
        getitem: "f32[2][1]cuda:0" = {OPERATOR}[0]
        getitem_2: "i64[][]cuda:0" = {OPERATOR}[2]
        getitem_3: "i64[][]cuda:0" = {OPERATOR}[3];  {OPERATOR} = None
        return (getitem, q, k, v, getitem_2, getitem_3)
"""
BACKWARD = f"""
def forward(self, q: "f32[2][1]cuda:0", getitem_2: "i64[][]cuda:0", getitem_3: "i64[][]cuda:0", tangents_1: "f32[2][1]cuda:0"):
        back = torch.ops.aten.{OPERATOR}_backward.default(tangents_1, q, q, q, None, q, q, getitem_2, getitem_3, 0.1, [True, True, True, False]);  getitem_2 = getitem_3 = None
        getitem_4: "f32[2][1]cuda:0" = back[0];  back = None
        return (getitem_4,)
"""
STRANGE_FORWARD = FORWARD.replace("return (getitem,", "return (getitem, getitem_2,")
STRANGE_BACKWARD = BACKWARD.replace("return (getitem_4,", "return (getitem_4, getitem_2")


def compile_pair(
    session: Runtime, forward: str = FORWARD, backward: str = BACKWARD
) -> tuple[Compiled, Compiled]:
    box = BoxedDeviceIndex(0)
    return (
        compile_once(session, 1, backward=False, box=box, text=forward),
        compile_once(session, 1, backward=True, box=box, text=backward),
    )


def run_as(session: Runtime, forward: str = FORWARD, backward: str = BACKWARD) -> list[tuple[Any, Any]]:
    return run(*compile_pair(session, forward, backward), ENOUGH)


def test_it_is_measured(session: Runtime, relocating: list[Relocating]) -> None:
    results = run_as(session)

    assert {ahead[0] for ahead, _ in results} == {"kernels", "relocated"}
    assert results[-1] == (["relocated"], ["relocated"])
    assert session.report.counts["measured"] == 2
    second = Runtime(session.locations)
    assert run(*compile_pair(second), 2) == [(["relocated"], ["relocated"])] * 2
    assert (second.report.counts["hits"], second.report.counts["measured"]) == (2, 0)


def test_where_it_loses_it_runs_as_kernels(
    session: Runtime, relocating: list[Relocating], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Clock, "times_us", {Deployment.KERNELS: 20.0, Deployment.GRAPH: 40.0})

    assert run_as(session)[-1] == (["kernels"], ["kernels"])


def test_a_forward_that_is_not_understood_runs_as_kernels_beside_a_backward_that_is(
    session: Runtime, relocating: list[Relocating]
) -> None:
    results = run_as(session, STRANGE_FORWARD)

    assert {ahead[0] for ahead, _ in results} == {"kernels"}
    assert results[-1] == (["kernels"], ["relocated"])
    assert len(relocating) == 1


def test_a_backward_that_is_not_understood_runs_as_kernels_beside_a_forward_that_is(
    session: Runtime, relocating: list[Relocating]
) -> None:
    results = run_as(session, backward=STRANGE_BACKWARD)

    assert {behind[0] for _, behind in results} == {"kernels"}
    assert results[-1] == (["relocated"], ["kernels"])
    assert len(relocating) == 1


@pytest.mark.parametrize(("text", "offered"), [(FORWARD, 1), (STRANGE_FORWARD, 0)])
def test_a_whole_graph_is_offered_relocation_if_it_is_understood(
    session: Runtime, relocating: list[Relocating], text: str, offered: int
) -> None:
    import torch._inductor.config as inductor_config

    with inductor_config.patch({"triton.cudagraphs": False}):
        compile_whole(session, backward=False, box=BoxedDeviceIndex(None), inductor_post_grad_graph_str=text)

    assert len(relocating) == offered


def test_what_is_recorded_is_told_where_the_state_is(
    session: Runtime, relocating: list[Relocating], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[RngState] = []
    made: Callable[..., Any] = Devices.recordings

    def recordings(self: Devices, *arguments: Any) -> Any:
        told.append(arguments[2].state)
        return made(self, *arguments)

    monkeypatch.setattr(Devices, "recordings", recordings)
    box = BoxedDeviceIndex(0)
    for text, backward in ((FORWARD, False), (BACKWARD, True)):
        compiled = compile_whole(
            session,
            backward=backward,
            box=box,
            inductor_post_grad_graph_str=text,
            disabled_cudagraphs_reason="it changes its inputs",
        )
        assert compiled.current_callable != compiled.call

    assert told == [RngState(seeds=(4,), offsets=(5,)), RngState(inputs=(1, 2))]
