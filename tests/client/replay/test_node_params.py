"""Node parameters as words: read from a graph, written into an executable, for every way in which a kernel is launched."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import pytest
import torch

from pygraphd.client.backend import driver as cuda
from pygraphd.client.backend.driver import DriverError, MemoryType, NodeType
from pygraphd.client.backend.errors import NotRelocatableError
from pygraphd.client.replay.node_params import Parameters
from tests.support.emulator import ALL_REDUCE

if TYPE_CHECKING:
    from tests.support.emulator import Emulator, Graph

pytestmark = pytest.mark.torch


def replace(parameters: Parameters, old: torch.Tensor, new: torch.Tensor) -> list[int]:
    """Write one tensor's address for another's; return the nodes that hold it."""
    words = [(word, node) for indices, node in parameters.candidates for word in indices]
    found = [(word, node) for word, node in words if parameters.words[word] == old.data_ptr()]
    for word, _ in found:
        parameters.words[word] = new.data_ptr()
    return [node for _, node in found]


def write(parameters: Parameters, executable: int, nodes: list[int]) -> None:
    """Write some nodes as the compiled helper does."""
    for node in nodes:
        function, *arguments = parameters.writes[node]
        call = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * (1 + len(arguments)))(function)
        if code := call(executable, *arguments):
            parameters.fail_to_write(code, node)


def run_with(emulator: Emulator, graph: Graph, old: torch.Tensor, new: torch.Tensor) -> list[int]:
    """Run a graph once with `new` in place of `old`; return the nodes that were written."""
    executable = emulator.driver.instantiate(graph.handle, 0)
    parameters = Parameters(emulator.driver, graph.handle)
    nodes = replace(parameters, old, new)
    write(parameters, executable, nodes)
    emulator.driver.launch(executable, 0)
    emulator.driver.destroy_executable(executable)
    emulator.driver.destroy_graph(graph.handle)
    return nodes


def test_arguments_given_one_by_one_are_written(emulator: Emulator) -> None:
    a, b, out, moved = torch.ones(5), torch.ones(5), torch.zeros(5), torch.full((5,), 7.0)
    graph = emulator.graph()
    graph.add(a, b, out)

    assert run_with(emulator, graph, a, moved) == [0]

    assert out.tolist() == [8.0] * 5


def test_arguments_in_one_buffer_are_written_and_the_others_keep_their_values(emulator: Emulator) -> None:
    a, out, moved = torch.ones(5), torch.zeros(5), torch.full((5,), 2.0)
    graph = emulator.graph()
    graph.scale(a, out, factor=1.5)

    assert run_with(emulator, graph, a, moved) == [0]

    assert out.tolist() == [3.0] * 5


def test_addresses_within_a_structure_are_written(emulator: Emulator) -> None:
    parts, out = [torch.full((2,), float(i)) for i in range(3)], torch.zeros(6)
    moved = torch.full((2,), 9.0)
    graph = emulator.graph()
    graph.gather(parts, out, magic=parts[1].data_ptr() + 1)

    assert run_with(emulator, graph, parts[1], moved) == [0]

    assert out.tolist() == [0, 0, 9, 9, 2, 2]


def test_copies_and_memsets_are_written(emulator: Emulator) -> None:
    a, b, moved = torch.ones(4), torch.zeros(4), torch.zeros(4)
    graph = emulator.graph()
    graph.copy(b, a)
    graph.other(NodeType.EMPTY)
    graph.set(b[:1], 0x41)

    assert run_with(emulator, graph, b, moved) == [0, 1]

    assert b.tolist() == [0.0] * 4
    assert moved[1:].tolist() == [1.0] * 3
    assert moved.view(torch.int32)[0].item() == 0x41414141


@pytest.mark.parametrize(
    "node_type",
    sorted(set(NodeType) - {NodeType.KERNEL, NodeType.MEMCPY, NodeType.MEMSET, NodeType.EMPTY}),
)
def test_a_node_that_cannot_be_moved_is_named(emulator: Emulator, node_type: NodeType) -> None:
    graph = emulator.graph()
    graph.other(node_type)

    with pytest.raises(NotRelocatableError, match=f"holds a {node_type.name} node"):
        Parameters(emulator.driver, graph.handle)
    emulator.driver.destroy_graph(graph.handle)


def test_a_node_type_of_a_later_driver_is_an_error(emulator: Emulator) -> None:
    graph = emulator.graph()
    graph.other(77)

    with pytest.raises(DriverError, match="type 77"):
        Parameters(emulator.driver, graph.handle)
    emulator.driver.destroy_graph(graph.handle)


@pytest.mark.parametrize("kind", [MemoryType.HOST, MemoryType.ARRAY])
def test_a_copy_from_the_host_is_refused(emulator: Emulator, kind: MemoryType) -> None:
    a, b = torch.ones(4), torch.zeros(4)
    graph = emulator.graph()
    graph.copy(b, a, kind)

    with pytest.raises(NotRelocatableError, match="memory of the host"):
        Parameters(emulator.driver, graph.handle)
    emulator.driver.destroy_graph(graph.handle)


@pytest.mark.parametrize(("height", "depth"), [(2, 1), (1, 3)])
def test_a_copy_of_several_dimensions_is_refused(emulator: Emulator, height: int, depth: int) -> None:
    graph = emulator.graph()
    graph.copy(torch.zeros(24), torch.ones(24), height=height, depth=depth)

    with pytest.raises(NotRelocatableError, match="it holds a MEMCPY node of several dimensions"):
        Parameters(emulator.driver, graph.handle)
    emulator.driver.destroy_graph(graph.handle)


def test_a_copy_that_does_not_say_where_memory_lies_is_asked_for(emulator: Emulator) -> None:
    a, b = torch.ones(4), torch.zeros(4)
    graph = emulator.graph()
    graph.copy(b, a, MemoryType.UNIFIED)
    Parameters(emulator.driver, graph.handle)

    emulator.host_memory(a.data_ptr(), 16)

    with pytest.raises(NotRelocatableError, match="memory of the host"):
        Parameters(emulator.driver, graph.handle)
    emulator.driver.destroy_graph(graph.handle)


def test_a_collective_is_refused(emulator: Emulator) -> None:
    pointer = ctypes.c_void_p(0)
    graph = emulator.graph()
    graph.kernel("ncclDevKernel_AllReduce", pointer, pointer, pointer, ctypes.c_int64(0))

    with pytest.raises(NotRelocatableError, match="collective"):
        Parameters(emulator.driver, graph.handle)
    emulator.driver.destroy_graph(graph.handle)


def test_a_collective_of_nccl_is_written_and_its_events_stay(emulator: Emulator) -> None:
    a, out, moved, comm = torch.ones(3), torch.zeros(3), torch.full((3,), 4.0), ctypes.c_int64()
    graph, again = emulator.graph(), emulator.graph()
    graph.reduce(comm, a, out)
    again.reduce(comm, moved, out)
    executable = emulator.driver.instantiate(graph.handle, 0)
    parameters = Parameters(emulator.driver, graph.handle, may_reduce=True)

    nodes = replace(parameters, a, moved)
    write(parameters, executable, nodes)
    emulator.driver.launch(executable, 0)

    assert (len(parameters), nodes, out.tolist(), comm.value) == (1, [0], [8.0] * 3, 1)
    (index,) = (at for at, word in enumerate(parameters.words) if word == moved.data_ptr())
    assert parameters.of_another(again.handle, [index]) == {index: moved.data_ptr()}
    emulator.driver.destroy_executable(executable)
    for each in (graph, again):
        emulator.driver.destroy_graph(each.handle)


@pytest.mark.parametrize(
    ("name", "storage", "may_reduce", "why"),
    [
        (ALL_REDUCE, 0, False, "WAIT_EVENT"),
        (ALL_REDUCE, 1, True, "collective"),
        ("_Z30ncclSymkDevKernel_AllReduce", 0, True, "collective"),
    ],
)
def test_a_collective_whose_addresses_others_know_is_refused(
    emulator: Emulator, name: str, storage: int, may_reduce: bool, why: str
) -> None:
    graph = emulator.graph()
    graph.reduce(ctypes.c_int64(), torch.ones(3), torch.ones(3), name, storage)

    with pytest.raises(NotRelocatableError, match=why):
        Parameters(emulator.driver, graph.handle, may_reduce=may_reduce)
    emulator.driver.destroy_graph(graph.handle)


def test_a_kernel_of_inductor_beside_a_collective_is_none(emulator: Emulator) -> None:
    pointer = ctypes.c_void_p(0)
    graph = emulator.graph()
    graph.kernel("triton_poi_fused_all_reduce_0", pointer, pointer, pointer, ctypes.c_int64(0))

    assert len(Parameters(emulator.driver, graph.handle)) == 1
    emulator.driver.destroy_graph(graph.handle)


def test_a_failed_write_is_an_error_that_names_it(emulator: Emulator) -> None:
    a = torch.ones(4)
    graph = emulator.graph()
    graph.add(a, a, a)
    executable = emulator.driver.instantiate(graph.handle, 0)
    parameters = Parameters(emulator.driver, graph.handle)
    emulator.fail_at(1)

    with pytest.raises(DriverError, match="writing a KERNEL node failed with CUresult 999"):
        write(parameters, executable, [0])

    emulator.driver.destroy_executable(executable)
    emulator.driver.destroy_graph(graph.handle)


def test_a_machine_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "LIBRARY", "libcuda.so.none")
    cuda.load.cache_clear()

    with pytest.raises(DriverError, match=r"loading libcuda\.so\.none"):
        cuda.load()
    cuda.load.cache_clear()


def test_a_driver_that_lacks_a_call_is_named() -> None:
    with pytest.raises(DriverError, match="cuGraphClone: the driver has no such call"):
        cuda.Driver(ctypes.CDLL(None))


def test_a_process_that_loads_ever_more_kernels_remembers_some(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "MAX_KERNELS", 3)
    graph = emulator.graph()
    graph.add(*(torch.ones(5) for _ in range(3)))
    driver = emulator.driver
    params = driver.kernel(driver.nodes(graph.handle)[0])
    for number in range(10):
        # As another kernel at the same handle, whose module came after another one had gone.
        sizes = [len(each) for each in driver.arguments(params, f"kernel{number}")]
        assert sizes == [8, 8, 8, 8]
        assert len(driver._sizes) <= 3
    driver.destroy_graph(graph.handle)
