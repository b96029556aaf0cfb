"""Measuring ends, decides in one step, and never mixes deployments within a step."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pygraphd.client.attendance import PATIENCE, SOON
from pygraphd.client.rota import AGAIN, Rota
from pygraphd.client.turns import MAX_CALLS, MAX_ROUNDS, SAMPLES, Turns
from pygraphd.schema.messages import Deployment, Graph, Kind

KERNELS, TREES, GRAPH = Deployment.KERNELS, Deployment.TREES, Deployment.GRAPH
FORWARD, BACKWARD, INFERENCE = Kind.FORWARD, Kind.BACKWARD, Kind.INFERENCE
BLOCK = 5
MOST_CALLS = 40
"""A few dozen calls is what measuring may cost."""


class Region:
    """What the rota sees of a region; samples are known `delay` calls after they were taken."""

    def __init__(
        self,
        kind: Kind = INFERENCE,
        delay: int = 0,
        family: int = 1,
        partition: int = 0,
        candidates: tuple[Deployment, ...] = (TREES, KERNELS),
        sizes: tuple[int, ...] = (),
    ) -> None:
        self.graph = Graph("a" * 64, kind, partition, 9, 1, sizes)
        self.family = family
        self.turns = Turns(candidates)
        self._candidates = candidates
        self.ran: list[Deployment] = []
        self.decided = False
        self.put_off = 0
        """How often it was launched as others were measured that are called more often."""
        self._delay = delay
        self._fair: list[Deployment | None] = []

    def ready(self) -> bool:
        known = Counter(self._fair[: max(0, len(self._fair) - self._delay)])
        return self.turns.exhausted or min(known[each] for each in self._candidates) >= SAMPLES

    def gain_in_trees_us(self) -> float:
        return 0.0

    def loss_in_trees_us(self) -> float | None:
        return None

    def call(self, rota: Rota) -> Deployment | None:
        """Be called once; returns what it ran in, None if it has decided by now."""
        if not self.decided and rota.is_for_later(self):
            self.put_off += 1
            return KERNELS
        deployment = None if self.decided else rota.enter(self)
        if deployment is None:
            self.decided = True
            rota.leave(self)
            return None
        # As a region has it: what it does not offer, it launches.
        deployment = deployment if deployment in self._candidates else KERNELS
        self._fair.append(deployment if self.turns.take(deployment, rota.round) else None)
        self.ran.append(deployment)
        return deployment

    def warm_up(self, rota: Rota) -> None:
        """Be called before it is measured."""
        rota.see(self)


def steps_until_decided(regions: list[Region], most: int = MOST_CALLS) -> int:
    rota = Rota()
    for step in range(1, most + 1):
        ran = {region.call(rota) for region in regions}
        assert len(ran) == 1, "one deployment for a step, and one step for all decisions"
        if ran == {None}:
            return step
    raise AssertionError(f"not decided after {most} steps")


def test_one_region_decides_after_a_few_dozen_calls() -> None:
    assert steps_until_decided([Region()]) == 22


@given(st.integers(1, 12))
def test_the_regions_of_a_step_always_agree_and_decide_together(count: int) -> None:
    assert steps_until_decided([Region() for _ in range(count)]) == 22


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5))
def test_they_decide_together_though_their_samples_come_late(delays: list[int]) -> None:
    """The GPU is behind the host by some steps, by more for some regions than for others."""
    assert steps_until_decided([Region(delay=delay) for delay in delays]) <= 23 + 3 * BLOCK


def test_samples_that_never_come_end_it_all_the_same() -> None:
    assert steps_until_decided([Region(delay=10**6)], most=MAX_ROUNDS + 1) == MAX_ROUNDS + 1


def test_samples_that_were_lost_are_taken_anew() -> None:
    """As of a call that ended in an error of the user's."""
    region, rota = Region(), Rota()
    for _ in range(SAMPLES):
        region.call(rota)
    region._fair = [None] * len(region._fair)

    calls = SAMPLES
    while not region.decided:
        region.call(rota)
        calls += 1
    assert calls == 21 + AGAIN + 1 + 7 + 1, "it waits, begins again, and decides"


def test_while_samples_are_waited_for_nothing_is_captured() -> None:
    region, rota = Region(delay=9, candidates=(GRAPH, KERNELS)), Rota()
    while not region.decided:
        region.call(rota)

    assert region.ran == [GRAPH] * 8 + [KERNELS] * 9 + [GRAPH] * 5 + [KERNELS] * 9


@pytest.mark.parametrize("delay", [AGAIN + 5, 3 * AGAIN, 100])
def test_a_gpu_that_is_far_behind_is_waited_for_no_longer_than_it_needs(delay: int) -> None:
    assert steps_until_decided([Region(delay=delay)], most=200) == 22 + delay


class Refusing(Region):
    """A region that turns out after some calls not to be relocatable."""

    def call(self, rota: Rota) -> Deployment | None:
        if self.ran.count(GRAPH) == 3:
            self._candidates = (TREES, KERNELS)
            self.turns.choose_from(self._candidates)
        return super().call(rota)


@pytest.mark.parametrize("refuses", [FORWARD, BACKWARD])
def test_what_refuses_to_be_relocated_is_tried_in_trees_together_with_the_rest_of_its_step(
    refuses: Kind,
) -> None:
    kinds, rota = (FORWARD, BACKWARD), Rota()
    regions = [
        (Refusing if kind is refuses else Region)(kind, candidates=(GRAPH, TREES, KERNELS)) for kind in kinds
    ]
    steps = 0
    while not all(region.decided for region in regions):
        steps += 1
        for region in regions:
            region.call(rota)

    assert steps == 52, "one more than the one that refuses nothing takes alone"


def middles(rounds: list[tuple[Deployment, int]]) -> dict[Deployment, float]:
    return {
        each: statistics.fmean(number for deployment, number in rounds if deployment is each)
        for each in {deployment for deployment, _ in rounds}
    }


@pytest.mark.parametrize("calls", [(1, 1), (1, 6), (1, 24), (24, 1)])
@pytest.mark.parametrize("joins", [0, 1])
@pytest.mark.parametrize("capture", [TREES, GRAPH])
def test_all_regions_of_a_step_are_measured_around_one_middle(
    calls: tuple[int, int], joins: int, capture: Deployment
) -> None:
    """However often each is called, and though the second may join a step later."""
    rota, regions = Rota(), [Region(candidates=(capture, KERNELS)) for _ in calls]
    counted: list[list[tuple[Deployment, int]]] = [[], []]
    for step in range(MOST_CALLS):
        for number, region in list(enumerate(regions))[: 2 if step >= joins else 1]:
            for _ in range(calls[number]):
                if (deployment := region.call(rota)) is not None and region._fair[-1] is not None:
                    counted[number].append((deployment, rota.round))

    assert all(region.decided for region in regions)
    for each in counted:
        middle = middles(each)
        assert middle[capture] == pytest.approx(middle[KERNELS], abs=1)


@pytest.mark.parametrize("every", [2, 5, 20, 40, 41])
def test_a_region_called_once_in_many_rounds_still_decides(every: int) -> None:
    rota, often, seldom = Rota(), Region(), Region()
    for step in range(60 * every):
        often.call(rota)
        if step % every == 0:
            seldom.call(rota)

    assert often.decided
    assert seldom.decided
    assert len(seldom.ran) <= MOST_CALLS


def test_a_region_that_joins_late_is_not_made_to_decide_with_the_others() -> None:
    rota, early, late = Rota(), Region(), Region()
    while not early.ready():
        early.call(rota)
    early.call(rota)
    assert late.call(rota) is not None
    for _ in range(MOST_CALLS):
        early.call(rota)
        late.call(rota)

    assert early.decided
    assert late.decided
    assert len(late.ran) >= 2 * SAMPLES


@given(st.lists(st.integers(1, 4), min_size=40, max_size=120))
def test_a_backward_runs_as_its_forward_did(micro_batches: list[int]) -> None:
    """Any number of forwards before their backwards, in the order autograd has: last in, first out."""
    rota, forward, backward = Rota(), Region(FORWARD), Region(BACKWARD)
    backward.call(rota)
    for count in micro_batches:
        forwards = [forward.call(rota) for _ in range(count)]
        backwards = [backward.call(rota) for _ in range(count)]
        if not (forward.decided or backward.decided):
            assert backwards == forwards[::-1]


@pytest.mark.parametrize(("forwards", "backwards"), [(3, 2), (1, 4), (2, 2)])
def test_a_forward_may_have_more_parts_than_its_backward_or_fewer(forwards: int, backwards: int) -> None:
    regions = [Region(FORWARD, partition=index) for index in range(forwards)]
    regions += [Region(BACKWARD, partition=index) for index in range(backwards)]

    assert steps_until_decided(regions) <= 23 + BLOCK


def test_a_forward_whose_backward_is_not_measured_holds_nothing_up() -> None:
    regions = [Region(FORWARD, family=1), Region(FORWARD, family=2), Region(BACKWARD, family=2)]

    assert steps_until_decided(regions) <= 23 + BLOCK


def test_forwards_without_backwards_are_measured_too() -> None:
    assert steps_until_decided([Region(FORWARD)]) == 22


@pytest.mark.parametrize("often", [1, 7, 24])
@pytest.mark.parametrize("is_first", [True, False])
def test_what_only_some_graphs_of_a_step_may_run_in_gets_its_turn(is_first: bool, often: int) -> None:
    """As where one model is compiled for CUDA Graphs of PyTorch's and another is not."""
    plain, both = Region(candidates=(GRAPH, KERNELS)), Region(candidates=(GRAPH, TREES, KERNELS))
    regions = [plain, both] if is_first else [both, plain]
    rota = Rota()
    for _ in range(2 * MOST_CALLS):
        for region in regions:
            for _ in range(often if region is both else 1):
                region.call(rota)

    assert both.decided
    assert plain.decided
    assert Counter(both.ran)[TREES] >= SAMPLES


@pytest.mark.parametrize("layers", [2, 12, 90])
def test_layers_that_share_one_graph_run_alike_within_a_step(layers: int) -> None:
    rota, forward, backward = Rota(), Region(FORWARD), Region(BACKWARD)
    for step in range(40):
        forwards = [forward.call(rota) for _ in range(layers)]
        backwards = [backward.call(rota) for _ in range(layers)]
        if step:  # the rota knows of the backward when it has seen it once
            assert len({*forwards, *backwards}) == 1

    assert forward.decided
    assert backward.decided


def test_a_backward_that_was_left_out_holds_nothing_up_for_ever() -> None:
    rota, forward, backward = Rota(), Region(FORWARD), Region(BACKWARD)
    forward.call(rota)
    backward.call(rota)
    for step in range(2 * MAX_ROUNDS):
        forward.call(rota)
        if step % 3:
            backward.call(rota)

    assert forward.decided
    assert backward.decided


@given(st.lists(st.integers(0, 3), min_size=1, max_size=300))
def test_any_order_of_calls_leaves_one_deployment_for_a_round(calls: list[int]) -> None:
    regions, rota = [Region() for _ in range(4)], Rota()
    ran: dict[int, set[Deployment]] = {}
    for index in calls:
        if (deployment := regions[index].call(rota)) is not None:
            ran.setdefault(rota.round, set()).add(deployment)

    assert all(len(each) == 1 for each in ran.values())


def run_steps(rota: Rota, small: Region, heavy: Region, layers: int, steps: int, *, heavy_first: bool) -> int:
    """Call `small` for each layer and `heavy` once a step, each twice before it is measured; returns how many steps it took."""
    parts = [heavy, *[small] * layers] if heavy_first else [*[small] * layers, heavy]
    calls: Counter[int] = Counter()
    for step in range(1, steps + 1):
        for part in parts:
            calls[id(part)] += 1
            if calls[id(part)] <= 2:
                part.warm_up(rota)
            else:
                part.call(rota)
        if small.decided and heavy.decided:
            return step
    raise AssertionError(f"not decided after {steps} steps")


@pytest.mark.parametrize("heavy_first", [True, False])
@pytest.mark.parametrize("layers", [2, 6, 12, 24])
def test_a_graph_of_many_layers_is_not_decided_before_the_other_graphs_of_a_step(
    layers: int, heavy_first: bool
) -> None:
    """What it costs in its first step, where every call meets other addresses and trees record, is not what it will cost."""
    rota, small, heavy = Rota(), Region(), Region()

    assert run_steps(rota, small, heavy, layers, MOST_CALLS, heavy_first=heavy_first) >= 2 * SAMPLES
    deployments = small.ran[-layers * 2 * SAMPLES :]
    changes = sum(one is not next_ for one, next_ in itertools.pairwise(deployments))
    assert changes <= 2 * SAMPLES // BLOCK + 1, "with the step, and not with the layer"


def test_more_layers_than_were_waited_for_are_waited_for_from_then_on() -> None:
    rota, small, heavy = Rota(), Region(delay=10**6), Region(delay=10**6)
    rounds = []
    for _ in range(12):
        begun = rota.round
        for _ in range(2 * PATIENCE + 1):
            small.call(rota)
        heavy.call(rota)
        rounds.append(rota.round - begun)

    assert rounds[1] > 1, "it is not known yet that the other one comes late"
    assert set(rounds[4:]) == {1}


@pytest.mark.parametrize(("every", "most"), [(20, 800), (60, 2_400), (200, 400), (2_000, 400)])
def test_what_is_called_all_the_time_does_not_wait_long_for_what_is_called_seldom(
    every: int, most: int
) -> None:
    """As of two models that a server runs."""
    rota, often, seldom = Rota(), Region(), Region()
    for call in range(most):
        if call % every == 0:
            seldom.call(rota)
        often.call(rota)

    assert often.decided


def test_measuring_ends_after_so_many_calls_in_few_rounds() -> None:
    rota, often, seldom = Rota(), Region(delay=10**6), Region(delay=10**6)
    for call in range(MAX_CALLS + 120):
        if call % 60 == 0:
            seldom.call(rota)
        often.call(rota)

    assert often.decided


def test_a_region_that_does_not_come_back_is_not_waited_for_much_longer_than_a_step_takes() -> None:
    rota, gone, stays = Rota(), Region(), Region()
    for _ in range(5):
        gone.call(rota)
        stays.call(rota)

    assert not stays.decided
    for _ in range(PATIENCE + MOST_CALLS):
        stays.call(rota)
    assert stays.decided


def test_what_is_about_to_be_measured_is_waited_for() -> None:
    rota, ready, other = Rota(), Region(), Region()
    while not ready.ready():
        ready.call(rota)
    other.warm_up(rota)
    other.warm_up(rota)

    assert ready.call(rota) is not None
    for _ in range(MOST_CALLS):
        other.call(rota)
        ready.call(rota)
    assert ready.decided
    assert other.decided


def test_an_evaluation_now_and_then_does_not_make_training_wait_longer_each_time() -> None:
    rota, training, evaluation = Rota(), Region(delay=10**6), Region(delay=10**6)
    waited = []
    for _ in range(2):
        for _ in range(10):
            evaluation.call(rota)
            training.call(rota)
        begun, calls = rota.round, 0
        while rota.round <= begun + 1:
            training.call(rota)
            calls += 1
        waited.append(calls)
        for _ in range(SOON * PATIENCE):
            training.call(rota)

    assert not training.decided
    assert waited == [PATIENCE + 2] * 2, "and two rounds that begin"


def test_dynamic_sizes_do_not_wait_for_each_other() -> None:
    rota, sizes = Rota(), [Region(sizes=(size,)) for size in range(8, 12)]
    for size in sizes:
        for _ in range(3):
            size.call(rota)
    for _ in range(MOST_CALLS):
        sizes[0].call(rota)

    assert sizes[0].decided


def test_one_that_never_comes_to_be_measured_does_not_hold_up_those_that_are() -> None:
    rota, measured, other = Rota(), Region(), Region()
    for _ in range(MOST_CALLS):
        measured.call(rota)
        other.warm_up(rota)

    assert measured.decided


def test_a_forward_that_decides_finds_what_is_measured_with_it() -> None:
    rota = Rota()
    forward, backward, part = Region(FORWARD), Region(BACKWARD), Region(BACKWARD, partition=1)
    other = Region(BACKWARD, family=2)
    assert rota.measured_with(1) == []
    while forward.call(rota) is not None:  # in the round in which it decides, nobody else has come
        for each in (backward, part, other):
            each.call(rota)

    assert set(map(id, rota.measured_with(1))) == {id(backward), id(part)}
    rota.leave(backward)
    assert rota.measured_with(1) == [part]
    assert rota.measured_with(3) == []


def test_one_that_was_decided_otherwise_is_not_waited_for() -> None:
    rota, region, told = Rota(), Region(), Region()
    region.call(rota)
    told.call(rota)
    rota.leave(told)
    for _ in range(MOST_CALLS - 2):
        region.call(rota)

    assert region.decided


@given(joins=st.lists(st.integers(0, 12), min_size=6, max_size=6), families=st.integers(1, 3))
def test_whoever_joins_first_and_when_all_decide_in_time(joins: list[int], families: int) -> None:
    """Checks that fail and answers that do not come let regions join at any point of a step."""
    forwards = [Region(FORWARD, family=each, partition=part) for each in range(families) for part in (0, 1)]
    backwards = [Region(BACKWARD, family=each) for each in reversed(range(families))]
    order = [*forwards, *backwards]
    starts = {id(each): start for each, start in zip(order, joins * 2, strict=False)}
    rota = Rota()
    for call in range(150 * len(order)):
        region = order[call % len(order)]
        if call >= starts[id(region)]:
            region.call(rota)
        if all(each.decided for each in order):
            break

    assert all(each.decided for each in order)
    assert max(len(each.ran) for each in order) <= 3 * MOST_CALLS


class Spared(Region):
    """Needs no trees, once it has samples of all else; `early` is whether it was asked before these were all there."""

    early = False

    def ready(self) -> bool:
        known = Counter(self._fair)
        self.early |= not (self.turns.may_end or self.turns.exhausted)
        return min(known[GRAPH], known[KERNELS]) >= SAMPLES


@pytest.mark.parametrize("calls", [1, 2, 4, 8, 24])
def test_trees_are_not_tried_where_no_region_needs_them(calls: int) -> None:
    """A graph that is called many times a step has its samples before one that is called once has."""
    rota = Rota()
    many, once = (Spared(candidates=(GRAPH, TREES, KERNELS), family=family) for family in (1, 2))
    for _ in range(2):
        for _ in range(calls):
            many.call(rota)
        once.warm_up(rota)
    for _ in range(60):
        for _ in range(calls):
            many.call(rota)
        once.call(rota)

    assert many.decided
    assert once.decided
    assert TREES not in [*many.ran, *once.ran]
    assert (many.early, once.early) == (False, False)


def test_a_forward_that_has_left_and_lives_on_keeps_no_round_from_ending() -> None:
    """A deployed graph that was looked at stays where it is until the other half is known, too."""
    rota, forward, backward = Rota(), Region(FORWARD), Region(BACKWARD)
    for each in (forward, backward, forward):
        each.call(rota)
    rota.leave(forward)

    for _ in range(MOST_CALLS):
        backward.call(rota)

    assert backward.decided


def test_who_is_expected_is_waited_for_in_the_first_round() -> None:
    """As where 12 layers share a forward, whose backward nobody has seen yet."""
    rota, forward, backward = Rota(), Region(FORWARD), Region(BACKWARD)
    for each in (forward, backward):
        rota.expect(each)

    for _ in range(12):
        forward.call(rota)

    assert rota.round == 1
    backward.call(rota)
    forward.call(rota)
    assert rota.round == 2
