"""What the compiled helper is told of a small graph's executables: the right things are followed, and wrong ones refused."""

from __future__ import annotations

import array
import ctypes
import shutil
import weakref
from typing import Any

import pytest
import torch

from pygraphd.client.driver import DriverError
from pygraphd.client.wandering import MANY_NODES, OFTEN, SOON, Follower, Following
from tests.relocation.test_at_once import by_the_helper, module, recipe  # noqa: F401

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
    pytest.mark.usefixtures("by_the_helper"),
]

BELOW = (1 << 64) - 8
"""8 bytes before, modulo 2**64."""
WRITE_KERNEL = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 3)
WRITE_OTHER = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)


def fail(code: int, node: int) -> None:
    raise DriverError(f"node {node}", code)


class Told:
    """A graph of one input and one memory: a node reads the input, another one, which has a context, both."""

    def __init__(self, failing: int | None = None, **others: Any) -> None:
        self.written: list[tuple[int, ...]] = []
        self.launched: list[tuple[int, int]] = []
        self._failing = failing
        self._kept: list[Any] = []
        self.input, self.memory = torch.zeros(64), torch.zeros(64)
        at = self.input.data_ptr()
        told: dict[str, Any] = {
            "inputs": 1,
            "followers": ((0, at, 64, 2, 0b11), (0, 0, 1, 1, 0b10)),
            "words": array.array("Q", [0, 0, 2, BELOW, 1, 4]),
            "soon": 8,
            "often": 5,
            "many": 3,
            "fail": fail,
        } | others
        self.track = module().track(*told.values())

    def _write(self, kind: Any) -> int:
        def write(*arguments: int) -> int:
            self.written.append(arguments)
            return 7 if arguments[1] == self._failing else 0

        self._kept.append(kind(write))
        return ctypes.cast(self._kept[-1], ctypes.c_void_p).value or 0

    def place(self, executable: Any = 3, **others: Any) -> tuple[Any, dict[str, Any]]:
        """Return an executable that is bound nowhere yet, and its addresses and words."""
        told: dict[str, Any] = {
            "pointers": array.array("Q", [0]),
            "memory": array.array("Q", [0]),
            "words": array.array("Q", [9, 9, 9]),
            "writes": ((self._write(WRITE_KERNEL), 11, 12), (self._write(WRITE_OTHER), 21, 22, 23)),
        } | others
        return module().place(self.track, *told.values(), executable), told

    def call(self, *places: Any, **others: Any) -> Any:
        """Call it; the output is the memory."""

        def launch(executable: int, stream: int) -> str:
            self.launched.append((executable, stream))
            return "done"

        told: dict[str, Any] = {
            "recipe": recipe(module(), allocate=lambda: self.memory),
            "track": self.track,
            "places": places,
            "inputs": [self.input],
            "memory": [None],
            "blank": [None],
            "launch": launch,
            "stream": 4,
        } | others
        return module().call_elsewhere(*told.values())


def test_all_that_follows_what_has_moved_is_written_and_then_it_is_launched() -> None:
    told = Told()
    place, knows = told.place()
    at, to = told.input.data_ptr(), told.memory.data_ptr()

    (output,), launched, written = told.call(place)

    assert output.data_ptr() == to
    assert (launched, written, told.launched) == ("done", 2, [(3, 4)])
    assert told.written == [(3, 11, 12), (3, 21, 22, 23)]
    assert (knows["pointers"][0], knows["memory"][0]) == (at, to)
    assert list(knows["words"]) == [at, to + 4, at - 8]


def test_only_nodes_that_follow_are_written() -> None:
    told = Told()
    place, knows = told.place(pointers=array.array("Q", [told.input.data_ptr()]))

    assert told.call(place)[2] == 1

    assert told.written == [(3, 21, 22, 23)]
    assert list(knows["words"]) == [9, told.memory.data_ptr() + 4, 9]
    assert told.call(place)[2] == 0
    assert len(told.written) == 1


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_whichever_is_bound_there_is_launched(bound: int) -> None:
    told = Told()
    there = {
        "pointers": array.array("Q", [told.input.data_ptr()]),
        "memory": array.array("Q", [told.memory.data_ptr()]),
    }
    places = [told.place(number, **(there if number == bound else {}))[0] for number in range(3)]

    assert told.call(*places)[1:] == ("done", 0)

    assert (told.written, told.launched) == ([], [(bound, 4)])


def test_where_none_is_bound_the_first_is_written() -> None:
    told = Told()
    places = [told.place(number)[0] for number in (5, 6)]

    told.call(*places)

    assert [each[0] for each in told.written] == [5, 5]
    assert told.launched == [(5, 4)]


class Turns:
    """Calls of a graph of one place, each of which finds the input in one of several places."""

    def __init__(self, count: int = 3, **others: Any) -> None:
        self.inputs = [torch.zeros(64) for _ in range(count)]  # of any alignment
        self.told = Told(followers=((0, 0, 1, 2, 0b11), (0, 0, 1, 1, 0b10)), **others)
        self.place, _ = self.told.place()

    def often(self, numbers: list[int]) -> list[bool]:
        """Return of which calls it was told that their addresses have come often."""
        return [self.told.call(self.place, inputs=[self.inputs[number]]) == () for number in numbers]


def test_addresses_that_come_often_are_told_of_with_nothing_done() -> None:
    turns = Turns()

    found = turns.often([0, 1] * 8)

    # Each has come five times before, but for the one that is bound still when the other one was told of.
    assert [number for number, often in enumerate(found) if often] == [10, 13]
    assert len(turns.told.launched) == len(found) - 2
    assert unused(turns) == 0


def test_those_that_were_told_of_are_not_for_as_long_again() -> None:
    turns = Turns()

    found = turns.often([0, 1] * 30)

    assert [number for number, often in enumerate(found) if often] == [10, 13, 32, 35, 54, 57]


def test_what_comes_too_seldom_is_not_told_of() -> None:
    turns = Turns(12)

    assert not any(turns.often([*range(12)] * 10))


@pytest.mark.parametrize(("many", "often"), [(2, True), (3, False)])
def test_in_graphs_of_many_nodes_those_that_come_again_are_told_of(many: int, often: bool) -> None:
    turns = Turns(many=many)

    assert turns.often([0, 1, 0]) == [False, False, often]


def test_of_less_than_half_of_the_nodes_it_is_not_told() -> None:
    """The second node alone follows the memory, and there are three."""
    told = Told(many=3)
    writes = ((told._write(WRITE_KERNEL), 11, 12), (told._write(WRITE_OTHER), 21, 22, 23), (1, 2, 3))
    place, _ = told.place(writes=writes)
    memories = [torch.zeros(64) for _ in range(2)]
    told.call(place)

    for turn in range(4):
        told.memory = memories[turn % 2]
        assert told.call(place)[2] == 1


def unused(turns: Turns) -> int:
    calls: int = module().unused(turns.told.track, turns.place)
    return calls


def test_for_how_many_calls_an_executable_was_not_launched() -> None:
    told = Told()
    there = {
        "pointers": array.array("Q", [told.input.data_ptr()]),
        "memory": array.array("Q", [told.memory.data_ptr()]),
    }
    spare, owner = told.place(5)[0], told.place(6, **there)[0]

    for _ in range(4):
        told.call(spare, owner)

    assert (module().unused(told.track, spare), module().unused(told.track, owner)) == (4, 0)
    for wrong in ((told.track, told.track), (spare, spare), (told.track, None)):
        with pytest.raises(ValueError, match="PyCapsule"):
            module().unused(*wrong)


@pytest.mark.parametrize(("failing", "node"), [(11, 0), (21, 1)])
def test_what_cannot_be_written_is_told_and_bound_nowhere(failing: int, node: int) -> None:
    told = Told(failing)
    place, knows = told.place()

    with pytest.raises(DriverError, match=f"node {node}") as raised:
        told.call(place)

    assert (raised.value.code, told.launched) == (7, [])
    assert [*knows["pointers"], *knows["memory"]] == [(1 << 64) - 1] * 2
    with pytest.raises(DriverError):  # it is not taken for bound
        told.call(place)


def test_a_failure_that_nobody_raises_is_one() -> None:
    told = Told(11, fail=lambda *_: None)

    with pytest.raises(RuntimeError, match="could not be written"):
        told.call(told.place()[0])

    assert told.launched == []


@pytest.mark.parametrize(
    "inputs",
    [[], ["a text"], [None], pytest.param("misaligned", id="misaligned")],
)
def test_a_call_that_does_not_fit_is_none(inputs: Any) -> None:
    told = Told()
    place, knows = told.place()

    assert told.call(place, inputs=[told.input[1:]] if inputs == "misaligned" else inputs) is None

    assert (told.written, told.launched, list(knows["pointers"])) == ([], [], [0])


def test_what_is_allocated_and_is_no_tensor_is_none_and_is_let_go() -> None:
    told, memory = Told(), [None]

    assert told.call(told.place()[0], recipe=recipe(module(), allocate=lambda: 5), memory=memory) is None

    assert (memory, told.written) == ([None], [])


@pytest.mark.parametrize(
    "wrong",
    [
        {"inputs": 3},
        {"inputs": -1},
        {"followers": (5, 6)},
        {"followers": ((0, 0, 1, 3, 0),) * 65},
        {"followers": ((-1, 0, 1, 3, 0),)},
        {"followers": ((0, 0, 0, 3, 0),)},
        {"followers": ((0, 0, 1, -3, 0),)},
        {"followers": ((0, 0, 1, 3),)},
        {"followers": [(0, 0, 1, 3, 0)]},
        {"words": array.array("Q", [0, 0])},
        {"words": [0] * 6},
    ],
)
def test_a_track_of_something_else_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        Told(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"pointers": array.array("Q")},
        {"pointers": [0]},
        {"memory": array.array("Q")},
        {"memory": bytes(8)},
        {"words": array.array("Q", [0, 0])},
        {"words": None},
        {"writes": ((1, 2, 3),)},
        {"writes": ((1, 2, 3), (1, 2))},
        {"writes": (5, 6)},
        {"writes": ((1, 2, 3),) * 65},
        {"writes": [(1, 2, 3)] * 2},
    ],
)
def test_a_place_without_what_its_track_speaks_of_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError, IndexError, BufferError)):
        Told().place(**wrong)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"recipe": None}, ValueError),
        ({"track": None}, ValueError),
        ({"places": ()}, TypeError),
        ({"places": [1]}, TypeError),
        ({"places": (1,)}, ValueError),
        ({"inputs": ()}, TypeError),
        ({"memory": ()}, TypeError),
        ({"memory": []}, IndexError),
        ({"blank": None}, TypeError),
    ],
)
def test_a_call_of_something_else_is_refused_before_it_launches(
    wrong: dict[str, Any], error: type[Exception]
) -> None:
    told = Told()

    with pytest.raises(error):
        told.call(told.place()[0], **wrong)

    assert told.launched == []


def test_a_place_of_another_track_is_refused() -> None:
    told, other = Told(), Told()

    for places in ([other.place()[0]], [told.place()[0], other.place()[0]]):
        with pytest.raises(ValueError, match="another track"):
            told.call(*places)

    assert (told.written, other.written, told.launched) == ([], [], [])


def test_too_few_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="8 arguments"):
        module().call_elsewhere(1, 2)


def test_an_executable_that_is_no_handle_is_refused() -> None:
    told = Told()

    with pytest.raises(TypeError):
        told.call(told.place("3")[0])

    assert told.written == []


def test_nothing_of_it_stays_when_it_goes() -> None:
    class Fails:
        def __call__(self, code: int, node: int) -> None:
            raise AssertionError

    fails = Fails()
    told = Told(fail=fails)
    place, knows = told.place()
    gone = weakref.ref(fails)
    del fails, told.track
    assert gone() is not None
    with pytest.raises(BufferError):
        knows["pointers"].append(1)  # it would move

    del place

    assert gone() is None
    knows["pointers"].append(1)


def test_what_is_told_of_followers_and_words() -> None:
    following = Following(
        (Follower(3, 512, 16, ((7, -8), (8, 0)), (1, 0, 1)),), (Follower(0, 0, 1, ((2, 4),), (5,)),)
    )

    inputs, followers, words, *often = following.told()

    assert (inputs, followers) == (1, ((3, 512, 16, 2, 0b11), (0, 0, 1, 1, 1 << 5)))
    assert list(words) == [7, BELOW, 8, 0, 2, 4]
    assert often == [SOON, OFTEN, MANY_NODES]
