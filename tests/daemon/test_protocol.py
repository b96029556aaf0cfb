"""What the daemon answers over its socket, to good and to bad requests."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pygraphd import __version__
from pygraphd.daemon import control
from pygraphd.schema import ownership
from pygraphd.schema.messages import (
    API_VERSION,
    MAX_BODY_BYTES,
    LookupAnswer,
    LookupRequest,
    RecordAnswer,
    RecordRequest,
    decode,
    encode,
)
from tests.support.daemon_home import HANGS_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.daemon_home import Home

pytestmark = pytest.mark.daemon


def _lookup_of(request: RecordRequest) -> bytes:
    return encode(LookupRequest(request.environment.digest(), tuple(r.graph.digest for r in request.records)))


def test_ping(shared_home: Home) -> None:
    pid = shared_home.processes[0].pid
    ping = control.ping(shared_home.locations.socket)
    assert ping is not None
    assert (ping.name, ping.version, ping.api, ping.pid) == ("pygraphd", __version__, API_VERSION, pid)
    assert set(ping.capabilities) >= {"lookup", "record", "stats", "prune", "rederive"}


def test_what_is_recorded_is_found_by_another_client(
    home: Home, make_request: Callable[..., RecordRequest]
) -> None:
    home.start()
    request = make_request("a", "b")
    status, answer = home.ask("POST", "/v3/record", encode(request))
    assert status == 200
    assert decode(RecordAnswer, json.dumps(answer).encode()) == RecordAnswer(
        request.environment.digest(), __version__, 2
    )
    status, answer = home.ask("POST", "/v3/lookup", _lookup_of(make_request("a", "b", "c")))
    found = decode(LookupAnswer, json.dumps(answer).encode())
    assert {entry.decision for entry in found.entries} == {request.records[0].decision}
    assert len(found.entries) == 2
    assert {(each.cost_us, each.host_us, each.span_us) for each in found.entries} == {(100.0, 90.0, 80.0)}
    _, stats = home.ask("GET", "/v1/stats")
    assert (
        stats.items()
        >= {"schema": 1, "entries": 2, "other_policy": 2, "unknown": 1, "records": 2, "problems": []}.items()
    )
    assert stats["settings"]["idle_exit"] == {"value": 1800.0, "origin": "default"}


@pytest.mark.slow
def test_rows_carry_the_peers_uid(home: Home, make_request: Callable[..., RecordRequest]) -> None:
    home.start()
    home.ask("POST", "/v3/record", encode(make_request("a")))
    listing = json.loads(home.pygraphd("cache", "inspect", "--json").stdout)
    assert [entry["uid"] for entry in listing["entries"]] == [os.getuid()]


@pytest.mark.parametrize(
    ("method", "target", "body", "status", "text"),
    [
        ("GET", "/", None, 404, "Not Found"),
        ("GET", "/v3/ping", None, 404, "Not Found"),
        ("DELETE", "/v1/ping", None, 405, "Method Not Allowed"),
        ("GET", "/v3/lookup", None, 405, "Method Not Allowed"),
        ("POST", "/v3/lookup", b"", 400, "not JSON"),
        ("POST", "/v3/lookup", b'{"environment": "x"}', 400, "graphs is missing"),
        ("POST", "/v3/record", b"[]", 400, "expected an object"),
        ("POST", "/v3/record", b"[" * 200000, 400, "not JSON"),
        ("POST", "/v1/prune", b"{}", 400, "give older_than_s or gpu"),
        ("POST", "/v1/prune", b'{"older_than_s": 1' + b"0" * 400 + b"}", 400, "is outside"),
        (
            "POST",
            "/v3/record",
            b" " * (MAX_BODY_BYTES + 1),
            413,
            "a body of over 4194304 bytes",
        ),
    ],
)
def test_bad_requests_get_a_reason(
    shared_home: Home, method: str, target: str, body: bytes | None, status: int, text: str
) -> None:
    answered, answer = shared_home.ask(method, target, body)
    assert answered == status
    assert text in str(answer["error"])
    assert control.ping(shared_home.locations.socket) is not None


# Text around real field names comes further into the decoder than bytes alone.
_BODIES = st.one_of(
    st.binary(max_size=2000),
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=70),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(
                    ["environment", "graphs", "origin", "records", "graph", "gpu", "older_than_s", "dry_run"]
                )
                | st.text(max_size=5),
                inner,
                max_size=5,
            )
        ),
        max_leaves=12,
    ).map(lambda value: json.dumps(value).encode()),
)


@given(body=_BODIES, target=st.sampled_from(["/v3/lookup", "/v3/record", "/v1/prune", "/v3/rederive"]))
@settings(max_examples=150, deadline=None)
def test_no_random_body_is_accepted_or_fatal(shared_home: Home, body: bytes, target: str) -> None:
    status, answer = shared_home.ask("POST", target, body)
    # A random one of these may be well-formed: {"gpu": "x"} is.
    assert 400 <= status < 500 or (target in ("/v1/prune", "/v3/rederive") and status == 200)
    assert status == 200 or answer["error"]
    assert shared_home.processes[0].poll() is None


@pytest.mark.parametrize(
    "garbage", [b"\x00" * 100, b"GET\r\n\r\n", b"POST /v3/record HTTP/1.1\r\nContent-Length: 99\r\n\r\nx"]
)
def test_what_is_not_http_harms_nobody(shared_home: Home, garbage: bytes) -> None:
    with ownership.connect(shared_home.locations.socket, HANGS_S) as connection:
        connection.sendall(garbage)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 16):
            pass  # until it has been dealt with
    log = shared_home.locations.log.read_bytes()
    assert b"Traceback" not in log
    assert control.ping(shared_home.locations.socket) is not None


def test_another_user_is_refused(home: Home) -> None:
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can become somebody else")
    home.start()
    # Even if the folder and the socket let them in.
    home.path.chmod(0o755)
    for folder in home.path.parents:
        if (
            folder.owner() == "root"
            and folder != folder.parent
            and folder.is_relative_to("/tmp/pytest-of-root")
        ):
            folder.chmod(0o755)
    home.locations.socket.chmod(0o666)
    code = (
        "import os, http.client, socket, sys\n"
        "os.setgid(12345); os.setuid(12345)\n"
        "c = http.client.HTTPConnection('x'); c.sock = socket.socket(socket.AF_UNIX); c.sock.connect(sys.argv[1])\n"
        "c.request('GET', '/v1/ping'); r = c.getresponse(); print(r.status, r.read().decode())"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code, str(home.locations.socket)], capture_output=True, text=True, check=True
    )
    assert answer.stdout.startswith("403 ")
    assert "uid 12345 may not use the daemon of uid 0" in answer.stdout


@pytest.mark.slow
def test_a_prune_goes_through_the_daemon(home: Home, make_request: Callable[..., RecordRequest]) -> None:
    home.start()
    home.ask("POST", "/v3/record", encode(make_request("a", "b")))
    home.ask("POST", "/v3/record", encode(make_request("a", gpu="NVIDIA A100")))
    dry = home.pygraphd("cache", "prune", "--gpu", "h200", "--dry-run")
    assert dry.stdout == "would delete 2 entries and 2 measurements\n"
    assert home.pygraphd("cache", "prune", "--gpu", "h200").returncode == 0
    assert home.status()["entries"] == 1
    assert home.pygraphd("cache", "prune", "--older-than", "30d", "--json").returncode == 0
