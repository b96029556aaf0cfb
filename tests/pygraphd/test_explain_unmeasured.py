"""Why there is no figure of a deployment: as much as the stored decision and the others' figures tell, and no more."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pygraphd.catalogue import Catalogue
from pygraphd.client import policy as client_policy
from pygraphd.explain import APART, explain_entry
from pygraphd.rejections import (
    BY_RULE,
    GONE,
    NOT_MEASURED,
    NOT_OFFERED,
    OR_REFUSED,
    OR_TOO_LATE,
    SPARED,
    TOO_SOON,
    why_not_measured,
)
from pygraphd.schema.messages import Decision, Deployment, Measurement
from pygraphd.schema.policy import CLEARLY, NO_GAIN, NOT_RELOCATED_FOR_NOW, POLICY_VERSION, fastest
from tests.pygraphd.test_explain import GRAPH, record

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pygraphd.store import Store

KERNELS, TREES, RELOCATE = Deployment.KERNELS, Deployment.TREES, Deployment.GRAPH
REFUSAL = "a node cannot be moved"


def measured(
    deployment: Deployment, median: float, host: float | None = None, samples: int = 8
) -> Measurement:
    return Measurement(deployment, samples, median, 0.1, median if host is None else host, 30.0, 0.5)


def told(database: Path) -> dict[Deployment, str]:
    """Return what the cache's one entry says of each deployment that was not chosen."""
    with Catalogue(database) as catalogue:
        (details,) = catalogue.of_graph(GRAPH)
        return {each.deployment: each.reason for each in explain_entry(details).rejected}


# --- what was offered and tried ---


def test_trees_are_spared_where_relocatable_graphs_have_won_clearly(store: Store, database: Path) -> None:
    figures = measured(KERNELS, 100), measured(RELOCATE, 50, host=100 * CLEARLY)
    assert client_policy.spares_trees(figures)
    record(store, fastest(figures), *figures)

    assert told(database) == {KERNELS: "slower by 100 %", TREES: SPARED}
    assert SPARED == "not measured: not needed as GRAPH had won clearly, or not offered there"


def test_trees_are_not_said_to_be_spared_where_they_would_not_have_been(store: Store, database: Path) -> None:
    figures = measured(KERNELS, 100), measured(RELOCATE, 50, host=100 * CLEARLY + 0.1)
    assert not client_policy.spares_trees(figures)
    record(store, fastest(figures), *figures)

    assert told(database)[TREES] == OR_TOO_LATE
    assert OR_TOO_LATE == "not measured: not offered there, or measuring ended before its turn"


def test_trees_are_not_spared_where_launching_won(store: Store, database: Path) -> None:
    figures = measured(KERNELS, 100), measured(RELOCATE, 100, host=10)
    record(store, fastest(figures), *figures)

    assert told(database) == {TREES: OR_TOO_LATE, RELOCATE: "as fast as KERNELS"}


TIMES = st.floats(0.1, 1e4)
FIGURES = TIMES, st.floats(0, 10), TIMES, TIMES, st.just(0.0)


@given(
    st.builds(Measurement, st.just(KERNELS), st.just(8), *FIGURES),
    st.builds(Measurement, st.just(RELOCATE), st.just(8), *FIGURES),
)
def test_trees_are_said_to_be_spared_where_the_client_spares_them(
    launch: Measurement, relocate: Measurement
) -> None:
    decision = fastest([launch, relocate])
    assume(decision.deployment is RELOCATE)
    weighed = {KERNELS: launch, RELOCATE: relocate}

    why = why_not_measured(TREES, decision, weighed, came_alone=False)

    assert why == (SPARED if client_policy.spares_trees([launch, relocate]) else OR_TOO_LATE)


@pytest.mark.parametrize("trees", [60, 100])
def test_nothing_is_known_of_relocatable_graphs_where_the_decision_does_not_say(
    store: Store, database: Path, trees: float
) -> None:
    figures = measured(KERNELS, 100), measured(TREES, trees)
    record(store, fastest(figures), *figures)

    assert told(database)[RELOCATE] == OR_REFUSED == "not measured: not offered there, or refused"


# --- what the decision says ---


@pytest.mark.parametrize("trees", [60, 100])
def test_a_refusal_for_now_is_told(store: Store, database: Path, trees: float) -> None:
    figures = measured(KERNELS, 100), measured(TREES, trees)
    record(store, client_policy.without_relocation(fastest(figures), REFUSAL), *figures)

    assert told(database)[RELOCATE] == f"not measured, as it could not be relocated: {REFUSAL}"


@pytest.mark.parametrize("figures", [(), (measured(KERNELS, 100),)])
@pytest.mark.parametrize("refused", [client_policy.only_launch_as_refused, client_policy.only_launch_for_now])
def test_a_refusal_that_left_launching_is_told(
    store: Store, database: Path, refused: Callable[[str], Decision], figures: tuple[Measurement, ...]
) -> None:
    record(store, refused(REFUSAL), *figures)

    assert told(database) == {
        TREES: NOT_OFFERED,
        RELOCATE: f"not measured, as it cannot be relocated: {REFUSAL}",
    }


@pytest.mark.parametrize(
    "decision",
    [
        client_policy.only_launch(client_policy.NO_DEVICE),
        client_policy.only_launch(client_policy.ON_THE_CPU),
        client_policy.only_launch(client_policy.MODE_WITHOUT_TREES),
        client_policy.only_launch(f"{client_policy.NOT_CAPTURED}a CPU operator"),
        client_policy.only_launch(client_policy.BY_SIZE),
        client_policy.only_trees(client_policy.CAPTURED_DIFFERENTLY),
    ],
)
def test_a_rule_leaves_no_choice(store: Store, database: Path, decision: Decision) -> None:
    record(store, decision)

    assert set(told(database).values()) == {BY_RULE}
    assert BY_RULE == "not measured: a rule decided, and left no choice"


@pytest.mark.parametrize("figures", [(), (measured(KERNELS, 100, samples=3),)])
def test_a_program_that_ended_early_leaves_two_causes(
    store: Store, database: Path, figures: tuple[Measurement, ...]
) -> None:
    record(store, client_policy.too_few_calls(3), *figures)

    assert told(database) == {TREES: TOO_SOON, RELOCATE: TOO_SOON}
    assert TOO_SOON == "not measured: too few calls, or not to be had there"


@pytest.mark.parametrize("reason", [client_policy.NO_MEMORY, client_policy.FAILED])
def test_what_kept_a_process_from_measuring_is_told(store: Store, database: Path, reason: str) -> None:
    record(store, client_policy.not_measured(reason, 3))

    assert told(database) == {TREES: f"not measured: {reason}", RELOCATE: f"not measured: {reason}"}


# --- what is not stored any more ---


@pytest.mark.parametrize(
    "decision",
    [
        fastest([measured(KERNELS, 100), measured(TREES, 60)]),
        Decision(KERNELS, NO_GAIN, POLICY_VERSION),
    ],
)
def test_what_figures_decided_is_no_rule_where_they_are_gone(
    store: Store, database: Path, decision: Decision
) -> None:
    record(store, decision)

    assert set(told(database).values()) == {GONE}
    assert GONE == "not measured, or its figures are gone"


def test_a_figure_of_another_time_is_not_called_missing(store: Store, database: Path) -> None:
    figures = measured(KERNELS, 100), measured(TREES, 60)
    record(store, fastest(figures), *figures)
    figures = measured(KERNELS, 100), measured(RELOCATE, 40)
    record(store, fastest(figures), *figures)

    assert told(database)[TREES] == APART


@pytest.mark.parametrize("deployment", Deployment)
@pytest.mark.parametrize("final", [True, False])
@pytest.mark.parametrize("came_alone", [True, False])
@pytest.mark.parametrize("reason", ["as another version put it", f"x{NOT_RELOCATED_FOR_NOW}{REFUSAL}"])
def test_whatever_a_decision_says_there_is_an_answer(
    deployment: Deployment, final: bool, came_alone: bool, reason: str
) -> None:
    chosen = next(each for each in Deployment if each is not deployment)
    decision = Decision(chosen, reason, 1, final=final)
    weighed = {} if came_alone else {chosen: measured(chosen, 100)}

    why = why_not_measured(deployment, decision, weighed, came_alone=came_alone)

    assert why.startswith(NOT_MEASURED)
    assert why != NOT_MEASURED
