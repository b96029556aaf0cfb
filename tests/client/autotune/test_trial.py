"""One partition's trial on a machine with two clocks: what runs when, what counts, and when it ends."""

from __future__ import annotations

from typing import Any

import pytest

from pygraphd.client.autotune.candidates import Candidates
from pygraphd.client.autotune.trial import MAX_CYCLES, MAX_WAIT, RECORDING_CALLS, SAMPLES, Trial
from pygraphd.schema.messages import Deployment
from pygraphd.schema.policy import decide
from tests.support.simulated import Machine

pytestmark = pytest.mark.torch

KERNELS, GRAPH = Deployment.KERNELS, Deployment.GRAPH
RECORDING_US = 1e6
MOST_CALLS = 2_000


class Partition:
    """A partition whose GRAPH records at its first calls; some of its later calls make an executable, which takes long, too."""

    refusal = why_refused = None
    recording_us = 0.0
    refused_for_good = is_awaited = False
    not_now: str | None = None
    run_kernels_or_record = None

    def __init__(
        self, machine: Machine, makes_at: frozenset[int] = frozenset(), kernels_us: float = 200.0
    ) -> None:
        self.machine = machine
        self.kernels_us = kernels_us
        self.one_time_work = self.replayed = 0
        self.ran: list[Deployment] = []
        self._makes_at = makes_at
        self.emptied_before: list[int] = []
        self.cleared_before: list[int] = []
        """The calls before which workspaces went, too."""
        self.gpu_us = 100.0
        self.graph_us = 20.0

    def why_not(self, inputs: list[Any]) -> str | None:
        return self.not_now

    def run(self, inputs: list[Any]) -> str:
        number = self.ran.count(GRAPH)
        self.ran.append(GRAPH)
        makes = number < 2 or number in self._makes_at
        self.one_time_work += makes
        self.machine.submit(RECORDING_US if makes else self.graph_us, self.gpu_us)
        return "graph"

    def run_kernels(self, inputs: list[Any]) -> str:
        self.ran.append(KERNELS)
        self.machine.run_kernels(self.kernels_us, self.gpu_us)
        return "kernels"

    def empty_cache(self, *, workspaces: bool = False) -> None:
        (self.cleared_before if workspaces else self.emptied_before).append(len(self.ran))

    def trim(self) -> None:
        raise AssertionError("nothing is decided yet")

    def close(self) -> None:
        pass


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def trial_of(partition: Partition, only: Deployment | None = None) -> Trial:
    return Trial(Candidates(partition.run_kernels, 0, partition), lambda action: action(), only)


def run(partition: Partition, trial: Trial, *, synchronizes: bool = True) -> int:
    """Call a partition until its trial is over; return how often."""
    calls = 0
    while not trial.is_over():
        result = trial.call([])
        assert result == ("graph" if partition.ran[-1] is GRAPH else "kernels")
        partition.machine.host_us += 50
        if synchronizes:
            partition.machine.synchronize()
        calls += 1
        assert calls < MOST_CALLS
    return calls


def test_a_decision_takes_two_dozen_calls(machine: Machine) -> None:
    partition = Partition(machine)
    trial = trial_of(partition)

    assert run(partition, trial) <= 24
    assert partition.ran[:RECORDING_CALLS] == [GRAPH] * RECORDING_CALLS
    assert {each.deployment: each.samples for each in trial.measurements()} == {
        GRAPH: SAMPLES,
        KERNELS: SAMPLES,
    }
    assert decide(trial.measurements()).deployment is GRAPH
    assert decide(trial.measurements()).final


def test_memory_of_the_other_deployment_is_given_back_when_the_deployment_changes(
    machine: Machine,
) -> None:
    partition = Partition(machine)

    run(partition, trial_of(partition))

    changes = [at for at in range(1, len(partition.ran)) if partition.ran[at] is not partition.ran[at - 1]]
    assert {GRAPH, KERNELS} == {partition.ran[at] for at in changes}
    assert partition.emptied_before == [at for at in changes if partition.ran[at] is KERNELS]
    assert partition.cleared_before == [at for at in changes if partition.ran[at] is GRAPH]


def test_what_later_calls_need_not_do_is_no_sample(machine: Machine) -> None:
    partition = Partition(machine, makes_at=frozenset({4, 6, 11}))
    trial = trial_of(partition)

    calls = run(partition, trial)

    steady = Partition(machine)
    assert calls == run(steady, trial_of(steady)) + 3
    assert all(each.host_us < 1_000 and each.host_mad_us == 0 for each in trial.measurements())


def test_what_each_call_does_is_what_calls_cost(machine: Machine) -> None:
    partition = Partition(machine, makes_at=frozenset(range(1_000)))
    trial = trial_of(partition)
    run(partition, trial)

    assert decide(trial.measurements()).deployment is KERNELS


def test_kernels_run_until_the_gpu_has_come_to_the_samples(machine: Machine) -> None:
    """The GPU lags behind, and nobody waits for it."""
    partition = Partition(machine, kernels_us=600.0)
    partition.gpu_us = 500.0
    trial = trial_of(partition)

    calls = run(partition, trial, synchronizes=False)

    assert calls > 24
    assert set(partition.ran[22:]) == {KERNELS}
    assert min(each.samples for each in trial.measurements()) == SAMPLES


def test_a_gpu_that_never_catches_up_ends_the_trial_without_an_answer(machine: Machine) -> None:
    partition = Partition(machine, kernels_us=10.0)
    partition.gpu_us = 1e6
    trial = trial_of(partition)

    calls = run(partition, trial, synchronizes=False)

    assert calls <= 24 + MAX_WAIT
    assert not decide(trial.measurements()).final


def test_a_noisy_machine_is_measured_a_few_times_more(machine: Machine) -> None:
    partition = Partition(machine)
    trial = trial_of(partition)
    calls = 0
    while not trial.is_over():
        partition.graph_us = (20.0, 900.0)[calls % 2]
        partition.kernels_us = (200.0, 2_000.0)[calls // 2 % 2]
        trial.call([])
        machine.synchronize()
        calls += 1

    assert {each.samples for each in trial.measurements()} == {MAX_CYCLES * SAMPLES}
    assert not decide(trial.measurements()).final


def test_noise_that_passes_is_outweighed(machine: Machine) -> None:
    partition = Partition(machine)
    trial = trial_of(partition)
    calls = 0
    while not trial.is_over():
        is_noisy = calls < 22
        partition.graph_us = 20.0 + 600 * (calls % 2) * is_noisy
        partition.kernels_us = 200.0 + 900 * (calls // 2 % 2) * is_noisy
        trial.call([])
        machine.synchronize()
        calls += 1

    decision = decide(trial.measurements())
    assert (decision.deployment, decision.final) == (GRAPH, True)
    assert calls > 30


def test_a_deployment_is_timed_by_itself_to_be_held_against_what_is_known(machine: Machine) -> None:
    partition = Partition(machine)
    trial = trial_of(partition, only=GRAPH)
    calls = 0
    while not trial.is_measured():
        trial.call([])
        machine.synchronize()
        calls += 1

    assert set(partition.ran) == {GRAPH}
    assert calls == RECORDING_CALLS + SAMPLES + 1
    (measured,) = trial.measurements()
    assert (measured.deployment, measured.samples, measured.host_us) == (GRAPH, SAMPLES, 20.0)


def test_the_price_is_what_calls_took_beyond_what_was_chosen(machine: Machine) -> None:
    partition = Partition(machine)
    trial = trial_of(partition)
    run(partition, trial)

    assert trial.price_ms(GRAPH) > 2 * RECORDING_US / 1e3 * 0.99
    assert trial.price_ms(GRAPH) > trial.price_ms(KERNELS) > 0


def test_what_cannot_be_timed_costs_the_answer_and_not_the_call(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[str] = []

    def guarded(action: Any) -> Any:
        try:
            return action()
        except RuntimeError as error:
            failures.append(str(error))

    def fail() -> bool:
        raise RuntimeError("an error of the driver's")

    partition = Partition(machine)
    trial = Trial(Candidates(partition.run_kernels, 0, partition), guarded)
    monkeypatch.setattr(machine, "query", fail)

    assert [trial.call([]) for _ in range(24)] == [
        "graph" if each is GRAPH else "kernels" for each in partition.ran
    ]
    assert trial.is_over()
    assert not decide(trial.measurements()).final
    assert set(failures) == {"an error of the driver's"}
