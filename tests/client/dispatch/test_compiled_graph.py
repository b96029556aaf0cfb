"""How the parts of a compiled graph are measured together, decided and put in place, and what is left to Inductor.

The clock stands in for the GPU's here (timing itself is tested in tests/gpu): everything else, from the plan to the slots of
Inductor's runner, is what runs in a program.
"""

from __future__ import annotations

import concurrent.futures
import importlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._inductor.cudagraph_utils import BoxedDeviceIndex

from pygraphd.client.backend import torch_private
from pygraphd.client.decisions.ranks.process_group import COLLECTIVES_OFF, GRAPH_REGISTER
from pygraphd.client.dispatch.compiled_graph import CAPTURED_BY_OTHERS
from pygraphd.client.frontend import runtime as runtimes
from pygraphd.client.frontend import settings
from pygraphd.client.frontend.devices import Devices
from pygraphd.client.frontend.installation import Hook
from pygraphd.client.frontend.runtime import Runtime
from pygraphd.schema.reasons import ReasonCode
from tests.support.compiled import (
    ENOUGH,
    REFUSING,
    UNKNOWN_STATE,
    Compiled,
    Relocating,
    compile_once,
    compile_pair,
    compile_whole,
    compile_whole_pair,
    default_mode,
    relocating,
    run,
    session,
    sources,
)
from tests.support.process_groups import init, nccl

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["default_mode", "init", "nccl", "relocating", "session"]  # fixtures

pytestmark = pytest.mark.torch


def test_all_parts_are_decided_and_what_measured_is_gone(
    session: Runtime, relocating: list[Relocating]
) -> None:
    box = BoxedDeviceIndex(0)
    forward = compile_once(session, 3, backward=False, box=box)
    backward = compile_once(session, 2, backward=True, box=box)
    assert forward.current_callable != forward.call  # misaligned inputs are copied: nobody else does so

    results = run(forward, backward)

    assert results[0] == (["kernels"] * 3, ["kernels"] * 2)
    assert results[-1] == (["relocated"] * 3, ["relocated"] * 2)
    slots = forward.compiled_fn_runner.partitions + backward.compiled_fn_runner.partitions
    assert [slot.run for slot in slots] == relocating
    assert not any(each.closed for each in relocating)
    assert session.report.counts["measured"] == 5
    assert sources(session) == {("GRAPH", "measured")}
    assert session.report.failures.keys() <= {"daemon: no daemon"}


@pytest.mark.parametrize("refusing", [{0}, {1}, {2}, {0, 1, 2}], ids=str)
def test_a_part_that_refuses_runs_as_kernels_and_holds_nobody_up(
    session: Runtime, relocating: list[Relocating], refusing: set[int]
) -> None:
    REFUSING.update(refusing)
    box = BoxedDeviceIndex(0)
    forward = compile_once(session, 2, backward=False, box=box)
    backward = compile_once(session, 1, backward=True, box=box)

    *_, (ahead, behind) = run(forward, backward)

    assert session.report.counts["measured"] == 3 - len(refusing)
    for index, result in enumerate([*ahead, *behind]):
        assert result == ("kernels" if index in refusing else "relocated")
        assert relocating[index].closed is (index in refusing)
        assert (relocating[index].calls == 1) is (index in refusing)


@pytest.mark.usefixtures("default_mode")
def test_a_whole_graph_is_relocated_or_runs_as_kernels(session: Runtime) -> None:
    forward, backward = compile_whole_pair(session)

    results = run(forward, backward)

    assert {str(ahead) for ahead, _ in results} == {"['kernels']", "relocated"}
    assert results[-1] == ("relocated", "relocated")
    assert session.report.summary()["deployed"] == {"KERNELS": 0, "GRAPH": 2}
    second = Runtime(session.locations)
    assert run(*compile_whole_pair(second), 2) == [("relocated", "relocated")] * 2
    assert (second.report.counts["hits"], second.report.counts["measured"]) == (2, 0)


@pytest.mark.usefixtures("default_mode")
def test_a_whole_graph_that_refuses_runs_as_kernels(session: Runtime, relocating: list[Relocating]) -> None:
    REFUSING.update({0, 1})

    results = run(*compile_whole_pair(session))

    assert results[-1] == (["kernels"], ["kernels"])
    assert session.report.summary()["deployed"] == {"KERNELS": 2, "GRAPH": 0}
    assert [each.calls for each in relocating] == [1, 1]
    reason = "it cannot be recorded: verification: output 0 differs"
    assert session.report.summary()["reasons"] == {reason: 2}
    second = Runtime(session.locations)
    assert run(*compile_whole_pair(second), 1) == [(["kernels"], ["kernels"])]
    counts = second.report.counts
    assert (counts["hits"], counts["measured"], len(relocating)) == (2, 0, 4)
    assert [each.calls for each in relocating[2:]] == [0, 0]


@pytest.mark.parametrize("compile_two", [compile_pair, compile_whole_pair])
def test_what_is_refused_in_one_process_alone_is_tried_again_by_the_next(
    session: Runtime, relocating: list[Relocating], compile_two: Any
) -> None:
    REFUSING.update({0, 1})
    pair = compile_two(session)
    for each in relocating:
        each.for_good = False
    run(*pair)

    reasons = session.report.summary()["reasons"]
    assert reasons == {"it cannot be recorded: verification: output 0 differs": 2}
    assert session.report.summary()["deployed"] == {"KERNELS": 2, "GRAPH": 0}
    second = Runtime(session.locations)
    forward, backward = compile_two(second)
    assert "relocated" in str(run(forward, backward, 5)[-1]), (
        "tried at once, and not after as many calls as ran as KERNELS before"
    )


@pytest.mark.usefixtures("default_mode")
@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"device_types": {"cuda", "cpu"}}, ReasonCode.NOT_ON_ONE_GPU.text),
        ({"device_idxs": {0, 1}}, ReasonCode.NOT_ON_ONE_GPU.text),
        ({"inductor_post_grad_graph_str": UNKNOWN_STATE}, ReasonCode.RANDOM_STATE_UNKNOWN.text),
    ],
    ids=["a part on the CPU", "two devices", "captured differently"],
)
def test_a_graph_that_a_recording_would_not_hold_runs_as_kernels(
    session: Runtime, relocating: list[Relocating], facts: dict[str, Any], reason: str
) -> None:
    compiled = compile_whole(session, backward=False, box=BoxedDeviceIndex(None), **facts)

    assert compiled.current_callable == compiled.call
    assert relocating == []
    assert session.report.summary()["reasons"] == {reason: 1}
    assert (session.report.counts["hits"], session.report.counts["spooled"]) == (0, 1)
    second = Runtime(session.locations)
    compile_whole(second, backward=False, box=BoxedDeviceIndex(0), **facts)
    assert (second.report.counts["hits"], second.report.counts["spooled"]) == (1, 0)


def test_attention_whose_state_is_not_known_runs_as_kernels_and_nothing_else_does(session: Runtime) -> None:
    """Captured, it would leave its random numbers on the GPU, and its backward would look for them on the CPU."""
    box = BoxedDeviceIndex(0)
    forward = compile_once(session, 1, backward=False, box=box, text=UNKNOWN_STATE)
    backward = compile_once(session, 1, backward=True, box=box)

    assert run(forward, backward)[-1] == (["kernels"], ["relocated"])
    assert session.report.summary()["reasons"][ReasonCode.RANDOM_STATE_UNKNOWN.text] == 1


def test_graphs_in_parts_and_whole_ones_are_measured_in_one_program(session: Runtime) -> None:
    box = BoxedDeviceIndex(0)
    forward = compile_once(session, 1, backward=False, box=box)
    backward = compile_whole(session, backward=True, box=box)

    assert run(forward, backward)[-1] == (["relocated"], "relocated")
    assert session.report.counts["measured"] == 2


@pytest.mark.parametrize(
    ("setting", "recorder", "reason"),
    [("0", object(), runtimes.SWITCHED_OFF), ("1", None, runtimes.CANNOT_RECORD)],
)
def test_where_nothing_can_be_recorded_inductor_does_what_it_does_without_us(
    session: Runtime, monkeypatch: pytest.MonkeyPatch, setting: str, recorder: object, reason: str
) -> None:
    monkeypatch.setenv(settings.RELOCATE, setting)
    monkeypatch.setattr(Devices, "recorder", lambda self, _index: recorder)
    aside, box = Runtime(session.locations), BoxedDeviceIndex(0)

    for backward in (False, True):
        assert planned(aside, backward=backward, box=box) is None
    summary = aside.report.summary()
    assert (summary["left_to_torch"], summary["deployed"]) == ({reason: 2}, {"KERNELS": 0, "GRAPH": 0})
    assert not torch_private.is_ours(box)


def planned(session: Runtime, *, backward: bool, box: object, compiled: Compiled | None = None) -> Any:
    kwargs = {"is_backward": backward, "cudagraphs": True, "boxed_forward_device_index": box}
    return session.compiled_graph(compiled or Compiled(1), kwargs)


def calling(*collectives: str) -> Compiled:
    """Return a compiled graph of which each partition calls a collective."""
    compiled = Compiled(len(collectives))
    compiled.source_code = "".join(
        f"def partition_{index}(args):\n    torch.ops._c10d_functional.{each}.default(buf0, '0')\n"
        for index, each in enumerate(collectives)
    )
    compiled.inductor_post_grad_graph_str = "\n".join(
        f"    a = torch.ops._c10d_functional.{each}.default(b, '0')" for each in collectives
    )
    return compiled


@pytest.mark.usefixtures("nccl")
def test_collectives_are_left_to_pytorch_if_they_are_switched_off(
    session: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    reduces, box = calling("all_reduce_"), BoxedDeviceIndex(0)
    assert planned(session, backward=False, box=BoxedDeviceIndex(0), compiled=reduces) is not None
    monkeypatch.setenv("PYGRAPH_COLLECTIVES", "0")
    aside = Runtime(session.locations)

    assert planned(aside, backward=False, box=box, compiled=reduces) is None
    assert planned(aside, backward=True, box=box) is None
    assert aside.report.summary()["left_to_torch"] == {COLLECTIVES_OFF: 1, runtimes.FORWARD_NOT_OURS: 1}
    other = BoxedDeviceIndex(0)
    assert planned(aside, backward=False, box=other) is not None
    assert planned(aside, backward=True, box=other, compiled=reduces) is not None


@pytest.mark.usefixtures("nccl")
def test_collectives_that_cannot_be_captured_are_left_to_pytorch_where_it_makes_graphs(
    session: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    reduces, ours, theirs = calling("all_reduce_"), BoxedDeviceIndex(0), BoxedDeviceIndex(0)
    assert planned(session, backward=False, box=ours) is not None

    assert planned(session, backward=False, box=theirs, compiled=calling("all_reduce_", "broadcast_")) is None
    assert planned(session, backward=True, box=theirs) is None
    assert planned(session, backward=False, box=BoxedDeviceIndex(0), compiled=reduces) is not None
    monkeypatch.setenv(GRAPH_REGISTER, "1")
    assert planned(session, backward=False, box=BoxedDeviceIndex(0), compiled=reduces) is None
    assert planned(session, backward=True, box=ours, compiled=reduces) is not None
    with inductor_config.patch({"triton.cudagraphs": False}):
        assert planned(session, backward=False, box=BoxedDeviceIndex(0), compiled=reduces) is not None

    cannot = "its collectives cannot be captured: "
    assert session.report.summary()["left_to_torch"] == {
        f"{cannot}it calls _c10d_functional::broadcast_": 1,
        f"{cannot}NCCL_GRAPH_REGISTER=1": 1,
        runtimes.FORWARD_NOT_OURS: 1,
    }


def test_a_backward_whose_forward_may_have_run_in_trees_is_left_to_them(session: Runtime) -> None:
    """They know nothing of a backward that runs as KERNELS, and take the next forward for one of the same step."""
    box = BoxedDeviceIndex(0)

    assert planned(session, backward=True, box=box) is None
    assert session.report.summary()["left_to_torch"] == {runtimes.FORWARD_NOT_OURS: 1}
    assert planned(session, backward=False, box=box) is not None
    assert planned(session, backward=True, box=box) is not None


def test_what_somebody_else_captures_is_left_alone(session: Runtime) -> None:
    """Inductor was to hand its partitions over, and a policy of the user's has taken them."""
    compiled = Compiled(2)
    plan = session.compiled_graph(compiled, {"is_backward": False, "cudagraphs": True})
    assert plan is not None

    plan.complete(compiled)

    assert compiled.current_callable == compiled.call
    summary = session.report.summary()
    assert (summary["left_to_torch"], summary["decisions"]) == ({CAPTURED_BY_OTHERS: 1}, [])


@pytest.mark.parametrize("asked", [True, False])
def test_graphs_whose_partitions_the_program_wraps_are_left_to_it(session: Runtime, asked: bool) -> None:
    utils: Any = importlib.import_module("torch._inductor.utils")
    box = BoxedDeviceIndex(0)
    assert planned(session, backward=False, box=box) is not None

    utils.set_customized_partition_wrappers(lambda partition, _: partition)
    try:
        with inductor_config.patch({"triton.cudagraphs": asked}):
            assert planned(session, backward=False, box=BoxedDeviceIndex(0)) is None
            assert planned(session, backward=True, box=box) is None
    finally:
        utils.set_customized_partition_wrappers(None)

    assert session.report.summary()["left_to_torch"] == {CAPTURED_BY_OTHERS: 2}


@pytest.mark.skipif(not hasattr(inductor_config, "cudagraph_policy"), reason="from torch 2.13 on")
@pytest.mark.parametrize("asked", [True, False])
def test_graphs_for_which_the_program_has_a_policy_are_left_to_it(session: Runtime, asked: bool) -> None:
    with inductor_config.patch({"triton.cudagraphs": asked, "cudagraph_policy": object()}):
        assert planned(session, backward=False, box=BoxedDeviceIndex(0)) is None

    assert session.report.summary()["left_to_torch"] == {CAPTURED_BY_OTHERS: 1}


def test_a_partition_that_cannot_be_wrapped_runs_as_kernels_and_is_not_left_to_trees(
    session: Runtime,
) -> None:
    """They would see one part of a step alone."""
    hook = Hook()
    hook.runtime = session
    hook._local.graph = SimpleNamespace(cudagraphify=lambda *_: 1 / 0)

    run = hook._around_cudagraphify(lambda *_, **__: pytest.fail("it was handed on"), run_kernels, {})

    assert run is run_kernels
    assert session.report.failures == {"wrapping a partition: ZeroDivisionError: division by zero": 1}


def run_kernels(inputs: list[Any]) -> str:
    return "kernels"


def in_a_thread(action: Callable[[], Any]) -> Any:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(action).result()


@pytest.mark.parametrize("compile_two", [compile_pair, compile_whole_pair])
def test_forwards_and_backwards_run_in_any_thread_and_no_tree_manager_is_asked(
    session: Runtime, monkeypatch: pytest.MonkeyPatch, compile_two: Any
) -> None:
    """It is a thread's own: another thread has none, and asking is an AssertionError."""
    import torch._inductor.cudagraph_trees as trees

    monkeypatch.setattr(trees, "get_manager", lambda *_, **__: pytest.fail("it was asked"))
    forward, backward = compile_two(session)
    x = torch.ones(1)

    for _ in range(10 * ENOUGH):
        forward.current_callable([x])
        in_a_thread(lambda: backward.current_callable([x]))
        in_a_thread(lambda: (forward.current_callable([x]), backward.current_callable([x])))

    assert session.report.failures.keys() <= {"daemon: no daemon"}
    assert "relocated" in str(forward.current_callable([x])) == str(backward.current_callable([x]))
