"""How the parts of a compiled graph are looked up, measured together, decided and put in place.

The clock stands in for the GPU's here (timing itself is tested in tests/gpu): everything else, from the plan to the slots of
Inductor's runner, is what runs in a program.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch

from pygraphd.client import _torch, checking, claims, fingerprint, looking, options, policy, profiler, region
from pygraphd.client.cache import Cache
from pygraphd.client.checking import DISPUTED
from pygraphd.client.recycling import Watched
from pygraphd.client.session import Session
from pygraphd.client.timeline import Entry
from pygraphd.schema.keys import Environment
from pygraphd.schema.locations import locate
from pygraphd.schema.messages import Deployment
from tests.daemon.conftest import Home

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.torch

ENOUGH = 40


class Clock(profiler.Profiler):
    """A profiler that finds what `times_us` says."""

    times_us: ClassVar = {Deployment.KERNELS: 100.0, Deployment.TREES: 50.0}
    span_us = 0.0
    """On the GPU, of each deployment; 0: as long as on the host."""
    spans_us: ClassVar[dict[Deployment, float]] = {}
    """On the GPU, of some deployments, if it is not `span_us`."""

    def start(self, deployment: Deployment, *, fair: bool = True, part: int = 0) -> Any:
        return deployment, fair, part

    def stop(self, call: Any, *, steady: bool = True) -> None:
        deployment, fair, part = call
        time = self.times_us[deployment]
        span = self.spans_us.get(deployment, self.span_us) or time
        entry = Entry(
            id(self), deployment, fair, idle=True, began_us=0.0, host_us=time, span_us=span, part=part
        )
        if fair:
            self._samples.setdefault(deployment, []).append(entry)


class Compiled:
    """What is read and set of a `CompiledFxGraph` with some partitions; `call` is Inductor's own callable."""

    def __init__(self, partitions: int) -> None:
        self.compiled_fn_runner = SimpleNamespace(partitions=[lambda inputs: "launched"] * partitions)
        self.inductor_post_grad_graph_str = "  a = torch.ops.aten.sin.default(b)"
        self.source_code = ""
        self.device_types = {"cuda"}
        self.device_idxs = {0}
        self.mutated_input_idxs: list[int] = []
        self.disabled_cudagraphs_reason = None
        self.cudagraph_info = SimpleNamespace(cudagraph_fail_reasons=[])
        self.partition_maps = [
            SimpleNamespace(input_index_mapping=[], output_index_mapping=[]) for _ in range(partitions)
        ]
        self.fx_kwargs: dict[str, Any] = {}
        self.inputs_to_check = [0]
        self._defers_input_alignment = False
        runner = self.compiled_fn_runner
        # As Inductor's: of the generated code, and not of this object.
        self.call = lambda inputs: [partition(inputs) for partition in runner.partitions]
        self.current_callable: Any = self.call


def trees(runnable: Any, **kwargs: Any) -> Any:
    return lambda inputs: "captured"


def compile_whole(session: Session, *, backward: bool, box: object, **facts: Any) -> Compiled:
    """Compile a graph of which Inductor captures nothing."""
    compiled = Compiled(1)
    vars(compiled).update(facts)
    kwargs = {"is_backward": backward, "cudagraphs": False, "boxed_forward_device_index": box}
    plan = session.plan(compiled, kwargs)
    plan.complete(compiled)
    return compiled


def compile_once(
    session: Session, partitions: int, *, backward: bool, box: object, text: str | None = None
) -> Compiled:
    compiled = Compiled(partitions)
    compiled.inductor_post_grad_graph_str = text or compiled.inductor_post_grad_graph_str
    kwargs = {"is_backward": backward, "cudagraphs": True, "boxed_forward_device_index": box}
    plan = session.plan(compiled, kwargs)
    slots = compiled.compiled_fn_runner.partitions
    slots[:] = [
        plan.cudagraphify(trees, slot, {"device_index": 0, "is_backward": backward}) for slot in slots
    ]
    plan.complete(compiled)
    return compiled


def pretend_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region, "Profiler", Clock)
    monkeypatch.setattr(checking, "Profiler", Clock)
    monkeypatch.setattr(looking, "Profiler", Clock)
    monkeypatch.setattr(Session, "why_not_launch", lambda self, candidates: None)
    monkeypatch.setattr(region.Region, "_why_not_measure", lambda self: None)
    monkeypatch.setattr(region, "has_cpu_tensor", lambda inputs: False)  # they stand for others
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(_torch, "note_backward", lambda index: None)
    environment = Environment("GPU", "9.0", 1, 1, "", "t", "t", "c", "d", "c")
    monkeypatch.setattr(fingerprint, "environment", lambda index: environment)


@pytest.fixture(autouse=True)
def relocation_where_it_is_meant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this machine not miss what it cannot have."""
    if "relocating" not in request.fixturenames:
        monkeypatch.setenv(options.RELOCATE, "0")


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    import torch._inductor.config as inductor_config

    pretend_there_is_a_gpu(monkeypatch)
    with inductor_config.patch({"triton.cudagraphs": True}):
        yield Session(locate({"PYGRAPHD_HOME": str(tmp_path)}))


def sources(session: Session) -> set[tuple[str, str]]:
    return {(each["deployment"], each["source"]) for each in session.report.summary()["decisions"]}


def run(forward: Compiled, backward: Compiled, steps: int = ENOUGH) -> list[tuple[Any, Any]]:
    x = torch.ones(1)
    return [(forward.current_callable([x]), backward.current_callable([x])) for _ in range(steps)]


def test_all_parts_are_decided_and_ours_are_gone(session: Session) -> None:
    box = SimpleNamespace(value=0)
    forward = compile_once(session, 3, backward=False, box=box)
    backward = compile_once(session, 2, backward=True, box=box)
    assert (
        forward.current_callable != forward.call
    )  # misaligned inputs are copied while a part may be launched

    results = run(forward, backward)

    for ahead, behind in results:
        assert len({*ahead, *behind}) == 1
    assert results[-1] == (["captured"] * 3, ["captured"] * 2)
    assert forward.current_callable == forward.call
    slots = forward.compiled_fn_runner.partitions + backward.compiled_fn_runner.partitions
    assert not any(isinstance(slot, region.Region) for slot in slots)
    assert session.report.counts["measured"] == 5
    assert sources(session) == {("TREES", "measured")}
    assert session.report.failures.keys() <= {"daemon: no daemon"}


def test_the_next_session_is_told_and_measures_nothing(session: Session) -> None:
    box = SimpleNamespace(value=0)
    run(compile_once(session, 2, backward=False, box=box), compile_once(session, 1, backward=True, box=box))
    second = Session(session.locations)

    forward = compile_once(second, 2, backward=False, box=box)
    backward = compile_once(second, 1, backward=True, box=box)

    assert run(forward, backward, 3) == [(["captured"] * 2, ["captured"])] * 3
    assert (second.report.counts["hits"], second.report.counts["measured"]) == (3, 0)
    assert sources(second) == {("TREES", "cache")}
    assert forward.current_callable == forward.call


def test_of_two_processes_one_measures_and_the_other_takes_up_its_answer(
    session: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(claims, "FIRST_LOOK_S", 0.0)
    monkeypatch.setattr(claims, "LAST_LOOK_S", 0.0)
    home = Home(tmp_path)
    try:
        home.start()
        first, second = Session(session.locations), Session(session.locations)
        boxes = [SimpleNamespace(value=0), SimpleNamespace(value=0)]
        models = [
            (compile_once(each, 2, backward=False, box=box), compile_once(each, 1, backward=True, box=box))
            for each, box in zip((first, second), boxes, strict=True)
        ]
        run(*models[0], region.WARM_UP_CALLS + 1)  # the first begins to measure

        waiting = run(*models[1], ENOUGH)
        run(*models[0], ENOUGH)
        told = run(*models[1], 5)
    finally:
        home.close()

    assert waiting == [(["launched"] * 2, ["launched"])] * ENOUGH
    assert told[-1] == (["captured"] * 2, ["captured"])
    counts = second.report.counts
    assert (first.report.counts["measured"], first.report.counts["waited"]) == (3, 0)
    assert (counts["measured"], counts["waited"], counts["adopted"], counts["recorded"]) == (0, 3, 3, 0)
    assert second.report.fallbacks.keys() == {region.WAITING}
    assert second.report.summary()["deployed"] == {"KERNELS": 0, "TREES": 3, "GRAPH": 0}
    assert first.report.failures == second.report.failures == {}


def test_what_is_refreshed_is_measured_anew_and_replaces_what_was_there(
    session: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def train(steps: int = ENOUGH) -> Session:
        each, box = Session(session.locations), SimpleNamespace(value=0)
        run(
            compile_once(each, 1, backward=False, box=box),
            compile_once(each, 1, backward=True, box=box),
            steps,
        )
        return each

    home = Home(tmp_path)
    try:
        home.start()
        train()
        monkeypatch.setattr(Clock, "times_us", {Deployment.KERNELS: 50.0, Deployment.TREES: 100.0})
        with monkeypatch.context() as refreshing:
            refreshing.setenv(options.REFRESH, "1")
            anew = train()
        told = train(3)
    finally:
        home.close()

    counts = anew.report.counts
    assert (counts["hits"], counts["measured"], counts["adopted"]) == (0, 2, 0)
    assert anew.report.summary()["deployed"]["KERNELS"] == 2
    assert (told.report.counts["hits"], told.report.summary()["deployed"]["KERNELS"]) == (2, 2)


def trained(session: Session, steps: int, host: str | None = None) -> tuple[Session, list[tuple[Any, Any]]]:
    """Train in a process of its own, so to say; of another host if one is named."""
    each, box = Session(session.locations), SimpleNamespace(value=0)
    if host is not None:
        each.cache = Cache(each.locations, host, each.report)
    models = (
        compile_once(each, 2, backward=False, box=box),
        compile_once(each, 1, backward=True, box=box),
    )
    return each, run(*models, steps)


def test_a_decision_from_elsewhere_is_used_at_once_and_stays_if_it_holds(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(session, ENOUGH, "elsewhere")
    monkeypatch.setattr(Clock, "times_us", {Deployment.KERNELS: 100.0, Deployment.TREES: 59.9})

    told, steps = trained(session, ENOUGH)

    assert steps == [(["captured"] * 2, ["captured"])] * ENOUGH
    counts = told.report.counts
    assert (counts["hits"], counts["checked"], counts["disputed"], counts["measured"]) == (3, 3, 0, 0)
    assert counts["spooled"] == 0
    summary = told.report.summary()
    assert summary["deployed"] == {"KERNELS": 0, "TREES": 3, "GRAPH": 0}
    assert {each["source"] for each in summary["decisions"]} == {"cache"}
    assert told.report.failures.keys() <= {"daemon: no daemon"}


@pytest.mark.parametrize("trees_us", [61.0, 39.0, 200.0])
def test_a_decision_from_elsewhere_that_does_not_hold_is_measured_anew(
    session: Session, monkeypatch: pytest.MonkeyPatch, trees_us: float
) -> None:
    trained(session, ENOUGH, "elsewhere")
    monkeypatch.setattr(Clock, "times_us", {Deployment.KERNELS: 100.0, Deployment.TREES: trees_us})

    told, steps = trained(session, 2 * ENOUGH)

    runs = "captured" if trees_us < 100 else "launched"
    assert (steps[0], steps[-1]) == ((["captured"] * 2, ["captured"]), ([runs] * 2, [runs]))
    counts = told.report.counts
    assert (counts["checked"], counts["disputed"], counts["measured"], counts["spooled"]) == (3, 3, 3, 3)
    assert told.report.fallbacks == {DISPUTED: 3}
    assert len(told.report.summary()["decisions"]) == 3
    again, _ = trained(session, ENOUGH)
    assert (again.report.counts["hits"], again.report.counts["checked"]) == (3, 0)


def test_a_backward_that_is_known_to_be_in_trees_is_measured_again_with_its_forward(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its forward is unknown and turns out to be launched: what trees would save for it lies elsewhere each time."""
    box = SimpleNamespace(value=0)
    run(compile_once(session, 1, backward=False, box=box), compile_once(session, 1, backward=True, box=box))
    monkeypatch.setattr(Clock, "times_us", {Deployment.KERNELS: 50.0, Deployment.TREES: 100.0})
    told, box = Session(session.locations), SimpleNamespace(value=0)
    forward = compile_once(told, 1, backward=False, box=box, text="  a = torch.ops.aten.cos.default(b)")
    backward = compile_once(told, 1, backward=True, box=box)

    steps = run(forward, backward)

    assert (told.report.counts["hits"], told.report.counts["measured"]) == (1, 2)
    assert all(ahead == behind for ahead, behind in steps)
    assert steps[-1] == (["launched"], ["launched"])
    assert told.report.counts["spooled"] == 2


def test_what_was_checked_and_measured_anew_is_gone_from_a_graph_in_one_piece(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without partitions Inductor puts what runs the graph where its callers find it, and there the wrapper goes, too."""

    def compile_in_one_piece(each: Session) -> Compiled:
        compiled = Compiled(1)
        kwargs = {"is_backward": False, "cudagraphs": True, "boxed_forward_device_index": None}
        plan = each.plan(compiled, kwargs)
        ways = {"device_index": 0, "is_backward": False}
        compiled.current_callable = plan.cudagraphify(trees, compiled.call, ways)
        plan.complete(compiled)
        return compiled

    elsewhere = Session(session.locations)
    elsewhere.cache = Cache(elsewhere.locations, "elsewhere", elsewhere.report)
    first = compile_in_one_piece(elsewhere)
    for _ in range(ENOUGH):
        first.current_callable([torch.ones(1)])
    monkeypatch.setattr(Clock, "times_us", {Deployment.KERNELS: 100.0, Deployment.TREES: 70.0})
    told = Session(session.locations)
    compiled = compile_in_one_piece(told)

    results = [compiled.current_callable([torch.ones(1)]) for _ in range(2 * ENOUGH)]

    assert told.report.counts["disputed"] == told.report.counts["measured"] == 1
    assert results[-1] == "captured"
    assert not isinstance(compiled.current_callable, checking.Checked | region.Region)


@pytest.mark.parametrize(("trust", "hits", "measured"), [("all", 3, 0), ("local", 0, 3)])
def test_what_is_trusted_can_be_set(
    session: Session, monkeypatch: pytest.MonkeyPatch, trust: str, hits: int, measured: int
) -> None:
    trained(session, ENOUGH, "elsewhere")
    monkeypatch.setenv(options.TRUST, trust)

    told, steps = trained(session, ENOUGH)

    counts = told.report.counts
    assert (counts["hits"], counts["measured"], counts["checked"]) == (hits, measured, 0)
    assert steps[-1] == (["captured"] * 2, ["captured"])


def test_a_program_that_ends_before_the_check_does_has_run_as_it_was_told(session: Session) -> None:
    trained(session, ENOUGH, "elsewhere")

    told, _ = trained(session, 5)
    told.close()

    summary = told.report.summary()
    assert (summary["checked"], summary["deployed"]["TREES"], summary["spooled"]) == (3, 3, 0)


def test_who_waits_to_the_end_records_nothing(session: Session, tmp_path: Path) -> None:
    home = Home(tmp_path)
    try:
        home.start()
        first, second = Session(session.locations), Session(session.locations)
        for each in (first, second):
            run(
                compile_once(each, 1, backward=False, box=(box := SimpleNamespace(value=0))),
                compile_once(each, 1, backward=True, box=box),
                10,
            )
        second.close()
        first.close()
    finally:
        home.close()

    assert second.report.summary()["reasons"] == {policy.LEFT_TO_OTHERS: 2}
    assert (second.report.counts["recorded"], first.report.counts["recorded"]) == (0, 2)


def test_what_is_launched_keeps_the_copying_of_misaligned_inputs(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Clock, "times_us", {Deployment.KERNELS: 50.0, Deployment.TREES: 100.0})
    box = SimpleNamespace(value=0)
    forward = compile_once(session, 1, backward=False, box=box)
    backward = compile_once(session, 1, backward=True, box=box)

    results = run(forward, backward)

    assert results[-1] == (["launched"], ["launched"])
    assert forward.current_callable != forward.call
    assert session.report.summary()["deployed"] == {"KERNELS": 2, "TREES": 0, "GRAPH": 0}


def test_a_program_that_ends_early_says_how_often_it_called(session: Session) -> None:
    box = SimpleNamespace(value=0)
    run(
        compile_once(session, 1, backward=False, box=box),
        compile_once(session, 1, backward=True, box=box),
        10,
    )
    session.close()
    second = Session(session.locations)
    run(compile_once(second, 1, backward=False, box=box), compile_once(second, 1, backward=True, box=box), 10)
    second.close()

    assert (second.report.counts["hits"], second.report.counts["measured"]) == (2, 0)
    assert second.report.counts["spooled"] == 0
    assert second.report.summary()["deployed"]["KERNELS"] == 2
    assert sources(session) == sources(second) == {("KERNELS", "unfinished")}


def test_attention_that_saves_its_state_elsewhere_if_captured_is_left_to_the_trees(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its backward would read an address of the CPU's on the GPU, or the other way round."""
    monkeypatch.setattr(Clock, "times_us", {Deployment.KERNELS: 50.0, Deployment.TREES: 100.0})
    text = "  a = torch.ops.aten._scaled_dot_product_efficient_attention.default(q, k, v, None, True, 0.1)"
    box = SimpleNamespace(value=0)
    forward = compile_once(session, 1, backward=False, box=box, text=text)
    backward = compile_once(session, 1, backward=True, box=box, text=text)

    assert run(forward, backward, ENOUGH) == [(["captured"], ["captured"])] * ENOUGH
    assert session.report.summary()["reasons"] == {policy.CAPTURED_DIFFERENTLY: 2}
    assert session.report.counts["measured"] == 0

    second = Session(session.locations)
    compile_once(second, 1, backward=False, box=box, text=text)
    assert (second.report.counts["hits"], second.report.counts["spooled"]) == (1, 0)
    assert (sources(session), sources(second)) == ({("TREES", "rule")}, {("TREES", "cache")})


# --- relocatable graphs ------------------------------------------------------------------------------------------


class Relocating:
    """Stands where relocatable graphs do; recording itself is tested in tests/relocation and tests/gpu."""

    def __init__(self, refusal: str | None) -> None:
        self._will_refuse = refusal
        self.refusal: str | None = None
        self.for_good = True
        self.calls = self.prepared = 0
        self.closed = False
        self.by_size: dict[tuple[int, ...], Relocating] = {}

    @property
    def refused_for_good(self) -> bool:
        return self.refusal is not None and self.for_good

    @property
    def refused_for_now(self) -> str | None:
        return None if self.for_good else self.refusal

    def __call__(self, inputs: list[Any]) -> str:
        self.calls += 1
        self.refusal = self._will_refuse
        return "launched" if self.refusal else "relocated"

    @property
    def bytes(self) -> int:
        return 0

    def at(self, sizes: tuple[int, ...]) -> Relocating:
        return self.by_size.setdefault(sizes, Relocating(self._will_refuse))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def relocating(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Relocating]]:
    """Offer relocatable graphs, which refuse for the partitions whose numbers are put in `REFUSING`."""
    made: list[Relocating] = []

    def relocatable(self: Session, launch: Any, device_index: int, *_: Any) -> Relocating:
        made.append(Relocating("verification: output 0 differs" if len(made) in REFUSING else None))
        return made[-1]

    monkeypatch.setattr(Session, "relocatable", relocatable)
    monkeypatch.setattr(
        Session, "_recorder_of", lambda self, _index: object() if self.options.relocate else None
    )
    monkeypatch.setattr(Clock, "times_us", {**Clock.times_us, Deployment.GRAPH: 40.0})
    yield made
    REFUSING.clear()


def compile_pair(session: Session) -> tuple[Compiled, Compiled]:
    """Compile a forward and its backward, of one part each."""
    box = SimpleNamespace(value=0)
    forward = compile_once(session, 1, backward=False, box=box)
    return forward, compile_once(session, 1, backward=True, box=box)


REFUSING: set[int] = set()
MORE = 60
"""Calls that end measuring of three deployments."""


def test_all_parts_are_relocated_where_that_is_fastest(
    session: Session, relocating: list[Relocating]
) -> None:
    box = SimpleNamespace(value=0)
    forward = compile_once(session, 2, backward=False, box=box)
    backward = compile_once(session, 1, backward=True, box=box)

    results = run(forward, backward, MORE)

    for ahead, behind in results:
        assert len({*ahead, *behind}) == 1
    assert {ahead[0] for ahead, _ in results} == {"launched", "relocated"}, "trees need not be tried"
    assert results[-1] == (["relocated"] * 2, ["relocated"])
    assert forward.compiled_fn_runner.partitions == relocating[:2]
    assert forward.current_callable != forward.call  # kernels were compiled for aligned inputs
    assert not any(each.closed for each in relocating)
    assert session.report.summary()["deployed"] == {"KERNELS": 0, "TREES": 0, "GRAPH": 3}


@pytest.mark.parametrize(("trees_us", "runs"), [(50.0, "captured"), (90.0, "relocated")])
def test_trees_are_tried_where_relocating_wins_by_little(
    session: Session,
    relocating: list[Relocating],
    monkeypatch: pytest.MonkeyPatch,
    trees_us: float,
    runs: str,
) -> None:
    times_us = {Deployment.KERNELS: 100.0, Deployment.TREES: trees_us, Deployment.GRAPH: 80.0}
    monkeypatch.setattr(Clock, "times_us", times_us)
    monkeypatch.setattr(Clock, "span_us", 10.0)

    results = run(*compile_pair(session), MORE)

    assert {ahead[0] for ahead, _ in results} == {"launched", "captured", "relocated"}
    assert results[-1] == ([runs], [runs])


def test_where_trees_are_faster_nothing_of_ours_is_left_in_the_way(
    session: Session, relocating: list[Relocating], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Clock, "times_us", {**Clock.times_us, Deployment.GRAPH: 500.0})
    box = SimpleNamespace(value=0)
    forward = compile_once(session, 2, backward=False, box=box)
    backward = compile_once(session, 1, backward=True, box=box)

    results = run(forward, backward, MORE)

    assert results[-1] == (["captured"] * 2, ["captured"])
    assert all(each.closed for each in relocating)
    again = Session(session.locations)
    box = SimpleNamespace(value=0)
    known = compile_once(again, 2, backward=False, box=box), compile_once(again, 1, backward=True, box=box)
    for compiled in (forward, backward, *known):
        assert compiled.current_callable == compiled.call


def test_a_relocated_graph_is_a_hit_for_the_next_session(
    session: Session, relocating: list[Relocating]
) -> None:
    run(*compile_pair(session), MORE)
    second = Session(session.locations)

    forward, backward = compile_pair(second)

    assert run(forward, backward, 3) == [(["relocated"], ["relocated"])] * 3
    assert forward.current_callable != forward.call
    assert (second.report.counts["hits"], second.report.counts["measured"]) == (2, 0)


def test_what_was_relocated_elsewhere_is_measured_where_it_cannot_be(
    session: Session, relocating: list[Relocating], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(*compile_pair(session), MORE)
    monkeypatch.setattr(Session, "relocatable", lambda *_: None)
    second = Session(session.locations)

    assert run(*compile_pair(second), MORE)[-1] == (["captured"], ["captured"])
    assert second.report.counts["measured"] == 2


@pytest.mark.parametrize("refusing", [{0}, {1}, {2}, {0, 1, 2}], ids=str)
def test_a_part_that_refuses_is_launched_in_its_turns_and_holds_nobody_up(
    session: Session, relocating: list[Relocating], refusing: set[int]
) -> None:
    REFUSING.update(refusing)
    box = SimpleNamespace(value=0)
    forward = compile_once(session, 2, backward=False, box=box)
    backward = compile_once(session, 1, backward=True, box=box)

    *_, (ahead, behind) = run(forward, backward, MORE)

    assert session.report.counts["measured"] == 3
    # A backward gains more in trees than its forward loses there, and goes there only with all of it.
    captured = refusing if 2 not in refusing else {0, 1, 2}
    for index, result in enumerate([*ahead, *behind]):
        assert result == ("captured" if index in captured else "relocated")
        assert relocating[index].closed is (index in captured)
        assert (relocating[index].calls == 1) is (index in refusing)


@pytest.fixture
def default_mode(session: Session, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import torch._inductor.config as inductor_config

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with inductor_config.patch({"triton.cudagraphs": False}):
        yield


def compile_whole_pair(session: Session) -> tuple[Compiled, Compiled]:
    box = SimpleNamespace(value=None)
    return compile_whole(session, backward=False, box=box), compile_whole(session, backward=True, box=box)


@pytest.mark.usefixtures("default_mode")
def test_without_trees_a_whole_graph_is_relocated_or_launched(
    session: Session, relocating: list[Relocating]
) -> None:
    forward, backward = compile_whole_pair(session)

    results = run(forward, backward, MORE)

    assert {str(ahead) for ahead, _ in results} == {"['launched']", "relocated"}
    assert all((ahead == "relocated") is (behind == "relocated") for ahead, behind in results)
    assert results[-1] == ("relocated", "relocated")
    assert session.report.summary()["deployed"] == {"KERNELS": 0, "TREES": 0, "GRAPH": 2}
    second = Session(session.locations)
    assert run(*compile_whole_pair(second), 2) == [("relocated", "relocated")] * 2
    assert (second.report.counts["hits"], second.report.counts["measured"]) == (2, 0)


@pytest.mark.usefixtures("default_mode")
def test_a_whole_graph_that_refuses_is_launched(session: Session, relocating: list[Relocating]) -> None:
    REFUSING.update({0, 1})

    results = run(*compile_whole_pair(session), MORE)

    assert results[-1] == (["launched"], ["launched"])
    assert session.report.summary()["deployed"] == {"KERNELS": 2, "TREES": 0, "GRAPH": 0}
    assert [each.calls for each in relocating] == [1, 1]
    reason = "it cannot be relocated: verification: output 0 differs"
    assert session.report.summary()["reasons"] == {reason: 2}
    second = Session(session.locations)
    assert run(*compile_whole_pair(second), 1) == [(["launched"], ["launched"])]
    counts = second.report.counts
    assert (counts["hits"], counts["measured"], len(relocating)) == (2, 0, 4)
    assert [each.calls for each in relocating[2:]] == [0, 0]


@pytest.mark.parametrize("for_good", [True, False])
def test_what_is_decided_while_relocating_is_refused_for_now_is_not_the_last_word(
    session: Session, relocating: list[Relocating], for_good: bool
) -> None:
    REFUSING.update({0, 1})
    pair = compile_pair(session)
    for each in relocating:
        each.for_good = for_good
    assert run(*pair, MORE)[-1] == (["captured"], ["captured"])
    REFUSING.clear()

    second = Session(session.locations)
    ran = run(*compile_pair(second), MORE)[-1]

    assert ran == ((["captured"], ["captured"]) if for_good else (["relocated"], ["relocated"]))
    assert second.report.counts["measured"] == (0 if for_good else 2)
    reasons = session.report.summary()["reasons"]
    assert any("could not be relocated: verification" in each for each in reasons) == (not for_good)


def refused_for_now(session: Session, relocating: list[Relocating], reason: str, number: int = 2) -> Session:
    """Run a forward and its backward of which the first `number` cannot be relocated for the time being."""
    REFUSING.update(range(len(relocating), len(relocating) + number))
    before = len(relocating)
    pair = compile_pair(session)
    for each in relocating[before : before + number]:
        each.for_good, each._will_refuse = False, reason
    run(*pair, MORE)
    return session


@pytest.mark.parametrize(
    ("first", "second", "measured"),
    [
        ("the allocator is another one", "the allocator is another one", 0),
        ("out of memory. Tried to allocate 2.00 GiB", "out of memory. Tried to allocate 20.50 MiB", 0),
        ("the allocator is another one", "there is no room", 2),
    ],
)
def test_a_process_that_is_refused_as_the_one_before_was_takes_what_that_has_found(
    session: Session, relocating: list[Relocating], first: str, second: str, measured: int
) -> None:
    refused_for_now(session, relocating, first)
    following = refused_for_now(Session(session.locations), relocating, second)

    assert following.report.counts["measured"] == measured
    assert following.report.counts["adopted"] == 2 - measured
    assert following.report.summary()["deployed"] == {"KERNELS": 0, "TREES": 2, "GRAPH": 0}
    assert sources(following) == {("TREES", "measured" if measured else "cache")}
    assert all(second in each or first in each for each in following.report.summary()["reasons"])

    third = Session(session.locations)
    REFUSING.clear()
    assert run(*compile_pair(third), MORE)[-1] == (["relocated"], ["relocated"])
    assert third.report.counts["measured"] == 2


def test_what_was_found_where_relocating_was_refused_is_taken_after_a_few_calls_and_looked_at_again(
    session: Session, relocating: list[Relocating]
) -> None:
    refused_for_now(session, relocating, "no room")
    following = Session(session.locations)
    REFUSING.update({2, 3})
    pair = compile_pair(following)
    for each in relocating[2:]:
        each.for_good, each._will_refuse = False, "no room"

    assert run(*pair, 6)[-1] == (["captured"], ["captured"])
    assert len(following.drift._looks) == 2


@pytest.mark.parametrize("setting", [{"PYGRAPH_REFRESH": "1"}, {}])
def test_what_was_found_where_relocating_was_refused_is_not_taken_by_who_asks_for_it_anew(
    session: Session, relocating: list[Relocating], monkeypatch: pytest.MonkeyPatch, setting: dict[str, str]
) -> None:
    refused_for_now(session, relocating, "no room")
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    following = refused_for_now(Session(session.locations), relocating, "no room")

    assert following.report.counts["measured"] == (2 if setting else 0)


def test_what_was_found_by_somebody_else_where_relocating_was_refused_is_measured(
    session: Session, relocating: list[Relocating], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would have to be checked, which costs as much."""
    refused_for_now(session, relocating, "no room")
    monkeypatch.setattr(Session, "must_check", lambda self, entry: True)

    assert refused_for_now(Session(session.locations), relocating, "no room").report.counts["measured"] == 2


def test_a_backward_is_not_put_into_trees_where_its_forward_is_relocated(
    session: Session, relocating: list[Relocating]
) -> None:
    """Both were refused before; now the backward alone is."""
    refused_for_now(session, relocating, "no room")
    following = Session(session.locations)
    REFUSING.clear()
    REFUSING.add(3)
    pair = compile_pair(following)
    relocating[3].for_good, relocating[3]._will_refuse = False, "no room"
    run(*pair, MORE)

    assert following.report.counts["adopted"] == 0
    assert following.report.counts["measured"] == 2


@pytest.mark.usefixtures("default_mode")
def test_where_nothing_else_is_offered_the_summary_says_why_relocating_is_refused_for_now(
    session: Session, relocating: list[Relocating]
) -> None:
    REFUSING.update({0, 1})
    pair = compile_whole_pair(session)
    for each in relocating:
        each.for_good = False
    run(*pair, MORE)

    reasons = session.report.summary()["reasons"]
    assert reasons == {"it cannot be relocated: verification: output 0 differs": 2}
    second = Session(session.locations)
    pair = compile_whole_pair(second)
    assert run(*pair, 5)[-1] == ("relocated", "relocated"), (
        "tried at once, and not after as many calls as were launched before"
    )


@pytest.mark.usefixtures("default_mode")
def test_what_is_refused_for_now_is_tried_again_by_the_next_process(
    session: Session, relocating: list[Relocating]
) -> None:
    REFUSING.update({0, 1})
    pair = compile_whole_pair(session)
    for each in relocating:
        each.for_good = False
    assert run(*pair, MORE)[-1] == (["launched"], ["launched"])

    assert run(*compile_whole_pair(Session(session.locations)), MORE)[-1] == ("relocated", "relocated")


@pytest.mark.usefixtures("default_mode")
@pytest.mark.parametrize(
    "facts",
    [
        {"device_types": {"cuda", "cpu"}},
        {"device_idxs": {0, 1}},
        {
            "inductor_post_grad_graph_str": "a = torch.ops.aten._scaled_dot_product_efficient_attention.default(b)"
        },
    ],
    ids=["a part on the CPU", "two devices", "captured differently"],
)
def test_a_graph_that_a_recording_would_not_hold_is_not_offered_one(
    session: Session, relocating: list[Relocating], facts: dict[str, Any]
) -> None:
    compiled = compile_whole(session, backward=False, box=SimpleNamespace(value=None), **facts)

    assert compiled.current_callable == compiled.call
    assert relocating == []
    assert session.report.summary()["reasons"] == {policy.MODE_WITHOUT_TREES: 1}


@pytest.mark.usefixtures("default_mode")
def test_what_was_launched_for_want_of_relocation_is_looked_at_anew_where_there_is_some(
    session: Session, relocating: list[Relocating], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as without:
        without.setenv(options.RELOCATE, "0")
        without.setattr(Session, "relocatable", lambda *_: None)
        compile_whole_pair(Session(session.locations))
        second = Session(session.locations)
        compile_whole_pair(second)
        assert second.report.counts["hits"] == 2
    third = Session(session.locations)

    assert run(*compile_whole_pair(third), MORE)[-1] == ("relocated", "relocated")
    assert (third.report.counts["hits"], third.report.counts["measured"]) == (0, 2)


def test_graphs_with_and_without_trees_are_measured_in_one_program(
    session: Session, relocating: list[Relocating]
) -> None:
    """Each is launched in the turns that it has nothing else for, and neither holds the other up."""
    box = SimpleNamespace(value=0)
    forward = compile_once(session, 1, backward=False, box=box)
    backward = compile_whole(session, backward=True, box=box)

    results = run(forward, backward, MORE)

    assert results[-1] == (["relocated"], "relocated")
    assert session.report.counts["measured"] == 2


@pytest.mark.usefixtures("default_mode", "relocating")
@pytest.mark.parametrize("facts", [{"device_types": {"cuda", "cpu"}}, {"device_idxs": {0, 1}}])
def test_what_cannot_be_relocated_whole_is_a_hit(session: Session, facts: dict[str, Any]) -> None:
    compile_whole(session, backward=False, box=SimpleNamespace(value=0), **facts)
    assert (session.report.counts["hits"], session.report.counts["spooled"]) == (0, 1)
    second = Session(session.locations)

    compile_whole(second, backward=False, box=SimpleNamespace(value=0), **facts)

    assert (second.report.counts["hits"], second.report.counts["spooled"]) == (1, 0)


def test_both_halves_are_observed_where_the_forward_alone_is_relocated(
    session: Session, relocating: list[Relocating], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its backward would not say what is free again, and the forward kept no memory."""
    monkeypatch.setitem(Clock.times_us, Deployment.TREES, 90.0)  # they gain less than the forward would lose
    REFUSING.add(1)
    pair = compile_pair(session)
    assert run(*pair, MORE)[-1] == (["relocated"], ["launched"])
    assert len(relocating) == 2
    known = compile_pair(Session(session.locations))

    assert run(*known, 1) == [(["relocated"], ["launched"])]

    for compiled in (*pair, *known):
        assert isinstance(inner(compiled), Watched)


def inner(compiled: Compiled) -> Any:
    """Return what Inductor's copying of misaligned inputs surrounds."""
    around = compiled.current_callable
    cells = [cell.cell_contents for cell in getattr(around, "__closure__", None) or ()]
    return next((cell for cell in cells if isinstance(cell, Watched)), around)
