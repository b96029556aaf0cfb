"""A summary may hold anything: it is refused in one line, or reported on, and never ends a command in a traceback."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pygraphd.cli import report_html
from pygraphd.cli.doctor_patterns import findings
from pygraphd.cli.doctor_text import findings_text
from pygraphd.cli.explain import Answer, explain_summary
from pygraphd.cli.render import as_json
from pygraphd.cli.render_explanations import answer_text
from pygraphd.cli.report import report
from pygraphd.cli.report_text import report_text
from pygraphd.cli.summaries import read_summary
from pygraphd.errors import UsageError
from tests.support.cli_command import locations, pygraphd

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pygraphd.schema.locations import Locations

__all__ = ["locations"]  # a fixture


def _example() -> dict[str, Any]:
    """Return the documented example, cut to two graphs: one at a size, and that without sizes."""
    found: dict[str, Any] = json.loads((Path(__file__).parents[3] / "docs/report-example.json").read_text())
    (sized, facts), whole = list(found["facts"].items())[:2]
    found["facts"] = {sized: {**facts, "whole": whole[0]}, whole[0]: {"partitions": 2, "partition": 1}}
    found["decisions"] = [{**found["decisions"][0], "sizes": [8]}, found["decisions"][1]]
    found["memory"] = {"limit_bytes": 2**30, "peak_requested_bytes": 2**20, "refused_recordings": 1}
    return found


EXAMPLE = _example()
VALUES: tuple[Any, ...] = (
    None, True, 5, -1, 1e-320, float("inf"), 10**400, "\x1b[31m", "\ud800", [], [None], {"x": None},
)  # fmt: skip
COMMANDS = (
    ("report",),
    ("report", "--json"),
    ("report", "--html", "-"),
    ("cache", "explain"),
    ("cache", "explain", "--json"),
    ("doctor",),
    ("doctor", "--json"),
)
Place = tuple[str | int, ...]


def _places(value: Any, above: Place = ()) -> Iterator[Place]:
    """Yield the place of each value within a JSON value; of a list, those in its first item."""
    yield above
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _places(part, (*above, name))
    elif isinstance(value, list) and value:
        yield from _places(value[0], (*above, 0))


def _with(place: Place, value: Any) -> Any:
    """Return the example with another value at a place."""
    if not place:
        return value
    changed = copy.deepcopy(EXAMPLE)
    *above, last = place
    part: Any = changed
    for name in above:
        part = part[name]
    part[last] = value
    return changed


def _show_all(file: Path, locations: Locations) -> None:
    """Make all that the three commands show of a summary; raises UsageError."""
    summary = read_summary(file)
    made = report(summary, locations)
    as_json(made.as_json())
    report_text(made)
    report_html.page(made)
    answer = Answer(explain_summary(summary), summary.left_out, 0, summary.notes)
    as_json(answer.as_json())
    answer_text(answer)
    findings_text(findings(summary), file, summary.program)


PLACES = tuple(_places(EXAMPLE))


def test_the_example_is_shown(tmp_path: Path, locations: Locations) -> None:
    file = tmp_path / "summary.json"
    file.write_text(json.dumps(EXAMPLE))
    _show_all(file, locations)


def test_no_value_at_any_place_is_a_traceback(
    tmp_path: Path, locations: Locations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYGRAPHD_SHIPPED", "0")
    file, refused = tmp_path / "summary.json", 0
    for place in PLACES:
        for value in VALUES:
            file.write_text(json.dumps(_with(place, value)))
            try:
                _show_all(file, locations)
            except UsageError:
                refused += 1
            except Exception as error:
                raise AssertionError(f"{place} = {value!r:.40}") from error
    assert 0 < refused < len(PLACES) * len(VALUES)


@pytest.mark.parametrize(
    ("name", "value"),
    [("places", 5), ("places", "abc"), ("places", [5]), ("partitions", None), ("partitions", 0), ("partition", None), ("partition", 1),
     ("launches_between", None), ("whole", []), ("module", None), ("figures", None), ("nodes", True)],
)  # fmt: skip
def test_facts_that_are_none_are_refused(
    tmp_path: Path, locations: Locations, capsys: pytest.CaptureFixture[str], name: str, value: Any
) -> None:
    file = tmp_path / "summary.json"
    file.write_text(json.dumps(_with(("facts", next(iter(EXAMPLE["facts"])), name), value)))

    assert pygraphd("report", str(file)) == 2
    assert "is not a summary: " in capsys.readouterr().err


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(VALUES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(PLACES), _json, st.sampled_from(COMMANDS))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_each_command_ends_in_order(
    tmp_path: Path,
    locations: Locations,
    capsys: pytest.CaptureFixture[str],
    place: Place,
    value: Any,
    words: tuple[str, ...],
) -> None:
    file = tmp_path / "summary.json"
    file.write_text(json.dumps(_with(place, value)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pygraphd.cli.doctor_probe.probe", dict)
        patch.setattr("pygraphd.cli.doctor.checks", lambda *_: [])
        patch.setenv("PYGRAPHD_SHIPPED", "0")
        code = pygraphd(*words, str(file))

    said = capsys.readouterr()
    assert code in {0, 2}
    assert "Traceback" not in said.out + said.err
    assert len(said.err.splitlines()) == (code == 2)
