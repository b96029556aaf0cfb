"""Graphs with operators that run at each call, in a mode without CUDA graphs: what is around these is decided part by part."""

# ruff: noqa: F811 - fixtures of another file
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._inductor import config

from pygraphd.client.backend.torch_private.partitions import reads_sizes
from pygraphd.client.dispatch.compiled_graph import SIZES_OF_TENSORS
from pygraphd.client.frontend import settings
from pygraphd.client.frontend.runtime import USES_STREAMS, Runtime
from pygraphd.schema.reasons import Reason, ReasonCode
from tests.support.compiled import (  # noqa: F401 - fixtures
    Compiled,
    Relocating,
    compile_whole,
    compile_whole_pair,
    default_mode,
    relocating,
    run,
    session,
)

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("default_mode")]

TEXT = "  a = torch.ops.aten.sin.default(b)\n  c = torch.ops.mine.op.default(a)"
BETWEEN = "class Runner:\n    def call(self, args):\n        torch.ops.mine.op.default(a)\n"
WITHIN = "def partition_0(args):\n    torch.ops.mine.op.default(a)\nclass Runner:\n    pass\n"


def compile_split(session: Runtime, source: str = BETWEEN) -> Compiled:
    """Compile an inference graph of two parts around an operator."""
    compiled = Compiled(2)
    compiled.inductor_post_grad_graph_str, compiled.source_code = TEXT, source
    kwargs = {"is_backward": False, "cudagraphs": False, "boxed_forward_device_index": None}
    plan = session.compiled_graph(compiled, kwargs)
    assert plan is not None
    plan.complete(compiled)
    return compiled


def run_alone(compiled: Compiled) -> Any:
    return run(compiled, compiled)[-1][0]


def test_each_part_is_decided_by_itself(session: Runtime, relocating: list[Relocating]) -> None:
    assert run_alone(compile_split(session)) == ["relocated", "relocated"]
    assert len(relocating) == 2
    assert session.report.summary()["between_graphs"] == {"mine::op": 1}

    second = Runtime(session.locations)
    assert compile_split(second).current_callable([]) == ["relocated", "relocated"]
    assert (second.report.counts["hits"], second.report.counts["measured"]) == (2, 0)


@pytest.mark.parametrize("how", ["whole", "within a part"])
def test_a_graph_that_cannot_be_split_around_it_runs_as_kernels_and_says_why(
    session: Runtime, relocating: list[Relocating], how: str
) -> None:
    if how == "whole":
        compiled = compile_whole(session, backward=False, box=None, inductor_post_grad_graph_str=TEXT)
    else:
        compiled = compile_split(session, WITHIN)

    assert {str(each) for each in run_alone(compiled)} == {"kernels"}
    assert relocating == []
    summary = session.report.summary()
    assert summary["reasons"] == {str(Reason(ReasonCode.CUSTOM_OPERATORS, "mine::op")): 1}
    assert summary["between_graphs"] == {}


def test_who_vouches_later_is_not_held_to_what_was_said_before(
    session: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = {"inductor_post_grad_graph_str": TEXT}
    run_alone(compile_whole(session, backward=False, box=None, **whole))
    monkeypatch.setenv(settings.GRAPH_OPS, "mine")

    vouching = Runtime(session.locations)
    assert run_alone(compile_whole(vouching, backward=False, box=None, **whole)) == "relocated"
    monkeypatch.delenv(settings.GRAPH_OPS)
    careful = Runtime(session.locations)
    assert run_alone(compile_whole(careful, backward=False, box=None, **whole)) == ["kernels"]


@pytest.mark.parametrize("source", [BETWEEN, WITHIN])
def test_a_partition_that_calls_an_operator_is_not_recorded_in_modes_with_cuda_graphs(
    session: Runtime, relocating: list[Relocating], source: str
) -> None:
    """Inductor hands it over there, where a pass of the user's has kept PyGraph from splitting the graph."""
    library = torch.library.Library("mine", "DEF")
    library.define("op(Tensor x) -> Tensor")
    library.impl("op", torch.clone, "CUDA")
    compiled = Compiled(1)
    compiled.inductor_post_grad_graph_str, compiled.source_code = TEXT, source
    kwargs = {"is_backward": False, "cudagraphs": True, "boxed_forward_device_index": None}
    with config.patch({"triton.cudagraphs": True}):
        plan = session.compiled_graph(compiled, kwargs)
        assert plan is not None
        slots = compiled.compiled_fn_runner.partitions
        slots[:] = [plan.cudagraphify(each, {"device_index": 0, "is_backward": False}) for each in slots]
        plan.complete(compiled)

    assert run_alone(compiled) == (["relocated"] if source == BETWEEN else ["kernels"])
    assert len(relocating) == (source == BETWEEN)
    if source == WITHIN:
        assert session.report.summary()["reasons"] == {
            str(Reason(ReasonCode.CUSTOM_OPERATORS, "mine::op")): 1
        }


STREAMS = "  wait_event = torch.ops.streams.wait_event.default(0, 1)"


@pytest.mark.parametrize("how", ["whole", "split"])
def test_a_graph_that_acts_on_streams_is_not_recorded(
    session: Runtime, relocating: list[Relocating], how: str
) -> None:
    """The streams are those of the program: a replay would neither wait for them nor record their events."""
    text = f"{TEXT}\n{STREAMS}"
    if how == "whole":
        compiled = compile_whole(session, backward=False, box=None, inductor_post_grad_graph_str=STREAMS)
    else:
        compiled = Compiled(2)
        compiled.inductor_post_grad_graph_str = text
        compiled.source_code = BETWEEN + "        torch.ops.streams.wait_event.default(0, 1)\n"
        plan = session.compiled_graph(
            compiled, {"is_backward": False, "cudagraphs": False, "boxed_forward_device_index": None}
        )
        assert plan is not None
        plan.complete(compiled)

    assert {str(each) for each in run_alone(compiled)} == {"kernels"}
    assert relocating == []
    (reason,) = session.report.summary()["reasons"]
    assert "streams::wait_event" in reason


def test_pytorch_captures_a_graph_that_acts_on_streams_where_that_was_asked_for(session: Runtime) -> None:
    compiled = Compiled(1)
    compiled.inductor_post_grad_graph_str = STREAMS
    kwargs = {"is_backward": False, "cudagraphs": True, "boxed_forward_device_index": None}
    with config.patch({"triton.cudagraphs": True}):
        assert session.compiled_graph(compiled, kwargs) is None
    assert session.report.summary()["left_to_torch"] == {USES_STREAMS: 1}


SIZES = (
    "class Runner:\n    def call(self, args):\n        arg0_size = arg0.size()\n        s0 = arg0_size[0]\n"
)


def test_a_graph_that_reads_a_size_off_a_tensor_is_not_recorded(
    session: Runtime, relocating: list[Relocating]
) -> None:
    """As the backward of a jagged tensor: no integer among the inputs tells its sizes, and a recording would serve them all."""
    compiled = compile_whole(session, backward=False, box=None, source_code=SIZES)

    assert run_alone(compiled) == ["kernels"]
    assert relocating == []
    assert session.report.summary()["reasons"] == {
        str(Reason(ReasonCode.CANNOT_BE_RECORDED, SIZES_OF_TENSORS)): 1
    }


def test_partitions_are_given_the_sizes_that_are_read_before_them(session: Runtime) -> None:
    assert not reads_sizes("def partition_0(args):\n    arg0, s0 = args\n" + SIZES)
    assert reads_sizes("def partition_0(args):\n    arg0_stride = arg0.stride()\n" + SIZES)
