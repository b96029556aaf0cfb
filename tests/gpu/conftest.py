"""A hook of its own for each GPU test, with no daemon and an empty home, and the counters to hold against.

For relocatable graphs there are two more fixtures, which put them in place of PyTorch's own CUDA graphs for everything that is compiled:
`relocated` runs a program with them, `moved` runs them beside it, on inputs that lie elsewhere at every call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pygraphd.client.frontend.installation import Hook
from tests.support.placement.with_rules import with_rules
from tests.support.relocated import Moved, Relocated, installed
from tests.support.watched import Watched

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from pygraphd.client.common.report import Report


@pytest.fixture(scope="session", autouse=True)
def compiled_helper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Have the compiled helper for every test."""
    from pygraphd.client.replay.native.ffi import helper

    assert helper.prepare(tmp_path_factory.mktemp("helper")) is None
    yield
    helper.forget()


@pytest.fixture
def graphs_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each trial in which a GRAPH was measured end with its first samples and choose it: other programs may share the GPU."""
    from pygraphd.schema import policy
    from pygraphd.schema.messages import Decision, Deployment, Measurement
    from pygraphd.schema.reasons import Reason, ReasonCode

    chosen = Decision(Deployment.GRAPH, Reason(ReasonCode.OTHER, "for a test"), policy.POLICY_VERSION)

    def decide(measurements: Sequence[Measurement]) -> Decision:
        has_graph = any(each.deployment is Deployment.GRAPH for each in measurements)
        return chosen if has_graph else policy.decide(measurements)

    # The first chooses, the second asks whether the samples are noisy.
    for module in ("partition_trial", "trial"):
        monkeypatch.setattr(f"pygraphd.client.autotune.{module}.decide", decide)


@pytest.fixture(scope="session", autouse=True)
def profiles_are_watched() -> None:
    """Notice profiles from the first test on, as in a process that is started with `PYGRAPH=1`."""
    from pygraphd.client.backend import torch_private

    torch_private.watch_profiler(sees_all=True)


@pytest.fixture(autouse=True)
def mode_is_left_behind() -> Iterator[None]:
    """Undo what compiling or calling in two threads at once leaves in torch 2.11: options set for the whole process.

    Those of a mode, and those of `dynamic`: what is left of `dynamic=False` has every number be compiled for anew, also in later tests.
    """
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor

    sizes = ("automatic_dynamic_shapes", "assume_static_by_default")
    with (
        inductor.patch({"triton.cudagraphs": inductor.triton.cudagraphs}),
        dynamo.patch({name: getattr(dynamo, name) for name in sizes}),
    ):
        yield


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    """Have the hook on for one test."""
    monkeypatch.setenv("PYGRAPHD_HOME", str(tmp_path))
    monkeypatch.setenv("PYGRAPHD_AUTOSTART", "0")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    import torch._inductor.compile_fx

    torch._dynamo.reset()
    hook = Hook()
    hook.enable()
    yield Watched(hook)
    hook.disable()
    torch._dynamo.reset()


@pytest.fixture
def relocated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Relocated]:
    """Run everything that is compiled as relocatable graphs."""
    relocated = Relocated()
    with installed(relocated, tmp_path, monkeypatch):
        yield relocated


@pytest.fixture
def moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Moved]:
    """Run relocatable graphs beside everything that is compiled, on inputs and memory that lie elsewhere at every call."""
    from pygraphd.client.backend import torch_private

    moved = Moved()
    monkeypatch.setattr(torch_private, "allocator", lambda _device: moved.guarded)
    with installed(moved, tmp_path, monkeypatch):
        yield moved
    moved.close()


@pytest.fixture
def rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Report]:
    """Have the rules for CPU values without the hook; return what they report to."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    with with_rules() as report:
        yield report
