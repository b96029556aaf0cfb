"""How often a follower looks, and that it never gets into a user's way."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from pygraphd.client.common.report import Report
from pygraphd.client.decisions.ranks.following import COMPILING_CALLS, PATIENT_CALLS, UNLED_CALLS, Follower
from pygraphd.schema.messages import Decision, Deployment
from pygraphd.schema.reasons import Reason, ReasonCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from pygraphd.client.backend.torch_private import Runnable

FASTER = Decision(Deployment.GRAPH, Reason(ReasonCode.FASTER), 1)


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Family:
    """Followers; what is put in `answers` is decided, by name."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.report = Report()
        self.answers: dict[str, Decision] = {}
        self.looks: list[str] = []
        self.waited: dict[str, float] = {}

    def follower(self, name: str, lead: Callable[[float], Runnable | None] = lambda _: None) -> Follower:
        def ask(waited_s: float) -> Decision | None:
            self.looks.append(name)
            self.waited[name] = waited_s
            return self.answers.get(name)

        def deploy(decision: Decision) -> Runnable:
            return lambda inputs: "captured"

        return Follower(lambda inputs: "kernels", ask, deploy, self.report, self.clock, lead)


@pytest.fixture
def family() -> Family:
    return Family()


def test_two_minutes_take_two_dozen_looks(family: Family) -> None:
    one = family.follower("one")
    for _ in range(120_000):
        family.clock.now += 0.001
        assert one([]) == "kernels"

    assert 20 <= len(family.looks) <= 30


def test_waiting_begins_after_compiling(family: Family) -> None:
    one = family.follower("one")
    for _ in range(COMPILING_CALLS):
        one([])
        family.clock.now += 1000

    assert family.looks == []
    one([])
    assert (family.looks, family.waited) == (["one"], {"one": 0.0})


def test_time_does_not_count_before_a_leader_can_have_measured(family: Family) -> None:
    one = family.follower("one")
    waited = []
    for _ in range(PATIENT_CALLS + 10):
        one([])
        waited.append(family.waited.get("one", 0.0))
        family.clock.now += 60.0

    assert set(waited[:PATIENT_CALLS]) == {0.0}
    assert waited[-1] == (PATIENT_CALLS + 9 - COMPILING_CALLS) * 60.0


def test_a_backward_that_is_compiled_late_waits_from_then_on(family: Family) -> None:
    forward = family.follower("forward")
    family.answers["forward"] = FASTER
    for _ in range(COMPILING_CALLS + 1):
        forward([])
    family.clock.now += 300.0
    backward = family.follower("backward")
    for _ in range(2 * PATIENT_CALLS):
        family.clock.now += 0.2
        backward([])

    assert 0.0 < family.waited["backward"] < 45.0


def test_a_rank_that_may_lead_does_so_after_a_few_calls_and_asks_no_more(family: Family) -> None:
    waited: list[float] = []

    def lead(waited_s: float) -> Runnable | None:
        waited.append(waited_s)
        return (lambda inputs: "measured") if waited_s >= 100.0 else None

    one = family.follower("one", lead)
    results = []
    for _ in range(UNLED_CALLS + 7):
        results.append(one([]))
        family.clock.now += 9.0

    assert results == ["kernels"] * (UNLED_CALLS + 4) + ["measured"] * 3
    assert (waited[0], waited[-1]) == ((UNLED_CALLS - COMPILING_CALLS) * 9.0, 108.0)
    assert set(family.waited.values()) == {0.0}  # for a decision it would wait on
    assert len(family.looks) == UNLED_CALLS + 5 - COMPILING_CALLS


def test_what_is_decided_runs_from_that_call_on_and_nothing_is_asked_again(family: Family) -> None:
    one = family.follower("one")
    assert [one([]) for _ in range(5)] == ["kernels"] * 5
    family.answers["one"] = FASTER
    family.clock.now += 1

    assert [one([]) for _ in range(3)] == ["captured"] * 3
    assert len(family.looks) == 2
    family.clock.now += 1000
    assert (one([]), len(family.looks)) == ("captured", 2)


def test_an_error_of_ours_is_counted_and_the_call_runs_as_kernels(family: Family) -> None:
    def fail(*_: Any) -> Any:
        raise ValueError("ours")

    broken = Follower(lambda inputs: "kernels", lambda _: FASTER, fail, family.report)

    assert [broken([]) for _ in range(9)] == ["kernels"] * 9
    assert family.report.failures == {"ranks: following: ValueError": 1}


def test_an_error_of_the_users_is_the_users(family: Family) -> None:
    def fail(inputs: list[Any]) -> None:
        raise ZeroDivisionError

    one = Follower(fail, lambda _: None, lambda *_: fail, family.report)

    for _ in range(5):
        with pytest.raises(ZeroDivisionError):
            one([])
    assert family.report.failures == {}


def test_of_several_threads_one_looks_and_the_others_run_as_kernels(family: Family) -> None:
    asked, answer = threading.Event(), threading.Event()
    looks = []

    def ask(waited_s: float) -> Decision:
        looks.append(waited_s)
        asked.set()
        answer.wait(10)
        return FASTER

    one = Follower(
        lambda inputs: "kernels",
        ask,
        lambda *_: lambda inputs: "captured",
        family.report,
        family.clock,
    )
    for _ in range(COMPILING_CALLS):
        one([])
    looker = threading.Thread(target=one, args=([],))
    looker.start()
    assert asked.wait(10)
    family.clock.now += 100

    assert [one([]) for _ in range(3)] == ["kernels"] * 3
    answer.set()
    looker.join()
    assert one([]) == "captured"
    assert len(looks) == 1
