"""The file of `cache export`: what is written is read again, and what was changed is refused as a whole."""

from __future__ import annotations

import dataclasses
import io
import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pygraphd.daemon.exchange import Contents, ImportAnswer, check_file, read_file, write
from pygraphd.errors import UsageError
from pygraphd.schema.checks import InvalidMessageError
from pygraphd.schema.keys import KEY_VERSION, Environment
from pygraphd.schema.messages import (
    MAX_BODY_BYTES,
    MAX_INTEGER_INPUTS,
    Decision,
    Deployment,
    Graph,
    Kind,
    Measurement,
    Origin,
    Record,
    decode,
)
from pygraphd.schema.portable import (
    MAX_LINE_BYTES,
    MAX_REQUEST_ENTRIES,
    ImportRequest,
    Portable,
    imported_host,
    requests,
)
from pygraphd.schema.reasons import MAX_DETAIL, Reason, ReasonCode

if TYPE_CHECKING:
    from collections.abc import Sequence

HERE = Environment("NVIDIA H200", "9.0", 132, 143771, "", "2.13.0", "3.5", "13.0", "580.1", "91400")
MEASURED = Measurement(Deployment.KERNELS, 12, 100.0, 1.0, 90.0, 80.0, 0.5)
NAMES = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "Zs")), max_size=40).filter(
    str.isprintable
)
TIMES = st.floats(0, 3.6e9, allow_nan=False)
MEASUREMENTS = st.builds(
    Measurement,
    st.sampled_from(Deployment),
    st.integers(1, 10**9),
    *[TIMES] * 4,
    st.floats(0, 1, allow_nan=False),
    st.none() | TIMES,
    st.none() | TIMES,
)


REASONS = st.builds(Reason, st.sampled_from(ReasonCode), NAMES)


@st.composite
def portables(draw: st.DrawFn) -> Portable:
    digest = draw(st.text("0123456789abcdef", min_size=64, max_size=64))
    graph = Graph(
        digest, draw(st.sampled_from(Kind)), 1, 3, 7, tuple(draw(st.lists(st.integers(-9, 9)))[:64])
    )
    decision = Decision(
        draw(st.sampled_from(Deployment)),
        draw(REASONS),
        draw(st.integers(0, 9)),
        calls=3,
        against=draw(REASONS),
    )
    measured = {each.deployment: each for each in draw(st.lists(MEASUREMENTS, max_size=3))}
    record = Record(graph, decision, tuple(measured.values()))
    at = draw(st.floats(0, 1e12, allow_nan=False)) if measured else None
    return Portable(dataclasses.replace(HERE, gpu=draw(NAMES)), Origin(draw(NAMES), draw(NAMES)), record, at)


def portable(**changes: object) -> Portable:
    record = Record(
        Graph("a" * 64, Kind.INFERENCE, 0, 1, 5),
        Decision(Deployment.KERNELS, Reason(ReasonCode.OTHER, "fast"), 1),
        (MEASURED,),
    )
    entry = Portable(HERE, Origin("gpu7", "0.1.0"), record, 1000.0)
    return dataclasses.replace(entry, **changes)  # type: ignore[arg-type]


def written(entries: Sequence[Portable]) -> bytes:
    stream = io.StringIO()
    write(entries, stream)
    return stream.getvalue().encode()


def read(data: bytes) -> list[Portable]:
    stream = io.BytesIO(data)
    contents = check_file(stream, "some.jsonl")
    entries = [entry for entry in read_file(stream, "some.jsonl") if entry is not None]
    assert contents == Contents(len(entries), 0)
    return entries


@given(st.lists(portables(), max_size=5))
def test_what_is_written_is_read_again(entries: list[Portable]) -> None:
    assert read(written(entries)) == entries


@given(st.lists(portables(), max_size=3), st.data())
def test_a_file_that_was_cut_off_is_refused(entries: list[Portable], data: st.DataObject) -> None:
    whole = written(entries)
    with pytest.raises(UsageError, match="nothing was imported"):
        read(whole[: data.draw(st.integers(0, len(whole) - 1))])


@given(st.binary(max_size=200) | st.text(max_size=100).map(str.encode))
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(UsageError, match=r"line 1: .*nothing was imported"):
        read(data)


def test_the_line_and_what_is_wrong_with_it_are_named() -> None:
    first, second, third = written([portable(), portable()]).splitlines(keepends=True)
    bad = json.loads(third)
    bad["record"]["graph"]["kind"] = "sideways"
    with pytest.raises(UsageError) as caught:
        read(first + second + json.dumps(bad).encode() + b"\n")
    assert str(caught.value) == (
        "some.jsonl: line 3: kind: expected one of forward, backward, inference, got 'sideways'; nothing was imported"
    )


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("format", "tar", "line 1: format: 'tar' is not 'pygraphd cache'"),
        ("version", 4, "line 1: version 4 of the format, and this pygraphd reads 3: upgrade it"),
        ("version", 0, "line 1: version: 0 is outside 1"),
        ("keys", KEY_VERSION + 1, "nothing of it would ever be found here: export it anew with this version"),
        ("entries", 2, "line 3: the file ends here, too early"),
        ("entries", 0, "goes on after 0 entries, as many as it says"),
        ("entries", -1, "line 1: entries: -1 is outside 0"),
    ],
)
def test_a_header_that_promises_something_else_is_refused(field: str, value: object, what: str) -> None:
    header, entry = written([portable()]).splitlines(keepends=True)
    changed = json.dumps({**json.loads(header), field: value}).encode()
    with pytest.raises(UsageError) as caught:
        read(changed + b"\n" + entry)
    assert what in str(caught.value)
    assert str(caught.value).endswith("; nothing was imported")


def test_a_newer_format_is_told_whatever_else_it_has() -> None:
    with pytest.raises(UsageError, match="upgrade it"):
        read(b'{"format": "pygraphd cache", "version": 4}\n')


def test_a_line_without_end_is_not_read_to_its_end() -> None:
    header, _entry = written([portable()]).splitlines(keepends=True)
    with pytest.raises(UsageError, match=f"line 2: more than {MAX_LINE_BYTES} bytes"):
        read(header + b" " * (MAX_LINE_BYTES + 10))


def test_an_entry_is_final_and_says_when_it_was_measured() -> None:
    record = portable().record
    guess = dataclasses.replace(record, decision=dataclasses.replace(record.decision, final=False))
    with pytest.raises(InvalidMessageError, match="not final"):
        portable(record=guess)
    with pytest.raises(InvalidMessageError, match="measured_at"):
        portable(measured_at=None)
    with pytest.raises(InvalidMessageError, match="measured_at"):
        portable(record=dataclasses.replace(record, measurements=()))
    with pytest.raises(InvalidMessageError, match="measured_at"):
        portable(measured_at=float("nan"))
    assert portable(record=dataclasses.replace(record, measurements=()), measured_at=None).measured_at is None


def test_a_request_of_the_largest_entries_fits_into_a_body() -> None:
    text, number = "\U0001f600" * MAX_DETAIL, 123456.789012345
    measured = tuple(
        Measurement(each, 10**9, number, number, number, number, 0.123456789012345, number, number)
        for each in Deployment
    )
    graph = Graph("a" * 64, Kind.INFERENCE, 0, 1, 2**53, (2**62,) * MAX_INTEGER_INPUTS)
    record = Record(
        graph,
        Decision(
            Deployment.KERNELS, Reason(ReasonCode.OTHER, text), 1, against=Reason(ReasonCode.OTHER, text)
        ),
        measured,
    )
    names: dict[str, Any] = dict.fromkeys(
        ("gpu", "torch", "driver", "cuda", "triton", "cudnn", "mig"), "😀" * 256
    )
    largest = Portable(dataclasses.replace(HERE, **names), Origin(text[:256], text[:64]), record, 1e11)
    entries = [largest] * (MAX_REQUEST_ENTRIES + 1)
    assert read(written(entries)) == entries
    bodies = [json.dumps(each.as_json()).encode() for each in requests(entries)]
    assert max(map(len, bodies)) <= MAX_BODY_BYTES
    assert [len(decode(ImportRequest, body).entries) for body in bodies] == [MAX_REQUEST_ENTRIES, 1]
    with pytest.raises(InvalidMessageError, match=f"at most {MAX_REQUEST_ENTRIES}"):
        ImportRequest(tuple(entries))


def test_answers_add_up() -> None:
    assert ImportAnswer(1, 2, 3, 1, 5) + ImportAnswer(10, 20, 30, 10, 50, dry_run=True) == ImportAnswer(
        11, 22, 33, 11, 55, dry_run=True
    )


def test_the_host_of_an_import_is_nobodys_and_marked_once() -> None:
    assert imported_host("gpu7") == "import:gpu7"
    assert imported_host(imported_host("gpu7")) == "import:gpu7"
    assert imported_host("") == "import:"
    assert imported_host("bundle:gpu7") == "bundle:gpu7"
    assert len(imported_host("x" * 256)) == 256
