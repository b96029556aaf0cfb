"""How the default process group is found and its store reached: nothing of the user's is kept, changed or waited for."""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from pygraphd.client.backend import torch_private
from pygraphd.client.backend.errors import NotRelocatableError, RanksError
from pygraphd.client.common.report import Report
from pygraphd.client.decisions.ranks.process_group import (
    COLLECTIVES_OFF,
    GRAPH_REGISTER,
    MAX_LATE,
    TOO_LATE,
    Groups,
    GroupStore,
)
from tests.support.process_groups import init, nccl

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["init", "nccl"]  # fixtures

pytestmark = pytest.mark.torch

GRAPH, HERE = "a" * 64, "e" * 64
LONG = datetime.timedelta(seconds=60)


def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, None, True, LONG, wait_for_workers=False)


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


def test_ranks_that_were_restarted_read_nothing_of_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    users = dist.HashStore()
    GroupStore(users).connect().set("asks/graph", "0:17")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    assert GroupStore(users).connect().check(["asks/graph"])

    for restarts in ("1", "2"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
        assert not GroupStore(users).connect().check(["asks/graph"])
        GroupStore(users).connect().set("asks/graph", "0:18")
        assert GroupStore(users).connect().check(["asks/graph"])
    # On several hosts the counts may differ, and all ranks have to find the same keys.
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert GroupStore(users).connect().get("asks/graph") == b"0:17"


REDUCES = frozenset({("_c10d_functional::all_reduce_", "0")})


def test_each_attempt_at_a_graph_has_a_vote_of_its_own(groups: Groups, nccl: dict[str, Any]) -> None:
    for _ in range(2):
        groups.lockstep(REDUCES, GRAPH).refuse("not now")
    groups.lockstep(REDUCES, HERE).refuse("not now")

    keys = [
        f"pygraph/2/recorded/0/0/2/{graph}/{n}/captured" for graph, n in ((GRAPH, 1), (GRAPH, 2), (HERE, 1))
    ]
    assert torch_private.default_store().check(keys)
    groups.lockstep(frozenset({("_c10d_functional::all_gather_into_tensor_out", "0")}), GRAPH)


def test_collectives_that_are_switched_off_are_refused_without_a_vote(nccl: dict[str, Any]) -> None:
    with pytest.raises(NotRelocatableError, match=COLLECTIVES_OFF):
        Groups(Report(), captures=False).lockstep(REDUCES, GRAPH)
    assert not torch_private.default_store().check([f"pygraph/2/recorded/0/0/2/{GRAPH}/1/captured"])


@pytest.mark.parametrize(
    ("collectives", "why"),
    [
        ({("symm_mem::one_shot_all_reduce", "0")}, "it calls symm_mem::one_shot_all_reduce"),
        ({("_c10d_functional::broadcast_", "0")}, "it calls _c10d_functional::broadcast_"),
        ({*REDUCES, ("_c10d_functional::all_reduce_", "1")}, "2 process groups"),
    ],
)
def test_what_cannot_be_captured_is_refused_before(
    groups: Groups, nccl: dict[str, Any], collectives: set[tuple[str, str]], why: str
) -> None:
    with pytest.raises(NotRelocatableError, match=why):
        groups.lockstep(collectives, GRAPH)
    assert why in str(groups.why_not_captured(collectives))


@pytest.mark.parametrize(
    ("name", "value", "ranks", "why"),
    [
        (GRAPH_REGISTER, "1", 2, "NCCL_GRAPH_REGISTER=1"),
        ("TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", "1", 2, "ALLOCATOR_HOOK"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2", 2, "TORCH_NCCL_ASYNC_ERROR_HANDLING=2"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3", 2, None),
        ("TORCH_NCCL_BLOCKING_WAIT", "1", 2, "BLOCKING_WAIT"),
        ("NCCL_NVLS_ENABLE", "2", 4, "multicast"),
        ("NCCL_NVLS_ENABLE", "2", 2, None),
        ("NCCL_NVLS_ENABLE", "0", 4, None),
    ],
)
def test_settings_with_which_collectives_cannot_be_captured_are_refused_for_all(
    groups: Groups, nccl: dict[str, Any], monkeypatch: pytest.MonkeyPatch, name: str, value: str, ranks: int, why: str | None
) -> None:  # fmt: skip
    monkeypatch.setenv(name, value)
    nccl["size"] = ranks
    key = f"pygraph/2/recorded/0/0/{ranks}/{GRAPH}/1/captured"

    known = groups.why_not_captured(REDUCES)
    assert not torch_private.default_store().check([key])
    with pytest.raises(NotRelocatableError, match=why) if why else contextlib.nullcontext():
        groups.lockstep(REDUCES, GRAPH)

    assert why in str(known) if why else known is None
    assert torch_private.default_store().check([key]) is bool(why)


def test_parallel_groups_of_one_name_do_not_count_each_others_votes(
    groups: Groups, nccl: dict[str, Any]
) -> None:
    mine = groups.lockstep(REDUCES, GRAPH).ballot()
    nccl["lowest"] = 2
    other = Groups(Report()).lockstep(REDUCES, GRAPH).ballot()

    results = [ballot.poll(time.monotonic()) for ballot in (mine, other, mine, other)]

    assert results == [None] * 4  # each waits for the second rank of its own group


def test_many_ranks_poll_their_one_store_less_often(
    groups: Groups, nccl: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 512)
    lockstep = groups.lockstep(REDUCES, GRAPH)
    pauses: list[float] = []
    lockstep._clock, lockstep._sleep = (lambda: sum(pauses)), pauses.append

    with pytest.raises(RanksError, match="1 of 2 ranks came"):
        lockstep.go_on()

    assert len(pauses) < 120


def test_a_group_with_a_short_timeout_is_refused(groups: Groups, nccl: dict[str, Any]) -> None:
    nccl["timeout_s"] = 10.0

    with pytest.raises(NotRelocatableError, match="a timeout of 10 s"):
        groups.lockstep(REDUCES, GRAPH)


def test_after_a_few_attempts_in_vain_none_is_made(groups: Groups, nccl: dict[str, Any]) -> None:
    groups.late = MAX_LATE
    assert groups.why_not_captured(REDUCES) is None  # other ranks may not have seen it

    with pytest.raises(NotRelocatableError, match="late"):
        groups.lockstep(REDUCES, GRAPH)

    key = f"pygraph/2/recorded/0/0/2/{GRAPH}/1/captured"
    assert torch_private.default_store().get(key) == f"never: {TOO_LATE}".encode()


def test_another_backend_than_nccl_is_refused(groups: Groups, nccl: dict[str, Any]) -> None:
    nccl["kind"] = "ProcessGroupWrapper"  # TORCH_DISTRIBUTED_DEBUG=DETAIL, which adds collectives of its own

    with pytest.raises(NotRelocatableError, match="served by ProcessGroupWrapper"):
        groups.lockstep(REDUCES, GRAPH)


def test_a_group_that_is_not_there_is_refused(groups: Groups, init: Callable[..., None]) -> None:
    init(dist.HashStore())

    with pytest.raises(NotRelocatableError, match="its process group was not found"):
        groups.lockstep(frozenset({("_c10d_functional::all_reduce_", "nowhere")}), GRAPH)


def test_without_several_ranks_there_is_nothing_to_record_together(
    groups: Groups, init: Callable[..., None]
) -> None:
    init(dist.HashStore(), 1)

    with pytest.raises(NotRelocatableError, match="no group of several ranks"):
        groups.lockstep(REDUCES, GRAPH)


def test_what_has_to_end_before_a_group_does(init: Callable[..., None]) -> None:
    from torch.distributed import destroy_process_group

    seen: list[bool] = []
    undo = torch_private.before_groups_end(lambda: seen.append(dist.is_initialized()))
    try:
        init(dist.HashStore())
        destroy_process_group()
    finally:
        undo()
    init(dist.HashStore())
    destroy_process_group()

    assert seen
    assert all(seen)


def test_what_has_to_end_before_a_group_is_aborted(init: Callable[..., None]) -> None:
    seen: list[bool] = []
    undo = torch_private.before_groups_end(lambda: seen.append(dist.is_initialized()))
    try:
        init(dist.HashStore())
        with contextlib.suppress(RuntimeError):  # the backend of this test cannot abort
            dist.distributed_c10d._abort_process_group()
    finally:
        undo()

    assert seen == [True]


def test_the_group_of_a_collective_is_found_by_its_name(init: Callable[..., None]) -> None:
    init(dist.HashStore())
    store = dist.HashStore()
    backend = dist.ProcessGroupGloo(store, 0, 1)
    assert dist.group.WORLD is not None
    dist.group.WORLD._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.GLOO, backend)

    lowest, size, timeout_s, kind = torch_private.group_on_gpus(dist.group.WORLD.group_name)

    assert (lowest, size, kind) == (0, 1, "ProcessGroupGloo")
    assert timeout_s > 0
