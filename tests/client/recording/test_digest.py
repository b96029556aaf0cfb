"""Large values are compared by digests, so that the memory of the replay is released before KERNELS run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pygraphd.client.analysis.graph_facts import GraphFacts
from pygraphd.client.recording import host_copies, pipeline, verification
from pygraphd.client.recording.alias_sets import input_groups
from pygraphd.client.recording.digest import COLUMNS, checksum, digest_of, unequal
from tests.support.noise import SIZE, Noise
from tests.support.recording_case import Case, Recording, case
from tests.support.refusals import refusal_of

if TYPE_CHECKING:
    from tests.support.recording_case import Operations

__all__ = ["case"]  # a fixture
pytestmark = pytest.mark.torch

WORDS = 4 * COLUMNS


@pytest.fixture
def by_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare all values by digests, however small."""
    monkeypatch.setattr(pipeline, "DIGESTS_FROM", 0)
    monkeypatch.setattr(verification, "KEPT_BYTES", 0)
    monkeypatch.setattr(verification, "MAX_KEPT", 0)


@pytest.mark.parametrize("begin", [0, 3])
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (slice(0, 8 * COLUMNS), slice(8 * COLUMNS, 16 * COLUMNS)),
        (slice(0, 16 * COLUMNS), slice(16 * COLUMNS, 32 * COLUMNS)),
        (slice(0, 8), slice(8, 16)),
        (slice(32 * COLUMNS, 32 * COLUMNS + 8), slice(32 * COLUMNS + 8, 32 * COLUMNS + 16)),
        (slice(0, 1), slice(1, 2)),
    ],
    ids=["rows", "many rows", "words of a row", "words behind the rows", "bytes"],
)
def test_a_checksum_tells_what_has_changed_places(begin: int, one: slice, other: slice) -> None:
    memory = torch.arange(8 * WORDS + 27).mul_(0x9E3779B1).bitwise_right_shift_(24).to(torch.uint8)[begin:]
    changed = memory.clone()
    changed[one], changed[other] = memory[other], memory[one]
    before = checksum(memory)
    held = memory.clone()

    memory.copy_(changed)
    assert not torch.equal(checksum(memory), before)
    memory.copy_(held)
    assert torch.equal(checksum(memory), before)
    for place in (0, 8 * COLUMNS, memory.numel() - 1):
        memory.copy_(held)
        memory[place] += 1
        assert not torch.equal(checksum(memory), before)


def test_a_checksum_tells_words_of_two_rows_that_differ_in_their_highest_bit() -> None:
    """As two numbers of opposite sign: weights of rows that are all odd would multiply the difference to 0."""
    memory = torch.zeros(4, COLUMNS, dtype=torch.int64)
    memory[0, 7] = torch.iinfo(torch.int64).min
    before = checksum(memory.view(torch.uint8).view(-1))

    assert not torch.equal(checksum(memory.roll(1, 0).view(torch.uint8).view(-1)), before)


def test_the_checksum_of_much_memory_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pygraphd.client.recording.digest.MAX_ROW_SUMS", COLUMNS - 1)
    memory = torch.arange(COLUMNS * COLUMNS).view(torch.uint8)
    before = checksum(memory)

    assert before.numel() == 1 + COLUMNS + COLUMNS
    memory[-1] += 1
    assert not torch.equal(checksum(memory), before)


@pytest.mark.parametrize(
    "like",
    [
        lambda x: x,
        lambda x: x.t(),
        lambda x: x[:, ::3],
        lambda x: x.to(torch.complex64).conj(),
        lambda x: x > 0,
        lambda x: x[:1].expand(7, -1),
        lambda x: x.to(torch.complex128)[:3],
        lambda x: x[0, 0],
    ],
    ids=["plain", "transposed", "with gaps", "conjugate", "boolean", "expanded", "16 bytes", "scalar"],
)
def test_a_digest_is_of_the_elements_and_tells_each(like: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pygraphd.client.recording.digest.PIECE_BYTES", 2048)
    values = torch.randn(16, 96)
    same, changed, elsewhere = (values.clone() for _ in range(3))
    changed[0, 0] = -values[0, 0]
    elsewhere[:, 1::3] = 0  # what lies in the gaps

    digest = digest_of(like(values))

    assert unequal({0: digest}, [like(same)]) == set()
    assert unequal({0: digest}, [like(changed)]) == {0}
    if like(values).stride()[-1:] == (3,):
        assert unequal({0: digest}, [like(elsewhere)]) == set()


def test_zeros_of_both_signs_differ() -> None:
    assert unequal({0: digest_of(torch.zeros(5))}, [-torch.zeros(5)]) == {0}


@pytest.mark.usefixtures("by_digests")
def test_no_memory_of_a_replay_is_held_while_kernels_run(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs of it, views of one another, and a copy of an input that it writes."""
    guarded, storages, held = verification._with_guard_blocks, list[torch.UntypedStorage](), list[int]()

    def noted(replay: Any) -> Any:
        tensors, between = guarded(replay)
        storages.append(tensors[0].untyped_storage())
        return tensors, between

    def body(operations: Operations, inputs: list[Any]) -> Any:
        if not isinstance(operations, Recording):
            held.extend(torch._C._storage_Use_Count(each._cdata) for each in storages)
        operations.accumulate(inputs[0], inputs[1])
        out = operations.add(inputs[0], inputs[1])
        return out, out[1:], out[:0], operations.add(out, out)

    monkeypatch.setattr(verification, "_with_guard_blocks", noted)
    run = case.made(body, GraphFacts(written=frozenset({0})))
    total = case.floats(0, 0)
    for i in range(1, 5):
        outputs = run([total, case.floats(1, 2)])
        assert [each.tolist() for each in outputs] == [
            [i + 1, 2 * i + 2],
            [2 * i + 2],
            [],
            [2 * i + 2, 4 * i + 4],
        ]

    case.expect(captured=1)
    assert held == [1]
    assert not case.report.fallbacks.keys() - {"first call of a size"}


@pytest.mark.usefixtures("by_digests")
def test_an_output_that_differs_in_bits_is_kept_by_the_next_recording(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = case.make(Noise(1e-5, monkeypatch).adding(case))
    for _ in range(5):
        run([case.floats(*[1.0] * SIZE)])

    case.expect(captured=1)
    assert case.recorder.captures == 2
    assert case.report.fallbacks["verification: output 0 differs in bits"] == 1


@pytest.mark.usefixtures("by_digests")
def test_an_output_that_may_differ_in_bits_is_kept_by_the_first_recording(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = case.made(Noise(1e-5, monkeypatch).adding(case), GraphFacts(nondeterministic=frozenset({0})))
    for _ in range(5):
        run([case.floats(*[1.0] * SIZE)])

    case.expect(captured=1)
    assert case.recorder.captures == 1
    assert not case.report.fallbacks.keys() - {"first call of a size"}


@pytest.mark.usefixtures("by_digests")
@pytest.mark.parametrize("what", ["reads", "writes to an input"])
def test_a_wrong_recording_is_refused(case: Case, what: str) -> None:
    def body(operations: Operations, inputs: list[Any]) -> Any:
        if what == "reads":
            return operations.look_up(inputs[0]), operations.add(inputs[0], inputs[1])
        if not isinstance(operations, Recording):
            operations.accumulate(inputs[1], inputs[0])
        return (operations.add(inputs[0], inputs[0]),)

    run = case.make(body)
    for _ in range(6):
        run([case.floats(1, 2), case.floats(3, 4)])

    case.expect(captured=0)
    name = "output 0" if what == "reads" else "input 1"
    assert (refusal_of(run) or "").startswith(f"verification: {name} differs")
    assert run.refused_for_good


@pytest.fixture
def on_host(case: Case, by_digests: None, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Have replays write inputs in place, however small; return the copies of each on the host."""
    monkeypatch.setattr(host_copies, "MIN_BYTES", 0)
    monkeypatch.setattr(host_copies, "MIN_HOST_BYTES", 1)
    case.recorder.peak = 0
    made = list[Any]()

    class Noted(host_copies.HostCopies):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append([kept.view(torch.float32).tolist() for _, kept in self._pairs])

    monkeypatch.setattr(verification, "HostCopies", Noted)
    return made


@pytest.mark.parametrize(
    "nondeterministic", [frozenset[int](), frozenset({0})], ids=["digests", "an output is kept"]
)
@pytest.mark.parametrize("why", ["donated", "overwritten"])
def test_inputs_that_are_written_in_place_have_their_values_when_kernels_run(
    case: Case, on_host: list[Any], nondeterministic: frozenset[int], why: str
) -> None:
    seen = list[Any]()

    def body(operations: Operations, inputs: list[Any]) -> Any:
        if not isinstance(operations, Recording):
            seen.append(inputs[0].tolist())
        operations.accumulate(inputs[0], inputs[1])
        return operations.add(inputs[0], inputs[1]), operations.first(inputs[0], 1)

    written, nothing = frozenset({0}), frozenset[int]()
    facts = GraphFacts(
        written=written,
        donated=written if why == "donated" else nothing,
        overwritten=written if why == "overwritten" else nothing,
        nondeterministic=nondeterministic,
    )
    run = case.made(body, facts)
    total = case.floats(0, 0)
    for i in range(1, 5):
        assert [each.tolist() for each in run([total, case.floats(1, 2)])] == [[i + 1, 2 * i + 2], [i]]
        assert total.tolist() == [i, 2 * i]

    case.expect(captured=1)
    assert on_host == [[[1, 2]]]
    assert seen == [[0, 0], [1, 2]]


@pytest.mark.parametrize("fails", ["wrong values", "an error"])
def test_inputs_that_were_written_in_place_are_as_they_were_if_it_fails(
    case: Case, on_host: list[Any], monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """With other values it is recorded again, and refused then."""

    def body(operations: Operations, inputs: list[Any]) -> Any:
        operations.accumulate(inputs[0], inputs[1])
        if isinstance(operations, Recording) and fails == "wrong values":
            operations.accumulate(inputs[0], inputs[1])
        return (operations.add(inputs[0], inputs[0]),)

    def fail(*_: object) -> None:
        raise RuntimeError("for a test")

    if fails == "an error":
        monkeypatch.setattr(verification, "read", fail)
    run = case.made(body, GraphFacts(written=frozenset({0}), donated=frozenset({0})))
    total = case.floats(0, 0)
    for i in range(1, 7):
        assert run([total, case.floats(1, 2)])[0].tolist() == [2 * i, 4 * i]
        assert total.tolist() == [i, 2 * i]

    case.expect(captured=0)
    assert on_host[0] == [[1, 2]]


def test_inputs_that_others_see_are_copied_on_the_device(case: Case, on_host: list[Any]) -> None:
    """Another stream may write to other parts of them meanwhile."""

    def body(operations: Operations, inputs: list[Any]) -> Any:
        operations.accumulate(inputs[0], inputs[1])
        return (operations.add(inputs[0], inputs[1]),)

    run = case.made(body, GraphFacts(written=frozenset({0, 1}), donated=frozenset({1})))
    for _ in range(4):
        run([case.floats(0, 0), case.floats(1, 2)])

    case.expect(captured=1)
    assert on_host == [[[1, 2]]]


def test_overwritten_inputs_that_share_memory_are_copied_on_the_device(on_host: list[Any]) -> None:
    """Other tensors may lie in the rest of their storage, or between their elements."""
    facts, memory = GraphFacts(overwritten=frozenset({0, 1})), torch.zeros(8)

    def chosen(*inputs: torch.Tensor) -> set[int]:
        found = host_copies.for_host(input_groups(inputs), inputs, facts, memory.device)
        return {index for group, _ in found for index, _ in group.members}

    assert chosen(memory, torch.zeros(4), torch.zeros(4)) == {0, 1}
    for shared in (memory[:4], memory[::3]):
        assert chosen(shared, torch.zeros(4)) == {1}
    assert chosen(memory, memory[4:]) == set()


def test_an_interrupt_leaves_no_input_with_what_a_replay_wrote() -> None:
    inputs = [torch.zeros(4), torch.zeros(4)]
    copies = host_copies.HostCopies(inputs, input_groups(inputs))
    for each in inputs:
        each.fill_(1)
    first, kept = copies._pairs[-1]
    interrupts = [KeyboardInterrupt]

    def copy(source: torch.Tensor) -> None:
        if interrupts:
            raise interrupts.pop()
        first.copy_(source)

    interrupting: Any = SimpleNamespace(copy_=copy)
    copies._pairs[-1] = interrupting, kept
    with pytest.raises(KeyboardInterrupt):
        copies.put_back()

    assert [each.tolist() for each in inputs] == [[0] * 4] * 2
