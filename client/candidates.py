"""The ways in which one captured region of a compiled graph may run, as callables."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from pygraphd.client import _torch
from pygraphd.client._torch import Runnable
from pygraphd.client.costs import Cost
from pygraphd.schema.messages import Deployment, Entry


class Relocating(Protocol):
    """A callable as relocatable graphs; `relocatable.Relocatable`, which only those import who want it."""

    @property
    def refusal(self) -> str | None:
        """Why nothing could be recorded so far."""

    @property
    def refused_for_good(self) -> bool:
        """Whether that lies in the graph itself, and will be so in the next process."""

    @property
    def refused_for_now(self) -> str | None:
        """That reason if it may be gone at any time."""

    @property
    def prepared(self) -> int:
        """A number that a call changes if it does what later calls need not do."""

    def __call__(self, inputs: list[Any]) -> Any:
        """Run on Inductor's list of inputs."""

    @property
    def bytes(self) -> int:
        """How much memory a launched call takes beside what is recorded, at most."""

    def at(self, sizes: tuple[int, ...]) -> Relocating:
        """Return what this is for one set of integer inputs."""

    def close(self) -> None:
        """Let go of all recordings."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """The ways in which a region may run. A backward says so to the trees, which do not see it when it is launched.

    `trees` is None where the user has not asked for what they do. `make_trees` and `make_relocate` make them anew.
    """

    launch: Runnable
    trees: Runnable | None
    device_index: int
    is_backward: bool
    relocate: Relocating | None = None
    make_trees: Callable[[], Runnable] | None = None
    make_relocate: Callable[[], Relocating | None] | None = None

    @property
    def offered(self) -> tuple[Deployment, ...]:
        """The deployments there are, in the order in which they are tried."""
        relocate = (Deployment.GRAPH,) if self.relocate is not None else ()
        trees = (Deployment.TREES,) if self.trees is not None else ()
        return (*relocate, *trees, Deployment.KERNELS)

    def offers(self, deployment: Deployment) -> bool:
        """Whether a deployment can be tried in this process."""
        return deployment in self.offered

    def lacks(self, deployment: Deployment) -> bool:
        """Whether a deployment is not there or has turned out not to be possible; it is launched in its place."""
        if not self.offers(deployment):
            return True
        return (
            deployment is Deployment.GRAPH and self.relocate is not None and self.relocate.refusal is not None
        )

    @property
    def possible(self) -> tuple[Deployment, ...]:
        """What is offered, without what has turned out not to be possible."""
        return tuple(each for each in self.offered if not self.lacks(each))

    @property
    def prepared(self) -> int:
        """A number that a call changes if it does what later calls need not do."""
        return self.relocate.prepared if self.relocate is not None else 0

    def why_provisional(self) -> str | None:
        """Return what keeps a deployment away for now, so that a decision without it must not be the last word; None if nothing does."""
        return self.relocate.refused_for_now if self.relocate is not None else None

    def why_only_launch(self) -> str | None:
        """Return why there is nothing to choose from, in this process and in others; None if there is, or may be."""
        relocate = self.relocate
        if self.trees is None and relocate is not None and relocate.refused_for_good:
            return relocate.refusal
        return None

    def why_only_launch_for_now(self) -> str | None:
        """Return why there is nothing to choose from here and now; None if there is."""
        return self.why_provisional() if self.possible == (Deployment.KERNELS,) else None

    def runnable(self, deployment: Deployment) -> Runnable:
        """Return the callable of a deployment."""
        if deployment is Deployment.TREES and self.trees is not None:
            return self.trees
        run = self.relocate if deployment is Deployment.GRAPH and self.relocate is not None else self.launch
        # It must not hold the other candidates, which are let go of.
        return functools.partial(_backward, self.device_index, run) if self.is_backward else run

    def let_go_of_all_but(self, deployment: Deployment) -> None:
        """Give back what the deployments that were not chosen keep."""
        if self.relocate is not None and deployment is not Deployment.GRAPH:
            self.relocate.close()

    def only(self, deployment: Deployment) -> Candidates:
        """Return the candidates without those that were not chosen, so that what these keep can go."""
        return replace(
            self,
            trees=self.trees if deployment is Deployment.TREES else None,
            relocate=self.relocate if deployment is Deployment.GRAPH else None,
        )

    def without_trees(self) -> Candidates:
        """Return these without PyTorch's trees, which are not made anew either."""
        return replace(self, trees=None, make_trees=None)

    def at(self, sizes: tuple[int, ...]) -> Candidates:
        """Return the candidates for one set of dynamic sizes: trees of their own, and of relocatable graphs their part."""
        relocate = self.relocate.at(sizes) if self.relocate is not None else None
        return replace(self, relocate=relocate, make_relocate=lambda: relocate)

    def has_rivals(self, deployment: Deployment, *, may_relocate: bool, may_try_trees: bool) -> bool:
        """Whether anything but KERNELS could be made anew, that is not what runs and is allowed."""
        relocate = may_relocate and self.make_relocate is not None and deployment is not Deployment.GRAPH
        trees = may_try_trees and self.make_trees is not None and deployment is not Deployment.TREES
        return relocate or trees

    def renewed(self) -> Candidates:
        """Return all candidates, with those that went made anew."""
        trees = self.trees
        if trees is None and self.make_trees is not None:
            trees = self.make_trees()
        return replace(self.with_relocation(), trees=trees)

    def with_relocation(self) -> Candidates:
        """Return these and relocatable graphs, if there can be any; trees may be missing still."""
        relocate = self.relocate
        if relocate is None and self.make_relocate is not None:
            relocate = self.make_relocate()
        return replace(self, relocate=relocate)


def _backward(device_index: int, run: Runnable, inputs: list[Any]) -> Any:
    _torch.note_backward(device_index)
    return run(inputs)


@dataclass(frozen=True, slots=True)
class Deployed:
    """How a region runs from now on: `run`, of what was offered; `cost` is what a call costs, if that is known.

    `adopted` is the answer of another process that says so, if it is one that was waited for.
    """

    run: Runnable
    deployment: Deployment
    candidates: Candidates
    cost: Cost | None = None
    adopted: Entry | None = None


def deployed(candidates: Candidates, deployment: Deployment, cost: Cost | None = None) -> Deployed:
    """Choose a deployment, and give back what the others keep."""
    run = candidates.runnable(deployment)
    candidates.let_go_of_all_but(deployment)
    return Deployed(run, deployment, candidates.only(deployment), cost)
