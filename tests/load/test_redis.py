from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.support.benchmark_commands import benchmarks
from tests.support.required import require
from tools.load.redis import Plan, measure_beside_redis
from tools.load.redis_server import COMMANDS, encoded, end_of

if TYPE_CHECKING:
    from pathlib import Path


def test_a_command_is_sent_with_the_length_of_each_word() -> None:
    assert encoded(b"GET", b"key") == b"*2\r\n$3\r\nGET\r\n$3\r\nkey\r\n"


@pytest.mark.parametrize(
    ("replies", "answer"),
    [(1, b"+OK\r\n"), (2, b":1\r\n:2\r\n"), (1, b"*3\r\n$2\r\nab\r\n$-1\r\n$4\r\n\r\n\r\n\r\n")],
)
def test_the_end_of_replies_is_found_once_all_is_there(replies: int, answer: bytes) -> None:
    assert end_of(answer, replies) == len(answer)
    assert all(end_of(answer[:length], replies) is None for length in range(len(answer)))


def test_without_a_server_the_command_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = benchmarks("redis", "--out", str(tmp_path / "redis.json"), package="tools.load")
    assert done.returncode == 2
    assert "no redis-server in PATH; install it, as with: apt-get install redis-server" in done.stderr


@pytest.mark.slow
@pytest.mark.daemon
def test_both_servers_are_asked_the_same(tmp_path: Path) -> None:
    require(COMMANDS, "TESTS_REQUIRE_REDIS")
    out = tmp_path / "redis.json"
    measure_beside_redis(Plan(clients=2, seconds=0.2, rounds=1, entries=200), out)
    records = json.loads(out.read_text())["records"]
    assert [(each["server"], each["request"]) for each in records] == [
        ("pygraphd", "lookup"),
        ("Redis", "lookup"),
        ("Redis, a connection each", "lookup"),
        ("pygraphd", "record"),
        ("Redis", "record"),
    ]
    assert all(each["per_s"] > 0 and each["p50_us"] <= each["p99_us"] for each in records)
