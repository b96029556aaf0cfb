"""Whatever a program does while its graphs are looked at: in the end they run as deployed, and nothing of ours is left in the way."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pygraphd.client import checking, options, region
from pygraphd.client.looking import MAX_LAUNCHED
from pygraphd.client.session import Session
from pygraphd.client.turns import MAX_ROUNDS
from pygraphd.schema.locations import locate
from pygraphd.schema.messages import Deployment
from tests.client.test_plan import Clock, Compiled, compile_once, pretend_there_is_a_gpu

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

pytestmark = pytest.mark.torch

KERNELS, TREES = Deployment.KERNELS, Deployment.TREES
DECIDES = 120
"""Steps that end measuring."""
ENDS = MAX_ROUNDS + DECIDES
"""Steps that end a look, of graphs that are called once a step."""


class BoomError(Exception):
    """The user's own."""


@dataclass(frozen=True)
class Family:
    """A forward and its backward, with so many parts each, called as often in a step."""

    forward: Compiled
    backward: Compiled
    layers: int

    @property
    def slots(self) -> list[Any]:
        return [each for one in (self.forward, self.backward) for each in one.compiled_fn_runner.partitions]


class Program:
    """Some families, called step by step; a call that raises ends its step."""

    def __init__(self, session: Session, shapes: Sequence[tuple[int, int, int]]) -> None:
        self.session = session
        self.families = [self._family(number, *shape) for number, shape in enumerate(shapes)]
        self._count = 0

    def _family(self, number: int, ahead: int, behind: int, layers: int) -> Family:
        box, text = SimpleNamespace(value=0), f"  a = torch.ops.aten.op{number}.default(b)"
        forward = compile_once(self.session, ahead, backward=False, box=box, text=text)
        backward = compile_once(self.session, behind, backward=True, box=box, text=text)
        return Family(forward, backward, layers)

    def calls(self) -> Iterator[Compiled]:
        for family in self.families:
            yield from [family.forward] * family.layers
        for family in reversed(self.families):
            yield from [family.backward] * family.layers

    def step(self, skipped: int = -1, looked: int = -1, fails: int = -1) -> set[str]:
        """Run a step; return how its parts ran. What is named by its number is skipped, or met by a look, or raises."""
        seen: set[str] = set()
        with contextlib.suppress(BoomError):
            for number, each in enumerate(self.calls()):
                if number == looked:
                    self.session.drift.look()
                if number == fails:
                    raise BoomError
                if number != skipped:
                    seen.update(each.current_callable([torch.ones(1)]))
        return seen

    @property
    def ours(self) -> list[str]:
        return [
            type(slot).__name__
            for family in self.families
            for slot in family.slots
            if isinstance(slot, checking.Checked | region.Region)
        ]


@contextlib.contextmanager
def pretended(folder: Path) -> Iterator[tuple[pytest.MonkeyPatch, Session]]:
    import torch._inductor.config as inductor_config

    with pytest.MonkeyPatch.context() as patch, inductor_config.patch({"triton.cudagraphs": True}):
        pretend_there_is_a_gpu(patch)
        patch.setenv(options.RELOCATE, "0")
        patch.setattr(Clock, "times_us", {KERNELS: 100.0, TREES: 50.0})
        session = Session(locate({"PYGRAPHD_HOME": str(folder)}))
        yield patch, session
        session.close()


SHAPES = st.lists(
    st.tuples(st.integers(1, 3), st.integers(1, 2), st.sampled_from([1, 1, 3])), min_size=1, max_size=3
)
NUMBERS = st.integers(-12, 12)
"""Of calls; there is none with a negative one."""
STEPS = st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), max_size=40)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(SHAPES, STEPS, st.sampled_from([100.0, 10.0]))
def test_in_the_end_all_run_as_deployed_and_nothing_is_in_the_way(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: list[tuple[int, int, int]],
    steps: list[tuple[int, int, int]],
    launch_us: float,
) -> None:
    with pretended(tmp_path_factory.mktemp("home")) as (patch, session):
        program = Program(session, shapes)
        for _ in range(DECIDES):
            program.step()
        assert program.ours == []
        before = [
            each.current_callable for family in program.families for each in (family.forward, family.backward)
        ]
        patch.setattr(Clock, "times_us", {KERNELS: launch_us, TREES: 50.0})

        for skipped, looked, fails in steps:
            program.step(skipped, looked, fails)
        patch.setattr(Clock, "times_us", {KERNELS: 100.0, TREES: 50.0})
        launched = 0
        for _ in range(ENDS):
            launched += "launched" in program.step()

        assert program.ours == []
        assert launched <= 4 * MAX_LAUNCHED or launch_us < 50
        assert session.report.failures.keys() <= {"daemon: no daemon"}
        after = [
            each.current_callable for family in program.families for each in (family.forward, family.backward)
        ]
        if not session.report.counts["drifted"]:
            assert after == before
            assert program.step() == {"captured"}
