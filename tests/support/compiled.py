"""Compiled graphs and sessions without a GPU: a clock stands in for the GPU's, and what is recorded is told."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._inductor.cudagraph_utils import BoxedDeviceIndex

from pygraphd.client.autotune import trial
from pygraphd.client.decisions import fingerprint, leases
from pygraphd.client.decisions.cache import Cache
from pygraphd.client.frontend.devices import Devices
from pygraphd.client.frontend.runtime import Runtime
from pygraphd.schema.keys import Environment
from pygraphd.schema.locations import locate
from pygraphd.schema.reasons import Reason, ReasonCode
from tests.support.clock import Clock
from tests.support.daemon_home import Home

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


ENOUGH = 40


UNKNOWN_STATE = "a = torch.ops.aten._scaled_dot_product_efficient_attention.default(b)"


REFUSING: set[int] = set()
"""Partitions, counted from the first that is compiled, that cannot be recorded."""


class Compiled:
    """What is read and set of a `CompiledFxGraph` with some partitions; `call` is Inductor's own callable."""

    def __init__(self, partitions: int) -> None:
        self.compiled_fn_runner = SimpleNamespace(partitions=[lambda inputs: "kernels"] * partitions)
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


def compile_whole(session: Runtime, *, backward: bool, box: object, **facts: Any) -> Compiled:
    """Compile a graph of which Inductor captures nothing."""
    compiled = Compiled(1)
    compiled.partition_maps = []
    vars(compiled).update(facts)
    kwargs = {"is_backward": backward, "cudagraphs": False, "boxed_forward_device_index": box}
    plan = session.compiled_graph(compiled, kwargs)
    assert plan is not None
    plan.complete(compiled)
    return compiled


def compile_once(
    session: Runtime, partitions: int, *, backward: bool, box: object, text: str | None = None
) -> Compiled:
    compiled = Compiled(partitions)
    compiled.inductor_post_grad_graph_str = text or compiled.inductor_post_grad_graph_str
    kwargs = {"is_backward": backward, "cudagraphs": True, "boxed_forward_device_index": box}
    plan = session.compiled_graph(compiled, kwargs)
    assert plan is not None
    slots = compiled.compiled_fn_runner.partitions
    slots[:] = [plan.cudagraphify(slot, {"device_index": 0, "is_backward": backward}) for slot in slots]
    plan.complete(compiled)
    return compiled


@pytest.fixture
def daemon_asked_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A daemon in the folder of `session`; who waits for another process asks it at each call."""
    monkeypatch.setattr(leases, "FIRST_POLL_S", 0.0)
    monkeypatch.setattr(leases, "LONGEST_POLL_S", 0.0)
    home = Home(tmp_path)
    try:
        home.start()
        yield
    finally:
        home.close()


class Relocating:
    """Stands where relocatable graphs do; recording itself is tested in tests/client/recording and tests/gpu."""

    is_awaited = False
    not_now: str | None = None
    run_kernels_or_record = None

    def __init__(self, refusal: str | None) -> None:
        self._will_refuse = refusal
        self.refusal: str | None = None
        self.for_good = True
        self.calls = self.one_time_work = self.replayed = 0
        self.closed = False
        self.note_failed_check: Callable[[tuple[int, ...], Reason], None] = lambda *_: None

    def why_not(self, inputs: list[Any]) -> str | None:
        return self.not_now

    @property
    def recording_us(self) -> float:
        return 10.0 * bool(self.calls)

    @property
    def refused_for_good(self) -> bool:
        return self.refusal is not None and self.for_good

    @property
    def why_refused(self) -> Reason | None:
        return None if self.refusal is None else Reason(ReasonCode.CANNOT_BE_RECORDED, self.refusal)

    @property
    def run(self) -> Relocating:
        return self

    def __call__(self, inputs: list[Any]) -> str:
        self.calls += 1
        self.refusal = self._will_refuse
        self.replayed += not self.refusal
        return "kernels" if self.refusal else "relocated"

    def empty_cache(self, *, workspaces: bool = False) -> None:
        pass

    def trim(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def pretend_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[Relocating]:
    """Have there be one, on which what is recorded is told; it refuses the partitions whose numbers are in `REFUSING`."""
    made: list[Relocating] = []

    def recordings(self: Devices, *given: Any) -> Relocating:
        made.append(Relocating("verification: output 0 differs" if len(made) in REFUSING else None))
        made[-1].note_failed_check = given[-1]
        return made[-1]

    monkeypatch.setattr(Devices, "recordings", recordings)
    monkeypatch.setattr(Devices, "recorder", lambda self, _index: object())
    monkeypatch.setattr(trial, "Sampler", Clock)
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
def session(tmp_path: Path, relocating: list[Relocating]) -> Iterator[Runtime]:
    import torch._inductor.config as inductor_config

    with inductor_config.patch({"triton.cudagraphs": True}):
        yield Runtime(locate({"PYGRAPHD_HOME": str(tmp_path)}))


def sources(session: Runtime) -> set[tuple[str, str]]:
    return {(each["deployment"], each["source"]) for each in session.report.summary()["decisions"]}


def run(forward: Compiled, backward: Compiled, steps: int = ENOUGH) -> list[tuple[Any, Any]]:
    x = torch.ones(1)
    return [(forward.current_callable([x]), backward.current_callable([x])) for _ in range(steps)]


def be_on(host: str, session: Runtime) -> None:
    """Have a process record as one of another host does."""
    session.decisions.cache = Cache(session.locations, host, session.report)


def trained(session: Runtime, steps: int, host: str | None = None) -> tuple[Runtime, list[tuple[Any, Any]]]:
    """Train in a process of its own, so to say; of another host if one is named."""
    each = Runtime(session.locations)
    if host is not None:
        be_on(host, each)
    return each, run(*compile_three(each), steps)


def compile_three(session: Runtime) -> tuple[Compiled, Compiled]:
    """Compile a forward of two parts and its backward of one."""
    box = BoxedDeviceIndex(0)
    forward = compile_once(session, 2, backward=False, box=box)
    return forward, compile_once(session, 1, backward=True, box=box)


def compile_pair(session: Runtime) -> tuple[Compiled, Compiled]:
    """Compile a forward and its backward, of one part each."""
    box = BoxedDeviceIndex(0)
    forward = compile_once(session, 1, backward=False, box=box)
    return forward, compile_once(session, 1, backward=True, box=box)


@pytest.fixture
def default_mode(session: Runtime, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import torch._inductor.config as inductor_config

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with inductor_config.patch({"triton.cudagraphs": False}):
        yield


def compile_whole_pair(session: Runtime) -> tuple[Compiled, Compiled]:
    box = BoxedDeviceIndex(None)
    return compile_whole(session, backward=False, box=box), compile_whole(session, backward=True, box=box)
