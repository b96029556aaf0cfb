"""Verifies on a real call that a recording computes what the compiled callable does, before it serves a call.

The recording runs first, on poisoned memory and on copies of the small inputs and of all inputs that it may write. Large inputs that
it only reads are read in place, and checksums show that they have not changed. Where copies of donated inputs would raise the peak
memory, it writes these in place, and they get their values back from the host. Then the callable runs as KERNELS on the inputs
themselves, with the generator's state restored. Outputs and inputs must agree afterwards. The caller gets the outputs of KERNELS.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch

from pygraphd.client.backend import torch_private
from pygraphd.client.backend.errors import NoMemoryError, NotRelocatableError
from pygraphd.client.recording.alias_sets import InputGroups, input_groups
from pygraphd.client.recording.comparison import (
    Again,
    Disagreement,
    Values,
    compare,
    form,
    read,
    tolerance_of,
)
from pygraphd.client.recording.digest import Digest, checksum, digest_of, unequal
from pygraphd.client.recording.host_copies import HostCopies
from pygraphd.client.recording.stand_ins import (
    AliasedCopies,
    RecordedCall,
    bytes_of,
    copies_of,
    is_copied,
    may_be_indices,
)
from pygraphd.client.replay.addresses import extent
from pygraphd.client.replay.outputs import first_positions
from pygraphd.client.replay.relocation_table import BLOCK, Span, blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from pygraphd.client.analysis.graph_facts import GraphFacts
    from pygraphd.client.backend.torch_private import Runnable
    from pygraphd.client.replay.replay import Replay
    from pygraphd.client.replay.rng import Generators

POISON = 0xFF
"""Byte that fills memory of the replay. Repeated it is NaN in every floating-point type, and -1 in every integer type."""

OLD_POISON = -2
"""Fill value (int64) of the memory of the capture. It differs from `POISON`, so that the two can be told apart.

As an index both count from the end: `x[index]` with a missed address reads a wrong value, and does not fail an assertion on the GPU.
An embedding does not count from the end: stand-ins for inputs that may be indices hold `other_indices`.
"""

JOINED_BYTES = 256 << 20
"""Adjacent memory is filled and compared in pieces of at most 256 MiB; a comparison needs an eighth of a piece as memory."""
MAX_KEPT = 1 << 20
"""Largest size in bytes of copies of inputs that are kept where others are compared by their digests."""
KEPT_BYTES = 8 << 20
"""Bytes of the outputs, smallest first, that are kept where others are compared by their digests."""
WROTE_TO_INPUT = "verification: it writes to an input that it is only to read"

REPETITIONS = 4
"""Further replays, and further runs as KERNELS, that show how much either differs from itself."""


class Verification:
    """A replay on copies of the inputs, to be compared with KERNELS. In poisoned memory, reads and writes at missed addresses show."""

    def __init__(
        self,
        replay: Replay,
        call: RecordedCall,
        facts: GraphFacts,
        run_kernels: Runnable,
        generator: torch.Generator | Generators | None,
        capture_memory: Sequence[torch.Tensor],
        stand_ins: Sequence[Any],
        aliased: AliasedCopies | None = None,
        on_host: InputGroups = (),
        run: Callable[[list[Any], list[torch.Tensor]], Any] | None = None,
    ) -> None:
        """Run the replay, by `run` if that is given, and set the generator back.

        `capture_memory` is that of the capture as 64-bit integers, with that of the `stand_ins`. Inputs in the groups `on_host` are written
        in place. A replay on `aliased` copies computes other values than KERNELS on the inputs. So `run_kernels` runs on aliased copies as
        well, and results are compared at once. Unless the call's `in_full` is None, the replay's memory is released afterwards.

        Raises the errors of `copies_of` and `Replay.serve_on`; `NoMemoryError` if results differ, maybe by aliases; `NotRelocatableError` if
        an input that is only to be read has changed. Else inputs and generator are as they were.
        """
        inputs, groups, written = call.inputs, call.groups, facts.written
        self._inputs = list(inputs)
        self._replay: Replay | None = replay
        self._run_kernels = run_kernels
        self._written = written
        self._aliased = aliased
        self._on_host = HostCopies(inputs, on_host)
        self._copies = self._copied([each for each in groups if each not in on_host])
        is_run_again = call.differed and facts.is_repeatable and aliased is None
        self._kept = copies_of(inputs, groups, written) if is_run_again else None
        read_only = [
            bytes_of(inputs[group.members[0][0]], span)
            for group, span in groups
            if not is_copied(group, span, written)
        ]
        before = [*map(checksum, read_only)]
        self._memory, between = _with_guard_blocks(replay)
        self._undefined = facts.undefined
        poisoned = _poison(capture_memory, stand_ins, inputs, groups)
        self._generator = generator
        self._began = generator.get_offset() if generator is not None else 0
        try:
            self._replay_once(run or replay.serve_on)
            # Now, so that this memory can be released before the callable needs as much.
            guards = [(torch.cat(between), POISON)] if between else []
            given = [*zip(map(checksum, read_only), before, strict=True)]
            changed = read([torch.ne(each, held).any() for each, held in (*guards, *poisoned, *given)])
            if any(changed[len(guards) + len(poisoned) :]):
                raise NotRelocatableError(WROTE_TO_INPUT)
            self._wrote_between = any(changed[: len(guards)])
            self._wrote_to_capture_memory = any(changed[len(guards) :])
            if call.in_full is not None and aliased is None:
                self._release_but(call.in_full)
        finally:
            # Also after an error: the call then runs as KERNELS on these inputs.
            self._on_host.put_back()
        # A stray write is told by `disagreement`. Here it would pass for a lack of memory, which is tried again.
        if aliased is not None and not (self._wrote_between or self._wrote_to_capture_memory):
            self._compare_aliased(aliased, groups)

    def _replay_once(self, run: Callable[[list[Any], list[torch.Tensor]], Any]) -> None:
        """Replay on the copies, and set the generator back."""
        try:
            self._outputs = run(list(self._copies), self._memory)
        finally:
            generator = self._generator
            self._ended = generator.get_offset() if generator is not None else 0
            self.random = self._ended != self._began
            """Whether the recording has drawn random numbers."""
            # KERNELS have to draw the same numbers, also if the replay has failed.
            self._put_generator(self._began)
        self._outside = self._outputs_outside()
        # A tensor that is given twice has two copies, and so is another output each time it is returned.
        self._firsts = first_positions(self._outputs, self._copies)

    def _release_but(self, in_full: Collection[int]) -> None:
        """Release the replay's memory and large copies of inputs; keep the values `in_full`, small ones, and digests of the others."""
        values, count, left = [*self._outputs, *self._copies], len(self._outputs), KEPT_BYTES
        in_place = {count + index for index in self._on_host.indices}
        copies = [
            values[index]
            for index, given in enumerate(self._inputs, start=count)
            if values[index] is not given or index in in_place
        ]
        goes = _storages((*copies, *self._memory))
        for index in sorted(_storages(values), key=lambda each: values[each].nbytes):
            value = values[index]
            if value.untyped_storage().data_ptr() not in goes.values():
                continue
            if index < count and (index in self._undefined or not value.numel()):
                values[index] = Digest(form(value), None)
            elif index >= count and index not in in_place and (index in in_full or value.nbytes <= MAX_KEPT):
                continue  # it has memory of its own
            elif index in in_full:
                values[index] = _clone(value)
            elif index < count and value.nbytes <= left:
                values[index], left = _clone(value), left - value.nbytes
            else:
                values[index] = digest_of(value)
        self._outputs, self._copies, self._memory = values[:count], values[count:], []

    def _copied(self, groups: InputGroups) -> list[Any]:
        """Return copies of the inputs that may be written, aliased ones among them."""
        if self._aliased is None:
            return copies_of(self._inputs, groups, self._written)
        others = [each for each in groups if each[0].members[0][0] not in self._aliased.tensors]
        return self._aliased.among(copies_of(self._inputs, others, self._written))

    def _compare_aliased(self, aliased: AliasedCopies, groups: InputGroups) -> None:
        replayed, copies = aliased.left(self._copies, aliased.memory.clone()), self._copied(groups)
        try:
            outputs = self._run_kernels(list(copies))
        finally:
            self._put_generator(self._began)
        mine = Values(self._comparable(outputs), replayed)
        right = Values(outputs, aliased.left(copies, aliased.memory))
        if found := compare(mine, right, tolerance_of((*self._inputs, *outputs))) or self._misplaced(outputs):
            raise NoMemoryError(f"{found}, without the memory to copy what it writes")
        self._outputs = ()

    def disagreement(self, outputs: Sequence[Any]) -> Disagreement | None:
        """Return how the replay differs from KERNELS, which have run on the inputs and returned `outputs`; None if it agrees."""
        # KERNELS have advanced it meanwhile, from where the replay had begun.
        if self._generator is not None and self._generator.get_offset() != self._ended:
            return Disagreement("it draws another number of random numbers")
        if self._wrote_to_capture_memory:
            return Disagreement("it writes to where it was recorded")
        if self._wrote_between:
            return Disagreement("it writes beyond its memory")
        if self._firsts != first_positions(outputs, self._inputs):
            return Disagreement("outputs that are one tensor are several")
        if self._aliased is not None:
            return None  # they were compared
        again = None
        if self._kept is not None:  # if they differ, each may differ as much from itself
            again = Again(lambda: self._runs(self._replay_again), lambda: self._runs(self._run_kernels))
        mine, right = Values(self._comparable(outputs), self._copies), Values(outputs, self._inputs)
        digests = {index: each for index, each in enumerate(mine.all) if isinstance(each, Digest)}
        differ = frozenset[int]()
        if digests and len(mine.outputs) == len(outputs):
            digests = {index: each for index, each in digests.items() if each.form == form(right.all[index])}
            differ = unequal(digests, right.all)
            # `compare` passes over values that are the same object: `differ` has those whose digests are not equal.
            every = [right.all[index] if index in digests else each for index, each in enumerate(mine.all)]
            mine = Values(every[: len(outputs)], every[len(outputs) :])
        found = compare(mine, right, tolerance_of(right.all), again) or self._misplaced(outputs)
        # Only where nothing else differs: a digest does not tell rounding from a wrong value.
        if found is None and differ:
            return Disagreement(f"{right.name(min(differ))} differs in bits", by_digest=differ)
        return found

    def _replay_again(self, inputs: list[Any]) -> Any:
        assert self._replay is not None
        # A recording that differs may be wrong, and write beyond its memory.
        memory, _ = _with_guard_blocks(self._replay)
        return self._replay.serve_on(inputs, memory)

    def _runs(self, run: Runnable) -> Iterator[Values]:
        """Yield the values that further runs leave, each on copies of the inputs and with the random numbers of the call."""
        assert self._kept is not None
        for _ in range(REPETITIONS):
            copies = copies_of(self._kept, input_groups(self._kept), self._written)
            self._put_generator(self._began)
            try:
                outputs = run(list(copies))
            finally:
                # The program goes on from where its own call has left the generator.
                self._put_generator(self._ended)
            yield Values(outputs, copies)

    def _put_generator(self, offset: Any) -> None:
        if self._generator is not None and self.random:
            self._generator.set_offset(offset)

    def close(self) -> None:
        """Release all memory."""
        self._replay = None
        self._inputs, self._copies, self._kept, self._memory, self._outputs = [], [], None, [], ()

    def _comparable(self, outputs: Sequence[Any]) -> list[Any]:
        """Return the outputs of the replay, with that of KERNELS in place of each undefined one."""
        if len(self._outputs) != len(outputs):
            return list(self._outputs)
        return [
            right if index in self._undefined and form(mine) == form(right) else mine
            for index, (mine, right) in enumerate(zip(self._outputs, outputs, strict=True))
        ]

    def _outputs_outside(self) -> dict[int, int]:
        """Return the addresses of the outputs that lie in no memory of the call and in none of its inputs, by index."""
        own = set(_storages((*self._copies, *self._memory)).values())
        return {
            index: self._outputs[index].data_ptr()
            for index, storage in _storages(self._outputs).items()
            if storage not in own and self._outputs[index].numel()
        }

    def _misplaced(self, outputs: Sequence[Any]) -> Disagreement | None:
        # An output outside of this memory must be a constant, or each call would overwrite the output of the call before.
        for index, address in self._outside.items():
            if address != outputs[index].data_ptr():
                return Disagreement(f"output {index} lies in memory that relocation does not know")
        return None


def _storages(values: Sequence[Any]) -> dict[int, int]:
    """Return the addresses of the storages of the tensors among some values, by index."""
    return {
        index: each.untyped_storage().data_ptr()
        for index, each in enumerate(values)
        if isinstance(each, torch.Tensor)
    }


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor with the same strides and flags, gaps included."""
    memory = bytes_of(tensor, extent(tensor)).clone()
    plain = torch_private.reinterpret(memory, tensor.dtype, tuple(tensor.size()), tuple(tensor.stride()), 0)
    return torch_private.viewed_like(plain, tensor)


def _with_guard_blocks(replay: Replay) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return poisoned memory for a replay in one allocation, and the guard block after each part of it, which is poisoned too.

    The parts lie in reverse order, so that a kernel that reaches one memory from the bounds of another misses it, as it would in a call.
    """
    memories = replay.layout.memories
    sizes = [blocks(memory.bytes) * BLOCK for memory in memories]
    begins = [*itertools.accumulate((size + BLOCK for size in reversed(sizes)), initial=0)][-2::-1]
    poison = replay.allocate_bytes(sum(sizes) + BLOCK * len(sizes)).fill_(POISON)
    tensors = [
        torch_private.reinterpret(poison, each.dtype, each.size, each.stride, begin // each.dtype.itemsize)
        for each, begin in zip(memories, begins, strict=True)
    ]
    # They own nothing: who clears the list of the parts releases the memory.
    ends = [poison.data_ptr() + begin + size for begin, size in zip(begins, sizes, strict=True)]
    return tensors, [torch_private.memory_at(end, BLOCK, poison.device) for end in ends]


def _poison(
    capture_memory: Sequence[torch.Tensor],
    stand_ins: Sequence[Any],
    inputs: Sequence[Any],
    groups: InputGroups,
) -> list[tuple[torch.Tensor, torch.Tensor | int]]:
    """Fill the memory of a capture with poison; return pairs of memory and its expected value."""
    for each in _joined(capture_memory):
        each.fill_(OLD_POISON)
    filled = set()
    for index in _indices(inputs, groups) if stand_ins else ():
        # Poison as an index of an embedding would fail an assertion on the GPU, which ends the process.
        stand_ins[index].copy_(other_indices(inputs[index]))
        filled.add(stand_ins[index].untyped_storage().data_ptr())
    others = [each for each in capture_memory if each.untyped_storage().data_ptr() in filled]
    poisoned = [each for each in capture_memory if each.untyped_storage().data_ptr() not in filled]
    return [*((each, each.clone()) for each in others), *((each, OLD_POISON) for each in _joined(poisoned))]


def bytes_to_compare(
    capture_memory: Sequence[torch.Tensor], inputs: Sequence[Any], groups: InputGroups
) -> int:
    """Return the bytes that a verification takes beside copies and the replay's memory: for other indices, and to compare the capture's."""
    indices: int = sum(inputs[index].nbytes for index in _indices(inputs, groups))
    of_capture: int = sum(each.nbytes for each in capture_memory)
    return 3 * indices + min(of_capture, JOINED_BYTES) // 8


def _joined(memory: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the same memory as 64-bit integers, in one tensor for each range without gaps: kernels for hundreds take milliseconds."""
    spans: list[Span] = []
    for span in sorted(Span(each.data_ptr(), each.data_ptr() + each.nbytes) for each in memory):
        if spans and spans[-1].end == span.start and spans[-1].size + span.size <= JOINED_BYTES:
            spans[-1] = Span(spans[-1].start, span.end)
        else:
            spans.append(span)
    return [
        torch_private.memory_at(span.start, span.size, memory[0].device).view(torch.int64) for span in spans
    ]


def _indices(inputs: Sequence[Any], groups: InputGroups) -> Iterator[int]:
    return (group.members[0][0] for group, _ in groups if may_be_indices(group.members, inputs))


def other_indices(indices: torch.Tensor) -> torch.Tensor:
    """Return other values of the same range, or poison if all are the same. Does not wait for the GPU."""
    least, most = torch.aminmax(indices.detach())
    return torch.where(least == most, OLD_POISON, least + most - indices.detach())
