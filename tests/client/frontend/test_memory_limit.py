"""`PYGRAPH_MEMORY` from the environment to the summary: what it allows is recorded, and what it does not allow runs as KERNELS."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._inductor.cudagraph_utils import BoxedDeviceIndex

from pygraphd.client.backend import driver, torch_private
from pygraphd.client.frontend.devices import Devices
from pygraphd.client.frontend.runtime import Runtime
from pygraphd.client.recording import capture
from pygraphd.client.recording.budget import OVER_LIMIT
from pygraphd.schema.locations import locate
from tests.support.compiled import ENOUGH, Compiled, pretend_there_is_a_gpu
from tests.support.recording_case import HostRecorder, add

if TYPE_CHECKING:
    from pathlib import Path

    from pygraphd.client.replay.native.ffi import TensorOps
    from tests.support.emulator import Allocator, Emulator

pytestmark = pytest.mark.torch

RECORDINGS, RECORDER = Devices.recordings, Devices.recorder
"""As they are: only a driver and a GPU are pretended."""


@pytest.mark.parametrize(
    ("memory", "limit", "is_recorded"), [("2KiB", 2048, False), ("1MiB", 1 << 20, True), ("0", 0, True)]
)
def test_the_setting_bounds_what_recording_takes_and_is_in_the_summary(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    emulator: Emulator,
    allocator: Allocator,
    loaded_helper: TensorOps,
    memory: str,
    limit: int,
    is_recorded: bool,
) -> None:
    monkeypatch.setenv("PYGRAPH_MEMORY", memory)
    recorders: list[HostRecorder] = []

    def recorder(_driver: object, _index: int, memory_bytes: int) -> HostRecorder:
        recorders.append(HostRecorder(emulator, allocator, memory_bytes))
        return recorders[-1]

    pretend_there_is_a_gpu(monkeypatch)
    monkeypatch.setattr(Devices, "recordings", RECORDINGS)
    monkeypatch.setattr(Devices, "recorder", RECORDER)
    monkeypatch.setattr(driver, "load", lambda: emulator.driver)
    monkeypatch.setattr(torch_private, "missing_for", lambda _: None)
    monkeypatch.setattr(capture, "CudaRecorder", recorder)
    with inductor_config.patch({"triton.cudagraphs": True}):
        session = Runtime(locate({"PYGRAPHD_HOME": str(tmp_path)}))
        made: Any = Compiled(1)
        plan = session.compiled_graph(
            made,
            {"is_backward": False, "cudagraphs": True, "boxed_forward_device_index": BoxedDeviceIndex(0)},
        )
        assert plan is not None
        run_kernels = recorders[0].compiled(add)
        made.compiled_fn_runner.partitions[:] = [plan.cudagraphify(run_kernels, {"device_index": 0})]
        plan.complete(made)

    def call(value: float) -> Any:
        inputs = [allocator.tensor(torch.full((300,), each)) for each in (value, 2.0)]
        return made.call(inputs)[0][0]

    results = [call(float(value)) for value in range(ENOUGH)]

    assert all(bool((each == value + 2).all()) for value, each in enumerate(results))
    session.close()
    summary = session.report.summary()
    assert summary["captured"] == is_recorded
    assert summary["memory"]["limit_bytes"] == limit
    assert (summary["memory"]["peak_requested_bytes"] <= limit) == (limit > 0 and is_recorded)
    assert (summary["memory"]["refused_recordings"] == 0) == is_recorded
    assert (OVER_LIMIT in summary["fallbacks"]) != is_recorded
    (decision,) = summary["decisions"]
    reason = decision["reason"]
    if not is_recorded:
        assert (decision["deployment"], decision["final"]) == ("KERNELS", False)
        assert (reason["code"], reason["detail"]) == ("no_memory_to_record", OVER_LIMIT)
        assert (recorders[0].captures, emulator.live_memory()) == (0, 0)
