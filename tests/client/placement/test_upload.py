"""CPU values are sent again when their bytes have changed, however that came about, and never while somebody reads what was sent."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pygraphd.client.common.report import Report
from pygraphd.client.placement import upload
from pygraphd.client.placement.upload import SENT, Sender, specs_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

pytestmark = pytest.mark.torch

HERE = torch.device("cpu")
"""Stands in for the GPU: what is sent is a copy in either case."""


class Sent:
    """A sender, and what it has counted."""

    def __init__(self) -> None:
        self.report = Report()
        self.sender = Sender(lambda: self.report)

    def pieces(self, *values: torch.Tensor, graph: str = "a") -> list[torch.Tensor]:
        """Send values; return what the operator returns."""
        return self.sender.send(list(values), HERE, specs_text(values), graph)

    def __call__(self, *values: torch.Tensor, graph: str = "a") -> list[torch.Tensor]:
        """Send values, and see that they have come."""
        sent = taken(values, self.pieces(*values, graph=graph))
        for one, other in zip(sent, values, strict=True):
            assert (one.dtype, one.size(), one.stride()) == (other.dtype, other.size(), other.stride())
            assert raw(one) == raw(other)
            assert one.data_ptr() != other.data_ptr()
            assert one.data_ptr() % upload.ALIGNMENT == 0
        assert not self.report.failures
        return sent

    @property
    def count(self) -> int:
        return self.report.counts["sent"]


@pytest.fixture
def sent() -> Sent:
    return Sent()


def taken(values: Sequence[torch.Tensor], pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return each value out of the piece that it lies in, as a compiled graph takes it."""
    found = {}
    for tensor, piece in zip(pieces, upload.packs(specs_text(values)), strict=True):
        assert (tensor.dtype, tuple(tensor.size())) == (piece.dtype, (piece.length,))
        for each in piece.values:
            found[each.index] = tensor[each.start :][: each.length].view(values[each.index].size())
    return [found[index] for index in range(len(values))]


def raw(value: torch.Tensor) -> bytes:
    return bytes(value.detach().clone().untyped_storage())


def by_numpy(value: torch.Tensor) -> None:
    value.numpy()[...] = 7


def by_data(value: torch.Tensor) -> None:
    value.data.fill_(7)


def in_place(value: torch.Tensor) -> None:
    value.fill_(7)


def by_storage(value: torch.Tensor) -> None:
    value.untyped_storage()[0] = 255


@pytest.mark.parametrize("change", [by_numpy, by_data, in_place, by_storage])
def test_what_has_changed_is_sent_again_and_nothing_else(
    sent: Sent, change: Callable[[torch.Tensor], None]
) -> None:
    value = torch.tensor(1.5)
    (first,) = sent.pieces(value)
    assert sent.pieces(value)[0] is first

    change(value)
    (second,) = sent.pieces(value)

    assert sent.pieces(value)[0] is second
    assert raw(sent(value)[0]) == raw(value)
    assert sent.count == 2


def test_memory_of_numpys_that_is_shared_is_looked_at() -> None:
    sent, array = Sent(), np.zeros(3, dtype=np.int64)
    value = torch.from_numpy(array)
    sent(value)
    version = value._version

    array[1] = 5

    assert sent(value)[0].tolist() == [0, 5, 0]
    assert value._version == version


@pytest.mark.parametrize(("one", "other"), [(0.0, -0.0), (float("nan"), 1.0)])
def test_numbers_that_are_equal_may_differ(sent: Sent, one: float, other: float) -> None:
    sent(torch.tensor(one))
    sent(torch.tensor(other))
    assert sent.count == 2


def test_a_number_in_another_place_is_not_sent_again(sent: Sent) -> None:
    """What Python keeps as a number is a new tensor at every call."""
    kept = [torch.tensor(2.5) for _ in range(8)]
    results = [sent.pieces(each)[0] for each in kept]

    assert sent.count == 1
    assert all(each is results[0] for each in results)


def test_what_is_sent_anew_leaves_alone_what_somebody_holds(sent: Sent) -> None:
    value = torch.tensor([1.0, 2.0])
    held = sent(value)[0]

    value.zero_()
    sent(value)

    assert held.tolist() == [1.0, 2.0]


def test_what_is_sent_anew_may_lie_where_it_lay(sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy before is gone when memory is asked for, so that graphs are bound to one address."""
    value, gone, copied = torch.tensor(1.0), [], upload._copy_packed
    before = weakref.ref(sent.pieces(value)[0])

    def watched(*arguments: Any) -> torch.Tensor:
        gone.append(before() is None)
        return copied(*arguments)

    monkeypatch.setattr(upload, "_copy_packed", watched)
    value += 1
    sent(value)

    assert gone == [True]


def test_values_that_change_at_every_call_have_one_place_wherever_they_are(sent: Sent) -> None:
    """As those that the CPU has just computed, or that Python keeps as numbers."""
    kept = [torch.tensor(float(step)) for step in range(12)]
    gone = []
    for value in kept:
        before = weakref.ref(sent.pieces(value)[0])
        gone.append(before)

    assert len(sent.sender) == 1
    assert sum(each() is None for each in gone) == len(kept) - 1


def test_values_of_one_type_are_sent_together_and_of_another_if_they_have_changed(sent: Sent) -> None:
    step, limit = torch.tensor(3), torch.tensor([9, 8])
    index = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
    first = sent.pieces(step, index, limit)
    assert sent.count == len(first) == 2

    step += 1
    second = sent.pieces(step, index, limit)

    assert sent.count == 3
    assert second[1] is first[1]
    assert [each.tolist() for each in sent(step, index, limit)] == [4, [[1, 2], [3, 4]], [9, 8]]


def test_graphs_that_take_alike_have_values_of_their_own(sent: Sent) -> None:
    values = [torch.tensor(float(each)) for each in range(20)]
    for _ in range(2):
        for number, value in enumerate(values):
            sent(value, graph=str(number))
    assert sent.count == 20


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "MAX_COPIED_GRAPHS", 3)
    sent = Sent()
    kept = [torch.tensor(float(number)) for number in range(10)]
    for graph in range(5):
        for each in kept:
            sent(each, graph=str(graph))
    assert len(sent.sender) == 3
    sent.sender.clear()
    assert len(sent.sender) == 0


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.bfloat16,
        torch.float16,
        torch.float64,
    ],
)
def test_any_type_is_sent(sent: Sent, dtype: torch.dtype) -> None:
    sent(torch.tensor([[1, 0, 1]]).to(dtype), torch.tensor(1).to(dtype))


def test_a_parameter_is_sent(sent: Sent) -> None:
    assert not sent(torch.nn.Parameter(torch.ones(2)))[0].requires_grad


def test_what_is_sent_in_inference_is_good_for_training(sent: Sent) -> None:
    value = torch.tensor(2.0)
    with torch.inference_mode():
        assert not sent(value)[0].is_inference()


def test_what_goes_wrong_is_counted_and_the_values_are_copied_plainly(
    sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(upload, "_copy_packed", fail)
    value = torch.tensor([1.0, 2.0])

    (copy,) = taken([value], sent.pieces(value))

    assert torch.equal(copy, value)
    assert sent.report.failures == {"sending CPU values: RuntimeError: no memory": 1}
    monkeypatch.undo()
    assert torch.equal(taken([value], sent.pieces(value))[0], value)


def test_what_lies_nowhere_is_copied_plainly(sent: Sent) -> None:
    zero = torch._efficientzerotensor(())
    (copy,) = taken([zero], sent.pieces(zero))
    assert copy.item() == 0.0
    assert (sent.count, len(sent.sender)) == (0, 0)


def test_threads_get_what_they_have_sent(sent: Sent) -> None:
    wrong: list[float] = []

    def work(number: int) -> None:
        value = torch.tensor(float(number))
        for step in range(200):
            value.fill_(number * 1000 + step)
            found = sent.pieces(value)[0][0].item()
            if found != value.item():
                wrong.append(found)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []
    assert not sent.report.failures


SHAPES = st.lists(st.integers(1, 4), max_size=3).map(tuple)


@given(st.lists(st.tuples(SHAPES, st.sampled_from([torch.float32, torch.int64, torch.bool])), min_size=1))
def test_any_values_come_as_they_lie(shapes: list[tuple[tuple[int, ...], torch.dtype]]) -> None:
    values = [torch.randint(0, 2, size).to(dtype) for size, dtype in shapes]
    sent, types = Sent(), {dtype for _, dtype in shapes}
    sent(*values)
    assert sent.count == len(types)
    values[-1].logical_not_()
    sent(*values)
    assert sent.count == len(types) + 1


def test_the_operator_says_what_it_returns() -> None:
    value = torch.ones(2, 3)
    arguments = ([value], HERE, specs_text([value]), "of this test")
    assert torch.equal(taken([value], SENT(*arguments))[0], value)
    torch.library.opcheck(SENT, arguments, test_utils=("test_schema", "test_faketensor"))
