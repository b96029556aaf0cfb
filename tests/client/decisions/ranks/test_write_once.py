"""A register is written once, whoever tries; and a store that fails, hangs or talks nonsense costs a bounded time."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from pygraphd.client.decisions.ranks.write_once import RegisterError, Registers, Verdict
from pygraphd.schema.checks import InvalidMessageError
from pygraphd.schema.messages import Decision, Deployment
from pygraphd.schema.reasons import Reason, ReasonCode
from tests.support.memory_store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Iterator

GRAPH = "a" * 64
FASTER = Verdict("e" * 64, Decision(Deployment.GRAPH, Reason(ReasonCode.FASTER), 1))
KERNELS = Verdict("f" * 64, Decision(Deployment.KERNELS, Reason(ReasonCode.NO_GAIN), 1, final=False, calls=3))


@pytest.fixture
def ranks() -> list[Registers]:
    store = MemoryStore()
    return [Registers(lambda: store, str(rank)) for rank in range(4)]


def test_who_writes_first_has_decided_for_all(ranks: list[Registers]) -> None:
    assert [rank.read(GRAPH) for rank in ranks] == [None] * 4

    assert ranks[2].write(GRAPH, FASTER) == FASTER

    assert ranks[0].write(GRAPH, KERNELS) == FASTER
    assert [rank.read(GRAPH) for rank in ranks] == [FASTER] * 4
    assert ranks[1].read("b" * 64) is None


def test_one_rank_finds_out_and_remains_the_one(ranks: list[Registers]) -> None:
    assert [rank.become_leader(GRAPH) for rank in ranks[::-1]] == [True, False, False, False]
    assert [rank.become_leader(GRAPH) for rank in ranks] == [False, False, False, True]
    assert ranks[0].become_leader("b" * 64)


class HangingStore(MemoryStore):
    """Never answers while it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = threading.Event()

    def check(self, keys: list[str]) -> bool:
        return self.opened.wait() and super().check(keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.opened.wait()
        return super().compare_set(key, expected, desired)


@pytest.fixture
def hanging() -> Iterator[HangingStore]:
    store = HangingStore()
    yield store
    store.opened.set()


def test_a_store_that_hangs_is_not_waited_for(hanging: HangingStore) -> None:
    registers = Registers(lambda: hanging, "0", limit_s=0.1)

    for action in (
        lambda: registers.become_leader(GRAPH),
        lambda: registers.read(GRAPH),
        lambda: registers.write(GRAPH, FASTER),
    ):
        with pytest.raises(RegisterError, match="no answer in time"):
            action()


def test_an_error_of_the_store_is_named() -> None:
    with pytest.raises(RegisterError, match=r"^ConnectionError$"):
        Registers(lambda: MemoryStore(failing={1: False}), "0").read(GRAPH)


@pytest.mark.parametrize(
    "value",
    [b"", b"{}", b'{"environment": "x", "decision": {}}', b"\xff"],
    ids=["empty", "no fields", "bad", "bytes"],
)
def test_a_register_that_makes_no_sense_is_an_error(value: bytes) -> None:
    registers = Registers(lambda: MemoryStore({f"decided/{GRAPH}": value}), "0")

    with pytest.raises(RegisterError, match="not understood"):
        registers.read(GRAPH)


def test_a_verdict_names_an_environment() -> None:
    with pytest.raises(InvalidMessageError):
        Verdict("here", FASTER.decision)
