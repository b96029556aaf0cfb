"""How the default process group is found and its store reached: nothing of the user's is kept, changed or waited for."""

from __future__ import annotations

import datetime
import gc
import importlib
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist

from pygraphd.client.backend import torch_private
from pygraphd.client.common.report import Report
from pygraphd.client.decisions.ranks.process_group import Groups, GroupStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.torch

GRAPH, HERE = "a" * 64, "e" * 64
LONG = datetime.timedelta(seconds=60)


def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, None, True, LONG, wait_for_workers=False)


@pytest.fixture
def init() -> Iterator[Callable[[dist.Store], None]]:
    """Return what makes a group of two ranks of which this process is the first, and the second nowhere."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")

    def start(store: dist.Store, ranks: int = 2) -> None:
        dist.init_process_group("fake", store=store, rank=0, world_size=ranks)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def groups() -> Groups:
    return Groups(Report(), operation_s=5.0)


def test_without_a_group_of_several_there_is_nothing_to_agree(
    groups: Groups, init: Callable[..., None]
) -> None:
    assert groups.agreement() is None

    init(dist.HashStore(), 1)

    assert groups.agreement() is None


def test_a_group_is_found_and_its_store_asked(groups: Groups, init: Callable[..., None]) -> None:
    init(dist.HashStore())

    agreement = groups.agreement()

    assert agreement is not None
    assert agreement is groups.agreement()
    assert agreement.role(GRAPH, [GRAPH], HERE).leads
    assert torch_private.default_store().check([f"pygraph/2/asks/{GRAPH}"])


def test_a_new_group_has_a_new_agreement_and_the_old_ones_store_is_gone(
    groups: Groups, init: Callable[..., None]
) -> None:
    init(dist.HashStore())
    before = groups.agreement()
    assert before is not None
    gone = weakref.ref(torch_private.default_store())
    dist.destroy_process_group()
    gc.collect()
    assert gone() is None
    assert groups.agreement() is None

    init(dist.HashStore())

    after = groups.agreement()
    assert after is not None
    assert after is not before
    assert not before.role(GRAPH, [GRAPH], HERE).leads
    assert after.role(GRAPH, [GRAPH], HERE).leads
    assert groups._report.failures == {"ranks: ConnectionError": 1}


def test_a_torch_that_lacks_something_is_reported(
    groups: Groups, init: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    init(dist.HashStore())
    monkeypatch.setattr(torch_private, "missing_for_groups", lambda: "torch lacks much")

    assert groups.agreement() is None
    assert groups._report.failures == {"ranks: torch lacks much": 1}


def test_a_server_is_not_kept_from_giving_up_its_port() -> None:
    users = server()
    port = users.port
    ours = GroupStore(users)
    assert ours.connect().compare_set("key", "", "value") == b"value"

    del users
    gc.collect()

    assert dist.TCPStore("127.0.0.1", port, None, True, LONG, wait_for_workers=False).port == port
    with pytest.raises(ConnectionError, match="gone"):
        ours.connect().check(["key"])


def test_a_file_is_removed_by_its_last_user(tmp_path: Path) -> None:
    users = dist.FileStore(str(tmp_path / "store"), 1)
    ours = GroupStore(users)
    assert ours.connect().compare_set("key", "", "value") == b"value"

    del users
    gc.collect()

    assert not (tmp_path / "store").exists()


def test_a_user_who_waits_for_a_key_holds_nothing_up() -> None:
    users = server()
    ours = GroupStore(users)
    waiting = threading.Thread(target=lambda: users.wait(["later"], LONG))
    waiting.start()
    time.sleep(0.2)

    answer = ours.connect().compare_set("key", "", "value")

    assert (answer, ours.connect().get("key")) == (b"value", b"value")
    assert waiting.is_alive()  # it waits still, and nothing has waited for it
    other = dist.TCPStore("127.0.0.1", users.port, None, False, LONG, wait_for_workers=False)
    other.set("later", "now")
    waiting.join()


def test_the_users_timeout_stays() -> None:
    users = server()
    GroupStore(users).connect().check(["key"])

    assert users.timeout == LONG


def test_a_fork_does_not_talk_over_its_parents_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    users = dist.HashStore()
    ours = GroupStore(users)
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)

    with pytest.raises(ConnectionError, match="fork"):
        ours.connect().check(["key"])
