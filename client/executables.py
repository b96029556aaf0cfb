"""Which executable of a graph serves a call: several are kept, each bound to addresses of its own, where addresses take turns."""

from __future__ import annotations

import itertools
import operator
from collections import deque
from typing import TYPE_CHECKING, Any

from pygraphd.client.driver import DriverError
from pygraphd.client.wandering import MANY_NODES, wandering

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from pygraphd.client.binding import Binding, Fresh
    from pygraphd.client.wandering import Wandering

FEW_BINDINGS = 4
"""Executables of one recording at least: batches in rotation and kept outputs make addresses recur with short periods."""
MAX_BINDINGS = 64
"""At most, as long as `MAX_NODES` are the nodes of all: the layers of a model may share one graph, and have weights of their own."""
MAX_NODES = 1_024
WRITES_OF_ONE = 10
"""All other addresses that come soon again get one when writing for them has taken as long as making it does: that of a single node
takes as long as so many calls that write a node take longer (H200: 160 us),"""
NODES_OF_A_WRITE = 5
"""and each of so many nodes more as one of them (H200: 0.2 to 1 ms for 256)."""
MOST_MOVERS = 32
"""Inputs that have moved are looked at before all others, if they are no more than these."""
REMEMBERED = 8
"""Sets of addresses that are remembered, so that what nearly comes back gets an executable of its own,"""
MET = 4 * MAX_BINDINGS
"""and of graphs that may have many executables, so that what comes back later does, too; these are told by their hash."""

IDLE_CALLS = 8
"""Calls for which an executable was not used, after which it may go to other addresses; or twice as many as there are executables."""

WANDERING = 16
"""Calls that had to be bound, after which the helper does so by itself, of a graph of a few nodes;"""
NEW_IN_A_ROW = 6
"""or so many one after the other whose addresses were new: of fewer that take turns, each soon has an executable."""

ONE_LESS = "addresses take turns and share an executable"


def _most_executables(nodes: int) -> int:
    """Return how many executables there may be of a graph with so many nodes."""
    return max(FEW_BINDINGS, min(MAX_BINDINGS, MAX_NODES // max(nodes, 1)))


def _differing(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """Return the positions at which two lists of addresses differ."""
    return list(itertools.compress(itertools.count(), map(operator.ne, first, second)))


def _is_near_any(addresses: list[int], moved: Collection[int], others: Collection[list[int]]) -> bool:
    """Whether some of the others differ from these addresses by half as much as what has moved, at most."""
    most = len(moved) // 2
    if not most:
        return addresses in others
    # Nearly always the first question is enough, and it is asked about a few positions of hundreds.
    at = operator.itemgetter(*moved)
    here = at(addresses)
    return any(
        sum(map(operator.ne, at(other), here)) <= most and len(_differing(other, addresses)) <= most
        for other in others
    )


class Bindings:
    """The executables of one graph, the one that was used last first."""

    def __init__(self, first: Binding, note: Callable[[str], None]) -> None:
        """Take over the first one; `note` is told why there is not another one where there should be."""
        self._note = note
        self._all = [first]
        self._most = _most_executables(first.nodes)
        self._recent: deque[list[int]] = deque(maxlen=REMEMBERED)
        self._met: dict[int, tuple[int, int]] = {}
        """For how many calls, one soon after the other, an executable was to be bound to addresses, and the latest; by the hash of these."""
        self._bound_to: dict[int, Binding] = {}
        """By the hash of the addresses, which may be outdated. Kept where there are more than a few."""
        self._spare = first
        """The latest that was bound to new addresses."""
        self._movers: set[int] = set()
        """Inputs that are looked at first,"""
        self._seen_to_move: set[int] = set()
        """and the positions for which this is so."""
        self.wandering: Wandering | None = None
        """What the helper serves calls by, most of which nobody here hears of then; None: it does not."""
        self._to_be_bound = 0
        """Calls that found no executable where they lie,"""
        self._new_in_a_row = 0
        """and of these the latest ones whose addresses were new."""
        self._calls = 0
        self.written = 0
        """Nodes written for the latest call."""
        self.made = 1
        """Executables so far, with those that have gone."""

    def __len__(self) -> int:
        """Return how many executables there are."""
        return len(self._all)

    def bound(self, inputs: list[Any], memory: list[Any], number: int, fresh: Fresh) -> Binding:
        """Return an executable that is bound to a call's addresses; raises `UnfitError` or `DriverError`.

        For `number` and `fresh` see `Binding.fits`.
        """
        self.written = 0
        self._calls += 1
        if self.wandering is not None:
            self.wandering.pause()
        latest = self._all[0]
        binding: Binding | None = latest.follower or latest
        assert binding is not None
        if not binding.fits(inputs, memory, number, fresh):
            binding = self._found(binding, inputs, memory, number, fresh)
        if binding is None:
            binding = self._bind(inputs, memory, number, fresh)
        self._note_use(binding, latest)
        self._go_on_wandering()
        return binding

    def _go_on_wandering(self) -> None:
        """Let the helper serve the next calls."""
        if self.wandering is not None:
            self.wandering.renew(self._to_be_written(), self._all)

    def _to_be_written(self) -> Binding:
        """Return the executable that is worth least where it is bound, of those with the memory of the latest call."""
        latest, last = self._all[0], self._all[-1]
        if self._spare.number == latest.number and not self._spare.came_again:
            return self._spare
        return last if last.number == latest.number and self._is_idle(last) else latest

    def expected(self, number: int) -> Binding | None:
        """Return the executable that a call is probably bound to; None if finding out is for `bound`.

        `came` is to be called if it was that one.
        """
        latest = self._all[0]
        binding = latest.follower or latest
        return binding if binding.number == number else None

    def came(self, binding: Binding) -> None:
        """Note a call that was bound to the executable that was `expected`."""
        self.written = 0
        self._calls = binding.latest_use = self._calls + 1
        if binding is not self._all[0] or binding.follower is not binding:
            self._note_use(binding, self._all[0])
        if self.wandering is not None:  # looked at here, as most graphs' calls come by
            self._go_on_wandering()

    def _note_use(self, binding: Binding, latest: Binding) -> None:
        if binding is not latest:
            self._to_front(self._all.index(binding))
        latest.follower = binding
        binding.latest_use = self._calls

    def _found(
        self, asked: Binding, inputs: list[Any], memory: list[Any], number: int, fresh: Fresh
    ) -> Binding | None:
        """Return an executable that is bound already, other than the one that was asked first; only those used last are asked."""
        if len(self._all) == 1 or (len(self._all) > FEW_BINDINGS and not self._all[0].came_again):
            return None  # of many, `_known` tells which one it is, which takes longer only if most calls find one here
        others = (each for each in self._all[: FEW_BINDINGS + 1] if each is not asked)
        return next((each for each in others if each.fits(inputs, memory, number, fresh)), None)

    def _bind(self, inputs: list[Any], memory: list[Any], number: int, fresh: Fresh) -> Binding:
        latest = self._all[0]
        latest.raise_if_torn()  # what it knows of addresses may be half of one call's and half of another's
        just_moved = latest.moved(inputs, memory, number, fresh)
        self._look_first_at(just_moved)
        addresses = latest.addresses_with(just_moved)
        mark = self._mark(addresses)
        if (known := self._known(addresses, mark)) is not None:
            known.number = number
            return known
        is_new = not self._comes_often() and mark not in self._met and addresses not in self._recent
        self._note_to_be_bound(is_new=is_new)
        if is_new and self._goes_on_with(latest, addresses, just_moved, number):
            if len(self._all) < self._most or self._is_idle(self._all[-1]):
                self._note_met(mark, 1)
            self.written = latest.bind(addresses, just_moved, number)
            binding = latest
        else:
            binding = self._bind_any(addresses, just_moved, number, mark)
        binding.new_at = self._calls if is_new else 0
        if is_new:
            self._spare = binding
        self._recent.append(addresses)
        return self._note_bound(binding, mark)

    def _note_to_be_bound(self, *, is_new: bool) -> None:
        """Begin to have the helper serve calls when enough of them had to be bound; what begins is tried once."""
        if self._to_be_bound == WANDERING:
            return
        self._new_in_a_row = self._new_in_a_row + 1 if is_new else 0
        self._to_be_bound += 1
        if self._new_in_a_row == NEW_IN_A_ROW:
            self._to_be_bound = WANDERING
        if self._to_be_bound == WANDERING:
            self.wandering = wandering(self._all)

    def _goes_on_with(
        self, latest: Binding, addresses: list[int], moved: Collection[int], number: int
    ) -> bool:
        """Whether the executable that was used last is to be bound to addresses of which nothing is known; says yes to most that wander.

        What `_bind_any` would find is the same, and finding it takes longer than writing a few nodes.
        """
        if latest.number != number or (latest.came_again and len(self._all) > 1):
            return False
        return len(moved) == 1 or (len(self._all) == 1 and not _is_near_any(addresses, moved, self._recent))

    def _bind_any(self, addresses: list[int], just_moved: Collection[int], number: int, mark: int) -> Binding:
        """Bind to addresses that no executable is bound to: another one, if they are worth it, or one that there is."""
        position, moved = self._nearest(addresses, just_moved)
        nearest = self._all[position]
        has_room, is_idle = len(self._all) < self._most, self._is_idle(self._all[-1])
        met = self._met_before(nearest, mark, moved) if has_room or is_idle else None
        deserves = has_room and (met is not None or self._deserves_another(addresses, number, moved))
        if deserves and (another := self._another(nearest, addresses, moved, number)) is not None:
            self._all.insert(0, another)
            self.made += 1
            self.written = another.nodes
            return another
        if nearest.came_again:
            position, moved = self._or_a_spare(position, moved, addresses)
        if moved and is_idle and self._all[position].came_again:
            position, moved = self._or_the_last(position, moved, addresses, met)
        self.written = self._all[position].bind(addresses, moved, number)
        return self._to_front(position)

    def _is_served(self) -> bool:
        """Whether only few calls are seen here."""
        return self.wandering is not None and self.wandering.is_at_work

    def _comes_often(self) -> bool:
        """Whether the helper has seen the addresses of this call so often that they are worth an executable."""
        return self.wandering is not None and self.wandering.comes_often

    def _is_idle(self, binding: Binding) -> bool:
        """Whether others have taken turns for so long that this executable is of no use where it is bound."""
        calls = max(IDLE_CALLS, 2 * len(self._all))
        is_seen = binding.latest_use >= self._calls - calls
        return not is_seen and (self.wandering is None or not self.wandering.uses(binding, calls))

    def _or_the_last(
        self, position: int, moved: Collection[int], addresses: list[int], met: int | None
    ) -> tuple[int, Collection[int]]:
        """Return the last executable instead of another, if it is as near, or the addresses come back; and what has moved for it.

        They were `met` before in this call: what was not used since then is not one of those that take turns with them.
        """
        last = len(self._all) - 1
        also = _differing(self._all[last].addresses, addresses)
        comes_back = addresses in self._recent or (met is not None and self._all[last].latest_use < met)
        return (last, also) if len(also) <= len(moved) or comes_back else (position, moved)

    def _mark(self, addresses: list[int]) -> int:
        """Return what tells addresses from others, of graphs that may have many executables; hashing hundreds takes a few us."""
        return hash(tuple(addresses)) if self._most > FEW_BINDINGS else 0

    def _known(self, addresses: list[int], mark: int) -> Binding | None:
        """Return the executable that is bound to these addresses, of many."""
        if len(self._all) <= FEW_BINDINGS:
            return None
        found = self._bound_to.get(mark)
        return found if found is not None and not found.is_torn and found.addresses == addresses else None

    def _note_bound(self, binding: Binding, mark: int) -> Binding:
        if self._most > FEW_BINDINGS:
            if len(self._bound_to) >= MET:
                self._bound_to = {self._mark(each.addresses): each for each in self._all}
            self._bound_to[mark] = binding
        return binding

    def _look_first_at(self, moved: Collection[int]) -> None:
        """Have executables that are bound elsewhere be told by the inputs that move, and not by hundreds that do not."""
        if self._seen_to_move.issuperset(moved):
            return
        inputs = self._all[0].inputs_among(moved)
        if len(inputs) > MOST_MOVERS:
            return
        both = self._movers | inputs
        if len(both) > MOST_MOVERS:
            self._seen_to_move, both = set(), inputs
        self._seen_to_move.update(moved)
        if both != self._movers:
            self._movers = both
            watch = self._all[0].watch_first(both)
            for each in self._all:
                each.inputs = watch

    def _to_front(self, position: int) -> Binding:
        if position:
            # At once: an interrupt of the user's that came in between would lose one.
            self._all[: position + 1] = [self._all[position], *self._all[:position]]
        return self._all[0]

    def _nearest(self, addresses: list[int], moved: Collection[int]) -> tuple[int, Collection[int]]:
        """Return the executable for which least has moved, and what has; `moved` is what has for the first.

        Of several it is the one that was used last: where more addresses rotate than there are executables, that is the last one to
        be asked for again. Of many, those are looked at that were not used for longest.
        """
        nearest, begin = 0, max(1, len(self._all) - FEW_BINDINGS)
        for position, binding in enumerate(self._all[begin:], start=begin):
            if len(moved) == 1:
                break  # none is nearer, and looking at hundreds of addresses takes as long as writing a few nodes
            also = _differing(binding.addresses, addresses)
            if len(also) < len(moved):
                nearest, moved = position, also
        return nearest, moved

    def _or_a_spare(
        self, position: int, moved: Collection[int], addresses: list[int]
    ) -> tuple[int, Collection[int]]:
        """Return instead the executable of the latest new addresses, unless they have come again, or it is not as near."""
        if self._spare.came_again:
            return position, moved
        also = _differing(self._spare.addresses, addresses)
        return (self._all.index(self._spare), also) if len(also) <= len(moved) else (position, moved)

    def _met_before(self, nearest: Binding, mark: int, moved: Collection[int]) -> int | None:
        """Return the call for which an executable was to be bound to these addresses before, if they are worth one of their own."""
        if self._is_served():
            return self._calls - 1 if self._comes_often() else None
        if self._most <= FEW_BINDINGS:
            return None
        times, before = self._met.pop(mark, (0, 0))
        if self._calls - before > 2 * self._most:
            times = 0  # one of its own would have been given to others by now
        self._note_met(mark, times + 1)
        return before if before and self._is_worth_one(nearest, moved, times) else None

    def _note_met(self, mark: int, times: int) -> None:
        if self._most > FEW_BINDINGS:
            self._met[mark] = times, self._calls
            if len(self._met) > MET:
                del self._met[next(iter(self._met))]

    def _is_worth_one(self, nearest: Binding, moved: Collection[int], times: int) -> bool:
        """Whether addresses that came so often, and for which so much has moved, are to have an executable of their own."""
        nodes, written = nearest.nodes, nearest.nodes_that_follow(moved)
        if written and times >= WRITES_OF_ONE + nodes // NODES_OF_A_WRITE:
            return True
        return nodes >= MANY_NODES and 2 * written >= nodes

    def _deserves_another(self, addresses: list[int], number: int, moved: Collection[int]) -> bool:
        """Whether these addresses, or nearly these, have come back lately; or memory of a set is met for the first time."""
        if len(self._all) >= FEW_BINDINGS:
            return False
        # What comes often of the helper's calls, it says itself.
        came_back = not self._is_served() and _is_near_any(addresses, moved, self._recent)
        return came_back or all(binding.number != number for binding in self._all)

    def _another(
        self, nearest: Binding, addresses: list[int], moved: Collection[int], number: int
    ) -> Binding | None:
        try:
            return nearest.another(addresses, moved, number)
        except DriverError as error:
            self._most = len(self._all)  # those that there are go on
            self._note(f"{ONE_LESS}: {error}")
            return None

    def close(self) -> None:
        """Destroy all executables."""
        self.wandering = None
        self._bound_to.clear()
        while self._all:
            self._all.pop().close()
