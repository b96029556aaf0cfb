"""Holds the parameters of all nodes of a graph in one array of 8-byte words, and writes them into executables.

The driver is given addresses within this array. So relocation changes words, and then makes one driver call for each node they belong to.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from pygraphd.client.backend.driver import (
    Driver,
    DriverError,
    KernelNodeParams,
    Memcpy3D,
    MemoryType,
    MemsetNodeParams,
    NodeType,
    packed_list,
)
from pygraphd.client.backend.errors import NotRelocatableError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    Struct = KernelNodeParams | MemsetNodeParams | Memcpy3D

WORD = 8
_ALIGNMENT = 64
"""Alignment of parameters in bytes: a parameter may be a tensor map, which needs this much."""
_EVENTS = frozenset({NodeType.WAIT_EVENT, NodeType.EVENT_RECORD})
"""Nodes by which NCCL orders its kernels and replays of one communicator. Its event is the same wherever a graph is bound."""
_UNWRITTEN = frozenset({NodeType.EMPTY, *_EVENTS})
_COLLECTIVES = ("nccl", "nvshmem", "multimem", "all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""Parts of names of kernels that wait for other ranks, which would not take part in a verification."""
_OF_NCCL = "ncclDevKernel_"
"""Part of the names of NCCL's kernels, but for those on symmetric memory, whose addresses the other ranks know."""
_OF_INDUCTOR = "triton_"
"""How names of Inductor's own kernels begin, which tell of the operators around them."""
_NCCL_STORAGE = 16
"""The offset of `workStorageType` in the parameters of NCCL's kernels, as 32 bits; 0: addresses follow in the parameters themselves."""


@dataclass(slots=True)
class _Node:
    """A node as it was read: where its bytes go in the array, and which of them may be addresses."""

    handle: int
    node_type: NodeType
    struct: Struct
    blocks: tuple[bytes, ...]
    scanned: tuple[range, ...]
    """For each block, its words that may be addresses."""
    packed: bool = False
    begins: list[int] = field(init=False)
    """For each block the word at which it begins, from the node's first on, and then how many words they take."""

    def __post_init__(self) -> None:
        self.begins = [0, *itertools.accumulate(map(_words, self.blocks))]

    @property
    def words(self) -> int:
        """The number of words in its blocks."""
        return self.begins[-1]

    @property
    def form(self) -> tuple[object, ...]:
        """Everything of the node but the values of its arguments."""
        return (*self.kind, *map(len, self.blocks))

    @property
    def kind(self) -> tuple[object, ...]:
        """The type of the node and, for a kernel, its function."""
        return _kind_of(self.node_type, self.struct)


class Parameters:
    """The parameters of a graph's nodes, as `words`, and which of these may be addresses, as (indices, node) in `candidates`."""

    def __init__(self, driver: Driver, graph: int, *, may_reduce: bool = False) -> None:
        """Read a graph's nodes; raises `NotRelocatableError` or `DriverError`. With `may_reduce`, they may be collectives of NCCL."""
        self._driver = driver
        handles = driver.nodes(graph)
        read = (_read(driver, handle, may_reduce=may_reduce) for handle in handles)
        self._nodes = [node for node in read if node is not None]
        self._unwritten = len(handles) - len(self._nodes)
        self._begins = [*itertools.accumulate((node.words for node in self._nodes), initial=0)][:-1]
        """For each node, the index of its first word."""
        self._context = driver.context()
        self._lay_out()
        self.candidates = list(self._candidates())

    def of_another(self, graph: int, indices: Iterable[int]) -> dict[int, int] | None:
        """Return some words of another graph, by index here; None if it is not of the same kernels. Raises as the constructor does."""
        driver, mine = self._driver, self._nodes
        kinds = {handle: _kind(driver, handle) for handle in driver.nodes(graph)}
        handles = [handle for handle, kind in kinds.items() if kind[0] not in _UNWRITTEN]
        if [kinds[handle] for handle in handles] != [node.kind for node in mine]:
            return None
        wanted: dict[int, list[int]] = {}
        for index in indices:
            wanted.setdefault(bisect.bisect_right(self._begins, index) - 1, []).append(index)
        found: dict[int, int] = {}
        # To read what all nodes are given would take most of the time.
        for number, those in wanted.items():
            # The first capture has passed the check for collectives, and the kernels are the same.
            node = _read(driver, handles[number], may_reduce=True)
            if node is None or node.form != mine[number].form:
                return None
            words = memoryview(_laid_out([node])).cast("Q")
            found.update((index, words[index - self._begins[number]]) for index in those)
        return found

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def has_copies(self) -> bool:
        """Whether some node copies or sets memory, outside of any kernel."""
        return any(node.node_type is not NodeType.KERNEL for node in self._nodes)

    @property
    def is_single_kernel(self) -> bool:
        """Whether the graph is one kernel, without any node beside it, that can be launched by itself."""
        is_one = len(self) == 1 and not self._unwritten and not self.has_copies
        return is_one and self._driver.is_plain_launch(self._nodes[0].handle)

    def fail_to_write(self, code: int, node: int) -> NoReturn:
        """Raise DriverError with the code that a write of a node has returned."""
        raise DriverError(f"writing a {self._nodes[node].node_type.name} node", code)

    def write_graph(self, *, but_kernels: bool = False) -> None:
        """Write all words, or those of copies and memsets only, into the graph itself, so that it is instantiated with them; raises DriverError."""
        for node, (_, handle, struct, *_) in zip(self._nodes, self.writes, strict=True):
            if but_kernels and node.node_type is NodeType.KERNEL:
                continue
            self._driver.write_node(node.node_type, handle, struct)

    def _lay_out(self) -> None:
        # The driver reads these structures at every write, by their addresses in `writes`.
        self._kept: list[Any] = []
        self.writes: list[tuple[int, ...]] = []
        """How each node is written: the address of the driver's function, the node, that of its parameters, and a context for some."""
        laid_out = _laid_out(self._nodes)
        self._memory = (ctypes.c_uint64 * max(len(laid_out) // WORD, 1))()
        # By way of bytes: `memoryview` cannot index the format in which ctypes exports its array.
        self.words = memoryview(self._memory).cast("B").cast("Q")
        first = ctypes.addressof(self._memory)
        ctypes.memmove(first, laid_out, len(laid_out))
        for node, begin in zip(self._nodes, self._begins, strict=True):
            struct = self._struct_address(node, [first + (begin + each) * WORD for each in node.begins[:-1]])
            context = () if node.node_type is NodeType.KERNEL else (self._context,)
            self.writes.append((self._driver.writer(node.node_type), node.handle, struct, *context))

    def _candidates(self) -> Iterator[tuple[range, int]]:
        for index, (node, first) in enumerate(zip(self._nodes, self._begins, strict=True)):
            for begin, scanned in zip(node.begins, node.scanned, strict=False):
                if scanned:
                    at = first + begin
                    yield range(at + scanned.start, at + scanned.stop, scanned.step), index

    def _struct_address(self, node: _Node, addresses: Sequence[int]) -> int:
        if node.node_type is not NodeType.KERNEL:
            return addresses[0]  # the one block is the structure itself
        assert isinstance(node.struct, KernelNodeParams)
        struct = KernelNodeParams.from_buffer_copy(node.struct)
        if node.packed:
            size = ctypes.c_size_t(len(node.blocks[0]))
            arguments = packed_list(addresses[0], size)
            self._kept.append(size)
            struct.extra = ctypes.addressof(arguments)
        else:
            arguments = (ctypes.c_void_p * max(len(addresses), 1))(*addresses)
            struct.kernelParams = ctypes.addressof(arguments)
        self._kept += [struct, arguments]
        return ctypes.addressof(struct)


def _words(block: bytes) -> int:
    """Return the number of words of a block with the padding that aligns the next one."""
    return -(-len(block) // _ALIGNMENT) * _ALIGNMENT // WORD


def _laid_out(nodes: Iterable[_Node]) -> bytes:
    """Return the blocks of nodes one after the other, each followed by the padding that aligns the next one."""
    blocks = (block for node in nodes for block in node.blocks)
    return b"".join([block.ljust(_words(block) * WORD, b"\0") for block in blocks])


def _kind(driver: Driver, handle: int) -> tuple[object, ...]:
    node_type = driver.node_type(handle)
    return _kind_of(node_type, driver.kernel(handle) if node_type is NodeType.KERNEL else None)


def _kind_of(node_type: NodeType, struct: Struct | None) -> tuple[object, ...]:
    return (node_type, struct.func, struct.kern) if isinstance(struct, KernelNodeParams) else (node_type,)


def _read(driver: Driver, handle: int, *, may_reduce: bool) -> _Node | None:
    """Return the parameters of a node; None for one that has none to write; raises `NotRelocatableError`."""
    node_type = driver.node_type(handle)
    if node_type is NodeType.KERNEL:
        return _read_kernel(driver, handle, may_reduce=may_reduce)
    if node_type is NodeType.MEMCPY:
        return _read_memcpy(driver, handle)
    if node_type is NodeType.MEMSET:
        # Its address is the first word of the structure.
        struct = driver.memset(handle)
        return _Node(handle, node_type, struct, (bytes(struct),), (range(1),))
    if node_type is NodeType.EMPTY or (may_reduce and node_type in _EVENTS):
        return None
    raise NotRelocatableError(f"it holds a {node_type.name} node")


def _read_kernel(driver: Driver, handle: int, *, may_reduce: bool) -> _Node:
    struct = driver.kernel(handle)
    name = driver.kernel_name(struct)
    blocks = driver.arguments(struct, name)
    # As NCCL's kernels are: one buffer holds all parameters, in place of an address for each.
    packed = not struct.kernelParams and bool(blocks)
    if _is_collective(name) and not (may_reduce and packed and _OF_NCCL in name and _shows_work(blocks[0])):
        raise NotRelocatableError(f"it holds a collective ({name})")
    # Whole words alone: compilers align the addresses in a kernel's parameters to 8 bytes.
    words = tuple(range(len(block) // WORD) for block in blocks)
    return _Node(handle, NodeType.KERNEL, struct, blocks, words, packed=packed)


@functools.lru_cache(maxsize=1024)
def _is_collective(name: str) -> bool:
    return not name.startswith(_OF_INDUCTOR) and any(mark in name for mark in _COLLECTIVES)


def _shows_work(block: bytes) -> bool:
    """Return whether the parameters of a kernel of NCCL hold the addresses that it works on."""
    return not any(block[_NCCL_STORAGE : _NCCL_STORAGE + 4]) and len(block) > 2 * _NCCL_STORAGE


def _read_memcpy(driver: Driver, handle: int) -> _Node:
    struct = driver.memcpy(handle)
    for side in ("src", "dst"):
        if not _on_device(driver, getattr(struct, f"{side}MemoryType"), getattr(struct, f"{side}Device")):
            # A replay would go on with the host memory of its recording: only addresses of the GPU are rewritten.
            raise NotRelocatableError("it copies from or to memory of the host")
    if struct.Height > 1 or struct.Depth > 1:
        # In an executable, the driver never writes one: each call at other addresses would fail.
        raise NotRelocatableError("it holds a MEMCPY node of several dimensions")
    words = (Memcpy3D.srcDevice.offset // WORD, Memcpy3D.dstDevice.offset // WORD)
    return _Node(
        handle,
        NodeType.MEMCPY,
        struct,
        (bytes(struct),),
        (range(words[0], words[1] + 1, words[1] - words[0]),),
    )


def _on_device(driver: Driver, memory_type: int, address: int) -> bool:
    if memory_type == MemoryType.UNIFIED:
        return driver.memory_type(address) is MemoryType.DEVICE
    return memory_type == MemoryType.DEVICE
