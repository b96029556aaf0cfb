"""Tensors over addresses that nothing owns."""

from __future__ import annotations

import pytest
import torch

from pygraphd.client.recording.aliased_memory import without_owner
from pygraphd.client.replay.relocation_table import Span

pytestmark = pytest.mark.torch


def span_of(*tensors: torch.Tensor) -> list[Span]:
    storages = [each.untyped_storage() for each in tensors]
    return [Span(each.data_ptr(), each.data_ptr() + each.nbytes()) for each in storages]


def test_tensors_within_the_ranges_have_the_same_layout_and_own_nothing() -> None:
    owner, other = torch.arange(64.0), torch.zeros(4)
    view, conjugate = owner[8:40].view(8, 4).t(), torch.view_as_complex(owner.view(32, 2)).conj()
    given = [view, other, None, 3, conjugate, owner[:0]]

    found = without_owner(given, span_of(owner))

    assert [found[at] is given[at] for at in range(6)] == [False, True, True, True, False, True]
    for mine, right in ((found[0], view), (found[4], conjugate)):
        assert mine.data_ptr() == right.data_ptr()
        assert (mine.size(), mine.stride(), mine.dtype) == (right.size(), right.stride(), right.dtype)
        assert mine.storage_offset() == right.storage_offset()
        assert mine.untyped_storage().nbytes() == right.untyped_storage().nbytes()
        assert mine.is_conj() == right.is_conj()
        assert torch.equal(mine, right)
    assert found[0].untyped_storage()._cdata != owner.untyped_storage()._cdata


def test_tensors_of_one_storage_share_one_afterwards() -> None:
    owner = torch.arange(8.0)

    first, second = without_owner([owner[:4], owner[4:]], span_of(owner))

    assert first.untyped_storage()._cdata == second.untyped_storage()._cdata
