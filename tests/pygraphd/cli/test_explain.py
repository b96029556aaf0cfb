"""What is known of each graph, out of a real store: figures, and the nearest environment of a miss."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from typing import TYPE_CHECKING

import pytest

from pygraphd.cli.catalogue import Catalogue
from pygraphd.cli.explain import (
    Difference,
    Explanation,
    explain,
    explain_entry,
    explain_summary,
)
from pygraphd.cli.render_explanations import answer_text
from pygraphd.cli.summaries import Summary
from pygraphd.client.decisions import spool as client_spool
from pygraphd.daemon.queries import KEPT_MEASUREMENTS
from pygraphd.daemon.rederiving import RederiveRequest
from pygraphd.daemon.store import Store
from pygraphd.errors import CommandError, Exit, UsageError
from pygraphd.schema.keys import Environment, entry_id
from pygraphd.schema.locations import Locations, locate
from pygraphd.schema.messages import (
    Decision,
    Deployment,
    Graph,
    Kind,
    Measurement,
    Origin,
    Record,
    RecordRequest,
    encode,
)
from pygraphd.schema.reasons import Reason, ReasonCode
from pygraphd.schema.summary import Deployed, Source
from tests.support.environments import HERE, OLD_DRIVER

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KERNELS, GRAPH_ = Deployment.KERNELS, Deployment.GRAPH
OLD_TORCH_AND_DRIVER = dataclasses.replace(OLD_DRIVER, torch="2.12.0")
GRAPH = "ab" * 32
FASTER = Decision(GRAPH_, Reason(ReasonCode.FASTER), 1)


def measured(deployment: Deployment, median: float, samples: int = 8) -> Measurement:
    return Measurement(deployment, samples, median, 0.1, median, median, 0.5)


def record(
    store: Store,
    decision: Decision = FASTER,
    *measurements: Measurement,
    environment: Environment = HERE,
    graph: str = GRAPH,
    uid: int = 7,
) -> None:
    records = (Record(Graph(graph, Kind.FORWARD, 0, 3, 17), decision, measurements),)
    store.record(RecordRequest(environment, Origin("host-a", "0.1.0"), records), uid)


def ran(source: Source = Source.MEASURED, environment: Environment = HERE, graph: str = GRAPH) -> Deployed:
    return Deployed(graph, Kind.FORWARD, environment.digest(), GRAPH_, FASTER.reason, True, source)


def summary(*decisions: Deployed) -> Summary:
    return Summary({each.digest(): each for each in (HERE, OLD_DRIVER)}, decisions, 0, {})


@pytest.fixture
def catalogue(store: Store, database: Path) -> Iterator[Catalogue]:
    with Catalogue(database) as opened:
        yield opened


def entry(catalogue: Catalogue) -> Explanation:
    (details,) = catalogue.of_graph(GRAPH)
    return explain_entry(details)


def medians(explanation: Explanation) -> list[float]:
    return [row["median_us"] for row in explanation.figures]


def run(catalogue: Catalogue, *decisions: Deployed) -> Explanation:
    (explanation,) = explain_summary(summary(*decisions), catalogue)
    return explanation


# --- figures ---


def test_an_entry_rests_on_the_figures_that_were_recorded_with_it(store: Store, catalogue: Catalogue) -> None:
    record(store, FASTER, measured(KERNELS, 500), measured(GRAPH_, 400), uid=3)
    record(store, FASTER, measured(GRAPH_, 60), measured(KERNELS, 100))

    explanation = entry(catalogue)

    assert (explanation.environment, explanation.factors) == (HERE.digest(), HERE.factors())
    assert [
        (row["deployment"], row["median_us"], row["mad_us"], row["uid"], row["host"])
        for row in explanation.figures
    ] == [
        ("KERNELS", 100, 0.1, 7, "host-a"),
        ("GRAPH", 60, 0.1, 7, "host-a"),
    ]


def test_figures_of_another_time_are_not_shown(store: Store, catalogue: Catalogue) -> None:
    record(store, FASTER, measured(GRAPH_, 10), measured(KERNELS, 500))
    record(store, FASTER, measured(KERNELS, 100))

    assert medians(entry(catalogue)) == [100]


@pytest.mark.parametrize("times", [1, KEPT_MEASUREMENTS + 1])
def test_later_figures_that_decided_nothing_are_not_what_it_rests_on(
    store: Store, catalogue: Catalogue, times: int
) -> None:
    record(store, FASTER, measured(KERNELS, 100), measured(GRAPH_, 60))
    guess = Decision(KERNELS, Reason(ReasonCode.TOO_FEW_CALLS), 1, final=False, calls=9)
    for _ in range(times):
        record(store, guess, measured(KERNELS, 90, samples=2), measured(GRAPH_, 95, samples=2))

    assert medians(entry(catalogue)) == [100, 60]


def test_a_rule_rests_on_no_figures(store: Store, catalogue: Catalogue) -> None:
    record(store, FASTER, measured(KERNELS, 100), measured(GRAPH_, 60))
    record(store, Decision(KERNELS, Reason(ReasonCode.NOT_CAPTURED_BY_TORCH, "a CPU operator"), 1))

    assert entry(catalogue).figures == ()


# --- summaries ---


def test_a_hit_is_explained_by_the_cache_and_has_no_neighbour(store: Store, catalogue: Catalogue) -> None:
    record(store, environment=OLD_DRIVER)
    record(store, FASTER, measured(KERNELS, 100), measured(GRAPH_, 60))

    explanation = run(catalogue, ran(Source.CACHE))

    assert explanation.ran == ran(Source.CACHE)
    assert explanation.entry is not None
    assert explanation.entry.facts["id"] == entry_id(HERE.digest(), GRAPH)
    assert medians(explanation) == [100, 60]
    assert explanation.nearest is None


def test_a_miss_names_the_nearest_environment_and_each_factor_that_differs(
    store: Store, catalogue: Catalogue
) -> None:
    record(store, environment=OLD_DRIVER)
    record(store, environment=OLD_TORCH_AND_DRIVER)

    explanation = run(catalogue, ran())

    assert (explanation.entry, explanation.figures) == (None, ())
    assert explanation.nearest is not None
    assert explanation.nearest.entry.facts["environment"] == OLD_DRIVER.digest()
    assert explanation.nearest.differences == (Difference("driver", "580.1", "580.2"),)


def test_of_environments_equally_near_the_newest_is_named(store: Store, catalogue: Catalogue) -> None:
    other_torch = dataclasses.replace(HERE, torch="2.12.0")
    record(store, environment=OLD_DRIVER)
    record(store, environment=other_torch)

    explanation = run(catalogue, ran())

    assert explanation.nearest is not None
    assert explanation.nearest.differences == (Difference("torch", "2.12.0", "2.13.0"),)


def test_every_factor_that_differs_is_named(store: Store, catalogue: Catalogue) -> None:
    record(store, environment=OLD_TORCH_AND_DRIVER)

    explanation = run(catalogue, ran())

    assert explanation.nearest is not None
    assert [each.factor for each in explanation.nearest.differences] == ["torch", "driver"]


def test_what_was_measured_because_the_driver_changed_says_so_afterwards(
    store: Store, catalogue: Catalogue
) -> None:
    record(store, environment=OLD_DRIVER)
    record(store, environment=HERE)

    new, old = explain_summary(summary(ran(), ran(environment=OLD_DRIVER)), catalogue)

    assert new.entry is not None
    assert new.nearest is not None
    assert new.nearest.differences == (Difference("driver", "580.1", "580.2"),)
    assert old.nearest is None  # it was the first; that another environment knows it now was no help then


@pytest.mark.parametrize("known_here", [True, False])
def test_what_was_not_taken_has_no_neighbour_to_explain_it(
    store: Store, catalogue: Catalogue, known_here: bool
) -> None:
    record(store, environment=OLD_DRIVER)
    if known_here:
        record(store, environment=HERE)
    doubted = dataclasses.replace(ran(), because=Reason(ReasonCode.REFRESH_ASKED))

    explanation = run(catalogue, doubted)

    assert (explanation.entry is not None) is known_here
    assert explanation.nearest is None
    assert explanation.as_json()["ran"]["because"] == {"code": "refresh_asked", "detail": ""}


def test_another_graph_is_no_neighbour(store: Store, catalogue: Catalogue) -> None:
    record(store, environment=OLD_DRIVER, graph="cd" * 32)

    explanation = run(catalogue, ran())

    assert (explanation.entry, explanation.nearest) == (None, None)


def test_what_ran_alike_is_explained_once_and_counted(store: Store, catalogue: Catalogue) -> None:
    first, second = explain_summary(summary(ran(), ran(Source.CACHE), ran()), catalogue)

    assert (first.times, second.times) == (2, 1)


# --- what no daemon has taken in yet ---


def leave(
    folder: Path,
    decision: Decision = FASTER,
    *measurements: Measurement,
    environment: Environment = HERE,
    graph: str = GRAPH,
) -> None:
    folder.mkdir(exist_ok=True)
    records = (Record(Graph(graph, Kind.FORWARD, 0, 3, 17), decision, measurements),)
    body = encode(RecordRequest(environment, Origin("host-b", "0.1.0"), records))
    path = folder / f"{len(list(folder.iterdir()))}.json"
    path.write_bytes(body)
    os.utime(path, (1000.0, 1000.0 + len(list(folder.iterdir()))))


def written(path: Path, *decisions: Deployed) -> str:
    environments = {each.digest(): each.factors() for each in (HERE, OLD_DRIVER)}
    listed = [dataclasses.asdict(each) for each in decisions]
    path.write_text(json.dumps({"schema": 2, "environments": environments, "decisions": listed}))
    return str(path)


def test_where_no_daemon_has_run_what_was_looked_up_is_in_the_spool(
    locations: Locations, tmp_path: Path
) -> None:
    leave(locations.spool, FASTER, measured(KERNELS, 100), measured(GRAPH_, 60))

    answer = explain(written(tmp_path / "summary.json", ran(Source.CACHE)), locations)

    (explanation,) = answer.explanations
    assert explanation.entry is not None
    assert (explanation.entry.spooled, explanation.nearest) == (True, None)
    assert [row["host"] for row in explanation.figures] == ["host-b"] * 2
    assert explanation.as_json()["entry"]["spooled"] is True
    lines = answer_text(answer, now=1000.0 + 61).splitlines()
    assert "source       looked up in the spool, where it waits for a daemon" in lines
    assert f"spool        the same, decided 1m ago by uid {os.geteuid()}" in lines
    assert not any(line.startswith("cache ") for line in lines)


def test_a_graph_in_the_spool_is_explained_where_there_is_no_cache(locations: Locations) -> None:
    leave(locations.spool)

    answer = explain(GRAPH[:6], locations)

    assert [each.graph for each in answer.explanations] == [GRAPH]
    assert answer.spool_waiting == 1
    assert not locations.database.exists()
    assert [path.name for path in locations.spool.iterdir()] == ["0.json"]
    with pytest.raises(UsageError, match="no entry has an id or graph that begins so"):
        explain("cd", locations)


def test_what_the_cache_has_hides_what_the_spool_says_of_it(filled: Locations) -> None:
    leave(filled.spool, Decision(KERNELS, Reason(ReasonCode.NO_GAIN), 1))
    leave(filled.spool, environment=OLD_TORCH_AND_DRIVER)

    explanations = explain(GRAPH, filled).explanations

    entries = [each.entry for each in explanations if each.entry is not None]
    assert [(each.facts["deployment"], each.spooled) for each in entries] == [
        ("GRAPH", False),
        ("GRAPH", False),
        ("GRAPH", True),
    ]
    assert explanations[2].factors["torch"] == "2.12.0"


def test_a_neighbour_may_wait_in_the_spool(locations: Locations, tmp_path: Path) -> None:
    leave(locations.spool, environment=OLD_DRIVER)

    answer = explain(written(tmp_path / "summary.json", ran()), locations)

    (explanation,) = answer.explanations
    assert explanation.nearest is not None
    assert explanation.nearest.differences == (Difference("driver", "580.1", "580.2"),)
    assert "(GRAPH there, in the spool, decided " in answer_text(answer)


def test_what_begins_a_graph_of_the_cache_and_another_of_the_spool_names_neither(filled: Locations) -> None:
    leave(filled.spool, graph="abcd" * 16)

    with pytest.raises(
        UsageError, match=r"begins the id or graph of 2 graphs \(abababababab, abcdabcdabcd\)"
    ):
        explain("ab", filled)


def test_what_is_explained_is_what_a_program_finds(locations: Locations) -> None:
    guess = Decision(KERNELS, Reason(ReasonCode.TOO_FEW_CALLS), 1, final=False, calls=3)
    slower = Decision(KERNELS, Reason(ReasonCode.NO_GAIN), 1)
    for number, decisions in enumerate(itertools.product([FASTER, slower, guess], repeat=3)):
        for decision in decisions:
            leave(locations.spool, decision, graph=f"{number:064x}")

    found = client_spool.read_entries(locations.spool, HERE.digest())

    assert len(found) == 27
    for graph, spooled in found.items():
        (explanation,) = explain(graph, locations).explanations
        assert explanation.entry is not None
        facts = explanation.entry.facts
        assert (facts["deployment"], facts["final"]) == (
            spooled.entry.decision.deployment,
            spooled.entry.decision.final,
        )


# --- the command's argument ---


@pytest.fixture
def locations(tmp_path: Path) -> Locations:
    return locate({"PYGRAPHD_HOME": str(tmp_path)})


@pytest.fixture
def filled(locations: Locations) -> Locations:
    with Store(locations.database) as store:
        record(store, environment=OLD_DRIVER)
        record(store, FASTER, measured(KERNELS, 100), measured(GRAPH_, 60))
        record(store, graph="ac" * 32)
    return locations


def test_a_graph_is_explained_in_every_environment_newest_first(filled: Locations) -> None:
    answer = explain("ABA", filled)

    assert [each.factors["driver"] for each in answer.explanations] == ["580.2", "580.1"]
    assert {each.graph for each in answer.explanations} == {GRAPH}
    assert {each.ran for each in answer.explanations} == {None}


def test_an_entry_is_explained_alone(filled: Locations) -> None:
    (explanation,) = explain(entry_id(OLD_DRIVER.digest(), GRAPH)[:16], filled).explanations

    assert (explanation.graph, explanation.environment) == (GRAPH, OLD_DRIVER.digest())


def test_a_file_wins_over_a_graph(filled: Locations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ab").write_text(
        json.dumps({"schema": 2, "environments": {}, "decisions": [], "decisions_left_out": 4})
    )

    answer = explain("ab", filled)

    assert (answer.explanations, answer.left_out) == ((), 4)


def test_what_is_in_the_spool_is_counted(filled: Locations) -> None:
    filled.spool.mkdir()
    (filled.spool / "1.json").touch()

    assert explain("ab", filled).spool_waiting == 1


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("a", r"a: begins the id or graph of 2 graphs \(abababababab, acacacacacac\): give more digits"),
        ("zz", "zz: is no file, and no id or graph begins so: each has 64 digits"),
        ("/", "/: is a folder, not a summary; a program run by `pygraphd run`"),
    ],
)
def test_what_names_no_one_graph_is_a_usage_error(filled: Locations, target: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        explain(target, filled)


def test_without_a_cache_there_is_nothing_to_explain(locations: Locations) -> None:
    with pytest.raises(CommandError, match="there is no cache yet") as caught:
        explain("ab", locations)
    assert caught.value.exit_code == Exit.ERROR


def test_a_decision_that_was_derived_anew_rests_on_the_same_figures(locations: Locations) -> None:
    old = dataclasses.replace(FASTER, reason=Reason(ReasonCode.OTHER, "as an older policy put it"))
    with Store(locations.database) as store:
        record(store, old, measured(KERNELS, 100.0), measured(GRAPH_, 50.0))
        assert store.rederive(RederiveRequest()).renewed == 1
        guess = Decision(KERNELS, Reason(ReasonCode.TOO_FEW_CALLS), 1, final=False, calls=3)
        record(store, guess, measured(KERNELS, 900.0, samples=1))

    (explanation,) = explain(GRAPH, locations).explanations

    assert medians(explanation) == [100.0, 50.0]


def test_of_a_summary_what_ran_is_told_without_a_cache_too(locations: Locations, tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    decision: dict[str, object] = {"graph": GRAPH, "kind": "forward", "environment": HERE.digest()}
    decision |= {"deployment": "KERNELS", "reason": {"code": "no_device"}, "final": True, "source": "rule"}
    environments = {HERE.digest(): HERE.factors()}
    path.write_text(
        json.dumps(
            {"schema": 2, "environments": environments, "decisions": [decision], "decisions_left_out": 0}
        )
    )

    (only,) = explain(str(path), locations).explanations

    assert (only.graph, only.entry, only.nearest, only.times) == (GRAPH, None, None, 1)
    assert only.ran is not None
    assert (only.ran.deployment, only.ran.reason) == (KERNELS, Reason(ReasonCode.NO_DEVICE))


def test_the_json_is_stable(filled: Locations) -> None:
    value = json.loads(json.dumps(explain("ab", filled).as_json()))

    assert value.keys() == {"schema", "graphs", "left_out", "spool_waiting", "notes"}
    first = value["graphs"][0]
    assert first.keys() == {
        "graph", "kind", "environment", "ran", "entry", "figures", "nearest",
    }  # fmt: skip
    assert first["environment"] == {"id": HERE.digest(), **HERE.factors()}
    assert (first["ran"], first["nearest"], first["entry"]["deployment"]) == (None, None, "GRAPH")
    assert [(each["deployment"], each["median_us"]) for each in first["figures"]] == [
        ("KERNELS", 100.0),
        ("GRAPH", 60.0),
    ]
    assert first["entry"]["provisional"] == ""


def test_the_json_of_a_miss_has_the_program_and_the_neighbour(store: Store, catalogue: Catalogue) -> None:
    record(store, environment=OLD_DRIVER)

    value = json.loads(json.dumps(run(catalogue, ran()).as_json()))

    assert value["ran"] == {
        "deployment": "GRAPH",
        "reason": {"code": "faster", "detail": ""},
        "against": {"code": "not_stated", "detail": ""},
        "text": "GRAPH is faster",
        "final": True,
        "source": "measured",
        "because": None,
        "times": 1,
    }
    assert value["entry"] is None
    assert value["nearest"]["entry"]["environment"] == OLD_DRIVER.digest()
    assert value["nearest"]["differences"] == [{"factor": "driver", "there": "580.1", "here": "580.2"}]
