"""Relocatable graphs in the place of PyTorch's own CUDA graphs for everything that is compiled, and their counters."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from tests.support.refusals import refusal_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    import pytest

    from pygraphd.client.analysis.graph_facts import GraphFacts
    from pygraphd.client.recording.recordings import Recordings
    from tests.support.beside import Beside
    from tests.support.seen import Seeing


class Relocated:
    """Recordings graphs in the place of PyTorch's own CUDA graphs, and their counters."""

    def __init__(self) -> None:
        from pygraphd.client.common.report import Report
        from tests.support.seen import Seen

        self.report = Report()
        self.seen = Seen()
        self.made: list[Recordings] = []
        self._recorders: dict[int, Seeing] = {}
        self._runs_kernels = False
        self.outputs: Iterator[GraphFacts] = iter(())

    def make(self, runnable: Callable[[list[Any]], Any], device_index: int) -> Callable[[list[Any]], Any]:
        """Return what runs in place of `runnable`."""
        outputs = next(self.outputs)
        if self._runs_kernels:
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
    def as_kernels(self) -> Iterator[None]:
        """Have what is compiled within run as KERNELS: the very code that relocated graphs are held against."""
        import torch

        torch._dynamo.reset()
        self._runs_kernels = True
        yield
        self._runs_kernels = False
        torch._dynamo.reset()

    def expect(self, **counts: int) -> None:
        """Assert the named counters, and that nothing ran as KERNELS but calls whose sizes were new."""
        from pygraphd.client.recording.recordings import NOT_YET

        assert set(self.report.fallbacks) <= {NOT_YET}, self.report.fallbacks
        assert [refusal_of(each) for each in self.made if refusal_of(each)] == []
        assert {name: self.report.counts[name] for name in counts} == counts

    def expect_all_captured(self) -> None:
        """Assert that every region has a recording that has served calls, and none was refused."""
        self.expect(captured=len(self.made))
        assert self.made
        for each in self.made:
            (replay,) = each.replays
            assert replay.counts.replays > 1  # one is the trial of the recording


class Moved(Relocated):
    """Runs each call twice: as KERNELS for the program, and relocated on copies of its inputs, which lie elsewhere each time.

    All copies and all that a replay allocates lie between guard zones, and are poisoned after the call.
    """

    def __init__(self) -> None:
        from tests.support.guards import Guarded

        super().__init__()
        self.guarded = Guarded("cuda")
        self.exact = True
        """Whether a replay must agree with KERNELS bit for bit if they agree with themselves; to be set before anything is compiled."""
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
