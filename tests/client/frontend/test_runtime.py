"""What of the cache is believed, and what a session keeps of what it was told. No torch is hooked here."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._inductor.cudagraph_utils import BoxedDeviceIndex

from pygraphd.client.analysis.graph_facts import GraphFacts
from pygraphd.client.autotune.candidates import Candidates
from pygraphd.client.autotune.partition_trial import PartitionTrial
from pygraphd.client.backend import driver, torch_private
from pygraphd.client.decisions.leases import PendingGraph
from pygraphd.client.dispatch.pair import Pair
from pygraphd.client.frontend.runtime import Runtime
from pygraphd.client.recording import capture
from pygraphd.client.replay.native.ffi import helper
from pygraphd.schema.keys import Environment
from pygraphd.schema.locations import locate
from pygraphd.schema.messages import (
    Decision,
    Deployment,
    Entry,
    Graph,
    Kind,
)
from pygraphd.schema.policy import POLICY_VERSION
from pygraphd.schema.reasons import Reason, ReasonCode
from tests.support.trial_host import Relocating

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

pytestmark = pytest.mark.torch

ENVIRONMENT = Environment("none", "", 0, 0, "", "2.13.0", "", "", "", "")


@pytest.fixture
def session(tmp_path: Path) -> Runtime:
    return Runtime(locate({"PYGRAPHD_HOME": str(tmp_path)}))


@pytest.mark.parametrize(
    ("policy", "age_days", "believed"),
    [
        (POLICY_VERSION, 29, True),
        (POLICY_VERSION, 31, False),
        (POLICY_VERSION + 1, 1, False),
        (POLICY_VERSION, None, True),
    ],
)
def test_what_is_old_or_another_policys_is_not_believed(
    session: Runtime, policy: int, age_days: int | None, believed: bool
) -> None:
    measured_at = None if age_days is None else time.time() - 86_400 * age_days
    entry = Entry(
        "a" * 64, Decision(Deployment.GRAPH, Reason(ReasonCode.OTHER), policy), measured_at=measured_at
    )

    assert (session.decisions.trust.why_not_trusted(entry) is None) is believed


@pytest.fixture
def forgotten() -> Iterator[None]:
    helper.forget()
    yield
    helper.forget()


def test_without_a_compiler_relocatable_graphs_are_missing_with_one_reason(
    session: Runtime, forgotten: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_private, "missing_for", lambda _: None)
    monkeypatch.setenv("CC", "/nowhere/cc")
    monkeypatch.setattr(driver, "load", lambda: None)

    for device in (0, 1, 0, 1):
        assert session.devices.recorder(device) is None

    (failure,) = session.report.failures
    assert failure.startswith("relocatable graphs: compiled helper: no C compiler")


@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize("records", [False, True])
def test_the_helper_is_compiled_only_where_graphs_can_be_recorded_and_files_written(
    session: Runtime, forgotten: None, monkeypatch: pytest.MonkeyPatch, readonly: bool, records: bool
) -> None:
    def load() -> None:
        if not records:
            raise driver.DriverError("too old", 0)

    monkeypatch.setattr(torch_private, "missing_for", lambda _: None)
    monkeypatch.setattr(driver, "load", load)
    monkeypatch.setattr(capture, "CudaRecorder", lambda *_: "recorder")
    monkeypatch.setattr(session.devices, "_options", replace(session.options, readonly=readonly))

    can = records and not readonly
    assert (session.devices.recorder(0) is not None) is can
    assert (session.locations.cache / "compiled").exists() is can


def test_threads_that_ask_for_a_gpu_at_once_get_one_recorder(
    session: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while the compiler is at work, and other threads run."""
    together = threading.Barrier(3)

    def made(*_: object) -> object:
        together.wait(60)
        return object()

    monkeypatch.setattr(torch_private, "missing_for", lambda _: None)
    monkeypatch.setattr(driver, "load", lambda: None)
    monkeypatch.setattr(helper, "prepare", lambda *_, **__: None)
    monkeypatch.setattr(capture, "CudaRecorder", made)
    with ThreadPoolExecutor(3) as threads:
        found = [*threads.map(lambda _: session.devices.recorder(0), range(3))]

    assert len({id(each) for each in found}) == 1


def test_without_a_driver_relocatable_graphs_are_missing_with_a_reason(
    session: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_private, "missing_for", lambda _: "this torch lacks much")

    for _ in range(3):
        assert session.devices.recordings(lambda inputs: None, 0, GraphFacts(), lambda *_: None) is None

    assert dict(session.report.failures) == {"relocatable graphs: this torch lacks much": 1}


@pytest.mark.slow
def test_who_does_not_want_relocatable_graphs_imports_nothing_of_them() -> None:
    code = "import sys, pygraphd.client.frontend.runtime; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    imported = done.stdout.split()
    rooms = ("recording", "replay", "backend.driver")
    assert [
        name for name in imported if name.startswith(tuple(f"pygraphd.client.{room}" for room in rooms))
    ] == []
    assert "pygraphd.client.autotune.partition_trial" in imported


def undecided(session: Runtime, run: Callable[[list[Any]], None]) -> PartitionTrial:
    pending = PendingGraph(Graph("a" * 64, Kind.INFERENCE, 0, 1, 1), ENVIRONMENT)
    return PartitionTrial(pending, Candidates(run, 0, Relocating()), session.decisions, lambda *_: None, 1)


def test_an_undecided_partition_goes_with_its_model_and_is_remembered(session: Runtime) -> None:
    class Capture:
        def __call__(self, inputs: list[Any]) -> None: ...

    capture = Capture()
    gone = weakref.ref(capture)
    trial = undecided(session, capture)
    trial([])

    del trial, capture
    gc.collect()
    assert gone() is None
    session.close()

    (decision,) = session.report.summary()["decisions"]
    assert (decision["graph"], decision["environment"]) == ("a" * 64, ENVIRONMENT.digest())
    assert (decision["reason"]["code"], decision["source"]) == ("too_few_calls", "unfinished")
    assert session.report.counts["spooled"] == 1


def test_a_partition_that_goes_with_its_model_is_pending_no_more(session: Runtime) -> None:
    trial = undecided(session, lambda inputs: None)
    session.decisions.acquire(trial.pending)
    assert len(session.decisions._pending) == 1

    del trial
    gc.collect()

    assert len(session.decisions._pending) == 0


def test_a_backward_has_its_forwards_options(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"options": (("a", "1"),)}
    monkeypatch.setattr(torch_private, "kernel_options", lambda: now["options"])
    pair, other = Pair(), Pair()

    forward = pair.options_for(is_backward=False)
    now["options"] = (("a", "2"),)

    assert pair.options_for(is_backward=True) == forward == (("a", "1"),)
    assert other.options_for(is_backward=True) == (("a", "2"),)


def test_a_pair_goes_with_the_box_of_its_graphs(session: Runtime) -> None:
    box = BoxedDeviceIndex(0)
    pair = session.pair(box)
    gone = weakref.ref(pair)
    assert session.pair(box) is pair
    assert session.pair(None) is not session.pair(None)

    del box, pair

    assert gone() is None


def test_a_forward_learns_of_its_backward_when_that_is_compiled(
    session: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts: list[tuple[bool, GraphFacts | None]] = []

    def note(original: Callable[[], None], compiled: Any, graph_kwargs: Mapping[str, Any]) -> None:
        made = session.compiled_graph(compiled, graph_kwargs)
        assert made is not None
        facts.append((graph_kwargs["is_backward"], made._beforehand))
        original()

    uninstall = torch_private.install(note, lambda original, runnable, kwargs: original(runnable, **kwargs))
    weight = torch.randn(6, 8, requires_grad=True)
    try:
        torch._dynamo.reset()
        for scale in (2.0, 3.0):
            torch.compile(lambda x, scale=scale: weight * torch.cumsum(x, 0) * scale)(
                torch.randn(6, 8)
            ).sum().backward()
    finally:
        uninstall()
        torch._dynamo.reset()

    forwards = [each for is_backward, each in facts if each is not None and not is_backward]
    assert [is_backward for is_backward, _ in facts] == [False, True] * 2
    assert [each.backward.returned_sizes for each in forwards] == [frozenset({48})] * 2
    assert forwards[0].backward is not forwards[1].backward
