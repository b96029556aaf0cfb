"""`python daemon_training.py NUMBER WORLD FOLDER`: one of several processes that train the same small model at once, until all is decided.

They meet twice: when all have compiled and looked up their graphs and none measures yet, and when each has asked who is to measure them.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pygraphd.client import hook
from pygraphd.client.autotune.partition_trial import WARM_UP_CALLS

if TYPE_CHECKING:
    from collections.abc import Callable

    from pygraphd.client.frontend.runtime import Runtime

DEVICE = "cuda"
STEPS = 20
LIMIT_S = 40.0
"""How long others are waited for, and how long it is trained at most."""


class Training:
    """The same few steps, as often as one likes: from the same weights, on the same data."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(6) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU())]
        self.module = torch.nn.Sequential(*layers, torch.nn.Linear(64, 8)).to(DEVICE)
        self._parameters = list(self.module.parameters())
        self._start = [each.detach().clone() for each in self._parameters]

    def again(self, run: Callable[..., Any], steps: int = STEPS) -> list[float]:
        """Train the module, of which `run` may be what was compiled; return the losses."""
        with torch.no_grad():
            for parameter, start in zip(self._parameters, self._start, strict=True):
                parameter.copy_(start)
        optimizer = torch.optim.SGD(self._parameters, lr=0.05)
        data = torch.Generator(DEVICE).manual_seed(1)
        losses = []
        for _ in range(steps):
            x = torch.randn(32, 64, device=DEVICE, generator=data)
            loss = (run(x) - x[:, :8]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
        return losses


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Return when it has come true."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(what)
        time.sleep(0.001)


def meet(folder: Path, place: str, number: int, world: int) -> None:
    """Return when all have come here."""
    (folder / f"{place}.{number}").touch()
    awaited = [folder / f"{place}.{each}" for each in range(world)]
    wait_until(lambda: all(each.exists() for each in awaited), place)


def our_session() -> Runtime:
    """Return what knows how graphs run here; it is there once something has been compiled."""
    session = hook._hook.runtime
    assert session is not None, "PyGraph is not at work here"
    return session


def all_is_decided(session: Runtime) -> bool:
    """Whether each graph runs as it will from now on."""
    return session.report._deployed.total() == session.report.counts["graphs"]


def main(number: int, world: int, folder: Path) -> None:
    """Train, and write the losses of each round."""
    training = Training()
    run = torch.compile(training.module)
    training.again(run, WARM_UP_CALLS)
    session = our_session()
    meet(folder, "compiled", number, world)
    training.again(run, 1)
    meet(folder, "asked", number, world)
    end = time.monotonic() + LIMIT_S
    rounds = [training.again(run)]
    while not all_is_decided(session) and time.monotonic() < end:
        rounds.append(training.again(run))
    rounds.append(training.again(run))
    (folder / f"losses.{number}").write_text(json.dumps(rounds))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
