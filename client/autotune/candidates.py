"""The candidates of one partition: the callables by which it can run in this process, as a GRAPH and as KERNELS."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pygraphd.client.backend.torch_private import Runnable
from pygraphd.schema.messages import Deployment

if TYPE_CHECKING:
    from pygraphd.schema.reasons import Reason


class RecordingsLike(Protocol):
    """What `recordings.Recordings` offers to a trial. This folder may not import that class."""

    @property
    def why_refused(self) -> Reason | None:
        """Why the callable could not be recorded so far; None if it was, or may be."""

    @property
    def refused_for_good(self) -> bool:
        """Whether the refusal lies in the graph, and so holds in the next process too."""

    @property
    def one_time_work(self) -> int:
        """A number that changes in calls that do work of which later calls have no part: it grows with a recording, and may shrink when one is dropped."""

    @property
    def recording_us(self) -> float:
        """Host time of recording and verifying so far, in microseconds; 0 if nothing was tried."""

    @property
    def replayed(self) -> int:
        """The number of calls that recordings have served."""

    @property
    def run(self) -> Runnable:
        """The cheapest callable for steady state, which takes Inductor's list of inputs."""

    def why_not(self, inputs: list[Any]) -> str | None:
        """Why a call on these inputs would run as KERNELS for now, as in a dispatch mode of the program; None if it may be a GRAPH."""

    @property
    def is_awaited(self) -> bool:
        """Whether calls as KERNELS have to make the recording, and have not yet."""

    @property
    def run_kernels_or_record(self) -> Runnable | None:
        """With collectives: runs calls as KERNELS, and records at those calls that all ranks have agreed on. Else None: `run_kernels` runs them."""

    def empty_cache(self, *, workspaces: bool = False) -> None:
        """Return the free memory of PyTorch's allocator to the device if there is much of it, with the workspaces of BLAS libraries."""

    def trim(self) -> None:
        """Return free memory and the workspaces of BLAS libraries to the device."""

    def close(self) -> None:
        """Destroy all recordings."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """The callables of one partition: `run_kernels` runs it as KERNELS, `recordings.run` as a GRAPH."""

    run_kernels: Runnable
    device_index: int
    recordings: RecordingsLike

    def runnable(self, deployment: Deployment) -> Runnable:
        """Return the callable of a deployment."""
        return self.recordings.run if deployment is Deployment.GRAPH else self.run_kernels

    def release_other(self, deployment: Deployment) -> None:
        """Release the memory that the other deployment than this holds."""
        # KERNELS have left workspaces and free memory behind, in sizes that a GRAPH does not use.
        self.recordings.trim() if deployment is Deployment.GRAPH else self.recordings.close()
