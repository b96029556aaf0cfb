"""The compiled helper's table of executables and its calls, told by hand: what is written and launched, and what is refused."""

from __future__ import annotations

import array
import ctypes
import shutil
import weakref
from typing import Any

import pytest
import torch

from pygraphd.client.backend.driver import DriverError
from pygraphd.client.replay.native.ffi import helper

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
    pytest.mark.usefixtures("loaded_helper"),
]

BELOW = (1 << 64) - 8
"""8 bytes before, modulo 2**64."""
FUNCTION = {
    3: ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 3),
    4: ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4),
}
STREAM = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))
LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


def module() -> Any:
    """Return the helper's module."""
    return helper.ops._module


def fail(code: int, node: int) -> None:
    raise DriverError(f"node {node}", code)


class Told:
    """A graph of one input and one memory: a node reads the input, another one, which has a context, both."""

    def __init__(self, failing: int | None = None, **others: Any) -> None:
        self.written: list[tuple[int, ...]] = []
        self.launched: list[tuple[int, int]] = []
        self.made: list[int] = []
        self._failing = failing
        self._kept: list[Any] = []
        self.input, self.memory = torch.zeros(64), torch.zeros(64)
        self.words = array.array("Q", [9, 9, 9])
        told: dict[str, Any] = {
            "numbers": array.array("Q", self.numbers()),
            "words": self.words,
            "executable": 3,
            "limit": 2,
            "worth": 1,
            "idle": 256,
            "make": self._make,
            "fail": fail,
        } | others
        self.table = module().table(*told.values())

    def numbers(self, **others: list[int]) -> list[int]:
        told = {
            "counts": [1, 2, 2, 3, 3, 2],
            "members": [0, 0, 0, 0],
            "segments": [1, self.input.data_ptr(), 64, 2, 2, 1, 0, 1, 1, 1],
            "words": [0, 0, 2, BELOW, 1, 4],
            "nodes": [0, 1, 1],
            "writes": [self._write(3), 11, 12, 0, self._write(4), 21, 22, 23],
            "bound": [0, 0],
        } | others
        return [number for each in told.values() for number in each]

    def _write(self, arguments: int) -> int:
        def write(*told: int) -> int:
            self.written.append(told)
            return 7 if told[1] == self._failing else 0

        self._kept.append(FUNCTION[arguments](write))
        return ctypes.cast(self._kept[-1], ctypes.c_void_p).value or 0

    def _make(self, stream: int, replaced: int) -> int:
        self.made.append(stream)
        return 5

    def bind(self, **others: Any) -> Any:
        told = {"table": self.table, "inputs": [self.input], "memory": [self.memory], "stream": 4} | others
        return module().bind(*told.values())

    def fused(self, **others: Any) -> Any:
        """Return a recording of this graph, whose output is the memory."""

        def launch(executable: int, stream: int) -> str:
            self.launched.append((executable, stream))
            return "done"

        def current_stream(device: int, stream: Any) -> int:
            stream[0] = 2 * device
            return 0

        made = module()
        self._kept.append(STREAM(current_stream))
        told: dict[str, Any] = {
            "allocate": lambda: self.memory,
            "arguments": ((),),
            "targets": (0,),
            "plan": made.plan([(0, 0, -2, 0, (), ())]),
            "blank": [None],
            "current_stream": ctypes.cast(self._kept[-1], ctypes.c_void_p).value,
            "device": 2,
            "is_capturing": 0,
            "generators": (),
            "table": self.table,
            "launch": launch,
            "fail": None,
            "expect": None,
        } | others
        return made.FusedReplay(*told.values())

    def call(self, *inputs: Any, **others: Any) -> Any:
        """Call it once, on the input if none are given."""
        return self.fused(**others)([*inputs] or [self.input])


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


def test_it_finds_where_tensors_of_all_kinds_lie() -> None:
    leaf = torch.zeros(3, requires_grad=True)
    leaf.sum().backward()
    assert leaf.grad is not None  # the Python object goes, and another one comes for the same tensor
    anywhere = {"segments": [1, 0, 1, 2, 2, 1, 0, 1, 1, 1], "bound": [1, 0]}

    for each in [*tensors(), leaf.grad, leaf.detach()]:
        told = Told(numbers=array.array("Q", Told().numbers(**anywhere)))
        told.bind(inputs=[each])
        assert told.words[0] == each.data_ptr()


def test_all_that_follows_what_has_moved_is_written_and_then_it_is_launched() -> None:
    told = Told()
    at, to = told.input.data_ptr(), told.memory.data_ptr()

    fused, inputs = told.fused(), [told.input]

    (output,), launched = fused(inputs)

    assert (output.data_ptr(), inputs) == (to, [])
    assert (launched, fused.written, told.launched) == ("done", 2, [(3, 4)])
    assert told.written == [(3, 11, 12), (3, 21, 22, 23)]
    assert list(told.words) == [at, to + 4, at - 8]
    fused([told.input])
    assert (fused.replays, fused.relocated, fused.written, len(told.written)) == (2, 1, 2, 2)


def test_what_comes_again_has_another_executable_whose_words_are_there_when_it_is_made() -> None:
    told = Told()
    first, second = told.memory, torch.zeros(64)
    assert [told.bind(memory=[each]) for each in (first, second, first)] == [(3, 2), (3, 1), (5, 1)]
    assert told.words[1] == first.data_ptr() + 4
    assert told.made == [4]

    assert [told.bind(memory=[each]) for each in (second, first, second)] == [(3, 0), (5, 0), (3, 0)]
    assert len(told.written) == 3


def test_an_executable_whose_copy_cannot_be_written_is_replaced() -> None:
    replaced = list[tuple[int, ...]]()

    def make(*given: int) -> int:
        replaced.append(given)
        return 7

    told = Told(21, make=make)

    assert told.bind() == (7, 2)
    assert [told.bind() for _ in range(2)] == [(7, 0)] * 2
    assert replaced == [(4, 3)]


@pytest.mark.parametrize(("failing", "node"), [(11, 0), (21, 1)])
def test_what_cannot_be_written_is_told_and_bound_nowhere(failing: int, node: int) -> None:
    told = Told(failing, limit=1, make=lambda *_: None)

    for _ in range(2):  # it is not taken for bound
        with pytest.raises(DriverError, match=f"node {node}") as raised:
            told.call()

    assert (raised.value.code, told.launched) == (7, [])


def test_a_failure_that_nobody_raises_is_one() -> None:
    told = Told(11, fail=lambda *_: None)

    with pytest.raises(RuntimeError, match="could not be written"):
        told.call()

    assert told.launched == []


def test_where_there_is_no_other_executable_the_first_is_written() -> None:
    told = Told(make=lambda *_: None)
    places = [told.memory, torch.zeros(64)]

    assert [told.bind(memory=[each]) for each in places * 3] == [(3, 2), *[(3, 1)] * 5]


@pytest.mark.parametrize(("made", "error"), [("a handle", TypeError), (-1, OverflowError)])
def test_what_is_no_executable_is_told_and_the_next_call_is_right(made: Any, error: type[Exception]) -> None:
    told = Told(make=lambda *_: made)
    first, second = told.memory, torch.zeros(64)
    for each in (first, second):
        told.bind(memory=[each])

    with pytest.raises(error):
        told.bind(memory=[first])

    assert told.bind(memory=[second]) == (3, 0)
    assert told.bind(memory=[torch.zeros(64)]) == (3, 1)


@pytest.mark.parametrize("inputs", [[], ["a text"], [None], pytest.param("misaligned", id="misaligned")])
def test_a_call_that_does_not_fit_is_none(inputs: Any) -> None:
    told = Told()
    given = [told.input[1:]] if inputs == "misaligned" else inputs

    assert told.fused()(given) is None
    assert told.bind(inputs=given) is None

    assert (told.written, told.launched, list(told.words)) == ([], [], [9, 9, 9])


def test_what_is_allocated_and_is_no_tensor_is_none_and_is_let_go() -> None:
    class Other:
        pass

    told, made = Told(), list[weakref.ref[Other]]()

    def allocate() -> Other:
        other = Other()
        made.append(weakref.ref(other))
        return other

    assert told.call(allocate=allocate) is None

    assert (made[0](), told.written) == (None, [])


@pytest.mark.parametrize(
    "wrong",
    [
        {"counts": [1, 2, 2, 3, 3, 3]},
        {"counts": [3, 2, 2, 3, 3, 2]},
        {"counts": [1 << 63, 2, 2, 3, 3, 2]},
        {"counts": [1], "members": [], "segments": [], "words": [], "nodes": [], "writes": [], "bound": []},
        {"members": [1 << 62, 0, 0, 0]},
        {"segments": [1, 0, 0, 2, 2, 1, 0, 1, 1, 1]},
        {"segments": [0, 0, 64, 2, 2, 2, 0, 1, 1, 1]},
        {"segments": [1, 0, 64, 3, 2, 1, 0, 1, 1, 1]},
        {"segments": [1, 0, 64, 2, 1, 1, 0, 1, 1, 1]},
        {"words": [0, 0, 3, 0, 1, 4]},
        {"nodes": [0, 2, 1]},
        {"bound": [0]},
    ],
)
def test_a_table_whose_numbers_do_not_agree_is_refused(wrong: dict[str, list[int]]) -> None:
    with pytest.raises(ValueError, match="do not agree"):
        Told(numbers=array.array("Q", Told().numbers(**wrong)))


@pytest.mark.parametrize(
    "wrong",
    [
        {"numbers": [1]},
        {"words": bytes(24)},
        {"words": array.array("Q", [0])},
        {"executable": "3"},
        {"limit": 0},
        {"limit": 65},
    ],
)
def test_a_table_of_something_else_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError, BufferError)):
        Told(**wrong)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"arguments": [()]}, TypeError),
        ({"arguments": (5,)}, TypeError),
        ({"arguments": ((), ())}, ValueError),
        ({"arguments": ((), ()), "targets": (0, 0)}, ValueError),
        ({"targets": 5}, TypeError),
        ({"targets": ("a",)}, TypeError),
        ({"targets": (1,)}, ValueError),
        ({"plan": None}, ValueError),
        ({"table": None}, ValueError),
        ({"blank": None}, TypeError),
        ({"generators": (5,)}, TypeError),
        ({"generators": []}, TypeError),
    ],
)
def test_a_recording_of_something_else_is_refused(wrong: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        Told().fused(**wrong)


@pytest.mark.parametrize(("target", "base"), [(0, 1), (7, 0), (0, -2)])
def test_an_output_that_is_nowhere_is_an_error_and_no_crash(target: int, base: int) -> None:
    with pytest.raises(IndexError):
        Told().call(plan=module().plan([(target, base, -2, 0, (), ())]))


def test_arguments_of_something_else_are_refused_before_it_launches() -> None:
    told = Told()

    for given in [(), ((told.input,),), ([told.input], 1)]:
        with pytest.raises(TypeError):
            told.fused()(*given)
    with pytest.raises(TypeError, match="are wanted"):
        module().run(1, 2)
    with pytest.raises(TypeError, match="a table, two lists and a stream"):
        module().bind(1, 2)

    assert told.launched == []


def test_nothing_of_it_stays_when_it_goes() -> None:
    class Fails:
        def __call__(self, code: int, node: int) -> None:
            raise AssertionError

    fails = Fails()
    told = Told(fail=fails)
    gone = weakref.ref(fails)
    del fails
    assert gone() is not None
    with pytest.raises(BufferError):
        told.words.append(1)  # it would move

    told.table = None

    assert gone() is None
    told.words.append(1)


def launching(code: int) -> tuple[dict[str, Any], list[tuple[int, ...]], list[int]]:
    """Return what launches by a function of C that returns this code, and what that and `fail` were told."""
    seen: list[tuple[int, ...]] = []
    failed: list[int] = []

    def launch(*told: int) -> int:
        seen.append(told)
        return code

    function = LAUNCH(launch)

    def fail(told: int) -> None:
        failed.append(told)
        raise DriverError("cuGraphLaunch", told) from None

    fail.keeps = function  # type: ignore[attr-defined]
    return {"launch": ctypes.cast(function, ctypes.c_void_p).value, "fail": fail}, seen, failed


def test_a_function_of_c_gets_executable_and_stream() -> None:
    launch, seen, failed = launching(0)

    (output,), launched = Told(executable=(1 << 63) + 3).call(**launch)

    assert (seen, failed, launched) == ([((1 << 63) + 3, 4)], [], None)
    assert isinstance(output, torch.Tensor)


def test_what_a_function_of_c_returns_is_told() -> None:
    launch, seen, failed = launching(700)

    with pytest.raises(DriverError, match="700"):
        Told().call(**launch)

    assert (len(seen), failed) == (1, [700])


def test_what_is_no_stream_is_refused_before_it_launches() -> None:
    launch, seen, _ = launching(0)

    with pytest.raises(TypeError):
        Told().call(**launch, stream=lambda: None)

    assert seen == []
