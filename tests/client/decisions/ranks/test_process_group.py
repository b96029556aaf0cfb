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
from pygraphd.client.decisions.ranks.late_ranks import MAX_LATE, TOO_LATE
from pygraphd.client.decisions.ranks.lockstep import STEPS
from pygraphd.client.decisions.ranks.process_group import (
    COLLECTIVES_OFF,
    GRAPH_REGISTER,
    Groups,
    GroupStore,
)
from tests.support.process_groups import init, nccl

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pygraphd.client.decisions.ranks.lockstep import Lockstep

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
    assert torch_private.default_store().check([f"pygraph/3/asks/{GRAPH}"])


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
    monkeypatch.setattr(torch_private, "missing_for", lambda _: "torch lacks much")

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
        f"pygraph/3/recorded/0/0/2/{graph}/{n}/captured" for graph, n in ((GRAPH, 1), (GRAPH, 2), (HERE, 1))
    ]
    assert torch_private.default_store().check(keys)
    groups.lockstep(frozenset({("_c10d_functional::all_gather_into_tensor_out", "0")}), GRAPH)


def test_collectives_that_are_switched_off_are_refused_without_a_vote(nccl: dict[str, Any]) -> None:
    with pytest.raises(NotRelocatableError, match=COLLECTIVES_OFF):
        Groups(Report(), captures=False).lockstep(REDUCES, GRAPH)
    assert not torch_private.default_store().check([f"pygraph/3/recorded/0/0/2/{GRAPH}/1/captured"])


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
    key = f"pygraph/3/recorded/0/0/{ranks}/{GRAPH}/1/captured"

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


class Job:
    """The ranks of a job in this process, with one store and one clock."""

    def __init__(self, ranks: int) -> None:
        self.now = 0.0
        self.ranks = [Groups(Report()) for _ in range(ranks)]

    def begin(self, rank: int, graph: str) -> Lockstep:
        lockstep = self.ranks[rank].lockstep(REDUCES, graph)
        lockstep._clock, lockstep._sleep = (lambda: self.now), self._sleep
        return lockstep

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def end(self, rank: int, lockstep: Lockstep) -> None:
        """Vote for the attempt, and note whether that was in vain, as `CollectiveRecordings` does."""
        with pytest.raises(RanksError):
            lockstep.go_on()
        if lockstep.is_late:
            self.ranks[rank].note_late(lockstep)


def test_a_job_whose_ranks_see_other_sizes_loses_little_time_before_it_gives_up(nccl: dict[str, Any]) -> None:
    """Each rank is alone in its attempts, and has all others wait in a collective."""
    job, refused = Job(64), list[str]()
    for size in range(200):
        rank = size % 64
        try:
            job.end(rank, job.begin(rank, f"{GRAPH}/{size}"))
        except NotRelocatableError as error:
            refused.append(str(error))

    assert refused == [TOO_LATE] * (200 - MAX_LATE)
    assert job.now <= MAX_LATE * (STEPS[0][1] + 1.0)


def test_ranks_that_wait_at_the_same_time_lose_it_once(nccl: dict[str, Any]) -> None:
    job = Job(8)
    attempts = [job.begin(rank, f"{GRAPH}/{rank}") for rank in range(8)]
    for rank, attempt in enumerate(attempts):
        job.end(rank, attempt)

    assert [job.begin(rank, HERE).late_before for rank in range(8)] == [1] * 8


def test_one_that_comes_after_the_limit_has_lost_no_time(
    nccl: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    job, nccl["size"] = Job(3), 3
    job.end(0, job.begin(0, GRAPH))
    for late in (1, 2):
        job.now += 5.0
        job.end(late, job.begin(late, GRAPH))

    assert job.begin(0, HERE).late_before == 1


def test_after_a_few_attempts_in_vain_none_is_made_and_other_ranks_are_told(nccl: dict[str, Any]) -> None:
    job = Job(2)
    for number in range(MAX_LATE):
        job.end(0, job.begin(0, f"{HERE}/{number}"))
    other = job.ranks[1]
    assert other.why_not_captured(REDUCES) is None  # without a question to the store

    with pytest.raises(NotRelocatableError, match="late"):
        other.lockstep(REDUCES, GRAPH)

    key = f"pygraph/3/recorded/0/0/2/{GRAPH}/1/captured"
    assert torch_private.default_store().get(key) == f"never: {TOO_LATE}".encode()


def test_what_a_rank_cannot_tell_the_others_it_counts_itself(
    nccl: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(1)
    attempt = job.begin(0, GRAPH)
    monkeypatch.setattr(GroupStore, "connect", unreachable)

    job.ranks[0].note_late(attempt)

    assert job.ranks[0]._late_of(attempt.group).count == 1

    attempt.late_before = 1
    job.ranks[0].note_late(attempt)  # in a pause after the first failure
    assert job.ranks[0]._late_of(attempt.group).count == 2


def test_a_rank_whose_group_ends_during_an_attempt_notes_that_it_was_late_all_the_same(
    nccl: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is said in the program's call: an error of c10d's would be raised there."""
    job = Job(1)
    attempt = job.begin(0, GRAPH)
    monkeypatch.setattr(torch_private, "default_store", unreachable)

    job.ranks[0].note_late(attempt)

    assert job.ranks[0]._late_of(attempt.group).count == 1


def test_a_rank_does_not_vote_in_a_store_that_does_not_answer(
    groups: Groups, nccl: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could not read the result, and would have to wait until its group gives the others up."""
    asked: list[object] = []

    def connect(store: GroupStore) -> Any:
        asked.append(store)
        return unreachable(store)

    with monkeypatch.context() as here:
        here.setattr(GroupStore, "connect", connect)
        for _ in range(200):
            with pytest.raises(RanksError, match="could not reach"):
                groups.lockstep(REDUCES, GRAPH)

    assert len(asked) == 1  # the others did not wait for it
    assert groups._report.failures == {"ranks: ConnectionError": 1}
    assert torch_private.default_store().num_keys() == 0


def unreachable(*_: object) -> Any:
    raise ConnectionError


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


def test_the_group_of_a_collective_is_found_by_its_name(init: Callable[..., None]) -> None:
    init(dist.HashStore())
    store = dist.HashStore()
    backend = dist.ProcessGroupGloo(store, 0, 1)
    assert dist.group.WORLD is not None
    dist.group.WORLD._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.GLOO, backend)

    lowest, size, timeout_s, kind = torch_private.group_on_gpus(dist.group.WORLD.group_name)

    assert (lowest, size, kind) == (0, 1, "ProcessGroupGloo")
    assert timeout_s > 0
