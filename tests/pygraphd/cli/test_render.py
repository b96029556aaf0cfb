from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from pygraphd.cli import render
from pygraphd.cli.entries import CachedEntry, EntryDetails, Page
from pygraphd.cli.render_entry import entry_text
from pygraphd.cli.status import Status
from pygraphd.daemon.pruning import PruneAnswer
from pygraphd.daemon.rederiving import Changed, Kept, RederiveAnswer
from pygraphd.daemon.team.state import TeamState
from pygraphd.schema.messages import Deployment

_FACTS = {
    "id": "a" * 64,
    "graph": "b" * 64,
    "kind": "backward",
    "partition": 0,
    "partitions": 3,
    "operators": 12,
    "sizes": [],
    "deployment": "GRAPH",
    "reason": "other",
    "detail": "18 % faster than [bold]KERNELS[/bold]",
    "against": "slower",
    "against_detail": "",
    "policy": 1,
    "final": True,
    "calls": 24,
    "uid": 1000,
    "host": "host-a",
    "created_at": 1000.0,
    "measured_at": 1000.0,
    "hits": 5,
    "last_hit": 2000.0,
    "environment": "c" * 64,
    "gpu": "NVIDIA H200",
}
_ENTRY = CachedEntry(_FACTS, {"KERNELS": 123.456, "GRAPH": 99.04})
_MEASUREMENT = {
    "deployment": "KERNELS", "samples": 12, "median_us": 123.456, "mad_us": 1.0, "host_us": 90.0, "span_us": 80.0,
    "host_mad_us": 2.0, "span_mad_us": None, "busy": 0.25, "host": "host-a", "version": "0.1.0", "uid": 1000, "measured_at": 1000.0,
}  # fmt: skip


@pytest.mark.parametrize("columns", [80, 60])
def test_a_listing_for_a_terminal_has_two_lines_an_entry_that_fit_it(columns: int) -> None:
    facts = {**_FACTS, "kind": "inference", "final": False, "hits": 1234567, "sizes": [4096, 17]}
    large = dataclasses.replace(_ENTRY, facts=facts, medians_us={"KERNELS": 123456.7})
    lines = "\n".join(
        render.entries_in_lines([[_ENTRY], [large]], columns, now=1000.0 + 300 * 86400)
    ).splitlines()

    assert [line.split() for line in lines[:2]] == [
        ["ID", "KIND", "DEPLOYMENT", "KERNELS", "us", "GRAPH", "us", "AGE", "HITS"],
        ["a" * 12, "backward", "GRAPH", "123.5", "99.0", "300d", "5"],
    ]
    assert lines[2] == "  NVIDIA H200, 1/3, 12 ops: 18 % faster than [bold]KERNELS[/bold]"[
        : columns - 1
    ] + "…" * (columns == 60)
    assert len(lines) == 5
    assert max(map(len, lines)) <= max(columns, 72)


def test_a_listing_is_plain_and_aligned_without_a_terminal() -> None:
    header, line = "\n".join(render.entries_table([Page.of([_ENTRY])], now=1000.0 + 3 * 86400)).splitlines()
    assert header.split() == (
        [
            "ID",
            "GRAPH",
            "KIND",
            "PART",
            "OPS",
            "SIZES",
            "DEPLOYMENT",
            "KERNELS",
            "us",
            "GRAPH",
            "us",
            "GPU",
            "AGE/HITS",
            "REASON",
        ]
    )
    assert line.split() == (
        [
            "aaaaaaaaaaaa",
            "bbbbbbbbbbbb",
            "backward",
            "1/3",
            "12",
            "-",
            "GRAPH",
            "123.5",
            "99.0",
            "NVIDIA",
            "H200",
            "3d/5",
            "18",
            "%",
            "faster",
            "than",
            "[bold]KERNELS[/bold]",
        ]
    )
    assert line.index("NVIDIA") == header.index("GPU")
    assert header.index("KERNELS us") + len("KERNELS us") == line.index("123.5") + len("123.5")
    assert "\x1b" not in header + line


def test_a_terminal_gets_the_same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "400")
    text = "\n".join(render.entries_table([Page.of([_ENTRY])], now=1000.0))
    assert "18 % faster than [bold]KERNELS[/bold]" in text
    assert "123.5" in text


def test_a_decision_that_is_not_final_is_marked() -> None:
    entry = CachedEntry(_FACTS | {"final": False}, {})
    assert " GRAPH? " in "\n".join(render.entries_table([Page.of([entry])], now=1000.0))


def test_a_listing_as_json() -> None:
    value = json.loads("\n".join(render.entries_json([Page.of([_ENTRY])])))
    medians = {"KERNELS": 123.456, "GRAPH": 99.04}
    said = {
        "text": "18 % faster than [bold]KERNELS[/bold]",
        "medians_us": medians,
        "provisional": "",
        "shipped": False,
    }
    assert value == {"schema": 1, "entries": [_FACTS | said]}


def test_each_entry_of_a_listing_as_json_is_one_line() -> None:
    odd = {
        "final": False,
        "sizes": [8, 17],
        "gpu": 'a "%s", {}\\ \x7f\u2028',
        "measured_at": None,
        "last_hit": 1e-7,
    }
    other = CachedEntry(_FACTS | odd, {"GRAPH": 5.0}, shipped=True)
    pages = [Page.of([_ENTRY, _ENTRY]), Page.of([other], shipped=True)]
    lines = "\n".join(render.entries_json(pages)).splitlines()
    assert lines[3:6] == [
        f"    {json.dumps(each.as_json())}{comma}"
        for each, comma in ((_ENTRY, ","), (_ENTRY, ","), (other, ""))
    ]
    entries = [json.loads(line.removesuffix(",")) for line in lines[3:6]]
    assert entries == [_ENTRY.as_json(), _ENTRY.as_json(), other.as_json()]
    assert [list(each) for each in entries] == [list(_ENTRY.as_json())] * 3
    assert len(lines) == 8


def test_a_page_has_the_entries_that_it_was_made_of() -> None:
    entries = [_ENTRY, CachedEntry(_FACTS | {"id": "d" * 64, "detail": ""}, {})]
    page = Page.of(entries)
    assert (list(page), len(page)) == (entries, 2)
    assert page.texts() == [each.text for each in entries]
    assert page.provisional() == [each.provisional for each in entries]
    assert (list(Page.of([])), len(Page.of([]))) == ([], 0)


@pytest.mark.parametrize(("measured_at", "age"), [(1000.0, "3d/5"), (None, "1d/5")])
def test_an_entry_is_as_old_as_what_it_rests_on(measured_at: float | None, age: str) -> None:
    """Which is what PYGRAPH_MAX_AGE looks at; a decision may have been derived anew since."""
    entry = CachedEntry(_FACTS | {"measured_at": measured_at, "created_at": 1000.0 + 2 * 86400}, {})

    assert f" {age} " in "\n".join(render.entries_table([Page.of([entry])], now=1000.0 + 3 * 86400))
    text = entry_text(EntryDetails(entry, {"id": "c"}, []), now=1000.0 + 3 * 86400)
    assert ("measured     3d ago" in text.splitlines()) is (measured_at is not None)


@pytest.mark.parametrize(
    ("reason", "why"),
    [
        ("too_few_calls", "seen for 24 calls only"),
        ("faster", "its figures are too noisy"),
        ("measuring_failed", "measuring failed"),
    ],
)
def test_a_provisional_entry_says_why(reason: str, why: str) -> None:
    entry = CachedEntry(_FACTS | {"final": False, "reason": reason, "detail": ""}, {})

    text = entry_text(EntryDetails(entry, {"id": "c"}, []), now=0.0)

    assert f"deployment   GRAPH (provisional: {why})" in text.splitlines()
    assert entry.as_json()["provisional"] == why


def test_one_entry_says_everything() -> None:
    details = EntryDetails(_ENTRY, {"id": "c" * 64, "gpu": "NVIDIA H200", "driver": "580.1"}, [_MEASUREMENT])
    text = entry_text(details, now=4600.0)
    for expected in (
        "a" * 64,
        "not KERNELS  KERNELS are slower",
        "partition 1 of 3, 12 operators",
        "1h ago by uid 1000",
        "5, last 43m ago",
        "driver",
    ):
        assert expected in text
    assert "KERNELS          12  123.5 ±1.0  90.0 ±2.0    80.0  25%" in text
    assert json.loads(render.as_json(details.as_json()))["measurements"] == [_MEASUREMENT]


def test_dynamic_sizes_are_said() -> None:
    entry = CachedEntry(_FACTS | {"sizes": [8, -1]}, {})

    assert "  8 x -1  " in "\n".join(render.entries_table([Page.of([entry])], now=1000.0))
    text = entry_text(EntryDetails(entry, {"id": "c"}, []), now=1000.0)
    assert "backward, partition 1 of 3, 12 operators, at 8 x -1\n" in text


def test_an_entry_without_measurements_says_so() -> None:
    assert entry_text(EntryDetails(_ENTRY, {"id": "c"}, []), now=0.0).endswith("no measurements")


def test_a_status_lists_every_problem() -> None:
    status = Status(False, "/s", "/d", "/l", entries=None, problems=["first", "second"])
    lines = render.status_text(status).splitlines()
    assert lines[0] == "pygraphd  not running"
    assert "entries   unknown" in lines
    assert lines[-2:] == ["problem   first", "problem   second"]


def test_a_running_status_says_since_when() -> None:
    status = Status(
        True,
        "/s",
        "/d",
        "/l",
        "0.1.0",
        42,
        3,
        7300.0,
        counters={"hits": 2, "misses": 1},
        settings={"idle_exit": {"value": 1800.0, "origin": "default"}},
    )
    text = render.status_text(status)
    assert "0.1.0 running, pid 42, up 2h" in text
    assert "idle_exit    30m (default)" in text
    assert "since start  2 hits, 1 misses" in text


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({}, "not asked yet; 0 records queued"),
        ({"answered_at": 940.0, "queued": 1}, "asked 1m ago; 1 record queued"),
        (
            {
                "answered_at": 700.0,
                "failing_since": 880.0,
                "problem": "refused",
                "retry_s": 30.0,
                "queued": 12,
            },
            "not usable for 2m: refused; tried again in 30s; 12 records queued",
        ),
        (
            {"answered_at": 999.0, "why_not_published": "the role may only read", "queued": 9, "dropped": 2},
            "asked 1s ago; nothing is published: the role may only read; 9 records queued; 2 dropped",
        ),
        (
            {"answered_at": 999.0, "queued": 2, "unpublished": 3000},
            "asked 1s ago; 2 records queued; 3000 entries of the cache to be published after",
        ),
        ({"answered_at": 999.0, "queue_problem": "disk full"}, "asked 1s ago; 0 records queued; disk full"),
    ],
)
def test_the_state_of_a_team_is_one_line(state: dict[str, Any], text: str) -> None:
    assert render.team_text(TeamState("postgresql+psycopg://h/team", **state), now=1000.0) == text


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (PruneAnswer(1, 2, 2048, dry_run=False), "deleted 1 entry and 2 measurements, 2 KiB freed"),
        (PruneAnswer(2, 1, 0, dry_run=True), "would delete 2 entries and 1 measurement"),
    ],
)
def test_what_a_prune_did(answer: PruneAnswer, text: str) -> None:
    assert render.prune_text(answer) == text


def test_what_a_derivation_changed_and_why_it_did_not() -> None:
    answer = RederiveAnswer(
        policy=2,
        entries=17,
        unchanged=8,
        renewed=4,
        changed=(
            Changed(Deployment.KERNELS, Deployment.GRAPH, 3),
            Changed(Deployment.GRAPH, Deployment.KERNELS, 1),
        ),
        kept=(Kept("too few calls to measure", 1),),
        unmeasured=5,
        dry_run=False,
    )
    assert render.rederive_text(answer).splitlines() == [
        "looked at         17 entries with measurements, policy 2",
        "KERNELS -> GRAPH  3",
        "GRAPH -> KERNELS  1",
        "renewed           4 with the same deployment",
        "unchanged         8",
        "kept              1: too few calls to measure",
        "left alone        5 that rest on no measurement",
    ]


def test_a_listing_has_one_header_and_columns_that_fit_all_its_pages() -> None:
    wide = dataclasses.replace(_ENTRY, facts={**_ENTRY.facts, "gpu": "a GPU with a longer name"})
    lines = "\n".join(
        render.entries_table([Page.of([each]) for each in (_ENTRY, wide, _ENTRY)], now=1000.0)
    ).splitlines()
    assert len(lines) == 4
    assert lines[2].index("a GPU") == lines[1].index("NVIDIA") == lines[0].index("GPU  ")
    assert len(lines[3]) == len(lines[2])


@pytest.mark.parametrize(
    ("host", "shown"), [("bundle:host-b", True), ("import:host-b", True), ("host-b", False)]
)
def test_an_entry_that_a_file_brought_says_so(host: str, shown: bool) -> None:
    entry = CachedEntry(_FACTS | {"host": host}, {})

    listed = "\n".join(render.entries_table([Page.of([entry])], now=1000.0))
    text = entry_text(EntryDetails(entry, {"id": "c"}, []), now=1000.0)

    assert (f", from {host}" in listed, f"ago by uid 1000, from {host}" in text) == (shown, shown)
