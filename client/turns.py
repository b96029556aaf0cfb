"""One region's order: which deployment it tries next, and which of its calls count.

Costs drift while they are measured: clocks rise, caches fill. So deployments that are held against each other are tried in blocks
whose counted rounds have one middle, whatever is not counted at their beginning: half of a capture's samples come before the
launches, half after them. All is counted in rounds (see `client.rota`). Knows nothing of torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from pygraphd.schema import policy
from pygraphd.schema.messages import Deployment

SAMPLES = policy.MIN_SAMPLES
"""Samples of each deployment that end measuring."""
HALF = SAMPLES // 2
MAX_ROUNDS = 400
"""Rounds after which measuring ends with what there is; two dozen are usual,"""
MAX_CALLS = 8_192
"""or calls; of a graph that 80 layers call, a few thousand are."""
UNCOUNTED = {Deployment.KERNELS: 1, Deployment.GRAPH: 4}
"""A deployment's first rounds in a process, which pay for setting it up. Relocatable graphs see that sizes come back, record, replay, and in training begin to keep memory. Later the first after a change is not counted."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rounds in one deployment: `rest` that do not count, then as many that do as are `counted`.

    Fewer will do if they have that many calls.
    """

    deployment: Deployment
    rest: int
    counted: int
    part: int = 0
    """Blocks of one part have one middle."""
    may_end: bool = False
    """Whether measuring may end within it: what came before has its middle."""


def blocks(candidates: tuple[Deployment, ...]) -> tuple[Block, ...]:
    """Return the blocks in which `candidates`, of which KERNELS is one, are measured."""
    if len(candidates) == 1:
        return (Block(*candidates, UNCOUNTED[candidates[0]], SAMPLES, may_end=True),)
    return _around_launches(Deployment.GRAPH)


def _around_launches(capture: Deployment, part: int = 0) -> tuple[Block, ...]:
    launches = Block(Deployment.KERNELS, UNCOUNTED[Deployment.KERNELS], SAMPLES, part)
    return Block(capture, UNCOUNTED[capture], HALF, part), launches, Block(capture, 1, HALF, part)


class Turns:
    """One region's progress through the deployments it may run in, `candidates`."""

    def __init__(self, candidates: tuple[Deployment, ...]) -> None:
        self.candidates = candidates
        self._blocks = blocks(candidates)
        self._rounds = 0
        self._calls = 0
        self._latest: tuple[int | None, Deployment] | None = None
        self._fair = False
        self._passed: list[int] = []
        self._counted = 0
        self._again = False
        self._enter(0)

    def choose_from(self, candidates: tuple[Deployment, ...]) -> None:
        """Go on with these: one that refuses is not waited for."""
        if candidates != self.candidates:
            self.candidates, self._blocks, self._again = candidates, blocks(candidates), False
            self._enter(0)

    def begin_again(self) -> None:
        """Take samples once more; measuring may end as soon as they are enough."""
        self._again = True
        self._enter(0)

    @property
    def choices(self) -> int:
        """How many deployments there are to choose from."""
        return len(self.candidates)

    @property
    def exhausted(self) -> bool:
        """Whether so many have not been enough."""
        return self._rounds >= MAX_ROUNDS or self._calls >= MAX_CALLS

    @property
    def part(self) -> int:
        """The part of measuring that the latest call belongs to; only calls of one part are held against each other."""
        return self._block.part

    @property
    def is_done(self) -> bool:
        """Whether all samples have been taken; they may not be known yet."""
        return self._block is self._blocks[-1] and self._has_enough()

    @property
    def may_end(self) -> bool:
        """Whether what was measured so far can be held against each other."""
        return self._block.may_end or self._again or self.is_done

    def needs(self, deployment: Deployment) -> bool:
        """Whether it is in the midst of a block of this deployment."""
        return self._block.deployment is deployment and not self._has_enough()

    def next(self) -> Deployment:
        """Return the deployment that this region would run in if it could choose."""
        if self.is_done:
            return Deployment.KERNELS
        # Another thread may ask while this region's goes on to the next block.
        blocks_, at = self._blocks, self._at + self._has_enough()
        return blocks_[min(at, len(blocks_) - 1)].deployment

    def take(self, deployment: Deployment, round_: int | None = None) -> bool:
        """Note that the region now runs in `deployment`; return whether this call is a fair sample of it.

        All calls of a round are, or none; without its number, each is a round of its own.
        """
        self._calls += 1
        if round_ is None or self._latest != (round_, deployment):
            follows = self._latest is not None and self._latest[1] is deployment
            self._rounds += 1
            self._latest = (round_, deployment)
            self._fair = self._take_round(deployment, follows=follows)
        self._sampled += self._fair
        return self._fair

    def _take_round(self, deployment: Deployment, *, follows: bool) -> bool:
        if self._goes_on(deployment):
            self._enter(self._at + 1)
        block = self._block
        if deployment is not block.deployment:
            return False  # others need this one
        if self._rested < block.rest or not follows:
            self._rested += 1
            return False
        if self._counted >= self._most() and self._has_enough() and self.choices > 1:
            return False  # others are not done with it
        self._counted += 1
        return True

    def _goes_on(self, deployment: Deployment) -> bool:
        """Whether a round is the first of the next block: what others need is no reason to leave this one."""
        is_other = deployment is not self._block.deployment
        return is_other and self._has_enough() and not self.is_done and deployment is self.next()

    def _most(self) -> int:
        """Return how many rounds of this block count: of the last one of a part, as many as of its first."""
        mine, before = self._block, self._at - 2
        first = self._blocks[before] if before >= 0 else None
        is_last = first is not None and (first.deployment, first.part) == (mine.deployment, mine.part)
        return self._passed[before] if is_last and self._passed[before] else mine.counted

    def _enter(self, number: int) -> None:
        self._passed = [*self._passed[: number - 1], self._counted] if number else []
        self._at = number
        self._block = self._blocks[number]
        self._rested = self._counted = self._sampled = 0

    def _has_enough(self) -> bool:
        return self._rested >= self._block.rest and self._sampled >= self._block.counted
