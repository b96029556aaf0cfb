"""The compiled helper finds and makes tensors as torch does; whether there is one, and why not, is told."""

from __future__ import annotations

import shutil
import signal
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
from pygraphd.client.replay.native.ffi import Helper, Piece, TensorOps

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
]


@pytest.fixture(scope="module")
def compiled(compiled_helper: Path) -> TensorOps:
    helper = Helper()
    assert helper.prepare(compiled_helper) is None
    return helper.ops


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

    helper = Helper()
    with monkeypatch.context() as patch:
        patch.setattr(torch_private, where, fail)
        reason = helper.prepare(compiled_helper)

    assert reason == "it cannot be compiled or tried: tensors are odd here"
    assert helper.prepare(compiled_helper) == reason  # it is tried once


@pytest.mark.parametrize("where", ["missing_for_helper", "configure_helper"])
def test_what_a_signal_handler_raises_meanwhile_is_the_programs(
    compiled_helper: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """As where a job has a time limit for each request."""
    original, handler = getattr(torch_private, where), signal.getsignal(signal.SIGUSR1)

    def late(*_: object) -> None:
        raise TimeoutError

    def interrupted(*arguments: Any) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        return original(*arguments)

    helper = Helper()
    signal.signal(signal.SIGUSR1, late)
    try:
        monkeypatch.setattr(torch_private, where, interrupted)
        with pytest.raises(TimeoutError):
            helper.prepare(compiled_helper)
        monkeypatch.setattr(torch_private, where, original)
        assert helper.prepare(compiled_helper) is None
        assert isinstance(helper.ops, TensorOps)
    finally:
        signal.signal(signal.SIGUSR1, handler)


def test_it_is_compiled_and_loaded_once(tmp_path: Path) -> None:
    helper = Helper()
    with pytest.raises(AssertionError):
        helper.ops  # noqa: B018 - nobody has asked for it

    assert helper.prepare(tmp_path) is None
    ops = helper.ops
    assert helper.prepare(tmp_path / "elsewhere") is None
    assert helper.ops is ops
    assert not (tmp_path / "elsewhere").exists()


def test_a_compiler_that_fails_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "false")

    assert Helper().prepare(tmp_path) == "false failed: it said nothing"


def test_who_may_not_write_uses_what_is_there(compiled_helper: Path, tmp_path: Path) -> None:
    assert Helper().prepare(compiled_helper, may_compile=False) is None

    assert "is not there" in str(Helper().prepare(tmp_path, may_compile=False))
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_loaded_is_the_reason(tmp_path: Path) -> None:
    path = build.place(tmp_path)
    path.parent.mkdir(parents=True, mode=0o700)
    path.write_bytes(b"no machine code")

    assert "cannot be loaded" in str(Helper().prepare(tmp_path))


def test_a_folder_that_cannot_be_written_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "compiled").write_text("a file where a folder should be")

    assert "cannot be compiled" in str(Helper().prepare(tmp_path))


@pytest.mark.parametrize("mode", ["default", "inference", "fake"])
def test_it_is_had_whatever_modes_are_on(compiled_helper: Path, mode: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    private_tensors._handle_offset.cache_clear()
    torch_private.missing_for_helper.cache_clear()
    with {"default": torch.enable_grad, "inference": torch.inference_mode, "fake": FakeTensorMode}[mode]():
        assert Helper().prepare(compiled_helper) is None
