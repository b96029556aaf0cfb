"""A driver over host memory, built from `host_driver.cpp`: kernels are functions, device memory is the process's own.

What is tested here is bookkeeping: addresses, words, nodes, memory, failures. What CUDA does with it is for tests/gpu.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from ctypes import c_char_p, c_int, c_int32, c_int64, c_long, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pygraphd.client.backend.driver import Driver, MemoryType, NodeType
from pygraphd.client.replay.relocation_table import BLOCK, Span, blocks

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from pygraphd.client.replay.native.ffi import TensorOps
    from tests.support.recorder import Recorder

_SIGNATURES: dict[str, tuple[tuple[Any, ...], Any]] = {
    "emulator_graph": ((), c_void_p),
    "emulator_add_kernel": ((c_void_p, c_char_p, c_void_p, c_int), c_int),
    "emulator_set_attribute": ((c_void_p, c_int), None),
    "emulator_add_copy": ((c_void_p, c_uint64, c_uint64, c_size_t, c_int, c_size_t, c_size_t), None),
    "emulator_add_set": ((c_void_p, c_uint64, c_uint, c_size_t), None),
    "emulator_add_other": ((c_void_p, c_int), None),
    "emulator_host_memory": ((c_uint64, c_size_t), None),
    "emulator_memory_is_gone": ((c_uint64, c_size_t), None),
    "emulator_forget_memory": ((), None),
    "emulator_fail_at": ((c_long,), None),
    "emulator_capturing": ((c_int,), None),
    "emulator_calls": ((), c_long),
    "emulator_early_writes": ((), c_long),
    "emulator_single_kernels": ((), c_long),
    "emulator_live_graphs": ((), c_long),
    "emulator_live_executables": ((), c_long),
    "emulator_live_memory": ((), c_long),
}

GUARD = 0xA5
ALL_REDUCE = "_Z39ncclDevKernel_AllReduce_Sum_f32_RING_LL"


class Parts(ctypes.Structure):
    """The structure that kernel `gather` takes by value."""

    _fields_ = (("magic", c_uint64), ("parts", c_void_p * 3), ("count", c_int32), ("length", c_int32))


class Gapped(ctypes.Structure):
    """The structure that kernel `first` takes by value, with what lies in its gap."""

    _fields_ = (("source", c_void_p), ("length", c_int32), ("gap", c_uint32))


class Reduce(ctypes.Structure):
    """The structure that a kernel of NCCL takes in a packed list."""

    _fields_ = (
        ("comm", c_void_p), ("channels", c_uint64), ("storage", c_uint32), ("mask", c_uint32), ("work", c_void_p),
        ("batch", c_uint64 * 3), ("send", c_void_p), ("receive", c_void_p), ("count", c_int64),
    )  # fmt: skip


class Graph:
    """A graph that is being made, node by node; `n` counts floats."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.handle: int = library.emulator_graph()

    def add(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        """Add `out = a + b`."""
        self.kernel("add", *map(_pointer, (a, b, out)), c_int64(out.numel()))

    def scale(self, a: torch.Tensor, out: torch.Tensor, factor: float) -> None:
        """Add `out = factor * a`, as a packed argument list."""
        arguments = (_pointer(a), _pointer(out), ctypes.c_float(factor), c_int64(out.numel()))
        self.kernel("scale", *arguments, packed=True)

    def accumulate(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Add `a += b`."""
        self.kernel("accumulate", _pointer(a), _pointer(b), c_int64(a.numel()))

    def gather(self, parts: list[torch.Tensor], out: torch.Tensor, magic: int = 0) -> None:
        """Add `out = cat(parts)`, the addresses in a structure behind the number `magic`."""
        pointers = (c_void_p * 3)(*[part.data_ptr() for part in parts])
        self.kernel("gather", Parts(magic, pointers, len(parts), parts[0].numel()), _pointer(out))

    def first(self, a: torch.Tensor, out: torch.Tensor, gap: int = 0) -> None:
        """Add `out = a[: len(out)]`, the address and the length in a structure with a gap, in which half of an address may lie."""
        self.kernel("first", Gapped(a.data_ptr(), out.numel(), gap), _pointer(out))

    def until(self, a: torch.Tensor, out: torch.Tensor) -> None:
        """Add `out = 2 * a`, with the addresses where `out` begins and where it ends."""
        self.kernel("until", *map(_pointer, (a, out)), c_void_p(out.data_ptr() + out.nbytes))

    def reduce(
        self, comm: Any, a: torch.Tensor, out: torch.Tensor, name: str = ALL_REDUCE, storage: int = 0
    ) -> None:
        """Add `out = 2 * a`, as NCCL adds an all-reduce of two ranks that hold the same; `comm`, a c_int64, counts how often it runs."""
        comm_at, nothing = ctypes.addressof(comm), (c_uint64 * 3)()
        work = Reduce(comm_at, 1, storage, 0, None, nothing, a.data_ptr(), out.data_ptr(), out.numel())
        self.other(NodeType.WAIT_EVENT)
        self.kernel(name, work, packed=True)
        self.other(NodeType.EVENT_RECORD)

    def through_table(self, table: Any, out: torch.Tensor) -> None:
        """Add `out = *table`: the input's address lies in `table`, an array of host memory."""
        self.kernel("through_table", c_void_p(ctypes.addressof(table)), _pointer(out), c_int64(out.numel()))

    def into_table(self, table: Any, n: int) -> None:
        """Add `*table = n`: the target's address lies in `table`, an array of host memory."""
        self.kernel("into_table", c_void_p(ctypes.addressof(table)), c_int64(n))

    def kernel(self, name: str, *arguments: Any, packed: bool = False) -> None:
        """Add a kernel of the driver's by name."""
        pointers = (c_void_p * len(arguments))(*[ctypes.addressof(argument) for argument in arguments])
        assert self._library.emulator_add_kernel(self.handle, name.encode(), pointers, packed) == 0

    def attribute(self, attribute: int) -> None:
        """Set an attribute of the kernel that was added last."""
        self._library.emulator_set_attribute(self.handle, attribute)

    def copy(
        self,
        to: torch.Tensor,
        source: torch.Tensor,
        kind: MemoryType = MemoryType.DEVICE,
        height: int = 1,
        depth: int = 1,
    ) -> None:
        """Add a copy node; of one with more dimensions, only the parameters are there."""
        size = to.numel() * to.element_size()
        self._library.emulator_add_copy(
            self.handle, to.data_ptr(), source.data_ptr(), size, kind, height, depth
        )

    def set(self, to: torch.Tensor, value: int) -> None:
        """Add a memset node."""
        self._library.emulator_add_set(self.handle, to.data_ptr(), value, to.numel() * to.element_size())

    def other(self, node_type: int) -> None:
        """Add a node of any type, without parameters."""
        self._library.emulator_add_other(self.handle, node_type)


def _pointer(tensor: torch.Tensor) -> c_void_p:
    return c_void_p(tensor.data_ptr())


class Arena:
    """Memory of a capture: blocks are handed out as the caching allocator does, from the lowest free address."""

    def __init__(self, blocks: int, library: ctypes.CDLL, base: int = 0) -> None:
        import torch

        self._library = library
        self._memory = torch.full(((blocks + 1) * BLOCK // 4,), float("nan"))
        self._base = base or -(-self._memory.data_ptr() // BLOCK) * BLOCK
        self._used: dict[int, int] = {}
        self.allocations: list[Span] = []

    def allocate(self, n: int, *, is_new: bool = False) -> torch.Tensor:
        """Return a tensor of `n` floats, with a storage of its own; if it `is_new`, where nothing has ever been."""
        import torch

        from pygraphd.client.backend import torch_private

        size = -(-n * 4 // BLOCK) * BLOCK
        start = self._base
        for used in sorted(self._used):
            if used - start >= size:
                break
            start = self._used[used]
        if is_new:
            start = max((-(-each.end // BLOCK) * BLOCK for each in self.allocations), default=self._base)
        self._used[start] = start + size
        self.allocations.append(Span(start, start + n * 4))  # as asked for: CUDA's trace says no more
        return torch_private.memory_at(start, n * 4, self._memory.device).view(torch.float32)

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor was allocated here, and has not been let go of."""
        return tensor.data_ptr() in self._used

    def free(self, tensor: torch.Tensor) -> None:
        del self._used[tensor.data_ptr()]

    def let_go(self) -> None:
        """Make everything that was recorded here worthless, as memory is that has been given back to the device."""
        self._memory.fill_(float("nan"))
        self._library.emulator_memory_is_gone(self._memory.data_ptr(), self._memory.numel() * 4)

    def untouched(self) -> bool:
        """Whether nothing was written since `let_go`."""
        return bool(self._memory.isnan().all())


class Emulator:
    """The driver under test, and the means to make graphs for it and to make it fail."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._arenas: list[Arena] = []
        self.driver = Driver(library)

    def graph(self) -> Graph:
        """Return an empty graph."""
        return Graph(self._library)

    def arena(self, blocks: int = 64, base: int = 0) -> Arena:
        """Return memory for a capture to allocate from; with a `base`, addresses from there on, at which there is memory."""
        self._arenas.append(
            Arena(blocks, self._library, base)
        )  # kept: what is gone must not be given out again
        return self._arenas[-1]

    def fail_at(self, call: int) -> None:
        """Have the driver's n-th call from now on fail; 0: none."""
        self._library.emulator_fail_at(call)

    def capturing(self, status: int) -> None:
        """Have the current stream be captured (1) or not (0), or have the driver fail to tell (-1)."""
        self._library.emulator_capturing(status)

    def calls(self) -> int:
        """Return how many driver calls there were since `fail_at`."""
        calls: int = self._library.emulator_calls()
        return calls

    def early_writes(self) -> int:
        """Return how many nodes were written so far into an executable that had neither been uploaded nor launched."""
        writes: int = self._library.emulator_early_writes()
        return writes

    def single_kernels(self) -> int:
        """Return how many kernels were launched so far without an executable."""
        count: int = self._library.emulator_single_kernels()
        return count

    def host_memory(self, address: int, size: int) -> None:
        """Declare memory to be the host's."""
        self._library.emulator_host_memory(address, size)

    def live_memory(self) -> int:
        """Return a number that is 0 once no address is reserved, nothing is mapped, and all memory is released."""
        count: int = self._library.emulator_live_memory()
        return count

    def live(self) -> tuple[int, int]:
        """Return how many graphs and executables have not been destroyed."""
        return self._library.emulator_live_graphs(), self._library.emulator_live_executables()


class Allocator:
    """Gives out memory as CUDA's caching allocator does, in whole blocks and a storage each, with guard zones around."""

    def __init__(self) -> None:
        self._given: list[tuple[torch.Tensor, int, int]] = []

    def __call__(self, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        import torch

        last = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        length = blocks((last + 1) * dtype.itemsize) * BLOCK
        memory = torch.full((length + 3 * BLOCK,), GUARD, dtype=torch.uint8, device="cpu")
        start = BLOCK + -memory.data_ptr() % BLOCK
        self._given.append((memory, start, start + length))
        storage = torch._C._construct_storage_from_data_pointer(
            memory.data_ptr() + start, memory.device, (last + 1) * dtype.itemsize
        )
        return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, size, stride)

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor in memory of its own."""
        copy = self(tuple(values.size()), tuple(values.stride()), values.dtype)
        return copy.copy_(values)

    def check(self) -> None:
        """Assert that nothing was written to a guard zone."""
        for memory, start, end in self._given:
            assert (memory[:start] == GUARD).all()
            assert (memory[end:] == GUARD).all()
        self._given.clear()


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Allocator]:
    """Have recordings allocate from one allocator with guard zones, which are looked at in the end."""
    from pygraphd.client.backend import torch_private

    allocator = Allocator()
    monkeypatch.setattr(torch_private, "allocator", lambda _device: allocator)
    yield allocator
    allocator.check()


@pytest.fixture
def recorder(emulator: Emulator, allocator: Allocator) -> Recorder:
    """Return what makes one recording."""
    from tests.support.recorder import Recorder

    return Recorder(emulator, allocator)


@pytest.fixture(scope="session")
def emulator_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the driver."""
    library = tmp_path_factory.mktemp("driver") / "libhost_driver.so"
    compiler = os.environ.get("CXX", "g++")
    source = Path(__file__).with_name("host_driver.cpp")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-std=c++17", source, "-o", library], check=True)
    return library


@pytest.fixture
def emulator(
    emulator_library: Path, loaded_helper: TensorOps, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Emulator]:
    """Return the driver, with the helper loaded and no profile so far; the test fails if a graph or an executable is left behind, or written to before its upload."""
    from pygraphd.client.backend.torch_private import profiling

    monkeypatch.setattr(profiling._profiles, "were_prepared", False)
    library = ctypes.CDLL(str(emulator_library))
    for name, (arguments, result) in _SIGNATURES.items():
        call = getattr(library, name)
        call.argtypes, call.restype = arguments, result
    emulator = Emulator(library)
    emulator.fail_at(0)
    before, early = emulator.live(), emulator.early_writes()
    yield emulator
    emulator.fail_at(0)
    emulator.capturing(0)
    library.emulator_forget_memory()
    assert emulator.live() == before
    assert emulator.early_writes() == early
    assert emulator.live_memory() == 0
