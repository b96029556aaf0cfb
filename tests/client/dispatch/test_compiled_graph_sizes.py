"""How a graph with dynamic sizes is carried out: each size that comes back is looked up, measured and decided apart."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._inductor.cudagraph_utils import BoxedDeviceIndex

from pygraphd.client.dispatch import shapes
from pygraphd.client.dispatch.shapes import ShapeDispatcher
from pygraphd.client.frontend import settings
from pygraphd.client.frontend.runtime import Runtime
from pygraphd.schema.messages import Deployment
from pygraphd.schema.reasons import Reason, ReasonCode
from tests.support.clock import Clock
from tests.support.compiled import (
    ENOUGH,
    Compiled,
    Relocating,
    be_on,
    compile_once,
    daemon_asked_at_once,
    relocating,
    session,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["daemon_asked_at_once", "relocating", "session"]  # fixtures

pytestmark = pytest.mark.torch

TEXT = 'def forward(self, arg0_1: "Sym(s77)", arg1_1):\n  a = torch.ops.aten.sin.default(b)'
GRAPH_WINS = {Deployment.KERNELS: 100.0, Deployment.GRAPH: 50.0}
KERNELS_WIN = {Deployment.KERNELS: 100.0, Deployment.GRAPH: 150.0}
Pair = tuple[Compiled, Compiled]


def compile_pair(session: Runtime, partitions: int = 1) -> Pair:
    box = BoxedDeviceIndex(0)
    forward = compile_once(session, partitions, backward=False, box=box, text=TEXT)
    return forward, compile_once(session, 1, backward=True, box=box, text=TEXT)


class Program:
    """Trains a forward and its backward at some sizes; `forward` and `backward` say what costs how much at which."""

    def __init__(self, session: Runtime, pair: Pair | None = None) -> None:
        self.forward: dict[int, Mapping[Deployment, float]] = {8: GRAPH_WINS, 16: KERNELS_WIN}
        self.backward = dict(self.forward)
        self.session = session
        self.ahead, self.behind = pair or compile_pair(session)

    def steps(self, sizes: Iterable[int], monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str, str]]:
        """Return for each step its size, and how forward and backward ran."""
        ran, x = [], torch.ones(1)
        for size in sizes:
            monkeypatch.setattr(Clock, "times_us", self.forward.get(size, GRAPH_WINS))
            (ahead,) = self.ahead.current_callable([x, size])
            monkeypatch.setattr(Clock, "times_us", self.backward.get(size, GRAPH_WINS))
            (behind,) = self.behind.current_callable([x, 2 * size])
            ran.append((size, ahead, behind))
        return ran

    def slots(self) -> list[Any]:
        runs = []
        for compiled in (self.ahead, self.behind):
            (slot,) = compiled.compiled_fn_runner.partitions
            runs += slot.run._decided
        return runs

    def saving_us(self, size: int, kernels_us: float | None) -> list[float | None]:
        """Return what a call as a GRAPH saves at a size of forward and backward, as the time budget knows it."""
        found = []
        for compiled, sizes in ((self.ahead, (size,)), (self.behind, (2 * size,))):
            (slot,) = compiled.compiled_fn_runner.partitions
            found.append(slot.run._decided[sizes].saving_us(kernels_us))
        return found


def expect(session: Runtime, **counts: int) -> None:
    assert {name: session.report.counts[name] for name in counts} == counts
    assert session.report.failures.keys() <= {"daemon: no daemon"}


def test_each_size_that_comes_back_runs_in_its_own_way_and_is_known_from_then_on(
    session: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = Program(session)

    ran = program.steps([8, 16, 8, 16, 1000] * ENOUGH, monkeypatch)

    last = {size: how for size, *how in ran}
    assert last[8] == ["relocated"] * 2
    assert last[16] == ["kernels"] * 2
    expect(session, graphs=2, looked_up=8, sizes=6, measured=6)
    second = Runtime(session.locations)
    again = Program(second).steps([8, 16] * 5 + [24], monkeypatch)
    assert again == [(8, "relocated", "relocated"), (16, "kernels", "kernels")] * 5 + [
        (24, "kernels", "kernels")
    ]
    expect(second, graphs=2, looked_up=6, hits=6, misses=0, sizes=4, measured=0, spooled=0)
    assert second.report.fallbacks == {shapes.NOT_OFTEN_ENOUGH: 2}


def test_a_known_size_runs_as_decided_at_once_however_many_unknown_ones_come_before(
    session: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    Program(session).steps([64, 56] * ENOUGH, monkeypatch)
    second = Runtime(session.locations)

    ran = Program(second).steps([*range(1, 50), 64, 64, 56, 56], monkeypatch)

    assert ran[-4:] == [(64, *["relocated"] * 2)] * 2 + [(56, *["relocated"] * 2)] * 2
    expect(second, looked_up=6, hits=6, misses=0, sizes=4, measured=0)


def test_the_time_budget_counts_calls_as_graphs_by_what_was_measured_here_or_is_in_the_cache(
    session: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nothing would pay for the recordings of further sizes."""

    def twice(us: float) -> list[Any]:
        return 2 * [pytest.approx(us, rel=0.1)]

    program = Program(session)
    program.steps([8] * ENOUGH, monkeypatch)
    assert program.saving_us(8, 1000.0) == twice(100.0 - 50.0)  # of this size, and not of any
    again = Program(Runtime(session.locations))
    again.steps([8, 24, 24, 24], monkeypatch)

    assert again.saving_us(8, 80.0) == twice(80.0 - 50.0)
    assert again.saving_us(8, None) == [None, None]
    assert again.saving_us(24, 80.0) == [None, None]


@pytest.mark.usefixtures("daemon_asked_at_once")
def test_a_size_that_another_process_has_measured_meanwhile_saves_what_that_one_found(
    session: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Program(session), Program(Runtime(session.locations))
    first.steps([8] * 6, monkeypatch)  # it has begun to measure
    second.steps([8] * 6, monkeypatch)  # it waits
    first.steps([8] * ENOUGH, monkeypatch)
    told = second.steps([8] * 5, monkeypatch)

    assert told[-1] == (8, *["relocated"] * 2)
    expect(second.session, measured=0, adopted=2)
    assert second.saving_us(8, 80.0) == 2 * [pytest.approx(80.0 - 50.0, rel=0.1)]


def test_a_known_size_that_has_become_too_old_since_the_first_call_is_not_used(
    session: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    Program(session).steps([64, 56] * ENOUGH, monkeypatch)
    second = Runtime(session.locations)
    program = Program(second)
    assert program.steps([64], monkeypatch) == [(64, *["relocated"] * 2)]
    trust = dataclasses.replace(second.decisions.trust, max_age_s=1e-9)
    monkeypatch.setattr(second.decisions, "trust", trust)

    assert program.steps([56], monkeypatch) == [(56, *["kernels"] * 2)]


def test_the_summary_says_at_which_sizes_a_graph_ran_how(
    session: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    Program(session).steps([8, 16] * ENOUGH, monkeypatch)

    summary = session.report.summary()

    found = {(each["kind"], each["sizes"]): each["reason"]["code"] for each in summary["decisions"]}
    assert found == {
        ("forward", ()): "decided_by_size",
        ("backward", ()): "decided_by_size",
        ("forward", (8,)): "saves_host_time",
        ("backward", (16,)): "saves_host_time",
        ("forward", (16,)): "longer_on_gpu",
        ("backward", (32,)): "longer_on_gpu",
    }
    assert summary["deployed"] == {"KERNELS": 4, "GRAPH": 2}


@pytest.mark.parametrize("partitions", [1, 2])
def test_a_graph_without_sizes_in_its_inputs_is_one_graph(
    session: Runtime, monkeypatch: pytest.MonkeyPatch, partitions: int
) -> None:
    """Its text may name sizes that it makes itself."""
    forward, backward = compile_pair(session, partitions)
    x = torch.ones(1)

    for _ in range(ENOUGH):
        forward.current_callable([x])
        backward.current_callable([x])

    slots = forward.compiled_fn_runner.partitions + backward.compiled_fn_runner.partitions
    assert [slot([x]) for slot in slots] == ["relocated"] * (partitions + 1)
    assert not any(isinstance(slot.run, ShapeDispatcher) for slot in slots)
    expect(session, measured=partitions + 1, sizes=0)
    second = Runtime(session.locations)
    forward, backward = compile_pair(second, partitions)
    assert forward.current_callable([x]) == ["relocated"] * partitions
    expect(second, hits=partitions + 1, measured=0)


@pytest.mark.parametrize(("factor", "disputed"), [(1.1, 0), (2.0, 2)])
def test_what_was_decided_elsewhere_is_checked_at_its_size(
    session: Runtime, monkeypatch: pytest.MonkeyPatch, factor: float, disputed: int
) -> None:
    elsewhere = Runtime(session.locations)
    be_on("elsewhere", elsewhere)
    Program(elsewhere).steps([8, 24] * ENOUGH, monkeypatch)
    program = Program(session)
    program.forward[8] = program.backward[8] = {name: factor * us for name, us in GRAPH_WINS.items()}

    ran = program.steps([8, 24] * 2 * ENOUGH, monkeypatch)

    assert ran[-2:] == [(8, "relocated", "relocated"), (24, "relocated", "relocated")]
    expect(session, validated=4, disputed=disputed, measured=disputed)


@pytest.mark.parametrize(("half", "of_kernels"), [("forward", 0), ("backward", 1)])
def test_either_half_can_be_found_not_to_hold(
    session: Runtime, monkeypatch: pytest.MonkeyPatch, half: str, of_kernels: int
) -> None:
    elsewhere = Runtime(session.locations)
    be_on("elsewhere", elsewhere)
    Program(elsewhere).steps([8] * ENOUGH, monkeypatch)
    program = Program(session)
    getattr(program, half)[8] = KERNELS_WIN

    _, *ran = program.steps([8] * 3 * ENOUGH, monkeypatch)[-1]

    assert [how == "kernels" for how in ran] == [of_kernels == 0, of_kernels == 1]
    expect(session, validated=2, disputed=1, measured=1)


def test_a_size_makes_room_for_another(session: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.SIZES, "1")
    session = Runtime(session.locations)
    program = Program(session)
    program.steps([8] * ENOUGH, monkeypatch)

    ran = program.steps([24, 32] * ENOUGH, monkeypatch)

    assert sorted(ahead for _, ahead, _ in ran[-2:]) == ["kernels", "relocated"]  # there is room for one
    assert len(program.slots()) == 2
    expect(session, sizes=4, measured=4)
    assert set(session.report.fallbacks) == {shapes.NOT_OFTEN_ENOUGH, shapes.TOO_MANY_TO_DECIDE}


def test_none_is_decided_apart_if_that_is_not_wanted(
    session: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(settings.SIZES, "0")
    session = Runtime(session.locations)

    ran = Program(session).steps([8] * ENOUGH, monkeypatch)

    assert ran == [(8, "kernels", "kernels")] * ENOUGH
    expect(session, sizes=0, measured=0)


def test_relocatable_graphs_are_kept_for_the_sizes_that_run_in_them(
    session: Runtime, relocating: list[Relocating], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = Program(session)

    ran = program.steps([8, 16] * ENOUGH, monkeypatch)

    assert ran[-2:] == [(8, "relocated", "relocated"), (16, "kernels", "kernels")]
    # Of all sizes of the forward and the backward, and then of both at the first size and at the second.
    assert [each.closed for each in relocating] == [False, False, False, False, True, True]


@pytest.mark.parametrize("times", [GRAPH_WINS, KERNELS_WIN], ids=["graph", "kernels"])
def test_what_was_decided_goes_with_the_model_without_the_help_of_the_collector(
    session: Runtime,
    relocating: list[Relocating],
    monkeypatch: pytest.MonkeyPatch,
    times: Mapping[Deployment, float],
) -> None:
    program = Program(session)
    program.forward[8] = program.backward[8] = times
    gc.collect()
    gc.disable()
    try:
        program.steps([8] * ENOUGH, monkeypatch)
        assert [each.closed for each in relocating[2:]] == [times is KERNELS_WIN] * 2
        slots = [
            weakref.ref(each.compiled_fn_runner.partitions[0]) for each in (program.ahead, program.behind)
        ]
        del program
        assert [ref() for ref in slots] == [None] * 2
    finally:
        gc.enable()


def test_what_was_never_decided_goes_with_the_model_too(
    session: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = Program(session)
    gc.collect()
    gc.disable()
    try:
        program.steps([8], monkeypatch)
        slots = [
            weakref.ref(each.compiled_fn_runner.partitions[0]) for each in (program.ahead, program.behind)
        ]
        del program
        assert [ref() for ref in slots] == [None] * 2
    finally:
        gc.enable()


def test_a_size_that_comes_and_goes_is_reported_once(
    session: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(settings.SIZES, "1")
    session = Runtime(session.locations)
    program = Program(session)
    program.steps([8] * 6, monkeypatch)  # is being measured
    program.steps([24, 32] * 20, monkeypatch)  # and makes room
    program.steps([8, 40] * 20 + [8] * 2 * ENOUGH, monkeypatch)
    session.close()

    summary = session.report.summary()

    named = [(each["kind"], tuple(each["sizes"])) for each in summary["decisions"] if each["sizes"]]
    assert len(named) == len(set(named)) == 2
    assert summary["deployed"] == {"KERNELS": 2, "GRAPH": 2}
    assert set(summary["reasons"]) == {ReasonCode.DECIDED_BY_SIZE.text, ReasonCode.SAVES_HOST_TIME.text}
    expect(session, sizes=8)  # which counts how often


def test_what_makes_room_in_one_copy_of_a_graph_stays_in_another(
    session: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(settings.SIZES, "1")
    session = Runtime(session.locations)
    one, other = Program(session), Program(session)
    one.steps([8] * 6, monkeypatch)  # both are measuring
    other.steps([8] * 6, monkeypatch)

    one.steps([24, 32] * 20, monkeypatch)
    assert other.steps([8] * 2 * ENOUGH, monkeypatch)[-1] == (8, "relocated", "relocated")

    expect(session, measured=2, spooled=6)  # of the other; and of each half of both, that it has sizes
    named = [(each["kind"], tuple(each["sizes"])) for each in session.report.summary()["decisions"]]
    assert ("forward", (8,)) in named
    assert ("backward", (16,)) in named


def test_a_backward_with_fewer_sizes_is_decided_by_its_own(
    session: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(pair: Pair, batch: int, length: int) -> tuple[str, str]:
        (ahead,) = pair[0].current_callable([torch.ones(1), batch, length])
        (behind,) = pair[1].current_callable([torch.ones(1), length])
        return ahead, behind

    pair = compile_pair(session)
    for _ in range(ENOUGH):
        last = step(pair, 4, 8)
    assert last == ("relocated", "relocated")
    second = Runtime(session.locations)
    pair = compile_pair(second)

    assert {step(pair, batch, 8) for batch in range(10, 60)} == {("kernels", "relocated")}
    assert [step(pair, 4, 8) for _ in range(3)][-1] == ("relocated", "relocated")
    expect(second, measured=0, misses=0)


def test_what_a_group_has_found_is_not_overwritten(session: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where it is not believed."""
    monkeypatch.setenv(settings.REFRESH, "1")
    session = Runtime(session.locations)
    whole, _ = compile_pair(session)
    for _ in range(ENOUGH):
        whole.current_callable([torch.ones(1)])  # as it would be for ranks
    expect(session, measured=1, spooled=1)
    second = Runtime(session.locations)

    Program(second).steps([8], monkeypatch)

    expect(second, spooled=1)  # of the backward alone


def test_of_sizes_only_the_one_that_a_result_check_has_found_wrong_is_marked(
    session: Runtime, relocating: list[Relocating], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = Program(session)
    program.forward = {8: GRAPH_WINS, 16: GRAPH_WINS}
    program.steps([8, 16] * ENOUGH, monkeypatch)

    relocating[0].note_failed_check((16,), Reason(ReasonCode.RESULTS_DIFFER))

    second = Program(Runtime(session.locations))
    ran = {size: ahead for size, ahead, _ in second.steps([8, 16] * 4, monkeypatch)}
    assert ran == {8: "relocated", 16: "kernels"}
