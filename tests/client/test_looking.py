"""Captured graphs that are held against launches of them again: which of the two is the faster way may change, whatever each costs."""

# ruff: noqa: F811 - fixtures of another file
from __future__ import annotations

import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pygraphd.client import _torch, checking, claims, looking, policy, region, room, workspaces
from pygraphd.client.families import Families
from pygraphd.client.session import Session
from pygraphd.schema.messages import Deployment
from tests.client.test_plan import (  # noqa: F401
    ENOUGH,
    Clock,
    Compiled,
    Relocating,
    compile_once,
    compile_pair,
    relocating,
    relocation_where_it_is_meant,
    run,
    session,
)
from tests.daemon.conftest import Home

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.torch

KERNELS, TREES, GRAPH = Deployment.KERNELS, Deployment.TREES, Deployment.GRAPH
MORE = 160
"""Calls that end a look that is in doubt, and measuring anew."""
LOOK = 30
"""Calls that end a look."""


def decided(session: Session, runs: str = "captured") -> tuple[Compiled, Compiled]:
    pair = compile_pair(session)
    assert run(*pair, MORE)[-1] == ([runs], [runs])
    return pair


def expect(session: Session, **counts: int) -> None:
    assert {name: session.report.counts[name] for name in counts} == counts
    assert session.report.failures.keys() <= {"daemon: no daemon"}


@pytest.mark.parametrize(
    ("times_us", "runs"),
    [
        ({KERNELS: 10.0, TREES: 50.0}, "launched"),
        ({KERNELS: 52.0, TREES: 59.0}, "launched"),
        ({KERNELS: 48.9, TREES: 50.0}, "launched"),
        ({KERNELS: 49.5, TREES: 50.0}, "captured"),  # less than it has to win by
        ({KERNELS: 51.0, TREES: 50.0}, "captured"),
        ({KERNELS: 1000.0, TREES: 50.0}, "captured"),
    ],
)
def test_what_launches_have_come_to_beat_is_measured_anew(
    session: Session, monkeypatch: pytest.MonkeyPatch, times_us: dict[Deployment, float], runs: str
) -> None:
    """What the captured one costs has changed by less than a fifth, if at all."""
    pair = decided(session)
    monkeypatch.setattr(Clock, "times_us", times_us)

    session.drift.look()

    assert run(*pair, MORE)[-1] == ([runs], [runs])
    drifted = 2 * (runs == "launched")
    expect(session, rechecked=2, drifted=drifted, measured=2 + drifted)
    assert session.report.fallbacks.get(checking.OVERTAKEN, 0) == drifted
    later = compile_pair(Session(session.locations))
    assert run(*later, 1) == [([runs], [runs])]


def test_it_is_told_why(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = decided(session)
    monkeypatch.setattr(Clock, "times_us", {KERNELS: 10.0, TREES: 50.0})
    session.drift.look()
    run(*pair, MORE)

    told = {each["because"] for each in session.report.summary()["decisions"]}

    assert told == {"TREES: launches have come to take less, measured 50.0 us here"}


def test_relocated_graphs_are_held_against_launches_too(
    session: Session, relocating: list[Relocating], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = decided(session, "relocated")
    monkeypatch.setattr(Clock, "times_us", {KERNELS: 30.0, TREES: 50.0, GRAPH: 40.0})

    session.drift.look()

    assert run(*pair, MORE)[-1] == (["launched"], ["launched"])
    expect(session, rechecked=2, drifted=2, measured=4)


def test_all_of_a_step_is_launched_or_nothing_of_it(session: Session) -> None:
    """Whatever PyTorch's trees meet that they have not met yet, they record."""
    box = SimpleNamespace(value=0)
    forward = compile_once(session, 3, backward=False, box=box)
    backward = compile_once(session, 2, backward=True, box=box)
    run(forward, backward, MORE)
    session.drift.look()

    steps = [({*ahead, *behind}) for ahead, behind in run(forward, backward, LOOK)]

    assert all(len(step) == 1 for step in steps)
    launched = steps.count({"launched"})
    assert 8 <= launched <= 12
    assert steps[0] == steps[-1] == {"captured"}
    expect(session, rechecked=5, drifted=0)
    assert run(forward, backward, MORE)[-1] == (["captured"] * 3, ["captured"] * 2)


def test_a_graph_that_many_layers_share_is_looked_at_in_rounds(session: Session) -> None:
    pair = decided(session)
    x = torch.ones(1)
    session.drift.look()

    for _ in range(LOOK):
        for each in (*(pair[0],) * 24, *(pair[1],) * 24):
            each.current_callable([x])

    expect(session, rechecked=2, drifted=0)
    assert not any(isinstance(slot, checking.Checked) for slot in slots(*pair))


def slots(*all_compiled: Compiled) -> list[Any]:
    return [slot for compiled in all_compiled for slot in compiled.compiled_fn_runner.partitions]


def test_inputs_are_aligned_while_calls_may_be_launched(session: Session) -> None:
    """Kernels are compiled for aligned inputs, and PyTorch's trees copy those that are not, which launches have to be spared as well."""
    pair = decided(session)
    assert all(each.current_callable == each.call for each in pair)
    session.drift.look()
    assert all(each.current_callable != each.call for each in pair)

    for _ in range(LOOK):
        wrapped = [each.current_callable != each.call for each in pair]
        ahead, behind = run(*pair, 1)[0]
        assert "launched" not in {*ahead, *behind} or all(wrapped)

    assert all(each.current_callable == each.call for each in pair)


@pytest.mark.parametrize("times_us", [{KERNELS: 10.0, TREES: 50.0}, {KERNELS: 100.0, TREES: 70.0}], ids=str)
def test_a_graph_in_one_piece_is_looked_at_where_its_callers_find_it(
    session: Session, monkeypatch: pytest.MonkeyPatch, times_us: dict[Deployment, float]
) -> None:
    compiled = Compiled(1)
    kwargs = {"is_backward": False, "cudagraphs": True, "boxed_forward_device_index": None}
    plan = session.plan(compiled, kwargs)
    compiled.current_callable = plan.cudagraphify(
        lambda runnable, **_: lambda inputs: "captured",
        lambda inputs: "launched",
        {"device_index": 0, "is_backward": False},
    )
    plan.complete(compiled)
    call = [compiled.current_callable([torch.ones(1)]) for _ in range(MORE)][-1]
    deployed = compiled.current_callable
    session.drift.look()

    seen = [compiled.current_callable([torch.ones(1)]) for _ in range(LOOK)]

    assert (call, seen[-1], set(seen)) == ("captured", "captured", {"captured", "launched"})
    assert compiled.current_callable is deployed
    monkeypatch.setattr(Clock, "times_us", times_us)
    session.drift.look()
    runs = min(times_us, key=lambda each: times_us[each])
    ended = [compiled.current_callable([torch.ones(1)]) for _ in range(MORE)][-1]
    assert ended == {KERNELS: "launched", TREES: "captured"}[runs]
    expect(session, rechecked=2, drifted=1)
    assert not [
        each
        for each in within(compiled.current_callable)
        if isinstance(each, checking.Checked | region.Region)
    ]
    assert len(session.drift._looks) == 1


def within(run: Any) -> list[Any]:
    """Return a callable, and all that it is wrapped around."""
    inner = [cell.cell_contents for cell in getattr(run, "__closure__", None) or ()]
    return [run, *(each for one in inner if callable(one) for each in within(one))]


def test_a_look_that_cannot_begin_leaves_all_as_it_was(session: Session) -> None:
    pair = decided(session)
    session.drift.look()
    session.drift.look()  # it is still at it

    run(*pair, LOOK)

    assert all(each.current_callable == each.call for each in pair)
    expect(session, rechecked=2, drifted=0)


@pytest.mark.parametrize("half", [0, 1], ids=["forward", "backward"])
def test_a_half_that_is_not_where_it_could_be_looked_at_is_not_waited_for(
    session: Session, monkeypatch: pytest.MonkeyPatch, half: int
) -> None:
    pair = decided(session)
    pair[half].compiled_fn_runner.partitions[0] = lambda inputs: "another tool's"
    session.drift.look()

    steps = run(*pair, LOOK)

    assert [step[1 - half] for step in steps].count(["launched"]) == 9
    expect(session, rechecked=1, drifted=0)
    assert not any(isinstance(slot, checking.Checked) for slot in slots(*pair))


def test_a_forward_may_lose_in_trees_what_its_backward_gains(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was put there for that, and is not measured anew at each look."""
    box = SimpleNamespace(value=0)
    forward = compile_once(session, 1, backward=False, box=box)
    backward = compile_once(session, 1, backward=True, box=box)
    theirs = {False: {KERNELS: 100.0, TREES: 110.0}, True: {KERNELS: 100.0, TREES: 50.0}}
    monkeypatch.setattr(Clock, "span_us", 20.0)  # it loses on the host alone

    def steps(count: int) -> Any:
        for _ in range(count):
            monkeypatch.setattr(Clock, "times_us", theirs[False])
            ahead = forward.current_callable([torch.ones(1)])
            monkeypatch.setattr(Clock, "times_us", theirs[True])
            behind = backward.current_callable([torch.ones(1)])
        return ahead, behind

    assert steps(MORE) == (["captured"], ["captured"])
    session.drift.look()
    assert steps(MORE) == (["captured"], ["captured"])
    expect(session, rechecked=2, drifted=0)

    theirs[True] = {KERNELS: 55.0, TREES: 50.0}
    session.drift.look()
    steps(MORE)

    expect(session, rechecked=4, drifted=2)


@pytest.mark.parametrize(("trees_us", "drifted"), [(50.0, 0), (70.0, 2)])
def test_without_memory_for_launches_only_its_cost_is_looked_at(
    session: Session, monkeypatch: pytest.MonkeyPatch, trees_us: float, drifted: int
) -> None:
    pair = decided(session)
    monkeypatch.setattr(Clock, "times_us", {KERNELS: 10.0, TREES: trees_us})
    monkeypatch.setattr(Session, "why_not_launch", lambda self, candidates: policy.NO_MEMORY)
    session.drift.look()

    steps = run(*pair, MORE)

    assert ((["launched"], ["launched"]) in steps) is bool(drifted)
    expect(session, rechecked=2, drifted=drifted)
    assert session.report.fallbacks[policy.NO_MEMORY] == 2
    expect_nothing_left(*pair)


def test_a_failure_to_ask_for_memory_has_only_costs_be_looked_at(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = decided(session)

    def fail(*_: Any) -> Any:
        raise RuntimeError("no such device")

    monkeypatch.setattr(Session, "why_not_launch", fail)
    session.drift.look()

    assert run(*pair, MORE) == [(["captured"], ["captured"])] * MORE
    assert session.report.failures["checking: RuntimeError"] == 2
    expect_nothing_left(*pair)


def expect_nothing_left(*pair: Compiled) -> None:
    assert not any(isinstance(slot, checking.Checked | region.Region) for slot in slots(*pair))


def failing(compiled: Compiled, error: BaseException) -> None:
    """Have launches of what is being looked at raise."""

    def launch(inputs: Any) -> Any:
        raise error

    for slot in slots(compiled):
        slot._launch = launch


@pytest.mark.parametrize("half", [0, 1], ids=["forward", "backward"])
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), KeyboardInterrupt()], ids=repr
)
def test_a_launch_that_fails_is_the_last_one(session: Session, half: int, error: BaseException) -> None:
    pair = decided(session)
    session.drift.look()
    failing(pair[half], error)
    failed, launched = 0, 0
    for _ in range(MORE):
        try:
            launched += "launched" in str(run(*pair, 1))
        except (torch.OutOfMemoryError, KeyboardInterrupt):
            failed += 1

    assert (failed, launched) == (1, 0)
    expect(session, rechecked=2, drifted=0)
    expect_nothing_left(*pair)
    assert all(each.current_callable == each.call for each in pair)


def test_where_threads_take_turns_only_costs_are_looked_at(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's trees are a thread's own, and nobody knows which calls are of one step."""
    pair = decided(session)
    session.drift.look()
    steps = []
    for number in range(MORE):
        monkeypatch.setattr("threading.get_ident", lambda number=number: number % 2)
        steps += run(*pair, 1)

    assert sum("launched" in str(step) for step in steps) <= 2
    expect(session, rechecked=2, drifted=0)
    expect_nothing_left(*pair)


def test_a_half_that_comes_no_more_leaves_the_other_captured(session: Session) -> None:
    pair = decided(session)
    session.drift.look()
    while run(*pair, 1)[0] != (["launched"], ["launched"]):
        pass

    alone = [pair[1].current_callable([torch.ones(1)])[0] for _ in range(2000)]

    assert alone.count("launched") <= looking.MAX_IN_ROUND
    assert alone[-1] == "captured"
    run(*pair, MORE)
    expect_nothing_left(*pair)


def test_while_others_come_all_the_time_a_look_ends_soon(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = decided(session)
    session.drift.look()
    launched = 0
    for number in range(60):
        box = SimpleNamespace(value=0)
        text = f"  a = torch.ops.aten.op{number}.default(b)"
        new = [compile_once(session, 1, backward=back, box=box, text=text) for back in (False, True)]
        for _ in range(8):
            launched += "launched" in str(run(*pair, 1))
            run(new[0], new[1], 1)

    assert launched <= 2 * looking.MAX_LAUNCHED
    expect_nothing_left(*pair)


@pytest.mark.parametrize("called", [0, 1, 12], ids="{} forwards before".format)
def test_layers_that_share_a_graph_are_run_alike_from_the_first_step_on(
    session: Session, called: int
) -> None:
    pair = decided(session)
    x = torch.ones(1)
    for _ in range(called):
        pair[0].current_callable([x])
    session.drift.look()  # in the midst of a step
    for _ in range(called):
        pair[1].current_callable([x])

    steps = [
        {each.current_callable([x])[0] for each in (*(pair[0],) * 12, *(pair[1],) * 12)}
        for _ in range(LOOK + 5)
    ]

    assert all(len(step) == 1 for step in steps)
    assert {"launched"} in steps
    expect(session, rechecked=2, drifted=0)
    expect_nothing_left(*pair)


def test_what_fails_while_it_is_settled_leaves_what_was_deployed(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = decided(session)
    before = slots(*pair)
    monkeypatch.setattr(Clock, "times_us", {KERNELS: 10.0, TREES: 50.0})

    def fail(*_: Any) -> Any:
        raise OSError("no such disk")

    monkeypatch.setattr(session.cache, "lookup", fail)
    session.drift.look()

    assert run(*pair, MORE)[-1] == (["captured"], ["captured"])
    assert slots(*pair) == before
    assert all(each.current_callable == each.call for each in pair)
    assert session.report.failures["checking: OSError"] == 2


def test_a_look_that_fails_to_begin_leaves_what_was_deployed(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = decided(session)
    before = slots(*pair)

    def fail(*_: Any) -> Any:
        raise AttributeError("torch has changed")

    monkeypatch.setattr(_torch, "aligned", fail)
    session.drift.look()

    assert slots(*pair) == before
    assert run(*pair, 5)[-1] == (["captured"], ["captured"])
    assert session.report.failures["looking again: AttributeError"] == 2


@pytest.mark.parametrize(
    ("more", "is_captured", "given_back"),
    [(room.LIBRARIES, False, 0), (room.LIBRARIES + 1, False, 1), (room.LIBRARIES + 1, True, 0)],
)
def test_what_launches_have_had_reserved_is_given_back_in_the_end(
    session: Session, monkeypatch: pytest.MonkeyPatch, more: int, is_captured: bool, given_back: int
) -> None:
    pair = decided(session)
    reserved, emptied = [1 << 30], list[int]()

    def empty() -> None:
        emptied.append(reserved[0])
        reserved[0] = 1 << 30

    monkeypatch.setattr(workspaces.workspaces, "empty_cache", empty)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved[0])
    session.drift.look()
    run(*pair, LOOK // 2)
    reserved[0] += more
    run(*pair, 8)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_captured)

    run(*pair, LOOK)

    assert emptied == [(1 << 30) + more] * given_back


@pytest.mark.parametrize(
    ("needed", "fits"),
    [
        ((0,), [True]),
        ((500 << 20,), [True]),
        ((900 << 20,), [False]),
        ((500 << 20, 500 << 20, 1 << 20), [True, False, True]),
    ],
)
def test_memory_is_promised_once_and_not_what_trees_or_others_have(
    monkeypatch: pytest.MonkeyPatch, needed: tuple[int, ...], fits: list[bool]
) -> None:
    """A launch cannot have what lies in the pool of another capture, and what graphs in trees take is as much again."""
    segments = [
        {"device": 0, "segment_pool_id": (0, 0), "total_size": 600 << 20, "allocated_size": 100 << 20},
        {"device": 0, "segment_pool_id": (0, 7), "total_size": 100 << 20, "allocated_size": 0},
        {"device": 1, "segment_pool_id": (0, 0), "total_size": 8 << 30, "allocated_size": 0},
    ]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (700 << 20, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    budget = room.Budget(0)  # 1000 MiB left of 1200, as 164 are for trees and libraries, and their margin

    assert [budget.why_not(each) is None for each in needed] == fits

    monkeypatch.setattr(room, "HOLDS_S", 0.0)  # as if time had passed, and nothing had been launched yet
    assert (budget.why_not(800 << 20) is None) is (sum(needed) == 0 or not fits[0])
    later = time.monotonic() + room.PROMISED_S + 1
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert budget.why_not(800 << 20) is None, "what was promised is given back by now"


@pytest.fixture
def waited(
    session: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[tuple[Session, tuple[Compiled, Compiled]]]:
    """Return a process that has waited for another one, whose answer is there by now, and what both have compiled."""
    monkeypatch.setattr(claims, "FIRST_LOOK_S", 0.0)
    monkeypatch.setattr(claims, "LAST_LOOK_S", 0.0)
    home = Home(tmp_path)
    try:
        home.start()
        first, second = Session(session.locations), Session(session.locations)
        measuring, waiting = compile_pair(first), compile_pair(second)
        run(*measuring, region.WARM_UP_CALLS + 1)
        run(*waiting, 5)
        run(*measuring, ENOUGH)
        yield second, waiting
    finally:
        home.close()


@pytest.mark.daemon
@pytest.mark.alone
@pytest.mark.parametrize("times_us", [{KERNELS: 10.0, TREES: 50.0}, {KERNELS: 100.0, TREES: 140.0}], ids=str)
def test_what_was_adopted_is_looked_at_as_what_was_measured_and_a_daemon_is_told(
    waited: tuple[Session, tuple[Compiled, Compiled]],
    monkeypatch: pytest.MonkeyPatch,
    times_us: dict[Deployment, float],
) -> None:
    second, pair = waited
    assert run(*pair, 5)[-1] == (["captured"], ["captured"])
    expect(second, adopted=2, measured=0, checked=0)
    monkeypatch.setattr(Clock, "times_us", times_us)

    second.drift.look()

    assert run(*pair, MORE)[-1] == (["launched"], ["launched"])
    third = Session(second.locations)
    assert run(*compile_pair(third), 1) == [(["launched"], ["launched"])]
    expect(second, rechecked=2, drifted=2, measured=2, recorded=2)
    expect(third, hits=2, measured=0)


@pytest.mark.daemon
@pytest.mark.alone
@pytest.mark.parametrize(("trees_us", "drifted"), [(50.0, 0), (70.0, 2)])
@pytest.mark.parametrize("recheck_s", [600.0, 0.0])
def test_what_somebody_else_has_found_meanwhile_is_checked_at_once(
    waited: tuple[Session, tuple[Compiled, Compiled]],
    monkeypatch: pytest.MonkeyPatch,
    trees_us: float,
    drifted: int,
    recheck_s: float,
) -> None:
    second, pair = waited
    second.drift._period_s = recheck_s
    second._host = "elsewhere"
    monkeypatch.setattr(Clock, "times_us", {KERNELS: 100.0, TREES: trees_us})

    steps = run(*pair, MORE)

    assert steps[-1] == (["captured"], ["captured"])
    expect(second, adopted=2, checked=2, drifted=drifted, measured=drifted)
    summary = second.report.summary()
    assert (len(summary["decisions"]), summary["deployed"]["TREES"]) == (2, 2)


def test_a_verdict_is_one_of_those_that_were_adopted_together() -> None:
    families = Families()
    first = families.jury_of_adopted(1)
    first.join(0)
    assert families.jury_of_adopted(1) is first
    assert families.jury_of_adopted(2) is not first

    first.found(0, holds=False)

    assert families.jury_of_adopted(1).verdict() is True, "nobody has joined yet"
