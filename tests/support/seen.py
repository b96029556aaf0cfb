"""What recordings are made of: how many nodes of each type, and which kernels."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from pygraphd.client.backend.driver import NodeType
from pygraphd.client.recording.capture import CudaRecorder

if TYPE_CHECKING:
    from pygraphd.client.backend.driver import Driver
    from pygraphd.client.recording.capture import Capture


class Seen:
    """The nodes of all recordings of a test."""

    def __init__(self) -> None:
        self.nodes: Counter[NodeType] = Counter()
        self.kernels: Counter[str] = Counter()

    def note(self, driver: Driver, graph: int) -> None:
        for node in driver.nodes(graph):
            node_type = driver.node_type(node)
            self.nodes[node_type] += 1
            if node_type is NodeType.KERNEL:
                self.kernels[driver.kernel_name(driver.kernel(node))] += 1

    def expect(self, *patterns: str) -> None:
        """Assert that each is part of a kernel's name, whatever the case: of one of Inductor's if it begins with `triton_`, of others' if not."""
        for pattern in patterns:
            inductors = pattern.startswith("triton_")
            names = [name for name in self.kernels if name.startswith("triton_") is inductors]
            assert any(re.search(pattern, name, re.IGNORECASE) for name in names), (pattern, [*self.kernels])


class Seeing(CudaRecorder):
    """Captures on a device, and has what it captured be seen."""

    def __init__(self, driver: Driver, device_index: int, seen: Seen) -> None:
        super().__init__(driver, device_index)
        self._seen = seen

    def capture(self, *arguments: Any, **options: Any) -> Capture:
        capture = super().capture(*arguments, **options)
        self._seen.note(self.driver, capture.graph)
        return capture
