"""Messages survive the wire, and nothing else does."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pygraphd.schema import messages
from pygraphd.schema.checks import InvalidMessageError
from pygraphd.schema.keys import Environment, sized_digest
from pygraphd.schema.messages import (
    Decision,
    Deployment,
    Entry,
    Graph,
    Kind,
    LookupAnswer,
    LookupRequest,
    Measurement,
    Origin,
    Ping,
    Record,
    RecordAnswer,
    RecordRequest,
    SizedEntry,
    SizesAnswer,
    SizesRequest,
)
from pygraphd.schema.reasons import Reason, ReasonCode

DIGESTS = st.text("0123456789abcdef", min_size=64, max_size=64)
TEXTS = st.text(st.characters(categories=["L", "N", "P"]), max_size=40)
COUNTS = st.integers(0, 1000)
TIMES = st.floats(0, messages.MAX_MICROSECONDS)
REASONS = st.builds(Reason, st.sampled_from(ReasonCode), TEXTS)
DECISIONS = st.builds(Decision, st.sampled_from(Deployment), REASONS, COUNTS, st.booleans(), COUNTS, REASONS)
MAYBE = st.none() | TIMES
MEASUREMENTS = st.builds(
    Measurement,
    st.sampled_from(Deployment),
    st.integers(1, 99),
    *[TIMES] * 4,
    st.floats(0, 1),
    MAYBE,
    MAYBE,
)
SIZES = st.lists(st.integers(-(2**63) + 1, 2**63 - 1), max_size=messages.MAX_INTEGER_INPUTS).map(tuple)
GRAPHS = st.builds(Graph, DIGESTS, st.sampled_from(Kind), st.integers(0, 3), st.integers(4, 9), COUNTS, SIZES)
GRAPHS |= st.builds(Graph.at, GRAPHS, SIZES)
ENVIRONMENTS = st.builds(Environment, TEXTS, TEXTS, COUNTS, COUNTS, TEXTS, TEXTS, TEXTS, TEXTS, TEXTS, TEXTS)
ONE_OF_EACH = st.lists(MEASUREMENTS, max_size=2, unique_by=lambda measurement: measurement.deployment)
RECORDS = st.builds(Record, GRAPHS, DECISIONS, ONE_OF_EACH.map(tuple))
ENTRIES = st.builds(Entry, DIGESTS, DECISIONS, COUNTS, TEXTS, MAYBE, MAYBE, MAYBE, MAYBE)


@st.composite
def sizes_answers(draw: st.DrawFn) -> SizesAnswer:
    whole = draw(DIGESTS)
    found = []
    for sizes in draw(st.lists(SIZES.filter(bool), max_size=3)):
        entry = dataclasses.replace(draw(ENTRIES), graph=sized_digest(whole, sizes))
        found.append(SizedEntry(sizes, entry))
    return SizesAnswer(draw(DIGESTS), draw(TEXTS), whole, tuple(found))


MESSAGES = st.one_of(
    st.builds(Ping, TEXTS, TEXTS, st.integers(1, 9), COUNTS, st.lists(TEXTS, max_size=3).map(tuple)),
    st.builds(LookupRequest, DIGESTS, st.lists(DIGESTS, max_size=3).map(tuple)),
    st.builds(LookupAnswer, DIGESTS, TEXTS, st.lists(ENTRIES, max_size=3).map(tuple)),
    st.builds(
        RecordRequest, ENVIRONMENTS, st.builds(Origin, TEXTS, TEXTS), st.lists(RECORDS, max_size=3).map(tuple)
    ),
    st.builds(RecordAnswer, DIGESTS, TEXTS, COUNTS),
    st.builds(SizesRequest, DIGESTS, DIGESTS, st.integers(1, messages.MAX_REQUEST_GRAPHS)),
    sizes_answers(),
)


@given(MESSAGES)
def test_a_message_survives_the_wire(message: messages.Message) -> None:
    assert messages.decode(type(message), messages.encode(message)) == message


@given(
    st.binary(max_size=200),
    st.sampled_from(
        [Ping, LookupRequest, LookupAnswer, RecordRequest, RecordAnswer, SizesRequest, SizesAnswer]
    ),
)
def test_random_bytes_are_refused_by_one_error(data: bytes, kind: type) -> None:
    with pytest.raises(InvalidMessageError):
        messages.decode(kind, data)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


@given(MESSAGES, st.data())
def test_a_message_with_one_field_replaced_is_valid_or_refused(
    message: messages.Message, data: st.DataObject
) -> None:
    value = json.loads(messages.encode(message))
    value[data.draw(st.sampled_from(sorted(value)))] = data.draw(JSON)

    try:
        decoded = messages.decode(type(message), json.dumps(value).encode())
    except InvalidMessageError:
        return
    assert messages.decode(type(message), messages.encode(decoded)) == decoded


def lookup(**changes: object) -> bytes:
    return json.dumps({"environment": "a" * 64, "graphs": ["b" * 64], **changes}).encode()


def test_an_unknown_field_is_ignored() -> None:
    assert messages.decode(LookupRequest, lookup(novelty=1)) == messages.decode(LookupRequest, lookup())


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (lookup(graphs=["b" * 63]), "64 hex digits"),
        (lookup(graphs=["B" * 64]), "64 hex digits"),
        (lookup(graphs=None), "graphs: expected a list"),
        (lookup(graphs=["b" * 64] * 1025), "1025 items"),
        (b"{}", "environment is missing"),
        (b"[]", "expected an object"),
        (b"{" * 100_000, "not JSON"),
        (b" " * (messages.MAX_BODY_BYTES + 1), "bytes, at most"),
    ],
    ids=range(8),
)
def test_a_bad_lookup_says_what_is_wrong(data: bytes, text: str) -> None:
    with pytest.raises(InvalidMessageError, match=text):
        messages.decode(LookupRequest, data)


@pytest.mark.parametrize(
    "bad", [float("nan"), float("inf"), -1.0, messages.MAX_MICROSECONDS * 2, "1", None, True]
)
def test_a_time_is_finite_and_in_range(bad: object) -> None:
    with pytest.raises(InvalidMessageError, match="median_us"):
        Measurement(Deployment.KERNELS, 1, bad, 0.0, 0.0, 0.0, 0.0)  # type: ignore[arg-type]


def test_a_partition_lies_within_its_graph() -> None:
    with pytest.raises(InvalidMessageError, match="partition"):
        Graph("a" * 64, Kind.FORWARD, 2, 2, 0)


def test_a_record_has_at_most_one_measurement_of_each_deployment() -> None:
    measurement = Measurement(Deployment.KERNELS, 1, 1.0, 0.0, 1.0, 1.0, 0.0)
    graph = Graph("a" * 64, Kind.FORWARD, 0, 1, 1)

    with pytest.raises(InvalidMessageError, match="at most one of each deployment"):
        Record(graph, Decision(Deployment.KERNELS, Reason(ReasonCode.OTHER), 1), (measurement, measurement))


@given(GRAPHS, SIZES, SIZES)
def test_a_graph_at_its_sizes_is_a_graph_of_its_own(
    graph: Graph, first: tuple[int, ...], second: tuple[int, ...]
) -> None:
    assert (graph.at(first).digest == graph.at(second).digest) == (first == second)
    assert graph.at(first).digest != graph.digest
    assert (graph.at(first).sizes, graph.at(first).operators) == (first, graph.operators)


@pytest.mark.parametrize(
    "bad", [(0.5,), (True,), (2**63,), (1,) * (messages.MAX_INTEGER_INPUTS + 1)], ids=str
)
def test_sizes_are_integers_and_not_too_many(bad: tuple[int, ...]) -> None:
    with pytest.raises(InvalidMessageError, match=r"sizes: "):
        Graph("a" * 64, Kind.FORWARD, 0, 1, 1, bad)


@given(GRAPHS, SIZES)
def test_a_graph_at_its_sizes_names_the_whole_and_no_other(graph: Graph, sizes: tuple[int, ...]) -> None:
    sized = graph.at(sizes)
    assert sized.whole == graph.digest

    for forged in ({"whole": sized.digest}, {"digest": graph.digest}, {"sizes": (*sizes, 7)}):
        with pytest.raises(InvalidMessageError, match=r"whole: |sizes: "):
            dataclasses.replace(sized, **forged)
    with pytest.raises(InvalidMessageError, match="whole: "):
        dataclasses.replace(sized, whole=8)  # type: ignore[arg-type]


@pytest.mark.parametrize("most", [0, -1, messages.MAX_REQUEST_GRAPHS + 1, True, 2.0, "64", None], ids=str)
def test_no_more_sizes_are_asked_for_than_an_answer_may_have(most: object) -> None:
    with pytest.raises(InvalidMessageError, match="most: "):
        SizesRequest("a" * 64, "b" * 64, most)  # type: ignore[arg-type]


def test_sizes_of_another_graph_are_refused_and_so_are_too_many() -> None:
    decision = Decision(Deployment.KERNELS, Reason(ReasonCode.OTHER), 1)
    sound = SizedEntry((8,), Entry(sized_digest("b" * 64, (8,)), decision))

    with pytest.raises(InvalidMessageError, match="whole: "):
        SizesAnswer("a" * 64, "1", "c" * 64, (sound,))
    with pytest.raises(InvalidMessageError, match="whole: "):
        SizesAnswer("a" * 64, "1", "b" * 64, (dataclasses.replace(sound, sizes=(16,)),))
    with pytest.raises(InvalidMessageError, match="1025 items"):
        SizesAnswer("a" * 64, "1", "b" * 64, (sound,) * 1025)
    with pytest.raises(InvalidMessageError, match="one at least"):
        SizedEntry((), sound.entry)


def test_a_record_of_a_peer_that_stores_no_spreads_or_has_conditions_is_read() -> None:
    graph = {"digest": "a" * 64, "kind": "forward", "partition": 0, "partitions": 1, "operators": 1}
    decision = {"deployment": "KERNELS", "reason": {"code": "other"}, "policy": 1}
    figures = {"samples": 9, "median_us": 1, "mad_us": 1, "host_us": 1, "span_us": 1, "busy": 0}
    record = {"graph": graph, "decision": decision, "measurements": [{"deployment": "GRAPH", **figures}]}

    read = messages.decode(Record, json.dumps({**record, "conditions": {"forward_in_trees": True}}).encode())

    (measured,) = read.measurements
    assert (measured.host_mad_us, measured.span_mad_us) == (None, None)


@pytest.mark.parametrize("name", ["LAUNCH", "RELOCATE", "TREES"])
def test_an_older_peers_deployments_are_refused_by_the_one_error(name: str) -> None:
    decision = {"deployment": name, "reason": {"code": "other"}, "policy": 1}

    with pytest.raises(InvalidMessageError, match="expected one of KERNELS, GRAPH"):
        messages.decode(Entry, json.dumps({"graph": "a" * 64, "decision": decision}).encode())


def test_an_entry_is_read_by_a_peer_that_knows_less_of_it() -> None:
    said = Entry(
        "a" * 64,
        Decision(Deployment.KERNELS, Reason(ReasonCode.OTHER), 1),
        cost_us=70.0,
        host_us=69.0,
        span_us=71.0,
    )
    older = dataclasses.make_dataclass("Entry", [("graph", str), ("cost_us", float | None, None)])

    assert messages.decode(older, json.dumps(dataclasses.asdict(said)).encode()) == older("a" * 64, 70.0)


def test_an_entry_of_a_peer_that_says_no_more_is_read() -> None:
    decision = {"deployment": "KERNELS", "reason": {"code": "other"}, "policy": 1}

    entry = messages.decode(Entry, json.dumps({"graph": "a" * 64, "decision": decision}).encode())

    assert (entry.uid, entry.host, entry.cost_us, entry.measured_at) == (None, "", None, None)
    assert (entry.host_us, entry.span_us) == (None, None)


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("uid", -1),
        ("uid", 2**40),
        ("uid", "0"),
        ("measured_at", -1.0),
        ("measured_at", float("nan")),
        ("host", None),
        ("host", "x" * 257),
        ("host", "a\nb"),
        ("cost_us", -1.0),
        ("cost_us", float("inf")),
        ("cost_us", "1"),
        ("host_us", -1.0),
        ("span_us", float("nan")),
        ("span_us", True),
    ],
)
def test_what_an_entry_says_beside_its_decision_is_checked_too(field: str, bad: object) -> None:
    with pytest.raises(InvalidMessageError, match=f"^{field}: "):
        Entry("a" * 64, Decision(Deployment.KERNELS, Reason(ReasonCode.OTHER), 1), **{field: bad})  # type: ignore[arg-type]


def test_a_lookup_of_20_graphs_is_small() -> None:
    request = LookupRequest("a" * 64, ("b" * 64,) * 20)

    assert len(messages.encode(request)) < 1500
