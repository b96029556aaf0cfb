"""A hook of its own for each GPU test, with no daemon and an empty home, and the counters to hold against.

For relocatable graphs there are two more fixtures, which put them in place of PyTorch's own CUDA graphs for everything that is compiled:
`relocated` runs a program with them, `moved` runs them beside it, on inputs that lie elsewhere at every call.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from pygraphd.client.frontend.installation import Hook
from tests.support.placement.with_rules import with_rules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from pygraphd.client.analysis.graph_facts import GraphFacts
    from pygraphd.client.common.report import Report
    from pygraphd.client.frontend.runtime import Runtime
    from pygraphd.client.recording.recordings import Recordings
    from tests.support.beside import Beside
    from tests.support.seen import Seeing


class Watched:
    """The hook under test; `expect` holds its counters against what should have happened."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook

    @property
    def spool(self) -> Path:
        """Where what was measured lies."""
        assert self._hook.runtime is not None
        return self._hook.runtime.locations.spool

    @property
    def session(self) -> Runtime:
        assert self._hook.runtime is not None
        return self._hook.runtime

    @property
    def report(self) -> Report:
        return self.session.report

    def expect(self, **counts: int) -> None:
        """Assert the named counters, and that nothing of ours has failed but the finding of a daemon."""
        assert {name: self.report.counts[name] for name in counts} == counts
        failures = {text for text in self.report.failures if not text.startswith("daemon: ")}
        assert failures == set()

    def deployed(self) -> dict[str, int]:
        """Return how many regions run in each deployment that any runs in."""
        deployed: dict[str, int] = self.report.summary()["deployed"]
        return {name: count for name, count in deployed.items() if count}

    def reasons(self) -> dict[str, int]:
        reasons: dict[str, int] = self.report.summary()["reasons"]
        return reasons

    def close(self) -> Any:
        """End the session as a process does."""
        assert self._hook.runtime is not None
        self._hook.runtime.close()


@pytest.fixture(scope="session", autouse=True)
def compiled_helper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Have the compiled helper for every test, and not those that happen to come late enough."""
    from pygraphd.client.replay.native.ffi import helper

    assert helper.prepare(tmp_path_factory.mktemp("helper")) is None
    assert helper.wait(60)
    yield
    helper.forget()


@pytest.fixture
def graphs_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each trial in which a GRAPH was measured choose it, whatever its times are: other programs may share the GPU."""
    from pygraphd.schema import policy
    from pygraphd.schema.messages import Decision, Deployment, Measurement
    from pygraphd.schema.reasons import Reason, ReasonCode

    chosen = Decision(Deployment.GRAPH, Reason(ReasonCode.OTHER, "for a test"), policy.POLICY_VERSION)

    def decide(measurements: Sequence[Measurement]) -> Decision:
        has_graph = any(each.deployment is Deployment.GRAPH for each in measurements)
        return chosen if has_graph else policy.decide(measurements)

    monkeypatch.setattr("pygraphd.client.autotune.partition_trial.decide", decide)


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


class Relocated:
    """Recordings graphs in the place of PyTorch's own CUDA graphs, and their counters."""

    def __init__(self) -> None:
        from pygraphd.client.common.report import Report
        from tests.support.seen import Seen

        self.report = Report()
        self.seen = Seen()
        self.made: list[Recordings] = []
        self._recorders: dict[int, Seeing] = {}
        self._is_launching = False
        self.outputs: Iterator[GraphFacts] = iter(())

    def make(self, runnable: Callable[[list[Any]], Any], device_index: int) -> Callable[[list[Any]], Any]:
        """Return what runs in place of `runnable`."""
        outputs = next(self.outputs)
        if self._is_launching:
            return runnable
        from pygraphd.client.recording.attention_host import make_recordings

        recorder = self._recorder(device_index)
        self.made.append(make_recordings(runnable, recorder, self.report, outputs))
        return self.made[-1]

    def _recorder(self, device_index: int) -> Seeing:
        """Return the one of a device, as a session does: graphs that draw random numbers wait for each other."""
        from pygraphd.client.backend import driver
        from tests.support.seen import Seeing

        if device_index not in self._recorders:
            self._recorders[device_index] = Seeing(driver.load(), device_index, self.seen)
        return self._recorders[device_index]

    def compile(self, original: Callable[[], None], compiled: Any, graph_kwargs: Mapping[str, Any]) -> None:
        """Do what the hook does around Inductor's `post_compile`."""
        from pygraphd.client.analysis.graph_facts import facts_of
        from pygraphd.client.backend import torch_private

        facts = torch_private.facts(compiled, graph_kwargs)
        told = facts_of(facts)
        assert told is not None
        self.outputs = (told.of_partition(facts.maps, part) for part in range(facts.partitions))
        torch_private.note_ours(graph_kwargs.get("boxed_forward_device_index"))
        original()
        torch_private.align_inputs(compiled)

    @contextlib.contextmanager
    def launched(self) -> Iterator[None]:
        """Have what is compiled within be launched: the very code that relocated graphs are held against."""
        import torch

        torch._dynamo.reset()
        self._is_launching = True
        yield
        self._is_launching = False
        torch._dynamo.reset()

    def expect(self, **counts: int) -> None:
        """Assert the named counters, and that nothing was launched but calls whose sizes were new."""
        from pygraphd.client.recording.recordings import NOT_YET

        assert set(self.report.fallbacks) <= {NOT_YET}
        assert [each.refusal for each in self.made if each.refusal] == []
        assert {name: self.report.counts[name] for name in counts} == counts

    def expect_all_captured(self) -> None:
        """Assert that every region has a recording that has served calls, and none was refused."""
        self.expect(captured=len(self.made))
        assert self.made
        for each in self.made:
            (replay,) = each.replays
            assert replay.counts.replays > 1  # one is the trial of the recording


class Moved(Relocated):
    """Runs each call twice: launched for the program, and relocated on copies of its inputs, which lie elsewhere each time.

    All copies and all that a replay allocates lie between guard zones, and are poisoned after the call.
    """

    def __init__(self) -> None:
        from tests.support.guards import Guarded

        super().__init__()
        self.guarded = Guarded("cuda")
        self.exact = True
        """Whether a replay must agree with a launch bit for bit if launches do; to be set before anything is compiled."""
        self.beside: list[Beside] = []

    def make(self, runnable: Callable[[list[Any]], Any], device_index: int) -> Callable[[list[Any]], Any]:
        super().make(runnable, device_index)
        import torch

        from tests.support.beside import Beside

        generator = torch.cuda.default_generators[device_index]
        self.beside.append(Beside(runnable, self.made[-1], self.guarded, generator))
        self.beside[-1].exact = self.exact
        return self.beside[-1]

    def expect_all_captured(self) -> None:
        """Assert besides that all has moved at every call."""
        super().expect_all_captured()
        for each in self.beside:
            each.expect_moved_calls()

    def close(self) -> None:
        """Assert that what calls have left behind was not written to."""
        for each in self.beside:
            each.close()


@contextlib.contextmanager
def installed(relocated: Relocated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have it run everything that is compiled within."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    import torch
    import torch._inductor.compile_fx

    from pygraphd.client.backend import torch_private

    def around_cudagraphify(_original: Any, runnable: Any, kwargs: Mapping[str, Any]) -> Any:
        return relocated.make(runnable, kwargs["device_index"])

    torch._dynamo.reset()
    uninstall = torch_private.install(relocated.compile, around_cudagraphify)
    yield
    uninstall()
    torch._dynamo.reset()
    for each in relocated.made:
        each.close()


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
