"""The compiled helper finds and makes tensors as torch does; whether there is one, and why not, is told."""

from __future__ import annotations

import shutil
import sys
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pygraphd.client.backend import torch_private
from pygraphd.client.backend.torch_private import tensors as private_tensors
from pygraphd.client.replay.native import build
from pygraphd.client.replay.native.ffi import NOT_ASKED_FOR, Helper, Piece, TensorOps

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
]


def loaded(helper: Helper) -> TensorOps:
    ops = helper.ops(pytest.fail)
    assert isinstance(ops, TensorOps)
    return ops


@pytest.fixture(scope="module")
def compiled(compiled_helper: Path) -> TensorOps:
    helper = Helper()
    assert helper.prepare(compiled_helper) is None
    return loaded(helper)


@settings(deadline=None)
@given(st.data())
def test_it_makes_the_tensors_that_torch_makes(compiled: TensorOps, data: st.DataObject) -> None:
    memory = [torch.arange(64, dtype=dtype) for dtype in (torch.float32, torch.int64)]
    inputs = [torch.nn.Parameter(torch.rand(8, 9)[1:]), None, torch.rand(70, requires_grad=True) * 2]
    sizes = st.lists(st.integers(1, 3), max_size=3).map(tuple)
    bases = st.sampled_from([0, 1, ~0, ~2])
    dtypes = st.sampled_from([None, None, torch.bfloat16, torch.bool, torch.float8_e4m3fn, torch.float32])
    drawn = data.draw(st.lists(st.tuples(bases, dtypes, st.integers(0, 9), sizes), max_size=6))
    pieces = [
        Piece(len(drawn) - number, base, dtype, offset, size, tuple(range(2, 2 + len(size))))
        for number, (base, dtype, offset, size) in enumerate(drawn)
    ]
    other: list[Any] = [None] * (len(drawn) + 1)

    one = compiled.filling(pieces)(memory, inputs, other)
    for each in pieces:
        tensor: Any = memory[each.base] if each.base >= 0 else inputs[~each.base]
        dtype = each.dtype or tensor.dtype
        other[each.target] = torch_private.reinterpret(
            tensor, dtype, each.size, each.stride, each.offset or 0
        )

    assert one[0] is other[0] is None
    for mine, right in zip(one[1:], other[1:], strict=True):
        assert type(mine) is type(right) is torch.Tensor
        assert (mine.size(), mine.stride(), mine.dtype) == (right.size(), right.stride(), right.dtype)
        assert mine.data_ptr() == right.data_ptr()
        assert mine.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
        assert mine.storage_offset() == right.storage_offset()
        assert (mine.requires_grad, mine._is_view(), mine._version) == (False, False, 0)
        assert sys.getrefcount(mine) == sys.getrefcount(right)


def test_what_it_makes_goes_when_nobody_holds_it(compiled: TensorOps) -> None:
    memory = torch.zeros(16)
    address = memory.untyped_storage()._cdata

    def uses() -> int:
        return int(torch._C._storage_Use_Count(address))

    before = uses()
    fill = compiled.filling([Piece(0, 0, None, 4, (2, 2), (2, 1))])

    for _ in range(100):
        made = fill([memory], [], [None])

    assert uses() == before + 1
    (gone,) = map(weakref.ref, made)
    made = ()
    assert gone() is None
    assert uses() == before


@pytest.mark.parametrize(
    ("piece", "error", "message"),
    [
        (Piece(0, 3, None, 0, (1,), (1,)), IndexError, "beyond the end"),
        (Piece(5, 0, None, 0, (1,), (1,)), IndexError, "beyond the end"),
        (Piece(0, ~4, None, 0, (1,), (1,)), IndexError, "beyond the end"),
        (Piece(0, ~0, None, 0, (1,), (1,)), TypeError, "not a tensor"),
        (Piece(0, 0, is_output=True), IndexError, "not made before"),
        (Piece(0, 7, is_output=True), IndexError, "not made before"),
        (Piece(0, -1, is_output=True), IndexError, "not made before"),
    ],
)
def test_what_cannot_be_made_is_an_error_and_no_crash(
    compiled: TensorOps, piece: Piece, error: type[Exception], message: str
) -> None:
    fill = compiled.filling([piece])

    with pytest.raises(error, match=message):
        fill([torch.zeros(2)], ["no tensor"], [None])


@pytest.mark.parametrize(
    "piece",
    [
        (0, 0, -1, 0, (1, 2), (1,)), (0, 0, -1, 0, ("many",), (1,)), (0, 0, -1, 0, (1,) * 65, (1,) * 65),
        ("first", 0, -1, 0, (), ()), (0, 0), None,
    ],
)  # fmt: skip
def test_a_piece_that_is_none_is_refused_at_once(compiled: TensorOps, piece: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        compiled._module.plan([piece])


@pytest.mark.parametrize("where", ["missing_for_helper", "configure_helper"])
def test_an_error_in_trying_it_is_the_reason_that_there_is_none(
    compiled_helper: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("tensors are odd here")

    monkeypatch.setattr(torch_private, where, fail)
    helper, notes = Helper(), list[str]()

    reason = helper.prepare(compiled_helper)

    assert helper.ops(notes.append) is None
    assert "tensors are odd here" in (reason or notes[0])
    assert helper.prepare(compiled_helper) == helper.reason


def test_there_is_none_until_it_is_compiled(tmp_path: Path) -> None:
    helper = Helper()
    assert (helper.ops(pytest.fail), helper.reason) == (None, NOT_ASKED_FOR)
    assert not helper.wait(60)
    assert helper.prepare(tmp_path) is None
    assert helper.prepare(tmp_path) is None

    assert helper.wait(60)
    assert loaded(helper) is loaded(helper)

    helper.forget()
    assert (helper.ops(pytest.fail), helper.reason) == (None, NOT_ASKED_FOR)


def test_while_the_compiler_is_at_work_there_is_no_reason(
    tmp_path: Path, compiled_helper: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper = Helper()
    monkeypatch.setattr(build, "_spawn", lambda _: None)
    assert helper.prepare(tmp_path) is None
    for _ in range(3):
        assert (helper.ops(pytest.fail), helper.reason) == (None, None)

    shutil.copy(build.place(compiled_helper), build.place(tmp_path))

    loaded(helper)


def test_a_compiler_that_does_not_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helper, notes = Helper(), list[str]()
    monkeypatch.setattr(build, "_spawn", lambda _: None)
    monkeypatch.setattr("pygraphd.client.replay.native.ffi.COMPILING_S", -1.0)
    assert helper.prepare(tmp_path) is None

    assert not any(helper.ops(notes.append) for _ in range(3))

    assert notes == [f"compiled helper: {helper.reason}"]
    assert "not compiled within" in notes[0]


def test_a_compiler_that_fails_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "false")
    helper = Helper()
    assert helper.prepare(tmp_path) is None

    assert not helper.wait(60)

    assert "could not be compiled" in str(helper.reason)
    assert Helper().prepare(tmp_path) == helper.reason


def test_who_may_not_write_uses_what_is_there(compiled_helper: Path, tmp_path: Path) -> None:
    helper = Helper()
    assert helper.prepare(compiled_helper, may_compile=False) is None
    loaded(helper)

    without = Helper()
    assert "is not there" in str(without.prepare(tmp_path, may_compile=False))
    assert without.ops(pytest.fail) is None
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_loaded_is_told_once(tmp_path: Path) -> None:
    path = build.place(tmp_path)
    path.parent.mkdir(parents=True, mode=0o700)
    path.write_bytes(b"no machine code")
    helper, notes = Helper(), list[str]()
    assert helper.prepare(tmp_path) is None

    for _ in range(3):
        assert helper.ops(notes.append) is None

    assert len(notes) == 1
    assert "cannot be loaded" in notes[0]


def test_a_folder_that_cannot_be_written_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "compiled").write_text("a file where a folder should be")

    assert "cannot be compiled" in str(Helper().prepare(tmp_path))


@pytest.mark.parametrize("mode", ["default", "inference", "fake"])
def test_where_tensors_are_found_out_whatever_modes_are_on(mode: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    private_tensors._handle_offset.cache_clear()
    with {"default": torch.enable_grad, "inference": torch.inference_mode, "fake": FakeTensorMode}[mode]():
        assert private_tensors._handle_offset() is not None
        assert torch_private.missing_for_helper() is None
