"""How the parts of a compiled graph are looked up, measured together, decided and put in place.

The clock stands in for the GPU's here (timing itself is tested in tests/gpu): everything else, from the plan to the slots of
Inductor's runner, is what runs in a program.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._inductor.cudagraph_utils import BoxedDeviceIndex

from pygraphd.client.autotune import partition_trial, trial
from pygraphd.client.autotune.validation import DISPUTED
from pygraphd.client.backend import torch_private
from pygraphd.client.decisions import fingerprint, leases, rules
from pygraphd.client.decisions.service import Cache
from pygraphd.client.dispatch.compiled_graph import CAPTURED_BY_OTHERS
from pygraphd.client.frontend import runtime as sessions
from pygraphd.client.frontend import settings
from pygraphd.client.frontend.runtime import Session
from pygraphd.client.hook import Hook
from pygraphd.schema.keys import Environment
from pygraphd.schema.locations import locate
from pygraphd.schema.messages import Decision, Deployment
from pygraphd.schema.policy import NOISY, POLICY_VERSION
from tests.daemon.conftest import Home
from tests.support.clock import Clock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.torch

ENOUGH = 40
UNKNOWN_STATE = "a = torch.ops.aten._scaled_dot_product_efficient_attention.default(b)"
REFUSING: set[int] = set()
"""Partitions, counted from the first that is compiled, that cannot be recorded."""


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


def compile_whole(session: Session, *, backward: bool, box: object, **facts: Any) -> Compiled:
    """Compile a graph of which Inductor captures nothing."""
    compiled = Compiled(1)
    vars(compiled).update(facts)
    kwargs = {"is_backward": backward, "cudagraphs": False, "boxed_forward_device_index": box}
    plan = session.plan(compiled, kwargs)
    assert plan is not None
    plan.complete(compiled)
    return compiled


def compile_once(
    session: Session, partitions: int, *, backward: bool, box: object, text: str | None = None
) -> Compiled:
    compiled = Compiled(partitions)
    compiled.inductor_post_grad_graph_str = text or compiled.inductor_post_grad_graph_str
    kwargs = {"is_backward": backward, "cudagraphs": True, "boxed_forward_device_index": box}
    plan = session.plan(compiled, kwargs)
    assert plan is not None
    slots = compiled.compiled_fn_runner.partitions
    slots[:] = [plan.cudagraphify(slot, {"device_index": 0, "is_backward": backward}) for slot in slots]
    plan.complete(compiled)
    return compiled


class Relocating:
    """Stands where relocatable graphs do; recording itself is tested in tests/client/recording and tests/gpu."""

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

    def __call__(self, inputs: list[Any]) -> str:
        self.calls += 1
        self.refusal = self._will_refuse
        return "launched" if self.refusal else "relocated"

    def at(self, sizes: tuple[int, ...]) -> Relocating:
        return self.by_size.setdefault(sizes, Relocating(self._will_refuse))

    def trim(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def pretend_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[Relocating]:
    """Have there be one, on which what is recorded is told; it refuses the partitions whose numbers are in `REFUSING`."""
    made: list[Relocating] = []

    def relocatable(self: Session, launch: Any, device_index: int, *_: Any) -> Relocating:
        made.append(Relocating("verification: output 0 differs" if len(made) in REFUSING else None))
        return made[-1]

    monkeypatch.setattr(Session, "relocatable", relocatable)
    monkeypatch.setattr(Session, "_recorder_of", lambda self, _index: object())
    monkeypatch.setattr(trial, "Sampler", Clock)
    monkeypatch.setattr(partition_trial.Region, "_why_not_measure", lambda self: None)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    environment = Environment("GPU", "9.0", 1, 1, "", "t", "t", "c", "d", "c")
    monkeypatch.setattr(fingerprint, "environment", lambda index: environment)
    return made


@pytest.fixture
def relocating(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Relocating]]:
    """Return what stands for relocatable graphs, in the order in which it is made."""
    yield pretend_there_is_a_gpu(monkeypatch)
    REFUSING.clear()


@pytest.fixture
def session(tmp_path: Path, relocating: list[Relocating]) -> Iterator[Session]:
    import torch._inductor.config as inductor_config

    with inductor_config.patch({"triton.cudagraphs": True}):
        yield Session(locate({"PYGRAPHD_HOME": str(tmp_path)}))


def sources(session: Session) -> set[tuple[str, str]]:
    return {(each["deployment"], each["source"]) for each in session.report.summary()["decisions"]}


def run(forward: Compiled, backward: Compiled, steps: int = ENOUGH) -> list[tuple[Any, Any]]:
    x = torch.ones(1)
    return [(forward.current_callable([x]), backward.current_callable([x])) for _ in range(steps)]


def test_all_parts_are_decided_and_what_measured_is_gone(
    session: Session, relocating: list[Relocating]
) -> None:
    box = BoxedDeviceIndex(0)
    forward = compile_once(session, 3, backward=False, box=box)
    backward = compile_once(session, 2, backward=True, box=box)
    assert forward.current_callable != forward.call  # misaligned inputs are copied: nobody else does so

    results = run(forward, backward)

    assert results[0] == (["launched"] * 3, ["launched"] * 2)
    assert results[-1] == (["relocated"] * 3, ["relocated"] * 2)
    slots = forward.compiled_fn_runner.partitions + backward.compiled_fn_runner.partitions
    assert [slot.run for slot in slots] == relocating
    assert not any(each.closed for each in relocating)
    assert session.report.counts["measured"] == 5
    assert sources(session) == {("GRAPH", "measured")}
    assert session.report.failures.keys() <= {"daemon: no daemon"}


def test_the_next_session_is_told_and_measures_nothing(session: Session) -> None:
    box = BoxedDeviceIndex(0)
    run(compile_once(session, 2, backward=False, box=box), compile_once(session, 1, backward=True, box=box))
    second = Session(session.locations)

    forward = compile_once(second, 2, backward=False, box=box)
    backward = compile_once(second, 1, backward=True, box=box)

    assert run(forward, backward, 3) == [(["relocated"] * 2, ["relocated"])] * 3
    assert (second.report.counts["hits"], second.report.counts["measured"]) == (3, 0)
    assert sources(second) == {("GRAPH", "cache")}


def test_of_two_processes_one_measures_and_the_other_takes_up_its_answer(
    session: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(leases, "FIRST_LOOK_S", 0.0)
    monkeypatch.setattr(leases, "LAST_LOOK_S", 0.0)
    home = Home(tmp_path)
    try:
        home.start()
        first, second = Session(session.locations), Session(session.locations)
        boxes = [BoxedDeviceIndex(0), BoxedDeviceIndex(0)]
        models = [
            (compile_once(each, 2, backward=False, box=box), compile_once(each, 1, backward=True, box=box))
            for each, box in zip((first, second), boxes, strict=True)
        ]
        run(*models[0], partition_trial.WARM_UP_CALLS + 1)  # the first begins to measure

        waiting = run(*models[1], ENOUGH)
        run(*models[0], ENOUGH)
        told = run(*models[1], 5)
    finally:
        home.close()

    assert waiting == [(["launched"] * 2, ["launched"])] * ENOUGH
    assert told[-1] == (["relocated"] * 2, ["relocated"])
    counts = second.report.counts
    assert (first.report.counts["measured"], first.report.counts["waited"]) == (3, 0)
    assert (counts["measured"], counts["waited"], counts["adopted"], counts["recorded"]) == (0, 3, 3, 0)
    assert second.report.fallbacks.keys() == {partition_trial.WAITING}
    assert second.report.summary()["deployed"] == {"KERNELS": 0, "GRAPH": 3}
    assert first.report.failures == second.report.failures == {}


def test_what_is_refreshed_is_measured_anew_and_replaces_what_was_there(
    session: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def train(steps: int = ENOUGH) -> Session:
        each, box = Session(session.locations), BoxedDeviceIndex(0)
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
        monkeypatch.setattr(Clock, "times_us", {Deployment.KERNELS: 50.0, Deployment.GRAPH: 100.0})
        with monkeypatch.context() as refreshing:
            refreshing.setenv(settings.REFRESH, "1")
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
    each, box = Session(session.locations), BoxedDeviceIndex(0)
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
    monkeypatch.setattr(Clock, "times_us", {Deployment.KERNELS: 100.0, Deployment.GRAPH: 59.9})

    told, steps = trained(session, ENOUGH)

    assert steps == [(["relocated"] * 2, ["relocated"])] * ENOUGH
    counts = told.report.counts
    assert (counts["hits"], counts["checked"], counts["disputed"], counts["measured"]) == (3, 3, 0, 0)
    assert counts["spooled"] == 0
    summary = told.report.summary()
    assert summary["deployed"] == {"KERNELS": 0, "GRAPH": 3}
    assert {each["source"] for each in summary["decisions"]} == {"cache"}
    assert told.report.failures.keys() <= {"daemon: no daemon"}


@pytest.mark.parametrize("graph_us", [61.0, 39.0, 200.0])
def test_a_decision_from_elsewhere_that_does_not_hold_is_measured_anew(
    session: Session, monkeypatch: pytest.MonkeyPatch, graph_us: float
) -> None:
    trained(session, ENOUGH, "elsewhere")
    monkeypatch.setattr(Clock, "times_us", {Deployment.KERNELS: 100.0, Deployment.GRAPH: graph_us})

    told, steps = trained(session, 2 * ENOUGH)

    runs = "relocated" if graph_us < 100 else "launched"
    assert (steps[0], steps[-1]) == ((["relocated"] * 2, ["relocated"]), ([runs] * 2, [runs]))
    counts = told.report.counts
    assert (counts["checked"], counts["disputed"], counts["measured"], counts["spooled"]) == (3, 3, 3, 3)
    assert told.report.fallbacks == {DISPUTED: 3}
    assert len(told.report.summary()["decisions"]) == 3
    again, _ = trained(session, ENOUGH)
    assert (again.report.counts["hits"], again.report.counts["checked"]) == (3, 0)


def test_what_was_checked_and_measured_anew_is_gone_from_a_graph_in_one_piece(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without partitions Inductor puts what runs the graph where its callers find it, and copies misaligned inputs around it."""

    def compile_in_one_piece(each: Session) -> tuple[Compiled, Any]:
        compiled = Compiled(1)
        kwargs = {"is_backward": False, "cudagraphs": True, "boxed_forward_device_index": None}
        plan = each.plan(compiled, kwargs)
        assert plan is not None
        ways = {"device_index": 0, "is_backward": False}
        slot = compiled.current_callable = plan.cudagraphify(lambda inputs: "launched", ways)
        plan.complete(compiled)
        return compiled, slot

    elsewhere = Session(session.locations)
    elsewhere.cache = Cache(elsewhere.locations, "elsewhere", elsewhere.report)
    first, _ = compile_in_one_piece(elsewhere)
    for _ in range(ENOUGH):
        first.current_callable([torch.ones(1)])
    monkeypatch.setattr(Clock, "times_us", {Deployment.KERNELS: 100.0, Deployment.GRAPH: 70.0})
    told = Session(session.locations)
    compiled, slot = compile_in_one_piece(told)

    results = [compiled.current_callable([torch.ones(1)]) for _ in range(2 * ENOUGH)]

    assert told.report.counts["disputed"] == told.report.counts["measured"] == 1
    assert results[-1] == "relocated"
    assert isinstance(slot.run, Relocating)


@pytest.mark.parametrize(("trust", "hits", "measured"), [("all", 3, 0), ("local", 0, 3)])
def test_what_is_trusted_can_be_set(
    session: Session, monkeypatch: pytest.MonkeyPatch, trust: str, hits: int, measured: int
) -> None:
    trained(session, ENOUGH, "elsewhere")
    monkeypatch.setenv(settings.TRUST, trust)

    told, steps = trained(session, ENOUGH)

    counts = told.report.counts
    assert (counts["hits"], counts["measured"], counts["checked"]) == (hits, measured, 0)
    assert steps[-1] == (["relocated"] * 2, ["relocated"])


def test_a_program_that_ends_before_the_check_does_has_run_as_it_was_told(session: Session) -> None:
    trained(session, ENOUGH, "elsewhere")

    told, _ = trained(session, 5)
    told.close()

    summary = told.report.summary()
    assert (summary["checked"], summary["deployed"]["GRAPH"], summary["spooled"]) == (3, 3, 0)


def test_who_waits_to_the_end_records_nothing(session: Session, tmp_path: Path) -> None:
    home = Home(tmp_path)
    try:
        home.start()
        first, second = Session(session.locations), Session(session.locations)
        for each in (first, second):
            run(
                compile_once(each, 1, backward=False, box=(box := BoxedDeviceIndex(0))),
                compile_once(each, 1, backward=True, box=box),
                10,
            )
        second.close()
        first.close()
    finally:
        home.close()

    assert second.report.summary()["reasons"] == {rules.LEFT_TO_OTHERS: 2}
    assert (second.report.counts["recorded"], first.report.counts["recorded"]) == (0, 2)


def test_a_program_that_ends_early_says_how_often_it_called(session: Session) -> None:
    box = BoxedDeviceIndex(0)
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


# --- relocatable graphs ------------------------------------------------------------------------------------------


def compile_pair(session: Session) -> tuple[Compiled, Compiled]:
    """Compile a forward and its backward, of one part each."""
    box = BoxedDeviceIndex(0)
    forward = compile_once(session, 1, backward=False, box=box)
    return forward, compile_once(session, 1, backward=True, box=box)


@pytest.mark.parametrize("refusing", [{0}, {1}, {2}, {0, 1, 2}], ids=str)
def test_a_part_that_refuses_is_launched_and_holds_nobody_up(
    session: Session, relocating: list[Relocating], refusing: set[int]
) -> None:
    REFUSING.update(refusing)
    box = BoxedDeviceIndex(0)
    forward = compile_once(session, 2, backward=False, box=box)
    backward = compile_once(session, 1, backward=True, box=box)

    *_, (ahead, behind) = run(forward, backward)

    assert session.report.counts["measured"] == 3 - len(refusing)
    for index, result in enumerate([*ahead, *behind]):
        assert result == ("launched" if index in refusing else "relocated")
        assert relocating[index].closed is (index in refusing)
        assert (relocating[index].calls == 1) is (index in refusing)


@pytest.fixture
def default_mode(session: Session, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import torch._inductor.config as inductor_config

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with inductor_config.patch({"triton.cudagraphs": False}):
        yield


def compile_whole_pair(session: Session) -> tuple[Compiled, Compiled]:
    box = BoxedDeviceIndex(None)
    return compile_whole(session, backward=False, box=box), compile_whole(session, backward=True, box=box)


@pytest.mark.usefixtures("default_mode")
def test_a_whole_graph_is_relocated_or_launched(session: Session) -> None:
    forward, backward = compile_whole_pair(session)

    results = run(forward, backward)

    assert {str(ahead) for ahead, _ in results} == {"['launched']", "relocated"}
    assert results[-1] == ("relocated", "relocated")
    assert session.report.summary()["deployed"] == {"KERNELS": 0, "GRAPH": 2}
    second = Session(session.locations)
    assert run(*compile_whole_pair(second), 2) == [("relocated", "relocated")] * 2
    assert (second.report.counts["hits"], second.report.counts["measured"]) == (2, 0)


@pytest.mark.usefixtures("default_mode")
def test_a_whole_graph_that_refuses_is_launched(session: Session, relocating: list[Relocating]) -> None:
    REFUSING.update({0, 1})

    results = run(*compile_whole_pair(session))

    assert results[-1] == (["launched"], ["launched"])
    assert session.report.summary()["deployed"] == {"KERNELS": 2, "GRAPH": 0}
    assert [each.calls for each in relocating] == [1, 1]
    reason = "it cannot be relocated: verification: output 0 differs"
    assert session.report.summary()["reasons"] == {reason: 2}
    second = Session(session.locations)
    assert run(*compile_whole_pair(second), 1) == [(["launched"], ["launched"])]
    counts = second.report.counts
    assert (counts["hits"], counts["measured"], len(relocating)) == (2, 0, 4)
    assert [each.calls for each in relocating[2:]] == [0, 0]


@pytest.mark.parametrize("compile_two", [compile_pair, compile_whole_pair])
def test_what_is_refused_in_one_process_alone_is_tried_again_by_the_next(
    session: Session, relocating: list[Relocating], compile_two: Any
) -> None:
    REFUSING.update({0, 1})
    pair = compile_two(session)
    for each in relocating:
        each.for_good = False
    run(*pair)

    reasons = session.report.summary()["reasons"]
    assert reasons == {"it cannot be relocated: verification: output 0 differs": 2}
    assert session.report.summary()["deployed"] == {"KERNELS": 2, "GRAPH": 0}
    second = Session(session.locations)
    forward, backward = compile_two(second)
    assert "relocated" in str(run(forward, backward, 5)[-1]), (
        "tried at once, and not after as many calls as were launched before"
    )


@pytest.mark.usefixtures("default_mode")
@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"device_types": {"cuda", "cpu"}}, rules.NOT_WHOLE),
        ({"device_idxs": {0, 1}}, rules.NOT_WHOLE),
        ({"inductor_post_grad_graph_str": UNKNOWN_STATE}, rules.STATE_UNKNOWN),
    ],
    ids=["a part on the CPU", "two devices", "captured differently"],
)
def test_a_graph_that_a_recording_would_not_hold_is_launched(
    session: Session, relocating: list[Relocating], facts: dict[str, Any], reason: str
) -> None:
    compiled = compile_whole(session, backward=False, box=BoxedDeviceIndex(None), **facts)

    assert compiled.current_callable == compiled.call
    assert relocating == []
    assert session.report.summary()["reasons"] == {reason: 1}
    assert (session.report.counts["hits"], session.report.counts["spooled"]) == (0, 1)
    second = Session(session.locations)
    compile_whole(second, backward=False, box=BoxedDeviceIndex(0), **facts)
    assert (second.report.counts["hits"], second.report.counts["spooled"]) == (1, 0)


def test_attention_whose_state_is_not_known_is_launched_and_so_is_nothing_else(session: Session) -> None:
    """Captured, it would leave its random numbers on the GPU, and its backward would look for them on the CPU."""
    box = BoxedDeviceIndex(0)
    forward = compile_once(session, 1, backward=False, box=box, text=UNKNOWN_STATE)
    backward = compile_once(session, 1, backward=True, box=box)

    assert run(forward, backward)[-1] == (["launched"], ["relocated"])
    assert session.report.summary()["reasons"][rules.STATE_UNKNOWN] == 1


def test_graphs_in_parts_and_whole_ones_are_measured_in_one_program(session: Session) -> None:
    box = BoxedDeviceIndex(0)
    forward = compile_once(session, 1, backward=False, box=box)
    backward = compile_whole(session, backward=True, box=box)

    assert run(forward, backward)[-1] == (["relocated"], "relocated")
    assert session.report.counts["measured"] == 2


# --- what is left to Inductor ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "recorder", "reason"),
    [("0", object(), sessions.SWITCHED_OFF), ("1", None, sessions.CANNOT_RECORD)],
)
def test_where_nothing_can_be_recorded_inductor_does_what_it_does_without_us(
    session: Session, monkeypatch: pytest.MonkeyPatch, setting: str, recorder: object, reason: str
) -> None:
    monkeypatch.setenv(settings.RELOCATE, setting)
    monkeypatch.setattr(Session, "_recorder_of", lambda self, _index: recorder)
    aside, box = Session(session.locations), BoxedDeviceIndex(0)

    for backward in (False, True):
        assert planned(aside, backward=backward, box=box) is None
    summary = aside.report.summary()
    assert (summary["left_to_torch"], summary["deployed"]) == ({reason: 2}, {"KERNELS": 0, "GRAPH": 0})
    assert not torch_private.is_ours(box)


def planned(session: Session, *, backward: bool, box: object) -> Any:
    kwargs = {"is_backward": backward, "cudagraphs": True, "boxed_forward_device_index": box}
    return session.plan(Compiled(1), kwargs)


def test_a_backward_whose_forward_may_have_run_in_trees_is_left_to_them(session: Session) -> None:
    """They know nothing of a backward that is launched, and take the next forward for one of the same step."""
    box = BoxedDeviceIndex(0)

    assert planned(session, backward=True, box=box) is None
    assert session.report.summary()["left_to_torch"] == {sessions.FORWARD_NOT_OURS: 1}
    assert planned(session, backward=False, box=box) is not None
    assert planned(session, backward=True, box=box) is not None


def test_what_somebody_else_captures_is_left_alone(session: Session) -> None:
    """Inductor was to hand its partitions over, and a policy of the user's has taken them."""
    compiled = Compiled(2)
    plan = session.plan(compiled, {"is_backward": False, "cudagraphs": True})
    assert plan is not None

    plan.complete(compiled)

    assert compiled.current_callable == compiled.call
    summary = session.report.summary()
    assert (summary["left_to_torch"], summary["decisions"]) == ({CAPTURED_BY_OTHERS: 1}, [])


def test_a_partition_that_cannot_be_wrapped_is_launched_and_not_left_to_trees(session: Session) -> None:
    """They would see one part of a step alone."""
    hook = Hook()
    hook.session = session
    hook._local.plan = SimpleNamespace(cudagraphify=lambda *_: 1 / 0)

    run = hook._around_cudagraphify(lambda *_, **__: pytest.fail("it was handed on"), launched, {})

    assert run is launched
    assert session.report.failures == {"wrapping a partition: ZeroDivisionError: division by zero": 1}


def launched(inputs: list[Any]) -> str:
    return "launched"


# --- threads and age ---------------------------------------------------------------------------------------------


def in_a_thread(action: Callable[[], Any]) -> Any:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(action).result()


@pytest.mark.parametrize("compile_two", [compile_pair, compile_whole_pair])
def test_forwards_and_backwards_run_in_any_thread_and_no_tree_manager_is_asked(
    session: Session, monkeypatch: pytest.MonkeyPatch, compile_two: Any
) -> None:
    """It is a thread's own: another thread has none, and asking is an AssertionError."""
    import torch._inductor.cudagraph_trees as trees

    monkeypatch.setattr(trees, "get_manager", lambda *_, **__: pytest.fail("it was asked"))
    forward, backward = compile_two(session)
    x = torch.ones(1)

    for _ in range(10 * ENOUGH):
        forward.current_callable([x])
        in_a_thread(lambda: backward.current_callable([x]))
        in_a_thread(lambda: (forward.current_callable([x]), backward.current_callable([x])))

    assert session.report.failures.keys() <= {"daemon: no daemon"}
    assert "relocated" in str(forward.current_callable([x])) == str(backward.current_callable([x]))


def test_what_was_measured_too_long_ago_is_measured_anew(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(*compile_pair(session))
    now = time.time()
    monkeypatch.setattr("pygraphd.client.frontend.runtime.time.time", lambda: now + 31 * 86_400)

    old = Session(session.locations)
    assert run(*compile_pair(old))[-1] == (["relocated"], ["relocated"])
    monkeypatch.setenv(settings.MAX_AGE, "40d")
    young = Session(session.locations)
    run(*compile_pair(young))

    assert (old.report.counts["hits"], old.report.counts["measured"]) == (0, 2)
    assert {each["because"] for each in old.report.summary()["decisions"]} == {
        "measured 31d ago, and PYGRAPH_MAX_AGE is less"
    }
    assert (young.report.counts["hits"], young.report.counts["measured"]) == (2, 0)


def test_what_was_measured_on_a_noisy_machine_runs_and_is_measured_by_the_next_process(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    decision = Decision(Deployment.GRAPH, f"GRAPH is faster{NOISY}", POLICY_VERSION, final=False)
    with monkeypatch.context() as noisy:
        noisy.setattr(partition_trial, "decide", lambda measurements: decision)
        assert run(*compile_pair(session))[-1] == (["relocated"], ["relocated"])
    short, second = Session(session.locations), Session(session.locations)

    run(*compile_pair(short), 2)
    short.close()
    pair = compile_pair(second)

    (known,) = {each["reason"] for each in session.report.summary()["decisions"]}
    assert known == decision.reason
    assert short.report.counts["spooled"] == 0, "what was measured is worth more than that nothing was"
    assert run(*pair)[-1] == (["relocated"], ["relocated"])
    assert (second.report.counts["hits"], second.report.counts["measured"]) == (2, 2)
