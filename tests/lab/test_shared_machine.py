"""First steps of processes that share a GPU's memory."""

from __future__ import annotations

import pytest

from tools.lab import shared_machine

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch


def machine(monkeypatch: pytest.MonkeyPatch) -> shared_machine.SharedMachine:
    monkeypatch.setattr(shared_machine, "_PAUSE_S", 0.0)
    return shared_machine.SharedMachine(frees=True)


def test_a_first_step_waits_for_memory_and_its_time_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: list[Exception | float] = [torch.OutOfMemoryError("full"), torch.OutOfMemoryError("full"), 1.0]

    def measure() -> float:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    sharing = machine(monkeypatch)

    assert sharing.first_step(measure) is None
    assert "attempt 3" in sharing.note()
    assert machine(monkeypatch).first_step(lambda: 2.0) == 2.0


def test_what_the_lack_of_memory_has_broken_is_said_to_lack_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = iter([torch.OutOfMemoryError("full"), RuntimeError("broken")])

    def measure() -> float:
        raise next(outcomes)

    with pytest.raises(torch.OutOfMemoryError, match="full"):
        machine(monkeypatch).first_step(measure)
