"""Ranks record in the same call or not at all, in whatever order they run, however late they are, whoever dies and whatever fails."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pygraphd.client.backend.errors import RanksError
from pygraphd.client.decisions.ranks.atomic_commit import COMMIT, IN_DOUBT, LATE, STALE, UNREACHABLE, Ballot
from pygraphd.client.decisions.ranks.lockstep import STEPS, Lockstep
from pygraphd.client.decisions.ranks.write_once import OPERATION_S, RegisterError, Registers
from tests.support.memory_store import MemoryStore

RANKS = 3
DOUBT_S = 600.0
TICK_S = 0.5
STUCK_S = 30.0
LIMIT_S = sum(limit_s for _, limit_s in STEPS) + STUCK_S


@dataclass
class Store:
    """What all ranks see: counters, write-once values, and how the operations of a rank fail."""

    counters: dict[str, int] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    fails: dict[int, str] = field(default_factory=dict)


@dataclass
class View:
    """One rank's way to the store."""

    store: Store
    rank: int

    def count(self, key: str, votes: int) -> int:
        self._fail("before")
        total = self.store.counters[key] = self.store.counters.get(key, 0) + votes
        self._fail("after")
        return total

    def write_text(self, key: str, value: str) -> str:
        self._fail("before")
        held = self.store.values.setdefault(key, value)
        self._fail("after")
        return held

    def read_text(self, key: str) -> str | None:
        self._fail("before")
        return self.store.values.get(key)

    def _fail(self, moment: str) -> None:
        if self.store.fails.get(self.rank) == moment:
            raise RegisterError(moment)


class Rank:
    """A process that comes to the call, captures, replays, compares, and then runs KERNELS or replays."""

    def __init__(self, number: int, job: Job) -> None:
        self.number, self.job = number, job
        self.lockstep: Lockstep | None = None
        self.ballot: Ballot | None = None
        self.has_replayed = self.is_dead = self.will_fail = False
        self.began = 0.0
        self.why = ""

    @property
    def is_serving(self) -> bool:
        return self.lockstep is not None and self.lockstep.steps == len(STEPS)

    @property
    def has_ended(self) -> bool:
        return bool(self.why) or self.is_serving

    @property
    def where(self) -> tuple[int, bool]:
        """The steps it has taken, and whether it votes on the next one."""
        return (self.lockstep.steps if self.lockstep is not None else 0), self.ballot is not None

    def run(self) -> None:
        """Do one thing: come, make a poll, or go on with the work."""
        lockstep = self.lockstep
        if self.is_dead or self.has_ended:
            return
        if lockstep is None:
            view = View(self.job.store, self.number)
            self.lockstep = Lockstep(view, "graph/1", RANKS, DOUBT_S, lambda: self.job.now)
        elif self.ballot is not None:
            self.poll(lockstep, self.ballot)
        elif lockstep.steps and not self.has_replayed:
            self.has_replayed = True
        elif self.will_fail:
            self.refuse(lockstep, "it cannot be recorded")
        elif not lockstep.steps or all(each.has_replayed for each in self.job.ranks):
            self.ballot = lockstep.ballot()
        elif self.job.now - self.began >= STUCK_S:
            self.refuse(lockstep, "the collectives wait for a rank")

    def poll(self, lockstep: Lockstep, ballot: Ballot) -> None:
        if (result := ballot.poll(self.job.now)) is not None:
            self.ballot, self.began = None, self.job.now
            try:
                lockstep.note(result)
            except RanksError as error:
                self.why = str(error)

    def refuse(self, lockstep: Lockstep, why: str) -> None:
        lockstep.refuse(why)
        self.why = why


class Job:
    """All ranks of a group."""

    def __init__(self) -> None:
        self.now = 0.0
        self.store = Store()
        self.ranks = [Rank(number, self) for number in range(RANKS)]

    @property
    def living(self) -> list[Rank]:
        return [rank for rank in self.ranks if not rank.is_dead]

    def do(self, what: str, number: int) -> None:
        rank = self.ranks[number]
        match what:
            case "run":
                rank.run()
            case "dies":
                rank.is_dead = True
            case "fails":
                rank.will_fail = True
            case "before" | "after":
                self.store.fails[number] = what
            case "heals":
                self.store.fails.pop(number, None)
            case _:
                self.now += float(what)

    def run_in_turns(self, rounds: int) -> None:
        for _ in range(rounds):
            for rank in self.ranks:
                rank.run()

    def settle(self) -> float:
        """Run all ranks in turns until each has come to an end; return how long that took."""
        began = self.now
        while not all(rank.has_ended for rank in self.living):
            assert self.now - began < 2 * DOUBT_S
            for rank in self.living:
                rank.run()
            self.now += TICK_S
        return self.now - began

    def assert_together(self) -> None:
        # A replay that only some of them make would wait for ever, or meet another collective.
        assert len({rank.has_replayed for rank in self.living}) <= 1
        serving = {rank.is_serving for rank in self.living}
        # One that cannot read what all have agreed to runs KERNELS, whose collectives match those of a replay.
        assert len(serving) <= 1 or {rank.why for rank in self.living if not rank.is_serving} == {IN_DOUBT}
        if True in serving:
            assert all(rank.has_replayed and rank.why in {"", IN_DOUBT} for rank in self.ranks)


AFTER = st.integers(0, 12)
"""Rounds in which all ranks do as they should, before anything happens: an attempt takes a dozen."""


def actions(*kinds: str) -> st.SearchStrategy[list[tuple[str, int]]]:
    passing = ("0.01", "1.5", "11", "31")
    return st.lists(
        st.tuples(st.sampled_from(("run", "run", "run", *kinds, *passing)), st.integers(0, RANKS - 1)),
        max_size=40,
    )


@given(AFTER, actions("dies", "fails"))
def test_living_ranks_choose_alike_and_within_the_limit(rounds: int, steps: list[tuple[str, int]]) -> None:
    job = Job()
    job.run_in_turns(rounds)
    for what, number in steps:
        job.do(what, number)

    took = job.settle()

    job.assert_together()
    assert took <= LIMIT_S + 20 * TICK_S
    assert len({rank.is_serving for rank in job.living}) <= 1
    if any(rank.is_dead and not rank.has_replayed for rank in job.ranks):
        assert not any(rank.is_serving for rank in job.living)


@given(AFTER, actions("dies", "fails", "before", "after", "heals"))
def test_a_store_that_fails_for_a_while_does_not_part_them(rounds: int, steps: list[tuple[str, int]]) -> None:
    job = Job()
    job.run_in_turns(rounds)
    for what, number in steps:
        # An outage ends before the group would give a collective up.
        if job.now < DOUBT_S - 40 or what in {"run", "heals"}:
            job.do(what, number)
    job.store.fails.clear()

    job.settle()

    job.assert_together()


@given(AFTER, actions("before", "after"), st.integers(0, RANKS - 1))
def test_a_rank_without_a_store_ends_and_the_others_agree(
    rounds: int, steps: list[tuple[str, int]], lost: int
) -> None:
    job = Job()
    job.run_in_turns(rounds)
    for what, number in steps:
        job.do(what, lost if what in {"before", "after"} else number)

    job.settle()

    others = [rank for rank in job.ranks if rank.number != lost]
    assert len({rank.is_serving for rank in others}) == len({rank.has_replayed for rank in others}) == 1


def test_ranks_that_do_as_they_should_replay() -> None:
    job = Job()

    job.settle()

    assert all(rank.is_serving and rank.has_replayed for rank in job.ranks)


@pytest.mark.parametrize("where", [(0, False), (0, True), (1, False), (1, True)])
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_rank_killed_at_any_step_has_the_others_run_kernels(where: tuple[int, bool], goes_on: bool) -> None:
    job = Job()
    victim = job.ranks[0]
    while victim.where != where or victim.lockstep is None:
        for rank in job.ranks:
            if victim.where != where or victim.lockstep is None:
                rank.run()
    if goes_on:
        victim.run()
    victim.is_dead = True

    job.settle()

    # One that dies after its last vote has agreed already: the others serve, and wait for it as for any dead rank.
    has_agreed = where == (1, True) and goes_on
    assert {rank.is_serving for rank in job.living} == {has_agreed}
    assert len({rank.has_replayed for rank in job.living}) == 1


def test_a_vote_against_says_whether_it_is_worth_to_try_again() -> None:
    store = Store()
    mine, other = (Lockstep(View(store, number), "graph/1", 2, 1.0, lambda: 0.0) for number in range(2))

    other.refuse("symmetric memory", for_good=True)
    with pytest.raises(RanksError, match=r"^symmetric memory$") as raised:
        mine.go_on()
    mine.refuse("too late to say so")

    assert raised.value.for_good
    assert [*store.values.values()] == ["never: symmetric memory"]


def registers(number: int, store: MemoryStore) -> Registers:
    return Registers(lambda: store, str(number))


def test_the_registers_of_a_group_can_vote() -> None:
    values: dict[str, bytes] = {}
    stores = [MemoryStore(values), MemoryStore(values), MemoryStore(values, {1: True})]
    first, second, third = map(registers, range(3), stores)
    mine, others, late = (Ballot(each, "key", 3, 0.0, 2.0) for each in (first, second, third))

    assert mine.poll(0.0) is None
    assert others.poll(0.0) is None
    assert late.poll(0.0) is None  # counted, and raised

    assert late.poll(0.1) == UNREACHABLE
    assert mine.poll(0.2) == others.poll(0.3) == UNREACHABLE


def test_a_rank_that_waits_alone_aborts_at_the_limit() -> None:
    ballot = Ballot(View(Store(), 0), "key", 2, 0.0, 2.0)

    assert [ballot.poll(now) for now in (0.0, 1.9)] == [None, None]
    assert ballot.poll(2.0) == LATE.format(1, 2)


def test_votes_and_a_commit_of_an_earlier_job_do_not_count() -> None:
    store = Store({"key/votes": 2}, {"key": COMMIT})
    ballots = [Ballot(View(store, number), "key", 2, 0.0, 2.0) for number in range(2)]

    assert [ballot.poll(0.0) for ballot in ballots] == [STALE] * 2


def test_a_rank_in_doubt_asks_on_as_long_as_its_group_waits() -> None:
    store = Store()
    ballot = Ballot(View(store, 0), "key", 2, 0.0, 2.0, 100.0)
    assert ballot.poll(0.0) is None
    store.fails[0] = "before"

    end = 2.0 + OPERATION_S + 100.0
    assert [ballot.poll(now) for now in (2.0, end - 1)] == [None, None]
    assert ballot.poll(end) == IN_DOUBT
