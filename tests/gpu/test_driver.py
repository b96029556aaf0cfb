"""The structures handed to the driver, held against those of NVIDIA's own bindings where these are installed."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from pygraphd.client.backend import driver, torch_private

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


def test_this_torch_has_all_that_relocation_needs() -> None:
    assert torch_private.missing_for("relocation") is None


def test_this_driver_has_all_calls() -> None:
    assert driver.load() is driver.load()


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (driver.KernelNodeParams, "CUDA_KERNEL_NODE_PARAMS"),
        (driver.MemsetNodeParams, "CUDA_MEMSET_NODE_PARAMS"),
        (driver.Memcpy3D, "CUDA_MEMCPY3D"),
    ],
)
def test_structures_lie_as_nvidias_do(mine: Any, theirs: str) -> None:
    """Each field is written through their object and read through ours."""
    bindings = pytest.importorskip("cuda.bindings.driver")
    struct = getattr(bindings, theirs)()
    view = mine.from_address(struct.getPtr())
    checked = 0
    for number, (name, kind) in enumerate(mine._fields_, start=1):
        if kind not in (ctypes.c_uint, ctypes.c_size_t):
            continue  # the others are objects there
        setattr(struct, name, number)
        assert getattr(view, name) == number
        checked += 1
    assert checked >= 4


def test_device_addresses_of_a_copy_lie_as_nvidias_do() -> None:
    bindings = pytest.importorskip("cuda.bindings.driver")
    struct = bindings.CUDA_MEMCPY3D()
    struct.srcDevice, struct.dstDevice = bindings.CUdeviceptr(11), bindings.CUdeviceptr(22)
    view = driver.Memcpy3D.from_address(struct.getPtr())

    assert (view.srcDevice, view.dstDevice) == (11, 22)


def test_node_types_are_nvidias() -> None:
    bindings = pytest.importorskip("cuda.bindings.driver")
    theirs = {each.name.removeprefix("CU_GRAPH_NODE_TYPE_"): each.value for each in bindings.CUgraphNodeType}

    assert {each.name: each.value for each in driver.NodeType}.items() <= theirs.items()
