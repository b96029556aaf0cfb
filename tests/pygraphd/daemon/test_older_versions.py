"""Files that versions with LAUNCH, RELOCATE and TREES wrote, as they wrote them: exports, and what their clients left in the spool."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pygraphd.daemon import spool
from pygraphd.daemon.exchange import ImportAnswer, read_file, write
from pygraphd.daemon.older_versions import code_of, translated, translated_request
from pygraphd.daemon.spool import SpoolState, ingest_file, records
from pygraphd.errors import UsageError
from pygraphd.schema.messages import Decision, Deployment, LookupRequest, RecordRequest
from pygraphd.schema.offline import read_entries
from pygraphd.schema.policy import POLICY_VERSION
from pygraphd.schema.portable import ImportRequest
from pygraphd.schema.reasons import Reason, ReasonCode

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pygraphd.daemon.store import Store
    from pygraphd.schema.portable import Portable


def _ingest(folder: Path, store: Callable[[RecordRequest, int], int]) -> int:
    return sum(ingest_file(folder / name, store) for name in records(folder))


HEADER = '{"format":"pygraphd cache","version":1,"keys":2,"pygraphd":"0.1.0","entries":%d}\n'
_ENTRY = (
    '{"environment":{"gpu":"NVIDIA H200","capability":"9.0","sm_count":132,"memory_mb":143771,"mig":"","torch":"2.13.0",'
    '"triton":"3.5","cuda":"13.0","driver":"580.1","cudnn":"91400"},"origin":{"host":"gpu7","version":"0.1.0"},"record":%s,'
    '"measured_at":%s}\n'
)
_RECORD = (
    '{"graph":{"digest":"%s","kind":"forward","partition":0,"partitions":1,"operators":5,"sizes":[]},'
    '"decision":{"deployment":"%s","reason":"%s","policy":4,"final":true,"calls":24},"measurements":[%s],'
    '"conditions":{"forward_in_trees":null,"backward_gain_us":12.5}}'
)
_FIGURES = (
    '{"deployment":"%s","samples":12,"median_us":%s,"mad_us":1.0,"host_us":%s,"span_us":30.0,"busy":0.5}'
)
_TIMES = {"LAUNCH": 100.0, "TREES": 60.0, "RELOCATE": 50.0}


def record(digit: str, deployment: str, reason: str, *measured: str) -> str:
    figures = ",".join(_FIGURES % (name, _TIMES[name], _TIMES[name]) for name in measured)
    return _RECORD % (digit * 64, deployment, reason, figures)


RECORDS = (
    record("1", "RELOCATE", "RELOCATE is faster", "LAUNCH", "RELOCATE", "TREES"),
    record("2", "TREES", "TREES is faster", "TREES", "LAUNCH", "RELOCATE"),
    record("3", "LAUNCH", "no CUDA device"),
    record("4", "TREES", "TREES is faster", "LAUNCH", "TREES"),
    record("5", "LAUNCH", "no gain over LAUNCH beyond noise and 2 %", "LAUNCH", "TREES"),
    record("6", "TREES", "its attention keeps random numbers elsewhere if captured"),
)
"""Of which three rest on TREES, and lack what decides between GRAPH and KERNELS."""


def exported(*records: str) -> bytes:
    lines = [_ENTRY % (each, "1000.0" if "median_us" in each else "null") for each in records]
    return "".join([HEADER % len(lines), *lines]).encode()


def read(data: bytes) -> tuple[list[Portable], int]:
    found = list(read_file(io.BytesIO(data), "old.jsonl"))
    entries = [entry for entry in found if entry is not None]
    return entries, len(found) - len(entries)


def found(database: Path, environment: str) -> dict[str, Decision]:
    asked = LookupRequest(environment, tuple(digit * 64 for digit in "123456"))
    return {entry.graph[0]: entry.decision for entry in read_entries(database, asked)}


def test_an_old_export_is_read_with_the_names_of_today() -> None:
    entries, left_out = read(exported(*RECORDS))

    assert left_out == 3
    assert [each.record.decision.deployment for each in entries] == ["GRAPH", "KERNELS", "KERNELS"]
    measured = [{m.deployment: m.median_us for m in each.record.measurements} for each in entries]
    assert measured == [{"KERNELS": 100.0, "GRAPH": 50.0}] * 2 + [{}]
    assert entries[1].record.decision.reason == Reason(ReasonCode.TREES_GONE)
    assert (entries[0].record.graph.digest, entries[0].measured_at) == ("1" * 64, 1000.0)


def test_it_is_imported_and_decided_anew(store: Store, database: Path) -> None:
    entries, _ = read(exported(*RECORDS))

    assert store.add_imported(ImportRequest(tuple(entries)), uid=0) == ImportAnswer(added=3, derived=2)

    decisions = found(database, entries[0].environment.digest())
    assert {graph: (each.deployment, each.policy) for graph, each in decisions.items()} == {
        "1": ("GRAPH", POLICY_VERSION),
        "2": ("GRAPH", POLICY_VERSION),
        "3": ("KERNELS", 4),
    }


def test_what_is_exported_from_then_on_has_the_names_of_today() -> None:
    entries, _ = read(exported(*RECORDS))
    stream = io.StringIO()
    write(entries, stream)

    assert json.loads(stream.getvalue().splitlines()[0])["version"] == 3
    assert not any(name in stream.getvalue() for name in ('"LAUNCH"', '"RELOCATE"', "TREES", "conditions"))
    assert read(stream.getvalue().encode()) == (entries, 0)


@pytest.mark.parametrize(
    ("sentence", "code", "detail"),
    [
        ("GRAPH is faster", "faster", ""),
        ("GRAPH is faster; the host or GPU was too noisy to rely on it", "faster", ""),
        ("no CUDA device", "no_device", ""),
        ("PyTorch does not capture it: cpu device (x.py:3)", "not_captured_by_torch", "cpu device (x.py:3)"),
        ("it cannot be relocated: it holds a HOST node", "cannot_be_recorded", "it holds a HOST node"),
        ("its forward is in no tree", "other", "its forward is in no tree"),
        ("two\nlines", "other", "two"),
        ("", "other", ""),
    ],
)
def test_a_sentence_becomes_a_code_where_it_says_exactly_that(sentence: str, code: str, detail: str) -> None:
    assert code_of(sentence) == {"code": code, "detail": detail}


def test_an_export_of_format_2_is_read_with_codes() -> None:
    line = RECORDS[2].replace("LAUNCH", "KERNELS")
    entries, left_out = read(exported(line).replace(b'"version":1', b'"version":2', 1))

    decision = entries[0].record.decision
    assert (decision.reason, decision.against) == (
        Reason(ReasonCode.NO_DEVICE),
        Reason(ReasonCode.NO_DEVICE),
    )
    assert left_out == 0


@pytest.mark.parametrize("bad", ["TELEPORT", "KERNEL", ""])
def test_what_never_was_a_name_is_refused_with_its_line(bad: str) -> None:
    data = exported(RECORDS[0], RECORDS[2].replace('"LAUNCH"', f'"{bad}"'))

    with pytest.raises(UsageError, match=r"old\.jsonl: line 3: deployment: expected one of KERNELS, GRAPH"):
        read(data)


def test_a_new_export_has_none_of_the_old_names() -> None:
    data = exported(RECORDS[2]).replace(b'"version":1', b'"version":3', 1)

    with pytest.raises(UsageError, match="line 2: deployment: expected one of KERNELS, GRAPH, got 'LAUNCH'"):
        read(data)


@pytest.mark.parametrize("line", ["null", "[]", '{"record": null}', '{"record": {"measurements": [1]}}'])
def test_a_line_that_makes_no_sense_is_refused_and_not_left_out(line: str) -> None:
    with pytest.raises(UsageError, match="line 2: "):
        read((HEADER % 1 + line + "\n").encode())


# --- the spool ---


def left_by_a_client_of_then(*records: str) -> bytes:
    environment = _ENTRY[: _ENTRY.index(',"origin"')]
    body = f'{environment},"origin":{{"host":"gpu7","version":"0.1.0"}},"records":[{",".join(records)}]}}'
    return body.encode()


def test_what_an_old_client_has_left_is_taken_in(tmp_path: Path, store: Store, database: Path) -> None:
    folder = tmp_path / "spool"
    folder.mkdir()
    (folder / "1.json").write_bytes(left_by_a_client_of_then(*RECORDS))
    (waiting,) = spool.waiting(folder)

    assert _ingest(folder, store.record) == 3

    assert spool.state(folder) == SpoolState(waiting=0, bad=0)
    decisions = found(database, waiting.request.environment.digest())
    assert {graph: str(each.deployment) for graph, each in decisions.items()} == {
        "1": "GRAPH",
        "2": "KERNELS",
        "3": "KERNELS",
    }
    assert store.rederive_outdated(60.0) == (2, 0)
    assert found(database, waiting.request.environment.digest())["2"].deployment is Deployment.GRAPH


def test_what_was_all_trees_is_taken_in_as_nothing(tmp_path: Path, store: Store) -> None:
    (tmp_path / "1.json").write_bytes(left_by_a_client_of_then(*RECORDS[3:]))

    assert _ingest(tmp_path, store.record) == 0

    assert (store.count_entries(), spool.state(tmp_path)) == (0, SpoolState(waiting=0, bad=0))


# --- anything ---

JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from([*_TIMES, "KERNELS"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["records", "decision", "measurements", "deployment"]), inner)
    ),
)


@given(JSON)
def test_whatever_is_left_there_raises_nothing(value: Any) -> None:
    translated_request(value)
    if isinstance(value, dict):
        assert translated(value) is None or isinstance(translated(value), dict)
