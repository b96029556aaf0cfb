"""The words and columns of `cache explain`, where standard output is no terminal."""

from __future__ import annotations

import dataclasses

from pygraphd.cli.entries import CachedEntry
from pygraphd.cli.explain import Answer, Difference, Explanation, Neighbour
from pygraphd.cli.render_explanations import answer_text
from pygraphd.schema.messages import Deployment, Kind
from pygraphd.schema.reasons import Reason, ReasonCode
from pygraphd.schema.summary import Deployed, Source

FASTER, SLOWER = Reason(ReasonCode.FASTER), Reason(ReasonCode.SLOWER)
NOISY = "; the host or GPU was too noisy to rely on it"
RAN = Deployed("a" * 64, Kind.FORWARD, "c" * 64, Deployment.GRAPH, FASTER, True, Source.CACHE)
FACTS = {
    "id": "1" * 64, "graph": "a" * 64, "kind": "forward", "partition": 0, "partitions": 3, "operators": 12, "sizes": [],
    "deployment": "GRAPH", "reason": "faster", "detail": "", "against": "slower", "against_detail": "", "policy": 1, "final": True, "calls": 0, "uid": 1000, "host": "",
    "created_at": 1000.0, "measured_at": 1000.0, "hits": 5, "last_hit": None, "environment": "d" * 64, "gpu": "NVIDIA H200",
}  # fmt: skip
ROW = {
    "deployment": "GRAPH", "samples": 12, "median_us": 60.04, "mad_us": 1.0, "host_us": 50.0, "span_us": 40.0,
    "host_mad_us": 0.5, "span_mad_us": None, "busy": 0.25, "host": "host-a", "version": "0.1.0", "uid": 1000, "measured_at": 1000.0,
}  # fmt: skip
ENTRY = CachedEntry(FACTS, {})
HIT = Explanation(
    "a" * 64,
    "forward",
    "c" * 64,
    {"gpu": "NVIDIA H200", "mig": "", "driver": "580.2"},
    RAN,
    1,
    ENTRY,
    (ROW | {"deployment": "KERNELS", "median_us": 100.0}, ROW),
)
MISS = dataclasses.replace(
    HIT,
    entry=None,
    figures=(),
    nearest=Neighbour(ENTRY, (Difference("driver", "580.1", "580.2"), Difference("mig", "1g.10gb", ""))),
)


def text(*explanations: Explanation, left_out: int = 0, waiting: int = 0) -> str:
    return answer_text(Answer(explanations, left_out, waiting), now=1000.0 + 2 * 86400)


def test_a_graph_that_the_cache_does_not_know_ran_at_its_sizes() -> None:
    ran = dataclasses.replace(RAN, sizes=(8, 512))

    assert "kind         forward, at 8 x 512" in text(dataclasses.replace(MISS, ran=ran)).splitlines()


def test_a_hit_says_who_measured_it_and_what_was_compared() -> None:
    assert text(HIT).splitlines() == [
        f"graph        {'a' * 64}",
        "kind         forward, partition 1 of 3, 12 operators",
        "environment  cccccccccccc (gpu NVIDIA H200, driver 580.2)",
        "ran as       GRAPH: GRAPH is faster",
        "source       looked up in the cache",
        "cache        the same, decided 2d ago by uid 1000",
        "measured     KERNELS, GRAPH: 2d ago on host-a by uid 1000, pygraphd 0.1.0",
        "DEPLOYMENT  SAMPLES     COST us    HOST us  GPU us  GPU BUSY",
        "KERNELS          12  100.0 ±1.0  50.0 ±0.5    40.0  25%",
        "GRAPH            12   60.0 ±1.0  50.0 ±0.5    40.0  25%",
    ]


def test_what_is_provisional_because_of_noise_says_so() -> None:
    noisy = CachedEntry(FACTS | {"final": False}, {})
    lines = text(dataclasses.replace(HIT, entry=noisy, ran=None)).splitlines()

    assert f"cache        GRAPH?: GRAPH is faster{NOISY}" in lines
    assert "provisional  its figures are too noisy: the next program measures it anew" in lines
    assert not any(line.startswith("provisional") for line in text(HIT).splitlines())


def test_a_miss_names_what_differs() -> None:
    lines = text(MISS).splitlines()

    assert lines[1] == "kind         forward"
    assert lines[-3:] == [
        "cache        not known in this environment",
        "nearest      environment dddddddddddd (GRAPH there, decided 2d ago by uid 1000)",
        "differs in   driver 580.1 -> 580.2, mig 1g.10gb -> none",
    ]


def test_a_graph_that_nobody_knows_says_when_it_will_be() -> None:
    assert text(dataclasses.replace(MISS, nearest=None)).splitlines()[-1] == (
        "cache        not known in any environment; recorded when a program that compiles it runs long enough"
    )


def test_a_program_that_says_otherwise_than_the_cache_is_shown_beside_it() -> None:
    guess = dataclasses.replace(
        RAN,
        deployment=Deployment.KERNELS,
        reason=Reason(ReasonCode.TOO_FEW_CALLS),
        final=False,
        source=Source.UNFINISHED,
    )
    lines = text(dataclasses.replace(HIT, ran=guess, times=3)).splitlines()

    assert "ran as       KERNELS?: too few calls to measure (3 times)" in lines
    assert "source       unfinished; the program ended before it was decided" in lines
    assert "cache        GRAPH: GRAPH is faster" in lines
    assert "decided      2d ago by uid 1000" in lines


def test_what_was_not_taken_is_said_with_its_reason() -> None:
    because = Reason(ReasonCode.COST_DIFFERS, "GRAPH 50.0 us by uid 7 on host-b, 412.0 us here")
    ran = dataclasses.replace(RAN, source=Source.MEASURED, because=because)

    lines = text(dataclasses.replace(HIT, ran=ran)).splitlines()
    gone = text(dataclasses.replace(MISS, ran=ran, nearest=None)).splitlines()

    assert lines[lines.index("source       measured by this program") + 1] == f"not taken    {because}"
    assert gone[-1] == "cache        not known in this environment"


def test_the_deployment_that_was_not_chosen_is_said_with_its_reason() -> None:
    chosen = dataclasses.replace(RAN, against=SLOWER)
    lines = text(dataclasses.replace(HIT, ran=chosen)).splitlines()
    only_stored = text(dataclasses.replace(HIT, ran=None)).splitlines()
    same = dataclasses.replace(RAN, reason=FASTER, against=FASTER)

    assert lines[lines.index("ran as       GRAPH: GRAPH is faster") + 1] == "not KERNELS  KERNELS are slower"
    assert "not KERNELS  KERNELS are slower" in only_stored
    assert not any(line.startswith("not ") for line in text(dataclasses.replace(HIT, ran=same)).splitlines())


def test_every_source_has_its_words() -> None:
    sources = {text(dataclasses.replace(HIT, ran=dataclasses.replace(RAN, source=each))) for each in Source}

    assert len(sources) == len(Source)


def test_what_the_summary_says_beside_its_graphs_comes_last() -> None:
    notes = {
        "left_on_cpu": {"it is a mask (a.py:3)": 1, "it is too large (a.py:9)": 4},
        "graph_breaks": {"print (a.py:5)": 1},
        "fallbacks": {},
        "failures": {"daemon: gone": 1},
    }
    answer = Answer((MISS,), 0, 0, notes)

    assert answer_text(answer, now=2000.0).split("\n\n")[1:] == [
        "left on CPU  it is too large (a.py:9) (4 times)\n"
        "left on CPU  it is a mask (a.py:3)\n"
        "graph break  print (a.py:5)\n"
        "failed       daemon: gone"
    ]
    assert answer.as_json()["notes"] == notes


def test_what_is_left_out_is_said_at_the_end() -> None:
    assert text(MISS, left_out=2, waiting=1).split("\n\n")[1:] == [
        "and 2 more, which the summary only counts",
        "1 file of results not in the cache yet; take them in with: pygraphd start",
    ]
    assert text() == "no graphs: the program compiled none"
