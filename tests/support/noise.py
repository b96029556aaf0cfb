"""An operator that gives something slightly different at each call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pygraphd.client.backend.driver import Driver

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from tests.support.recording_case import Case, Operations


SIZE = 64


class Noise:
    """Adds what is another number each time that kernels run, as KERNELS or in a graph."""

    def __init__(self, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.values = torch.zeros(SIZE)
        self.share = share
        self.runs_as_kernels = 0
        self._random = torch.Generator().manual_seed(0)
        launch = Driver.launch

        def shaken(driver: Driver, executable: int, stream: int) -> None:
            self.shake()
            launch(driver, executable, stream)

        monkeypatch.setattr(Driver, "launch", shaken)

    def shake(self) -> None:
        self.values.copy_(self.share * torch.rand(SIZE, generator=self._random))

    def adding(self, case: Case) -> Callable[[Operations, list[Any]], Any]:
        def body(operations: Operations, inputs: list[Any]) -> Any:
            if operations is case.recorder.as_kernels:
                self.runs_as_kernels += 1
                self.shake()
            return (operations.add(inputs[0], self.values),)

        return body
