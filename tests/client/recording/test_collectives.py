"""A graph with collectives is recorded by all ranks in the same call, and runs its collectives as often on this rank as on the others."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from pygraphd.client.analysis.graph_facts import GraphFacts
from pygraphd.client.backend import torch_private
from pygraphd.client.backend.driver import DriverError
from pygraphd.client.backend.errors import NotRelocatableError, RanksError
from pygraphd.client.decisions.ranks.atomic_commit import UNREACHABLE
from pygraphd.client.decisions.ranks.lockstep import FOR_GOOD, Lockstep
from pygraphd.client.frontend import devices
from pygraphd.client.recording.collectives import A_RANK_RUNS_KERNELS, ATTEMPT_CALLS, NOT_IDLE
from pygraphd.client.recording.pipeline import STUCK
from pygraphd.schema.reasons import ReasonCode
from tests.support.process_groups import init
from tests.support.recording_case import case
from tests.support.refusals import refusal_of

__all__ = ["case", "init"]  # fixtures

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.recording_case import Case, Operations

pytestmark = pytest.mark.torch

REDUCE = "_c10d_functional::all_reduce_"
REDUCES = frozenset({(REDUCE, "0")})


@dataclass
class Peer:
    """The other rank of a group of two, and the store of both. It takes part in a step unless `against` has its reason, or it `is_late`."""

    against: dict[str, str] = field(default_factory=dict)
    is_late: bool = False
    late: int = 0
    values: dict[str, str] = field(default_factory=dict)
    now: float = 0.0
    graphs: list[str] = field(default_factory=list)
    refuses: str = ""
    is_gone: bool = False

    @property
    def first(self) -> tuple[str | None, str | None]:
        """The results of the votes in the first attempt."""
        return self.values.get("1/captured"), self.values.get("1/compared")

    def note_late(self, lockstep: Lockstep) -> None:
        self.late += 1

    def lockstep(self, collectives: frozenset[tuple[str, str]], graph: str) -> Lockstep:
        ((operator, _),) = collectives
        assert operator == REDUCE
        if self.is_gone:
            raise RanksError(UNREACHABLE)
        if self.refuses:
            raise NotRelocatableError(self.refuses)
        self.graphs.append(graph)
        return Lockstep(self, str(len(self.graphs)), 2, 600.0, lambda: self.now, self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def count(self, key: str, votes: int) -> int:
        step = key.split("/")[1]
        if step in self.against:
            self.values.setdefault(key.removesuffix("/votes"), self.against[step])
        return 1 if self.is_late or step in self.against else 2

    def write_text(self, key: str, value: str) -> str:
        return self.values.setdefault(key, value)

    def read_text(self, key: str) -> str | None:
        return self.values.get(key)


def body(operations: Operations, inputs: list[Any]) -> Any:
    x, y = inputs
    return (operations.add(operations.reduce(operations.add(x, y)), y),)


class Ranks:
    """The recordings of a sum over both ranks, and this rank's calls of it."""

    def __init__(self, case: Case, peer: Peer, made: Any = None) -> None:
        self.case, self.peer = case, peer
        facts = GraphFacts(collectives=(REDUCES,), digest="d" * 64)
        self.run: Any = made or case.made(body, facts, groups=peer)

    def __call__(self, calls: int = 1, *, as_graph: bool = True) -> list[int]:
        """Make some calls; return how often each ran the collective. Each has its right result, in a new place."""
        comm, ran = self.case.recorder.as_kernels.comm, []
        for number in range(calls):
            before = comm.value
            inputs = [self.case.floats(number, 1), self.case.floats(2, 3)]
            (result,) = (self.run if as_graph else self.run.run_kernels_or_record)(inputs)
            assert result.tolist() == [2 * number + 6, 11]
            ran.append(comm.value - before)
        return ran


@pytest.fixture
def ranks(case: Case) -> Ranks:
    return Ranks(case, Peer())


@pytest.mark.parametrize("as_graph", [True, False])
def test_all_ranks_record_at_the_same_call(ranks: Ranks, as_graph: bool) -> None:
    assert ranks.run.is_awaited

    assert ranks(ATTEMPT_CALLS[0], as_graph=as_graph) == [1, 1, 2]
    assert not ranks.run.is_awaited
    assert ranks(20) == [1] * 20
    assert ranks(20, as_graph=False) == [1] * 20

    ranks.case.expect(captured=1)
    assert ranks.run.run([ranks.case.floats(0, 1), ranks.case.floats(2, 3)])[0].tolist() == [6, 11]
    assert ranks.case.recorder.noted == 1
    assert ranks.run.replays[0].counts.replays == 22
    assert ranks.run.replays[0].counts.relocated > 0
    assert ranks.peer.graphs == ["d" * 64 + "/"]
    assert [*ranks.peer.values.values()] == ["commit", "commit"]


def test_a_rank_that_is_late_has_all_run_kernels_until_the_next_attempt(ranks: Ranks) -> None:
    ranks.peer.is_late = True
    assert ranks(ATTEMPT_CALLS[1] - 1) == [1] * (ATTEMPT_CALLS[1] - 1)
    assert ranks.peer.now >= 10
    assert refusal_of(ranks.run) is None
    assert ranks.run.is_awaited

    ranks.peer.is_late = False
    assert ranks(3) == [2, 1, 1]

    assert any("1 of 2 ranks came" in each for each in ranks.case.report.fallbacks)


def test_without_a_store_a_size_is_tried_again_until_its_last_attempt(ranks: Ranks) -> None:
    ranks.peer.is_gone = True
    assert ranks(ATTEMPT_CALLS[1] - 1) == [1] * (ATTEMPT_CALLS[1] - 1)
    assert ranks.run.is_awaited
    ranks.peer.is_gone = False

    assert ranks(3) == [2, 1, 1]

    assert ranks.case.report.fallbacks[UNREACHABLE] == 1


def test_a_size_that_never_finds_its_store_is_refused(ranks: Ranks) -> None:
    ranks.peer.is_gone = True

    assert ranks(ATTEMPT_CALLS[-1] + 1) == [1] * (ATTEMPT_CALLS[-1] + 1)

    assert refusal_of(ranks.run) == UNREACHABLE
    assert ranks.peer.values == {}


def test_after_the_last_attempt_it_is_refused(ranks: Ranks) -> None:
    ranks.peer.is_late = True

    assert ranks(ATTEMPT_CALLS[-1] + 1) == [1] * (ATTEMPT_CALLS[-1] + 1)

    assert ranks.run.why_refused.code is ReasonCode.RANKS_NOT_RECORDED
    assert not ranks.run.refused_for_good
    assert not ranks.run.is_awaited
    assert len(ranks.peer.graphs) == ranks.peer.late == len(ATTEMPT_CALLS)


@pytest.mark.parametrize(("step", "ran"), [("captured", 1), ("compared", 2)])
def test_what_another_rank_refuses_none_has(ranks: Ranks, step: str, ran: int) -> None:
    ranks.peer.against = {step: f"{FOR_GOOD}it cannot be captured" if step == "captured" else "it differs"}

    assert ranks(ATTEMPT_CALLS[1] + 1) == [1, 1, ran, *[1] * (ATTEMPT_CALLS[1] - 2)]

    assert refusal_of(ranks.run) in {"it cannot be captured", "it differs"}
    ranks.case.expect(captured=0)
    assert ranks.case.emulator.live() == (0, 0)


def test_a_rank_that_cannot_capture_refuses_for_all_and_says_so_at_once_later(ranks: Ranks) -> None:
    ranks.case.recorder.between = lambda: (_ for _ in ()).throw(
        NotRelocatableError("it copies from the host")
    )

    assert ranks(ATTEMPT_CALLS[1]) == [1] * ATTEMPT_CALLS[1]

    assert ranks.run.refused_for_good
    assert {*ranks.peer.values.values()} == {f"{FOR_GOOD}it copies from the host"}
    assert ranks.case.recorder.captures == 1


def test_settings_that_no_rank_can_record_with_are_named(ranks: Ranks) -> None:
    ranks.peer.refuses = "NCCL_GRAPH_REGISTER=1"

    assert ranks(ATTEMPT_CALLS[1]) == [1] * ATTEMPT_CALLS[1]

    assert str(ranks.run.why_refused) == "its collectives cannot be captured: NCCL_GRAPH_REGISTER=1"


def test_a_replay_that_fails_runs_its_collectives_as_kernels(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pygraphd.client.replay.replay import Replay

    def fail(*_: object) -> None:
        raise DriverError("cuGraphLaunch", 1)

    monkeypatch.setattr(Replay, "serve_on", fail)

    assert ranks(ATTEMPT_CALLS[1]) == [1, 1, 2, *[1] * (ATTEMPT_CALLS[1] - 3)]

    assert ranks.peer.first == ("commit", f"{FOR_GOOD}cuGraphLaunch failed with CUresult 1")
    assert refusal_of(ranks.run) is not None


def fail_when_verified(monkeypatch: pytest.MonkeyPatch, note: Callable[[Any], object]) -> None:
    """Have each replay fail; `note` is called with each tensor that it was to use."""
    from pygraphd.client.replay.replay import Replay

    def fail(_: Replay, inputs: list[Any], memory: list[Any]) -> None:
        [*map(note, memory)]  # no variable of this frame, which the error holds, may keep one
        raise DriverError("cuGraphLaunch", 1)

    monkeypatch.setattr(Replay, "serve_on", fail)


def test_kernels_in_place_of_a_replay_get_its_memory(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    noted: list[int] = []

    def note(tensor: Any) -> None:
        noted.append(len(noted))
        weakref.finalize(tensor.untyped_storage(), ended.append, noted[-1])

    fail_when_verified(monkeypatch, note)
    pipeline, seen = ranks.run._pipeline, []
    run_kernels = pipeline._run_kernels

    def counted(inputs: list[Any]) -> Any:
        seen.append((len(noted), len(ended)))
        return run_kernels(inputs)

    monkeypatch.setattr(pipeline, "_run_kernels", counted)

    ranks(ATTEMPT_CALLS[0])

    assert seen[-1] == (len(noted), len(noted))
    assert noted


def test_a_rank_without_memory_for_either_raises_and_runs_no_later_collective(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks(ATTEMPT_CALLS[0] - 1)
    fail_when_verified(monkeypatch, id)
    run_kernels, pipeline = ranks.run._pipeline._run_kernels, ranks.run._pipeline

    def without_memory(inputs: list[Any]) -> Any:
        if "1/captured" in ranks.peer.values:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run_kernels(inputs)

    monkeypatch.setattr(pipeline, "_run_kernels", without_memory)
    before = ranks.case.recorder.as_kernels.comm.value

    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as raised:
        ranks(1)

    assert ranks.case.recorder.as_kernels.comm.value == before
    assert ranks.peer.first == ("commit", "a call raised")  # no rank waits for this one
    assert raised.value.__context__ is None  # whose frames would hold the memory of the recording


def test_a_recording_that_differs_is_not_tried_again(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    from pygraphd.client.recording import comparison, verification

    differs: Callable[..., Any] = lambda *_: comparison.Disagreement("output 0 differs")  # noqa: E731
    monkeypatch.setattr(verification, "compare", differs)

    assert ranks(ATTEMPT_CALLS[1]) == [1, 1, 2, *[1] * (ATTEMPT_CALLS[1] - 3)]

    assert ranks.peer.first == ("commit", f"{FOR_GOOD}verification: output 0 differs")
    assert ranks.run.why_refused.code is ReasonCode.RESULTS_DIFFER


def test_an_error_of_the_users_is_theirs_and_has_no_rank_wait(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks(ATTEMPT_CALLS[0] - 1)
    pipeline = ranks.run._pipeline
    record = pipeline.record

    def then_fail(*given: Any, **named: Any) -> Any:
        attempt = record(*given, **named)
        monkeypatch.setattr(ranks.run, "_run_kernels", lambda _: 1 / 0)
        return attempt

    monkeypatch.setattr(pipeline, "record", then_fail)
    with pytest.raises(ZeroDivisionError):
        ranks(1)

    assert [*ranks.peer.values.values()] == ["commit", "a call raised"]


def test_a_rank_whose_gpu_is_behind_does_not_take_part(ranks: Ranks) -> None:
    ranks.case.recorder.idle = [False]

    assert ranks(ATTEMPT_CALLS[1]) == [*[1] * (ATTEMPT_CALLS[1] - 1), 2]

    assert [*ranks.peer.values.values()] == [NOT_IDLE, "commit", "commit"]
    assert ranks.peer.late == 1


@pytest.mark.parametrize("waits", [1, 2])
def test_what_a_stuck_gpu_works_on_is_not_given_back(ranks: Ranks, waits: int) -> None:
    """The first wait is for the GPU to be idle, the second for the replay, the third for the call."""
    ranks.case.recorder.idle = [*[True] * waits, False]

    assert ranks(ATTEMPT_CALLS[1]) == [1, 1, 2, *[1] * (ATTEMPT_CALLS[1] - 3)]

    assert refusal_of(ranks.run) == STUCK
    assert ranks.peer.late == 1
    assert ranks.peer.first == ("commit", f"{FOR_GOOD}{STUCK}")
    assert ranks.case.emulator.live()[0] > 0
    ranks.run._pipeline.stuck.clear()
    for each in ranks.case.recorder.cursors:
        each.closed = True
    for recording in ranks.case.recorder.recordings:
        recording.release()


def test_a_rank_that_runs_kernels_keeps_the_others_from_waiting(ranks: Ranks) -> None:
    ranks.run.close()

    assert ranks(ATTEMPT_CALLS[0], as_graph=False) == [1] * ATTEMPT_CALLS[0]

    assert [*ranks.peer.values.values()] == [f"{FOR_GOOD}{A_RANK_RUNS_KERNELS}"]
    assert ranks.case.recorder.captures == 0


@pytest.mark.parametrize("ends", ["of one", "of both", "default"])
def test_with_a_group_the_recordings_end_that_use_it_and_no_others(
    case: Case,
    init: Callable[..., None],
    ends: str,
) -> None:
    init(dist.HashStore())
    groups = {"of one": dist.new_group([0]), "of both": dist.new_group([0, 1]), "default": dist.group.WORLD}
    peer: Any = Peer()
    options: Any = SimpleNamespace(sizes=SimpleNamespace(sizes=8), recheck_s=0.0)
    here = devices.Devices(options, Path(), case.report, peer)
    recorder: Any = case.recorder
    here._recorders[0] = recorder
    made = {}
    for name, group in groups.items():
        assert group is not None
        facts = GraphFacts(collectives=(frozenset({(REDUCE, group.group_name)}),), digest="d" * 64)
        made[name] = Ranks(
            case, Peer(), here.recordings(case.recorder.compiled(body), 0, facts, lambda *_: None)
        )
        made[name](ATTEMPT_CALLS[0])
    undo = torch_private.before_groups_end(here.end_collectives)
    try:
        dist.destroy_process_group(groups[ends])
    finally:
        undo()

    left = {name for name, each in made.items() if each.run.replays}
    assert left == (set() if ends == "default" else {*groups} - {ends})
    for name in left:
        (replay,) = made[name].run.replays
        before = replay.counts.replays
        assert made[name](3) == [1] * 3
        assert replay.counts.replays == before + 3
    here.end_collectives()


def test_a_layout_that_does_not_fit_runs_as_kernels_and_is_never_recorded_alone(ranks: Ranks) -> None:
    ranks(ATTEMPT_CALLS[0])
    captures = ranks.case.recorder.captures

    for number in range(12):
        inputs = [ranks.case.floats(0, number, 1)[1:], ranks.case.floats(2, 3)]
        assert ranks.run(inputs)[0].tolist() == [2 * number + 6, 11]

    assert ranks.case.recorder.captures == captures
    assert len(ranks.peer.graphs) == 1
    assert ranks.run.replays[0].counts.replays == 1
    assert not any("holds a collective" in each for each in ranks.case.report.fallbacks)
