"""A compiled callable that runs twice at each call: as KERNELS for the program, and relocated on copies that lie elsewhere.

Both must agree bit for bit, unless the callable adds in an order of its own; everything must have moved since the call before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pygraphd.client.recording.comparison import Values, compare, tolerance_of
from tests.support.guards import Old, poisoned, storages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pygraphd.client.recording.comparison import Disagreement
    from pygraphd.client.recording.recordings import Recordings
    from tests.support.guards import Guarded

RUNS = 8
"""Runs as KERNELS that are held against another one before it is believed that all are the same."""


class Beside:
    """Runs `run_kernels` for the program, and `relocatable`, which is made of it, beside it."""

    def __init__(
        self,
        run_kernels: Callable[[list[Any]], Any],
        relocatable: Recordings,
        guarded: Guarded,
        generator: Any,
    ) -> None:
        self.relocatable = relocatable
        self.calls = 0
        self.exact = True
        """Whether they must agree bit for bit if runs as KERNELS do."""
        self._run_kernels = run_kernels
        self._guarded = guarded
        self._generator = generator
        self._places: dict[tuple[str, int], int] = {}
        self._old = Old()

    def __call__(self, inputs: list[Any]) -> Any:
        self.calls += 1
        mine = list(inputs)
        before, copies = self._guarded.copies(mine), self._guarded.copies(mine)
        began = self._generator.get_offset()
        outputs = self.relocatable(list(copies))
        ended = self._generator.get_offset()
        self._generator.set_offset(began)
        of_kernels = self._run_kernels(inputs)
        assert self._generator.get_offset() == ended, "another number of random numbers was drawn"
        assert len(outputs) == len(of_kernels)
        right = [*of_kernels, *mine]
        if self._differs([*outputs, *copies], right, 0.0, len(of_kernels)):
            self._expect_close([*outputs, *copies], right, len(of_kernels), before, began)
        self._expect_moved(copies, outputs, right)
        self._end_call(outputs, storages(right))
        return of_kernels

    def _differs(
        self, mine: Sequence[Any], right: Sequence[Any], tolerance: float, outputs: int
    ) -> Disagreement | None:
        """Return how values differ, of which the first ones are `outputs`."""
        undefined = self.relocatable.facts.undefined
        made = [right[i] if i in undefined else mine[i] for i in range(outputs)]
        return compare(Values(made, mine[outputs:]), Values(right[:outputs], right[outputs:]), tolerance)

    def _expect_close(
        self, mine: Sequence[Any], right: Sequence[Any], outputs: int, before: Sequence[Any], began: int
    ) -> None:
        """Assert that values that differ do so by no more than what adding in another order makes of them."""
        differs = self._differs(mine, right, 0.0, outputs)
        same = self.exact and self._kernels_agree(right, outputs, before, began)
        assert not same, f"{differs}, and {RUNS} runs as KERNELS agree bit for bit"
        far = self._differs(mine, right, tolerance_of(right), outputs)
        assert far is None, str(far)

    def _kernels_agree(self, right: Sequence[Any], outputs: int, before: Sequence[Any], began: int) -> bool:
        for _ in range(RUNS):
            copies = self._guarded.copies(before)
            self._generator.set_offset(began)
            of_kernels = self._run_kernels(list(copies))
            if self._differs([*of_kernels, *copies], right, 0.0, outputs):
                return False
        return True

    def _expect_moved(self, copies: Sequence[Any], outputs: Sequence[Any], right: Sequence[Any]) -> None:
        """Assert that no input and no output lies where it lay at the call before, but for what is the program's own."""
        own = storages(right)
        places = {
            (what, index): each.data_ptr()
            for what, values in (("input", copies), ("output", outputs))
            for index, each in enumerate(values)
            if self._moves(each) and each.untyped_storage().data_ptr() not in own
        }
        came_again = [key for key, place in places.items() if self._places.get(key) == place]
        assert not came_again, f"they lie where they lay at the call before: {came_again}"
        self._places = places

    def _moves(self, value: Any) -> bool:
        return (
            isinstance(value, torch.Tensor)
            and value.numel() > 0
            and value.device.type == self._guarded.device
        )

    def _end_call(self, outputs: Sequence[Any], own: set[int]) -> None:
        """Poison all that was worked on beside the program, and see to it that what was poisoned before is as it was."""
        given = self._guarded.end_call()
        guarded = {block.memory.data_ptr() for block in given}
        self._old.add([*given, *poisoned(outputs, self._guarded.device, own | guarded)])

    def expect_moved_calls(self) -> None:
        """Assert that all calls were replays but for one that ran as KERNELS and one or two that were recorded, and moved each time."""
        for replay in self.relocatable.replays:
            # The trial of the recording is a replay, too.
            counts = replay.counts
            assert counts.replays >= max(self.calls - 2, 2), (self.calls, counts)
            assert counts.written >= counts.relocated == counts.replays, counts

    def close(self) -> None:
        self._old.close()
