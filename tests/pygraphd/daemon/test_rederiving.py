"""Decisions derived anew, in a real store, from what was measured, and never from less."""

from __future__ import annotations

import json
import sqlite3
import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pygraphd.daemon.queries import CHUNK
from pygraphd.daemon.rederiving import (
    NOT_VALID,
    Changed,
    Kept,
    RederiveAnswer,
    RederiveRequest,
)
from pygraphd.daemon.store import Store, StoreError
from pygraphd.schema.checks import InvalidMessageError
from pygraphd.schema.keys import Environment
from pygraphd.schema.messages import (
    Decision,
    Deployment,
    Graph,
    Kind,
    LookupRequest,
    Measurement,
    Origin,
    Record,
    RecordRequest,
    decode,
)
from pygraphd.schema.offline import read_entries
from pygraphd.schema.policy import (
    MIN_SAMPLES,
    POLICY_VERSION,
    decide,
    is_noisy,
    only_kernels,
)
from pygraphd.schema.reasons import Reason, ReasonCode

if TYPE_CHECKING:
    from pathlib import Path

KERNELS, GRAPH = Deployment.KERNELS, Deployment.GRAPH
HERE = Environment("NVIDIA H200", "9.0", 132, 143771, "", "2.13.0", "3.5", "13.0", "580.1", "91400")
OLDER = POLICY_VERSION - 1
OLD_KERNELS = Decision(KERNELS, Reason(ReasonCode.OTHER, "an older policy's reason"), OLDER)
OLD_GRAPH = Decision(GRAPH, Reason(ReasonCode.OTHER, "an older policy's reason"), OLDER)


def measured(samples: int = MIN_SAMPLES, mad: float = 0.0, **medians: float) -> tuple[Measurement, ...]:
    return tuple(
        Measurement(Deployment(name), samples, time, mad, time, time, 0.5) for name, time in medians.items()
    )


FAST, EVEN, SLOW = (measured(KERNELS=100, GRAPH=time) for time in (50, 99.5, 120))
NOISY_FIGURES = measured(mad=50.0, KERNELS=100, GRAPH=50)


def add(store: Store, decision: Decision, measurements: tuple[Measurement, ...] = (), name: int = 0) -> None:
    """Record a decision as another process would have sent it."""
    record = Record(Graph(f"{name:064x}", Kind.BACKWARD, 0, 1, 3), decision, measurements)
    store.record(RecordRequest(HERE, Origin("host-a", "0.1.0"), (record,)), uid=1000)


def answers(database: Path, *names: int) -> list[Decision]:
    asked = LookupRequest(HERE.digest(), tuple(f"{name:064x}" for name in names or (0,)))
    return [entry.decision for entry in sorted(read_entries(database, asked), key=lambda entry: entry.graph)]


def query(database: Path, statement: str) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(database)
    try:
        rows = connection.execute(statement).fetchall()
        connection.commit()
        return rows
    finally:
        connection.close()


def rederive(store: Store, *, dry_run: bool = False) -> RederiveAnswer:
    return store.rederive(RederiveRequest(dry_run))


def test_what_an_older_policy_decided_is_decided_anew(store: Store, database: Path) -> None:
    add(store, OLD_KERNELS, FAST, name=0)
    add(store, OLD_GRAPH, EVEN, name=1)
    add(store, OLD_GRAPH, FAST, name=2)
    add(store, decide(SLOW), SLOW, name=3)

    assert rederive(store) == RederiveAnswer(
        policy=POLICY_VERSION,
        entries=4,
        unchanged=1,
        renewed=1,
        changed=(Changed(GRAPH, KERNELS, 1), Changed(KERNELS, GRAPH, 1)),
        kept=(),
        unmeasured=0,
        dry_run=False,
    )

    assert answers(database, 0, 1, 2, 3) == [decide(each) for each in (FAST, EVEN, FAST, SLOW)]
    costs = query(database, "SELECT cost_us, host_us, span_us FROM decision ORDER BY graph")
    assert costs == [(time,) * 3 for time in (50.0, 100.0, 50.0, 100.0)]


def test_a_second_time_changes_nothing(store: Store) -> None:
    add(store, OLD_KERNELS, FAST)

    first, second = rederive(store), rederive(store)

    assert (first.unchanged, len(first.changed)) == (0, 1)
    assert (second.unchanged, second.changed, second.renewed) == (1, (), 0)


def test_a_dry_run_says_the_same_and_writes_nothing(store: Store, database: Path) -> None:
    add(store, OLD_KERNELS, FAST)
    before = query(database, "SELECT * FROM decision")

    dry = rederive(store, dry_run=True)

    assert query(database, "SELECT * FROM decision") == before
    assert (dry.changed, dry.dry_run) == (rederive(store).changed, True)
    assert query(database, "SELECT * FROM decision") != before


def test_whose_it_is_and_its_hits_stay_and_the_time_is_the_decisions(store: Store, database: Path) -> None:
    add(store, OLD_KERNELS, FAST)
    store.add_hits({(HERE.digest(), f"{0:064x}"): (3, 100.0)})
    facts = query(database, "SELECT * FROM measurement")
    began = time.time()

    rederive(store)

    ((uid, host, hits, last_hit, created_at, measured_at),) = query(
        database, "SELECT uid, host, hits, last_hit, created_at, measured_at FROM decision"
    )
    assert (uid, host, hits, last_hit) == (1000, "host-a", 3, 100.0)
    assert isinstance(created_at, float)
    assert isinstance(measured_at, float)
    assert created_at >= began > measured_at
    assert query(database, "SELECT * FROM measurement") == facts


def test_a_rule_is_left_alone(store: Store, database: Path) -> None:
    add(store, OLD_KERNELS, name=0)
    # Measured at first, but then a rule said otherwise.
    add(store, OLD_GRAPH, FAST, name=1)
    add(store, OLD_KERNELS, name=1)

    answer = rederive(store)

    assert (answer.entries, answer.unmeasured) == (0, 2)
    assert answers(database, 0, 1) == [OLD_KERNELS, OLD_KERNELS]


@pytest.mark.parametrize(
    "measurements",
    [measured(7, KERNELS=100, GRAPH=50), measured(GRAPH=50), measured(KERNELS=100)],
    ids=["too few samples", "without KERNELS", "of KERNELS alone"],
)
def test_what_does_not_suffice_never_replaces_a_final_decision(
    store: Store, database: Path, measurements: tuple[Measurement, ...]
) -> None:
    add(store, OLD_GRAPH, measurements)

    answer = rederive(store)

    assert (answer.kept, answer.changed, answer.renewed) == ((Kept("too few calls to measure", 1),), (), 0)
    assert answers(database) == [OLD_GRAPH]


def test_what_does_not_suffice_stays_open_and_says_how_often_it_ran(store: Store, database: Path) -> None:
    add(
        store,
        Decision(KERNELS, Reason(ReasonCode.TOO_FEW_CALLS), OLDER, final=False, calls=17),
        measured(3, KERNELS=100, GRAPH=50),
    )

    answer = rederive(store)

    assert (answer.renewed, answer.kept) == (1, ())
    assert answers(database) == [only_kernels(Reason(ReasonCode.TOO_FEW_CALLS), final=False, calls=17)]


def test_a_policy_that_needs_less_closes_what_was_open(store: Store, database: Path) -> None:
    add(store, Decision(KERNELS, Reason(ReasonCode.TOO_FEW_CALLS), OLDER, final=False, calls=17), FAST)

    assert rederive(store).changed == (Changed(KERNELS, GRAPH, 1),)

    (decision,) = answers(database)
    assert (decision.deployment, decision.final) == (GRAPH, True)


def test_what_is_noisy_by_this_policy_is_provisional_and_measured_anew(store: Store, database: Path) -> None:
    add(store, OLD_GRAPH, NOISY_FIGURES)

    assert rederive(store).kept == ()

    (decision,) = answers(database)
    assert decision == decide(NOISY_FIGURES)
    assert not decision.final
    assert is_noisy(decision.reason, final=False)


def test_measurements_of_different_times_are_not_compared(store: Store, database: Path) -> None:
    add(store, OLD_KERNELS, measured(KERNELS=100, GRAPH=10))
    add(store, OLD_KERNELS, EVEN)

    rederive(store)

    assert answers(database) == [decide(EVEN)]


def test_newer_measurements_that_led_to_no_decision_are_not_weighed(store: Store, database: Path) -> None:
    add(store, OLD_KERNELS, FAST)
    guess = Decision(KERNELS, Reason(ReasonCode.TOO_FEW_CALLS), OLDER, final=False, calls=9)
    add(store, guess, measured(3, KERNELS=100, GRAPH=120))

    assert rederive(store).changed == (Changed(KERNELS, GRAPH, 1),)

    assert answers(database) == [decide(FAST)]


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE measurement SET deployment = 'TELEPORT' WHERE graph LIKE '%1'",
        "UPDATE measurement SET median_us = -1 WHERE graph LIKE '%1'",
        "UPDATE decision SET deployment = 'TELEPORT' WHERE graph LIKE '%1'",
    ],
)
def test_rows_that_make_no_sense_harm_no_others(store: Store, database: Path, damage: str) -> None:
    for name in range(2):
        add(store, OLD_KERNELS, FAST, name=name)
    query(database, damage)
    before = query(database, "SELECT * FROM decision WHERE graph LIKE '%1'")

    answer = rederive(store)

    assert (answer.kept, answer.changed) == ((Kept(NOT_VALID, 1),), (Changed(KERNELS, GRAPH, 1),))
    assert query(database, "SELECT * FROM decision WHERE graph LIKE '%1'") == before


def test_more_entries_than_fit_one_transaction_are_all_reached(store: Store, database: Path) -> None:
    count = 2 * CHUNK + 1
    for name in range(count):
        add(store, OLD_KERNELS, FAST, name=name)

    assert rederive(store).changed == (Changed(KERNELS, GRAPH, count),)

    assert {decision.deployment for decision in answers(database, *range(count))} == {GRAPH}


class TestOutdated:
    """What a daemon does by itself when it starts."""

    @pytest.fixture
    def mixed(self, store: Store) -> Store:
        newer = Decision(KERNELS, Reason(ReasonCode.OTHER, "a newer policy's reason"), POLICY_VERSION + 1)
        current = Decision(KERNELS, Reason(ReasonCode.OTHER, "a reason of its own"), POLICY_VERSION)
        for name, decision in enumerate((OLD_KERNELS, current, newer)):
            add(store, decision, FAST, name=name)
        add(store, OLD_KERNELS, name=3)
        return store

    def test_only_what_an_older_policy_derived_is_derived_anew(self, mixed: Store, database: Path) -> None:
        before = answers(database, 1, 2, 3)

        assert mixed.rederive_outdated(60.0) == (1, 0)

        assert answers(database, 0) == [decide(FAST)]
        assert answers(database, 1, 2, 3) == before
        assert mixed.rederive_outdated(60.0) == (0, 0)

    def test_it_ends_when_its_time_is_over(self, mixed: Store, database: Path) -> None:
        assert mixed.rederive_outdated(0.0) == (0, 1)

        assert answers(database, 0) == [OLD_KERNELS]


def test_nothing_measured_is_nothing_to_do(store: Store) -> None:
    assert rederive(store) == RederiveAnswer(POLICY_VERSION, 0, 0, 0, (), (), 0, dry_run=False)


def test_a_database_that_cannot_be_written_is_an_error(store: Store, database: Path) -> None:
    add(store, OLD_KERNELS, FAST)
    query(database, "PRAGMA user_version=99")
    store.check()

    with pytest.raises(StoreError, match="written by a newer pygraphd"):
        rederive(store)


COUNTS = st.integers(0, 2**40)
ANSWERS = st.builds(
    RederiveAnswer,
    COUNTS,
    COUNTS,
    COUNTS,
    COUNTS,
    st.lists(st.builds(Changed, st.sampled_from(Deployment), st.sampled_from(Deployment), COUNTS)).map(tuple),
    st.lists(st.builds(Kept, st.text("abc ", max_size=9), COUNTS)).map(tuple),
    COUNTS,
    st.booleans(),
)


@given(ANSWERS)
def test_an_answer_survives_the_wire(answer: RederiveAnswer) -> None:
    assert decode(RederiveAnswer, json.dumps(answer.as_json()).encode()) == answer


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_request_survives_the_wire(dry_run: bool) -> None:
    request = RederiveRequest(dry_run)
    assert decode(RederiveRequest, json.dumps(request.as_json()).encode()) == request


@pytest.mark.parametrize("body", [b'{"dry_run": 1}', b'{"dry_run": null}', b"[]", b""])
def test_a_bad_request_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidMessageError):
        decode(RederiveRequest, body)
