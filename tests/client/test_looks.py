"""The compiled helper and Python say the same of tensors; which of them is asked, and why, is told."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pygraphd.client import _torch, native
from pygraphd.client.looks import Helper, InPython

if TYPE_CHECKING:
    from pathlib import Path

    from pygraphd.client.looks import Looks

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache folder in which the helper is compiled."""
    folder = tmp_path_factory.mktemp("cache")
    helper = Helper()
    assert helper.prepare(folder) is None
    assert helper.wait(60)
    return folder


@pytest.fixture(scope="module")
def compiled(cache: Path) -> Looks:
    helper, notes = Helper(), list[str]()
    assert helper.prepare(cache) is None
    looks = helper.looks(notes.append)
    assert not isinstance(looks, InPython)
    assert notes == []
    return looks


def tensors() -> list[Any]:
    """Return tensors of all kinds that Inductor is given."""
    base = torch.arange(24.0)
    leaf = torch.zeros(3, requires_grad=True)
    with torch.inference_mode():
        inference = torch.zeros(2)
    return [
        base, base[5:], base.view(4, 6).t(), torch.nn.Parameter(torch.zeros(2)), leaf, leaf * 2,
        torch.empty(0), torch.zeros((), dtype=torch.int64), inference, torch.nn.Buffer(torch.zeros(1)),
    ]  # fmt: skip


@given(st.data())
def test_both_say_of_any_addresses_what_is_so(compiled: Looks, data: st.DataObject) -> None:
    given_tensors = tensors()
    pointers: list[int | None] = [each.data_ptr() for each in given_tensors]
    indices = data.draw(st.lists(st.integers(0, len(given_tensors) - 1), max_size=12))
    moved = data.draw(st.none() | st.integers(0, len(given_tensors) - 1))
    if moved is not None:
        pointers[moved] = (pointers[moved] or 0) + 4

    for looks in (compiled, InPython()):
        assert looks.unchanged(given_tensors, pointers, indices) is (moved not in indices)


def test_a_tensor_that_has_come_back_from_autograd_is_where_it_is(compiled: Looks) -> None:
    leaf = torch.zeros(3, requires_grad=True)
    leaf.sum().backward()
    before = leaf.grad.data_ptr()  # the Python object goes, and another one comes for the same tensor

    assert compiled.unchanged([leaf.grad, leaf.detach()], [before, leaf.data_ptr()], [0, 1])
    leaf.data = torch.ones(3)
    assert not compiled.unchanged([leaf], [before], [0])
    assert compiled.unchanged([leaf], [leaf.data_ptr()], [0])


def test_inputs_that_are_not_looked_at_may_be_anything(compiled: Looks) -> None:
    tensor = torch.zeros(2)

    assert compiled.unchanged([None, tensor, 5], [None, tensor.data_ptr(), None], [1])


def test_both_see_who_holds_a_tensor(compiled: Looks) -> None:
    held = tensors()
    for looks in (compiled, InPython()):
        before = looks.references(held)
        assert looks.same_references(held, before)
        holder = torch.empty(0)
        holder.grad = held[6].detach()
        assert looks.same_references(held, before)
        holder.grad = held[6]  # held in C++ alone
        assert looks.same_references(held, before) is not _torch.references_show_uses()
        holder.grad = None
        assert looks.same_references(held, before)
        another = held[2]
        assert not looks.same_references(held, before)
        del another


def test_until_it_is_compiled_python_does(tmp_path: Path) -> None:
    helper, notes = Helper(), list[str]()
    assert isinstance(helper.looks(notes.append), InPython)
    assert not helper.wait(0)
    assert helper.prepare(tmp_path) is None
    assert helper.prepare(tmp_path) is None

    assert helper.wait(60)
    assert not isinstance(helper.looks(notes.append), InPython)

    assert notes == []
    assert helper.wait(0)
    helper.forget()
    assert isinstance(helper.looks(notes.append), InPython)


def test_what_cannot_be_loaded_is_told_once(tmp_path: Path) -> None:
    path = native.place(tmp_path)
    path.parent.mkdir(parents=True, mode=0o700)
    path.write_bytes(b"no machine code")
    helper, notes = Helper(), list[str]()
    assert helper.prepare(tmp_path) is None

    for _ in range(3):
        assert isinstance(helper.looks(notes.append), InPython)

    assert len(notes) == 1
    assert "cannot be loaded" in notes[0]


def test_where_tensors_cannot_be_found_it_is_not_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helper = Helper()
    monkeypatch.setattr(_torch, "missing_for_looks", lambda: "this torch keeps tensors elsewhere")

    assert helper.prepare(cache) == "this torch keeps tensors elsewhere"
    assert isinstance(helper.looks(lambda _: None), InPython)


def test_a_folder_that_cannot_be_written_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "compiled").write_text("a file where a folder should be")

    assert "cannot be compiled" in str(Helper().prepare(tmp_path))


@pytest.mark.parametrize("mode", ["default", "inference", "fake"])
def test_where_tensors_are_found_out_whatever_modes_are_on(mode: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    _torch._handle_offset.cache_clear()
    with {"default": torch.enable_grad, "inference": torch.inference_mode, "fake": FakeTensorMode}[mode]():
        assert _torch._handle_offset() is not None
        assert _torch.missing_for_looks() is None
