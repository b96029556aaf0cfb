"""How waits in vain are counted where threads of one rank count at the same time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pygraphd.client.decisions.ranks.late_ranks import MAX_LATE, LateRanks

if TYPE_CHECKING:
    from collections.abc import Callable


class Marks:
    """Marks in memory; `meanwhile` runs once, while a mark is being read."""

    def __init__(self, count: int) -> None:
        self.values = {f"late/G/{number}": "late" for number in range(count)}
        self.reads = 0
        self.meanwhile: Callable[[], object] | None = None

    def read_text(self, key: str) -> str | None:
        self.reads += 1
        value, meanwhile, self.meanwhile = self.values.get(key), self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return value

    def write_text(self, key: str, value: str) -> str:
        return self.values.setdefault(key, value)

    def count(self, key: str, votes: int) -> int:
        raise NotImplementedError


def test_a_mark_that_two_threads_read_at_the_same_time_counts_once() -> None:
    marks, late = Marks(1), LateRanks("G")
    marks.meanwhile = lambda: late.read(marks)

    assert late.read(marks) == 1

    assert late.count == 1
    late.tell(marks, late.count)
    assert LateRanks("G").read(marks) == 2  # no number is left out, behind which other ranks would not look


def test_a_wait_that_could_not_be_told_hides_none_that_follows() -> None:
    marks, late = Marks(0), LateRanks("G")
    late.note(late.read(marks))

    late.note(before := late.read(marks))
    late.tell(marks, before)

    assert late.count == LateRanks("G").read(marks) == 2


def test_once_there_are_enough_nothing_is_read() -> None:
    marks, late = Marks(10 * MAX_LATE), LateRanks("G")
    assert late.read(marks) == marks.reads == MAX_LATE

    assert late.read(marks) == marks.reads == MAX_LATE


def test_each_group_counts_for_itself() -> None:
    marks, late, other = Marks(MAX_LATE), LateRanks("G"), LateRanks("H")

    assert (late.read(marks), other.read(marks)) == (MAX_LATE, 0)

    other.tell(marks, 0)
    assert other.read(marks) == 1
