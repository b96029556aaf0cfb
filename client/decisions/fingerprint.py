"""The keys of a compiled graph and of its environment, collected from torch and the machine.

Uses public torch and the facts of `torch_private`. No key depends on the values of weights.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pygraphd.client.common.signals import raised_by_handler
from pygraphd.schema.keys import Environment, GraphFactors
from pygraphd.schema.messages import Graph, Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from pygraphd.client.backend.torch_private import CompiledFacts

_NO_GPU = "none"


def graphs(facts: CompiledFacts, options: tuple[tuple[str, str], ...]) -> tuple[Graph, ...]:
    """Return one `Graph` for each partition of a compiled graph, in order."""
    kind = _kind(facts)
    if facts.host_operators:
        # Its text does not say which operators may be captured: the user may vouch for them.
        options = (*options, ("pygraph.host_operators", ",".join(facts.host_operators)))
    operators, count = len(_OPERATOR.findall(facts.text)), facts.partitions
    text, user_kernels = map(_with_numbered_groups, (facts.text, facts.user_kernels))
    inputs = facts.static_inputs, facts.mutated_inputs
    digests = (
        GraphFactors(text, kind, index, count, *inputs, options, user_kernels).digest()
        for index in range(count)
    )
    return tuple(Graph(digest, kind, index, count, operators) for index, digest in enumerate(digests))


_OPERATOR = re.compile(r"^\s+\w+.* = torch\.ops\.", re.MULTILINE)


def _kind(facts: CompiledFacts) -> Kind:
    if facts.is_backward:
        return Kind.BACKWARD
    return Kind.INFERENCE if facts.is_inference else Kind.FORWARD


def _with_numbered_groups(text: str) -> str:
    """Return a text with the process groups of its collectives as g0, g1 and so on, so that ranks of parallel groups share a graph."""
    numbers: dict[str, int] = {}
    return _GROUP.sub(lambda found: f"{found[1]}'g{numbers.setdefault(found[2], len(numbers))}'", text)


_GROUP = re.compile(r"(torch\.ops\.(?:_c10d_functional|_dtensor)\.\w+\.\w+\([^\n]*)'([^'\n]*)'")
"""A collective up to the last text among its arguments, which names its group."""


@functools.cache
def environment(device_index: int | None) -> Environment:
    """Return the environment of graphs on a CUDA device; None: of graphs on the CPU.

    None does not touch CUDA, so that a program on the CPU does not create a context.
    """
    if device_index is None:
        return Environment(_NO_GPU, "", 0, 0, "", torch.__version__, _triton(), "", "", "")
    properties = torch.cuda.get_device_properties(device_index)
    return Environment(
        gpu=properties.name,
        capability=f"{properties.major}.{properties.minor}",
        sm_count=properties.multi_processor_count,
        memory_mb=properties.total_memory // 2**20,
        mig=_mig_profile(properties.name),
        torch=torch.__version__,
        triton=_triton(),
        cuda=torch.version.cuda or "",
        driver=_probe(_driver),
        cudnn=_probe(lambda: str(torch.backends.cudnn.version())),
    )


def _mig_profile(name: str) -> str:
    # The driver names an instance "NVIDIA H100 80GB HBM3 MIG 1g.10gb".
    return name.partition(" MIG ")[2]


def _probe(read: Callable[[], str]) -> str:
    """Return the result of `read`, or "unknown: " and the name of its error, which matches an environment with the same error alone."""
    try:
        return read()
    except Exception as error:  # a broken driver may raise anything, and costs only the sharing
        if raised_by_handler(error):
            raise  # the program's own
        return f"unknown: {type(error).__name__}"


def _triton() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _driver() -> str:
    try:
        return _driver_by_nvml()
    except OSError:
        # Without NVML's library the kernel module still names the version.
        return _driver_by_proc(Path("/proc/driver/nvidia/version").read_text())


def _driver_by_nvml() -> str:
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    text = ctypes.create_string_buffer(96)
    if nvml.nvmlInit_v2() or nvml.nvmlSystemGetDriverVersion(text, len(text)):
        raise OSError("NVML does not answer")
    nvml.nvmlShutdown()
    return text.value.decode()


def _driver_by_proc(text: str) -> str:
    match = re.search(r"\b\d{3}\.\d+(?:\.\d+)?\b", text)
    if match is None:
        raise ValueError("no driver version in /proc/driver/nvidia/version")
    return match[0]
