"""What has to end before a process group does is told of it, whichever way the group ends."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist

from pygraphd.client.backend import torch_private
from tests.support.process_groups import init

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["init"]  # a fixture

pytestmark = pytest.mark.torch


def test_what_has_to_end_before_a_group_does(init: Callable[..., None]) -> None:
    from torch.distributed import destroy_process_group

    seen: list[bool] = []
    undo = torch_private.before_groups_end(lambda _: seen.append(dist.is_initialized()))
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
    undo = torch_private.before_groups_end(lambda _: seen.append(dist.is_initialized()))
    try:
        init(dist.HashStore())
        with contextlib.suppress(RuntimeError):  # the backend of this test cannot abort
            dist.distributed_c10d._abort_process_group()
    finally:
        undo()

    assert seen == [True]


@pytest.mark.parametrize("end", ["destroy_process_group", "_abort_process_group"])
def test_what_ends_with_a_group_is_told_its_name_and_with_the_default_group_all_does(
    init: Callable[..., None], end: str
) -> None:
    seen: list[str | None] = []
    init(dist.HashStore())
    of_one, of_both = dist.new_group([0]), dist.new_group([0, 1])
    undo = torch_private.before_groups_end(seen.append)
    try:
        with contextlib.suppress(RuntimeError):  # the backend of this test cannot abort
            getattr(dist.distributed_c10d, end)(of_one)
        assert set(seen) == {of_one.group_name}
        with contextlib.suppress(RuntimeError):
            getattr(dist.distributed_c10d, end)(of_both)
        assert set(seen) == {of_one.group_name, of_both.group_name}
        with contextlib.suppress(RuntimeError):
            getattr(dist.distributed_c10d, end)()
    finally:
        undo()

    assert of_one.group_name != of_both.group_name
    assert None in seen or end == "_abort_process_group"


@pytest.mark.parametrize("error", [RuntimeError, AttributeError, ValueError])
def test_a_group_without_a_name_may_be_any(
    init: Callable[..., None], monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def without_name(_: dist.ProcessGroup) -> str:
        raise error("ProcessGroup name not set")

    init(dist.HashStore())
    of_one, seen = dist.new_group([0]), list[str | None]()
    monkeypatch.setattr(dist.ProcessGroup, "group_name", property(without_name))
    undo = torch_private.before_groups_end(seen.append)
    try:
        of_one.shutdown()
    finally:
        undo()

    assert seen == [None]
