"""How a plan is carried out on ranks that share it: two sessions in one process stand for two ranks, a real store between them."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch._inductor.cudagraph_utils import BoxedDeviceIndex

from pygraphd.client.decisions import fingerprint, rules
from pygraphd.client.decisions.cache import Cache
from pygraphd.client.decisions.ranks import consensus, reachability
from pygraphd.client.decisions.ranks.consensus import Agreement
from pygraphd.client.decisions.ranks.following import UNLED_CALLS, Follower
from pygraphd.client.decisions.ranks.process_group import Groups
from pygraphd.client.decisions.ranks.write_once import Registers
from pygraphd.client.frontend.runtime import Runtime
from pygraphd.schema.locations import locate
from pygraphd.schema.messages import Deployment, LeaseAnswer
from pygraphd.schema.reasons import ReasonCode
from tests.support.clock import Clock
from tests.support.compiled import (
    ENOUGH,
    Compiled,
    Relocating,
    be_on,
    compile_once,
    compile_whole,
    pretend_there_is_a_gpu,
    run,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from pygraphd.schema.keys import Environment

pytestmark = pytest.mark.torch


class TwoRanks(Groups):
    """Finds a group without there being one: each session is a rank of it."""

    def __init__(self, session: Runtime, store: dist.Store | Store, name: str, wait_limit_s: float) -> None:
        super().__init__(session.report)
        self._of_two = Agreement(Registers(lambda: store, name), session.report, wait_limit_s)

    def agreement(self) -> Agreement:
        return self._of_two


class Store:
    """A store whose operations can be had to fail: those on keys with the text `fails`."""

    def __init__(self) -> None:
        self.values = dist.HashStore()
        self.fails: str | None = None

    def check(self, keys: list[str]) -> bool:
        self._fail(*keys)
        return bool(self.values.check(keys))

    def get(self, key: str) -> bytes:
        self._fail(key)
        return bytes(self.values.get(key))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._fail(key)
        return bytes(self.values.compare_set(key, expected, desired))

    def _fail(self, *keys: str) -> None:
        if self.fails is not None and any(self.fails in key for key in keys):
            raise ConnectionError


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Runtime]]:
    """Return two ranks with a home each."""
    import torch._inductor.config as inductor_config

    pretend_there_is_a_gpu(monkeypatch)
    with inductor_config.patch({"triton.cudagraphs": True}):
        yield sessions(tmp_path)


def sessions(folder: Path, wait_limit_s: float = 120.0) -> list[Runtime]:
    store = dist.HashStore()
    made = []
    for name in ("one", "two"):
        (folder / name).mkdir(exist_ok=True)
        session = Runtime(locate({"PYGRAPHD_HOME": str(folder / name)}))
        session.groups = TwoRanks(session, store, name, wait_limit_s)
        made.append(session)
    return made


def pair(session: Runtime, parts: int = 1, text: str | None = None) -> tuple[Compiled, Compiled]:
    box = BoxedDeviceIndex(0)
    forward = compile_once(session, parts, backward=False, box=box, text=text)
    return forward, compile_once(session, 1, backward=True, box=box, text=text)


def test_one_rank_measures_and_the_other_follows(ranks: list[Runtime]) -> None:
    leader, other = ranks
    measured, followed = pair(leader, 2), pair(other, 2)
    assert run(*followed, 5) == [(["kernels"] * 2, ["kernels"])] * 5

    assert run(*measured)[-1] == (["relocated"] * 2, ["relocated"])
    steps = wait_for(other, followed)

    assert steps[-1] == (["relocated"] * 2, ["relocated"])
    slots = followed[0].compiled_fn_runner.partitions + followed[1].compiled_fn_runner.partitions
    assert all(isinstance(slot.run, Relocating) for slot in slots)
    assert (leader.report.counts["led"], leader.report.counts["measured"]) == (3, 3)
    counts = other.report.counts
    assert (counts["followed"], counts["looked_up"], counts["measured"], counts["spooled"]) == (3, 0, 0, 0)
    assert other.report.summary()["reasons"] == leader.report.summary()["reasons"]
    assert other.report.failures == {}


def test_with_collectives_the_other_ranks_run_graphs_while_one_measures(
    ranks: list[Runtime], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or its own GRAPH would take as long as their KERNELS."""
    monkeypatch.setattr(Relocating, "run_kernels_or_record", staticmethod(lambda _: "kernels"))
    leader, other = ranks
    measured, followed = pair(leader), pair(other)

    assert run(*followed, 5) == [(["relocated"], ["relocated"])] * 5
    assert run(*measured)[-1] == (["relocated"], ["relocated"])

    assert wait_for(other, followed)[-1] == (["relocated"], ["relocated"])
    assert (leader.report.counts["measured"], other.report.counts["measured"]) == (2, 0)


def wait_for(session: Runtime, compiled: tuple[Compiled, Compiled]) -> list[tuple[Any, Any]]:
    """Run until the graphs are decided; return all steps."""
    steps = []
    while session.decisions._pending:
        steps += run(*compiled, 1)
        assert len(steps) < 10**6
    return steps + run(*compiled, 1)


@pytest.mark.parametrize("granted", [True, False], ids=["daemon", "alone"])
def test_ranks_decide_for_all_dynamic_sizes_at_once(
    ranks: list[Runtime], monkeypatch: pytest.MonkeyPatch, granted: bool
) -> None:
    """They may see different ones; and what a program without a group has found of a graph does not count."""

    def lease(_: Cache, environment: Environment, graphs: Sequence[str]) -> LeaseAnswer | None:
        return LeaseAnswer(environment.digest(), "1", tuple(graphs), 60.0) if granted else None

    monkeypatch.setattr(Cache, "lease", lease)
    text = 'arg0_1: "Sym(s77)"\n  a = torch.ops.aten.sin.default(b)'
    alone = Runtime(ranks[0].locations)
    forward = compile_once(alone, 1, backward=False, box=BoxedDeviceIndex(0), text=text)
    forward.current_callable([torch.ones(1), 8])
    measured, followed = pair(ranks[0], text=text), pair(ranks[1], text=text)

    for _ in range(ENOUGH):
        measured[0].current_callable([torch.ones(1), 8])
        measured[1].current_callable([torch.ones(1), 8])

    assert run(*measured)[-1] == (["relocated"], ["relocated"])
    assert wait_for(ranks[1], followed)[-1] == (["relocated"], ["relocated"])
    counts = ranks[0].report.counts
    assert (counts["hits"], counts["measured"], counts["sizes"]) == (1, 2, 0)


def known_from_elsewhere(leader: Runtime) -> None:
    """Have another host's decision for GRAPH, of 50 us, in the leader's cache."""
    elsewhere = Runtime(leader.locations)
    be_on("elsewhere", elsewhere)
    assert run(*pair(elsewhere))[-1] == (["relocated"], ["relocated"])


@pytest.mark.parametrize("graph_us", [55.0, 200.0])
def test_a_decision_from_elsewhere_is_everybodys_at_once_and_checked_by_the_rank_that_leads(
    ranks: list[Runtime], monkeypatch: pytest.MonkeyPatch, graph_us: float
) -> None:
    leader, other = ranks
    known_from_elsewhere(leader)
    monkeypatch.setattr(Clock, "times_us", {Deployment.KERNELS: 100.0, Deployment.GRAPH: graph_us})
    checked, followed = pair(leader), pair(other)

    assert run(*followed, 1) == [(["relocated"], ["relocated"])]
    steps = run(*checked, 2 * ENOUGH)

    assert (steps[0], steps[-1]) == ((["relocated"], ["relocated"]),) * 2  # what all run stays
    assert run(*followed, 1) == [(["relocated"], ["relocated"])]
    holds = graph_us < 60
    counts = leader.report.counts
    disputed = 0 if holds else 2
    assert (counts["validated"], counts["disputed"], counts["measured"]) == (2, disputed, disputed)
    assert other.report.counts["validated"] == 0
    ways = "relocated" if holds else "kernels"
    assert run(*pair(Runtime(leader.locations)), 3)[-1] == ([ways], [ways])  # the next program knows


def test_who_comes_late_runs_what_is_decided_from_the_first_call(ranks: list[Runtime]) -> None:
    run(*pair(ranks[0]))

    assert run(*pair(ranks[1]), 3) == [(["relocated"], ["relocated"])] * 3
    assert ranks[1].report.summary()["deployed"] == {"KERNELS": 0, "GRAPH": 2}


@pytest.fixture
def store(ranks: list[Runtime], monkeypatch: pytest.MonkeyPatch) -> Store:
    """Return the store of both ranks, which can fail; they ask it again at once."""
    monkeypatch.setattr(reachability, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(reachability, "MAX_STORE_FAILURES", 10**6)
    store = Store()
    for name, session in zip(("one", "two"), ranks, strict=True):
        session.groups = TwoRanks(session, store, name, 120.0)
    return store


def store_of(session: Runtime) -> dist.Store:
    agreement = session.groups.agreement()
    assert agreement is not None
    store: dist.Store = agreement.registers._connect()
    return store


def test_a_backward_that_the_leader_does_not_have_is_measured_by_one_of_the_others(
    ranks: list[Runtime], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consensus, "UNLED_S", 1e-9)
    leader, other = ranks
    third = Runtime(locate({"PYGRAPHD_HOME": str(tmp_path / "two")}))
    third.groups = TwoRanks(third, store_of(other), "three", 120.0)
    text = "  a = torch.ops.aten.of_other_ranks.default(b)"
    measured = pair(leader)
    forwards, backwards = [], []
    for session in (other, third):
        box = BoxedDeviceIndex(0)
        forwards.append(compile_once(session, 1, backward=False, box=box))
        backwards.append(compile_once(session, 1, backward=True, box=box, text=text))
    run(*measured)

    steps = wait_for(other, (forwards[0], backwards[0]))

    assert [backward for _, (backward,) in steps[:UNLED_CALLS]] == ["kernels"] * UNLED_CALLS
    assert steps[-1] == (["relocated"], ["relocated"])
    assert wait_for(third, (forwards[1], backwards[1]))[-1] == (["relocated"], ["relocated"])
    measurements = [session.report.counts["measured"] for session in (leader, other, third)]
    assert measurements == [2, 1, 0]


def test_what_a_leader_finds_out_in_a_pause_of_the_store_is_everybodys_after_it(
    ranks: list[Runtime], store: Store
) -> None:
    leader, other = ranks
    measured, followed = pair(leader), pair(other)
    store.fails = ""
    assert run(*measured, 2 * ENOUGH)[-1] == run(*followed, 5)[-1] == (["kernels"], ["kernels"])
    assert leader.decisions._pending
    store.fails = None

    assert run(*measured, 3)[-1] == (["relocated"], ["relocated"])
    assert wait_for(other, followed)[-1] == (["relocated"], ["relocated"])
    assert leader.report.summary()["reasons"] == other.report.summary()["reasons"]
    assert (leader.report.counts["measured"], other.report.counts["measured"]) == (2, 0)


def test_what_a_leader_has_measured_is_kept_if_the_store_never_comes_back(
    ranks: list[Runtime], store: Store
) -> None:
    leader, _ = ranks
    measured = pair(leader)
    store.fails = "decided"
    assert run(*measured, 2 * ENOUGH)[-1] == (["kernels"], ["kernels"])

    leader.close()

    assert leader.report.summary()["reasons"] == {"ranks: the group's store could not be asked": 2}
    assert leader.report.counts["spooled"] == 2
    assert run(*pair(Runtime(leader.locations)), 1) == [(["relocated"], ["relocated"])]


def test_what_a_leader_knows_in_a_pause_of_the_store_is_everybodys_after_it(
    ranks: list[Runtime], store: Store
) -> None:
    leader, other = ranks
    run(*pair(Runtime(leader.locations)))
    store.fails = "decided"
    known, followed = pair(leader), pair(other)
    assert run(*known, 5)[-1] == run(*followed, 5)[-1] == (["kernels"], ["kernels"])
    store.fails = None

    assert wait_for(leader, known)[-1] == (["relocated"], ["relocated"])
    assert wait_for(other, followed)[-1] == (["relocated"], ["relocated"])
    assert (leader.report.counts["measured"], other.report.counts["measured"]) == (0, 0)


def test_a_leader_that_comes_too_late_runs_kernels_like_the_others_and_keeps_what_it_found(
    ranks: list[Runtime], tmp_path: Path
) -> None:
    leader, other = sessions(tmp_path, wait_limit_s=0.0)
    measured, followed = pair(leader), pair(other)

    run(*followed, 5)
    assert run(*measured)[-1] == (["kernels"], ["kernels"])

    reasons = {"ranks: no decision within 0 s": 2}
    assert leader.report.summary()["reasons"] == other.report.summary()["reasons"] == reasons
    assert (leader.report.counts["measured"], leader.report.counts["spooled"]) == (2, 2)
    later = Runtime(leader.locations)
    assert run(*pair(later), 1) == [(["relocated"], ["relocated"])]


def test_a_backward_is_decided_whatever_its_forward_runs_as(ranks: list[Runtime]) -> None:
    leader, other = ranks
    measured = pair(leader)
    digest = measured[0].compiled_fn_runner.partitions[0].run.pending.graph.digest
    assert isinstance(other.groups, TwoRanks)
    role = other.groups.agreement().role(digest, [digest], fingerprint.environment(0).digest())
    role.propose(digest, rules.only_kernels(ReasonCode.OTHER, "too late"))

    assert run(*measured)[-1] == (["kernels"], ["relocated"])

    assert leader.report.summary()["reasons"] == {"too late": 1, ReasonCode.SAVES_HOST_TIME.text: 1}
    assert run(*pair(Runtime(leader.locations)), 1) == [(["relocated"], ["relocated"])]


def test_a_rank_that_cannot_capture_has_all_run_kernels(ranks: list[Runtime]) -> None:
    leader, other = ranks
    compile_whole(
        other,
        backward=False,
        box=None,
        device_types={"cuda", "cpu"},
        disabled_cudagraphs_reason="mutated inputs",
    )
    forward = compile_once(leader, 1, backward=False, box=None)

    assert run(forward, forward)[-1] == (["kernels"], ["kernels"])

    assert other.report.counts["led"] == 1
    assert leader.report.summary()["deployed"] == {"KERNELS": 1, "GRAPH": 0}
    assert leader.report.summary()["reasons"] == other.report.summary()["reasons"]


def test_a_rank_that_cannot_have_what_is_decided_runs_as_kernels_and_says_so(ranks: list[Runtime]) -> None:
    leader, other = ranks
    forward = compile_once(leader, 1, backward=False, box=None)
    run(forward, forward)

    compile_whole(
        other,
        backward=False,
        box=None,
        device_types={"cuda", "cpu"},
        disabled_cudagraphs_reason="mutated inputs",
    )

    assert leader.report.summary()["deployed"]["GRAPH"] == 1
    assert other.report.summary()["deployed"] == {"KERNELS": 1, "GRAPH": 0}
    assert other.report.summary()["reasons"] == {
        "ranks: the group chose GRAPH, which this rank cannot run": 1
    }
    assert other.report.counts["spooled"] == 0


def test_a_program_that_ends_while_it_waits_says_so(ranks: list[Runtime]) -> None:
    pair(ranks[0])
    run(*pair(ranks[1]), 5)

    ranks[1].close()

    assert ranks[1].report.summary()["reasons"] == {ReasonCode.RANKS_UNDECIDED.text: 2}
    assert ranks[1].report.counts["spooled"] == 0


def test_what_waits_goes_with_its_model(ranks: list[Runtime]) -> None:
    pair(ranks[0])
    forward, backward = pair(ranks[1])
    run(forward, backward, 5)
    gone = weakref.ref(forward.compiled_fn_runner.partitions[0].run)
    assert isinstance(gone(), Follower)

    del forward, backward
    gc.collect()

    assert gone() is None


def test_graphs_of_before_the_group_stay_this_ranks_own(
    ranks: list[Runtime], monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, other = ranks
    group, other.groups = other.groups, Groups(other.report)
    own = pair(other)
    other.groups = group
    with monkeypatch.context() as here:
        here.setattr(Clock, "times_us", {Deployment.KERNELS: 50.0, Deployment.GRAPH: 100.0})
        assert run(*pair(leader))[-1] == (["kernels"], ["kernels"])

    assert run(*own)[-1] == (["relocated"], ["relocated"])
    assert (other.report.counts["followed"], other.report.counts["measured"]) == (0, 2)
