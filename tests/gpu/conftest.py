"""A hook of its own for each GPU test, with no daemon and an empty home, and the counters to hold against.

For relocatable graphs there are two more fixtures, which put them in place of PyTorch's trees for everything that is compiled:
`relocated` runs a program with them, `moved` runs them beside it, on inputs that lie elsewhere at every call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pygraphd.client.families import Families
from pygraphd.client.hook import Hook
from tests.client.placement.with_rules import with_rules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from pygraphd.client.output_facts import OutputFacts
    from pygraphd.client.recycling import Link
    from pygraphd.client.relocatable import Relocatable
    from pygraphd.client.report import Report
    from pygraphd.client.session import Session

GUARD = 0xA5
GUARD_BYTES = 4096


class Watched:
    """The hook under test; `expect` holds its counters against what should have happened."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook

    @property
    def spool(self) -> Path:
        """Where what was measured lies."""
        assert self._hook.session is not None
        return self._hook.session.locations.spool

    @property
    def session(self) -> Session:
        assert self._hook.session is not None
        return self._hook.session

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
        assert self._hook.session is not None
        self._hook.session.close()


@pytest.fixture(scope="session", autouse=True)
def compiled_helper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Have every test look at tensors by the compiled helper, and not those that happen to come late enough."""
    from pygraphd.client.bulk import helper

    assert helper.prepare(tmp_path_factory.mktemp("helper")) is None
    assert helper.wait(60)
    yield
    helper.forget()


@pytest.fixture(autouse=True)
def mode_is_left_behind() -> Iterator[None]:
    """Undo what compiling in two threads at once leaves in torch 2.11: the options of a mode, set for the whole process."""
    import torch._inductor.config as config

    with config.patch({"triton.cudagraphs": config.triton.cudagraphs}):
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
    """Relocatable graphs in the place of PyTorch's trees, and their counters."""

    def __init__(self) -> None:
        from pygraphd.client.report import Report

        self.report = Report()
        self.made: list[Relocatable] = []
        self.calls = 0
        self.links: dict[int, Link] = {}
        self.link: Link | None = None
        self.families = Families()
        self.outputs: Iterator[OutputFacts] = iter(())

    def make(self, runnable: Callable[[list[Any]], Any], device_index: int) -> Callable[[list[Any]], Any]:
        """Return what runs in place of `runnable`."""
        from pygraphd.client import driver
        from pygraphd.client.capture import CudaRecorder
        from pygraphd.client.relocatable import Relocatable

        recorder = CudaRecorder(driver.load(), device_index)
        self.made.append(Relocatable(runnable, recorder, self.report, self.link, next(self.outputs)))
        return self.made[-1]

    def compile(self, original: Callable[[], None], compiled: Any, graph_kwargs: Mapping[str, Any]) -> None:
        """Do what the hook does around Inductor's `post_compile`."""
        from pygraphd.client import _torch, recycling

        facts = _torch.facts(compiled, graph_kwargs)
        box = graph_kwargs.get("boxed_forward_device_index")
        link = None if facts.is_inference else self.links.setdefault(id(box), recycling.Link())
        self.link = None if facts.is_backward else link
        outputs = self.families.output_facts(id(box), facts)
        self.outputs = (outputs.of_partition(facts.output_maps, part) for part in range(facts.partitions))
        original()
        if link is not None:
            recycling.watch(compiled, link, is_backward=facts.is_backward)
        _torch.realign(compiled)

    @property
    def sets(self) -> list[int]:
        """How many sets of memory each region keeps for what its forward saves."""
        return [
            len(replay._recycler) if replay._recycler is not None else 0
            for each in self.made
            for replay in each._replays.values()
        ]

    def expect(self, **counts: int) -> None:
        """Assert the named counters, and that nothing was launched but calls whose sizes were new."""
        from pygraphd.client.relocatable import NOT_YET

        assert set(self.report.fallbacks) <= {NOT_YET}
        assert [each.refusal for each in self.made if each.refusal] == []
        assert {name: self.report.counts[name] for name in counts} == counts

    def expect_all_captured(self) -> None:
        """Assert that every region has a recording, and none was refused."""
        self.expect(captured=len(self.made))
        assert self.made


class Moved(Relocated):
    """Runs each call twice: launched for the program, and relocated on copies of its inputs, which lie elsewhere each time.

    All copies and all outputs lie between guard zones or in memory that was poisoned before, and are poisoned after.
    """

    def make(self, runnable: Callable[[list[Any]], Any], device_index: int) -> Callable[[list[Any]], Any]:
        relocatable = super().make(runnable, device_index)
        undefined = self.made[-1].outputs.undefined
        import torch

        generator = torch.cuda.default_generators[device_index]

        def run(inputs: list[Any]) -> Any:
            self.calls += 1
            mine = list(inputs)
            copies, zones = _guarded_copies(mine, self.calls)
            began = generator.get_offset()
            outputs = relocatable(list(copies))
            ended = generator.get_offset()
            generator.set_offset(began)
            launched = runnable(inputs)
            assert generator.get_offset() == ended
            pairs = enumerate(zip(outputs, launched, strict=True))
            comparable = [right if index in undefined else output for index, (output, right) in pairs]
            _assert_agree("output", comparable, launched)
            _assert_agree("input", copies, mine)
            for zone in zones:
                assert (zone == GUARD).all()
            _poison([*copies, *outputs], keep=[*mine, *launched])
            return launched

        return run


def _guarded_copies(inputs: list[Any], shift: int) -> tuple[list[Any], list[Any]]:
    """Return copies of the inputs at other addresses than ever before, and the guard zones around them."""
    import torch

    from pygraphd.client import _torch
    from pygraphd.client.recording import input_groups

    copies, zones = list(inputs), []
    for group, span in input_groups(inputs, ()):
        if not inputs[group.members[0][0]].is_cuda:
            continue
        before = GUARD_BYTES * (1 + shift % 3) + span.start % 512
        memory = torch.full((before + span.size + 2 * GUARD_BYTES,), GUARD, dtype=torch.uint8, device="cuda")
        memory = memory[: memory.numel() // 512 * 512]
        storage = inputs[group.members[0][0]].untyped_storage()
        bytes_ = torch.empty(0, dtype=torch.uint8, device="cuda")
        bytes_.set_(storage, span.start - storage.data_ptr(), (span.size,), (1,))
        memory[before : before + span.size] = bytes_
        for index, offset in group.members:
            tensor = inputs[index]
            start = (before + offset) // tensor.element_size()
            size, stride = tuple(tensor.size()), tuple(tensor.stride())
            copies[index] = _torch.reinterpret(memory, tensor.dtype, size, stride, start)
        zones += [memory[:before], memory[before + span.size :]]
    return copies, zones


def _assert_agree(what: str, mine: Any, right: Any) -> None:
    from pygraphd.client import verification

    assert verification._compare(what, mine, right, verification._coarsest(right)) is None


def _poison(values: list[Any], keep: list[Any]) -> None:
    import torch

    kept = {value.untyped_storage().data_ptr() for value in keep if isinstance(value, torch.Tensor)}
    for value in values:
        if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() not in kept:
            value.untyped_storage().fill_(0xFF)


def _installed(relocated: Relocated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Relocated]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    import torch
    import torch._inductor.compile_fx

    from pygraphd.client import _torch

    def around_cudagraphify(_original: Any, runnable: Any, kwargs: Mapping[str, Any]) -> Any:
        return relocated.make(runnable, kwargs["device_index"])

    torch._dynamo.reset()
    uninstall = _torch.install(relocated.compile, around_cudagraphify)
    yield relocated
    uninstall()
    torch._dynamo.reset()
    for each in relocated.made:
        each.close()


@pytest.fixture
def relocated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Relocated]:
    """Run everything that is compiled as relocatable graphs."""
    yield from _installed(Relocated(), tmp_path, monkeypatch)


@pytest.fixture
def moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Relocated]:
    """Run relocatable graphs beside everything that is compiled, on inputs that lie elsewhere at every call."""
    yield from _installed(Moved(), tmp_path, monkeypatch)


@pytest.fixture
def rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Report]:
    """Have the rules for CPU values without the hook; return what they report to."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    with with_rules() as report:
        yield report
