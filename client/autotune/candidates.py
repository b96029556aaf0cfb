"""The two ways in which one partition of a compiled graph may run, as callables: as a GRAPH, if there can be one, and as KERNELS."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from pygraphd.client.backend.torch_private import Runnable
from pygraphd.schema.messages import Deployment

if TYPE_CHECKING:
    from pygraphd.schema.reasons import Reason


class Relocating(Protocol):
    """A callable as relocatable graphs; `recordings.Recordings`, which only those import who want it."""

    @property
    def refusal(self) -> str | None:
        """Why nothing could be recorded so far."""

    @property
    def why_refused(self) -> Reason | None:
        """The same as a code and a detail."""

    @property
    def refused_for_good(self) -> bool:
        """Whether that lies in the graph itself, and will be so in the next process."""

    @property
    def prepared(self) -> int:
        """A number that a call changes if it does what later calls need not do."""

    @property
    def run(self) -> Runnable:
        """The callable that runs it, with Inductor's list of inputs, at the lowest cost that is to be had."""

    def at(self, sizes: tuple[int, ...]) -> Relocating:
        """Return what this is for one set of integer inputs."""

    def trim(self) -> None:
        """Give back what launching has left."""

    def close(self) -> None:
        """Let go of all recordings."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """What one partition may run as: `launch` launches its kernels, `relocate` runs it as a GRAPH; None: there can be none."""

    launch: Runnable
    device_index: int
    relocate: Relocating | None = None

    @property
    def offered(self) -> tuple[Deployment, ...]:
        """The deployments that there are, in the order in which they are tried."""
        return (Deployment.KERNELS,) if self.relocate is None else (Deployment.GRAPH, Deployment.KERNELS)

    @property
    def possible(self) -> tuple[Deployment, ...]:
        """The same, without a GRAPH that has refused."""
        return (Deployment.KERNELS,) if self.lacks(Deployment.GRAPH) else self.offered

    def lacks(self, deployment: Deployment) -> bool:
        """Whether a deployment is not there or has refused; KERNELS run in its place."""
        return deployment is Deployment.GRAPH and (self.relocate is None or self.relocate.refusal is not None)

    @property
    def prepared(self) -> int:
        """A number that a call changes if it does what later calls need not do."""
        return self.relocate.prepared if self.relocate is not None else 0

    def runnable(self, deployment: Deployment) -> Runnable:
        """Return the callable of a deployment."""
        return (
            self.relocate.run if deployment is Deployment.GRAPH and self.relocate is not None else self.launch
        )

    def deploy(self, deployment: Deployment) -> Runnable:
        """Return the callable of a deployment, and give back what the other one keeps."""
        if self.relocate is not None:
            self.relocate.trim() if deployment is Deployment.GRAPH else self.relocate.close()
        return self.runnable(deployment)

    def at(self, sizes: tuple[int, ...]) -> Candidates:
        """Return the candidates for one set of dynamic sizes."""
        return replace(self, relocate=self.relocate.at(sizes) if self.relocate is not None else None)
