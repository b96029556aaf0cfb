"""The CUDA driver calls that relocation needs, through ctypes, without torch.

The structures are those of cuda.h (CUDA 12.4 and newer). A call that fails raises `DriverError`; nothing is retried. ctypes is used and
not cuda-python, since the hot path passes addresses that were computed once, and no user has to install anything.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import functools
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LIBRARY = "libcuda.so.1"
USE_NODE_PRIORITY = 8
"""CU_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY: a kernel keeps the priority of the stream it was recorded on."""
MAX_KERNELS = 4096
"""Kernels whose parameter sizes are remembered: a process that compiles on and on loads ever more. To ask again takes microseconds."""
_POINTER_ATTRIBUTE_MEMORY_TYPE = 2
_MEMORY_PINNED = 1
_LOCATION_DEVICE = 1
_READ_AND_WRITE = 3
_CAPTURE_MODE_RELAXED = 2
_STREAM_NON_BLOCKING = 1
_COOPERATIVE = 2
_CLUSTER_DIMENSION = 4
_ATTRIBUTE_WORDS = 8

# The markers in a packed parameter list: CU_LAUNCH_PARAM_END, _BUFFER_POINTER and _BUFFER_SIZE.
_PACKED_BUFFER = 1
_PACKED_SIZE = 2


class DriverError(RuntimeError):
    """A driver call has failed: `call` is its name and `code` its CUresult. If `code` is 0, no call was made, and `call` says why."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call} failed with CUresult {code}" if code else call)
        self.call = call
        self.code = code


class NodeType(enum.IntEnum):
    """CUgraphNodeType."""

    KERNEL = 0
    MEMCPY = 1
    MEMSET = 2
    HOST = 3
    GRAPH = 4
    EMPTY = 5
    WAIT_EVENT = 6
    EVENT_RECORD = 7
    EXT_SEMAS_SIGNAL = 8
    EXT_SEMAS_WAIT = 9
    MEM_ALLOC = 10
    MEM_FREE = 11
    BATCH_MEM_OP = 12
    CONDITIONAL = 13


class MemoryType(enum.IntEnum):
    """CUmemorytype."""

    HOST = 1
    DEVICE = 2
    ARRAY = 3
    UNIFIED = 4


class KernelNodeParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2; sizes in threads and bytes."""

    _fields_ = (
        ("func", c_void_p),
        *((f"{what}Dim{axis}", c_uint) for what in ("grid", "block") for axis in "XYZ"),
        ("sharedMemBytes", c_uint),
        ("kernelParams", c_void_p),
        ("extra", c_void_p),
        # The driver reads `kern` only where `func` is NULL, so callers here take whichever is set.
        ("kern", c_void_p),
        ("ctx", c_void_p),
    )


class MemsetNodeParams(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS; sizes in bytes."""

    _fields_ = (
        ("dst", c_uint64),
        ("pitch", c_size_t),
        ("value", c_uint),
        ("elementSize", c_uint),
        ("width", c_size_t),
        ("height", c_size_t),
    )


class Memcpy3D(ctypes.Structure):
    """CUDA_MEMCPY3D_v2; sizes in bytes."""

    _fields_ = (
        *((f"src{what}", c_size_t) for what in ("XInBytes", "Y", "Z", "LOD")),
        ("srcMemoryType", c_int),
        ("srcHost", c_void_p),
        ("srcDevice", c_uint64),
        ("srcArray", c_void_p),
        ("reserved0", c_void_p),
        ("srcPitch", c_size_t),
        ("srcHeight", c_size_t),
        *((f"dst{what}", c_size_t) for what in ("XInBytes", "Y", "Z", "LOD")),
        ("dstMemoryType", c_int),
        ("dstHost", c_void_p),
        ("dstDevice", c_uint64),
        ("dstArray", c_void_p),
        ("reserved1", c_void_p),
        ("dstPitch", c_size_t),
        ("dstHeight", c_size_t),
        ("WidthInBytes", c_size_t),
        ("Height", c_size_t),
        ("Depth", c_size_t),
    )


class MemoryProperties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("handleTypes", c_int),
        ("locationType", c_int),
        ("device", c_int),
        ("win32", c_void_p),
        ("flags", c_uint64),
    )


class MemoryAccess(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("locationType", c_int), ("device", c_int), ("access", c_int))


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuGraphClone": (POINTER(c_void_p), c_void_p),
    "cuGraphDestroy": (c_void_p,),
    "cuGraphDestroyNode": (c_void_p,),
    "cuGraphGetNodes": (c_void_p, POINTER(c_void_p), POINTER(c_size_t)),
    "cuGraphInstantiateWithFlags": (POINTER(c_void_p), c_void_p, c_uint64),
    "cuGraphUpload": (c_void_p, c_void_p),
    "cuGraphExecDestroy": (c_void_p,),
    "cuGraphLaunch": (c_void_p, c_void_p),
    "cuLaunchKernel": (c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p),
    "cuStreamIsCapturing": (c_void_p, POINTER(c_int)),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuGraphNodeGetType": (c_void_p, POINTER(c_int)),
    "cuGraphKernelNodeGetAttribute": (c_void_p, c_int, c_void_p),
    # cuda.h maps the plain names to `_v2` by macros. A library has both symbols, and ctypes sees no macros.
    "cuGraphKernelNodeGetParams_v2": (c_void_p, POINTER(KernelNodeParams)),
    "cuGraphMemcpyNodeGetParams": (c_void_p, POINTER(Memcpy3D)),
    "cuGraphMemsetNodeGetParams": (c_void_p, POINTER(MemsetNodeParams)),
    "cuGraphKernelNodeSetParams_v2": (c_void_p, c_void_p),
    "cuGraphMemcpyNodeSetParams": (c_void_p, c_void_p),
    "cuGraphMemsetNodeSetParams": (c_void_p, c_void_p),
    "cuGraphExecKernelNodeSetParams_v2": (c_void_p, c_void_p, c_void_p),
    "cuGraphExecMemcpyNodeSetParams": (c_void_p, c_void_p, c_void_p, c_void_p),
    "cuGraphExecMemsetNodeSetParams": (c_void_p, c_void_p, c_void_p, c_void_p),
    "cuFuncGetName": (POINTER(c_char_p), c_void_p),
    "cuKernelGetName": (POINTER(c_char_p), c_void_p),
    "cuFuncGetParamInfo": (c_void_p, c_size_t, POINTER(c_size_t), POINTER(c_size_t)),
    "cuKernelGetParamInfo": (c_void_p, c_size_t, POINTER(c_size_t), POINTER(c_size_t)),
    "cuStreamBatchMemOp_v2": (c_void_p, c_uint, c_void_p, c_uint),
    "cuMemcpyDtoH_v2": (c_void_p, c_uint64, c_size_t),
    "cuPointerGetAttribute": (c_void_p, c_int, c_uint64),
    "cuCtxGetCurrent": (POINTER(c_void_p),),
    "cuThreadExchangeStreamCaptureMode": (POINTER(c_int),),
    "cuMemAddressReserve": (POINTER(c_void_p), c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemCreate": (POINTER(c_void_p), c_size_t, POINTER(MemoryProperties), c_uint64),
    "cuMemRelease": (c_void_p,),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_void_p, c_uint64),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemSetAccess": (c_uint64, c_size_t, POINTER(MemoryAccess), c_size_t),
}


class Driver:
    """The driver of a process. Handles are plain integers; whoever gets a graph or an executable has to destroy it.

    Every call releases the GIL: a driver call may wait for a launch that waits for a callback in Python.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        """Bind the calls; raises DriverError (code 0) for a driver that lacks one."""
        self._calls = {name: _bind(library, name, signature) for name, signature in _SIGNATURES.items()}
        self._launch = self._calls["cuGraphLaunch"]
        self.launch_address: int | None = _address_of(self._launch)
        """The address of cuGraphLaunch, an int (*)(executable, stream); None: only `launch` may call it."""
        self.kernel_launch_address = _address_of(self._calls["cuLaunchKernel"])
        self.capture_address = _address_of(self._calls["cuStreamIsCapturing"])
        """The address of cuStreamIsCapturing, an int (*)(stream, status)."""
        self._write_words = self._calls["cuStreamBatchMemOp_v2"]
        self._sizes: dict[tuple[int, str], tuple[int, ...]] = {}

    def _call(self, name: str, *arguments: object) -> None:
        code = self._calls[name](*arguments)
        if code:
            raise DriverError(name, code)

    def _handle(self, name: str, *arguments: object) -> int:
        handle = c_void_p()
        self._call(name, byref(handle), *arguments)
        return handle.value or 0

    # --- graphs ---

    def clone(self, graph: int) -> int:
        """Return a copy of a graph."""
        return self._handle("cuGraphClone", graph)

    def destroy_graph(self, graph: int) -> None:
        """Destroy a graph; its executables live on, but none of their nodes can be written any more."""
        self._call("cuGraphDestroy", graph)

    def destroy_node(self, node: int) -> None:
        """Take a node out of its graph."""
        self._call("cuGraphDestroyNode", node)

    def nodes(self, graph: int) -> list[int]:
        """Return the nodes of a graph."""
        count = c_size_t()
        self._call("cuGraphGetNodes", graph, None, byref(count))
        if not count.value:
            return []  # the driver rejects an array of no nodes
        handles = (c_void_p * count.value)()
        self._call("cuGraphGetNodes", graph, handles, byref(count))
        return [handle for handle in handles if handle is not None]

    def instantiate(self, graph: int, stream: int) -> int:
        """Return an executable of a graph, uploaded on a stream of the current device.

        A node that is written before its executable's first upload takes longer at every launch, for good. After it, writing costs
        the GPU nothing (H200, driver 580: a chain of 400 products takes 945 us instead of 878).
        """
        with self.relaxed():
            executable = self._handle("cuGraphInstantiateWithFlags", graph, USE_NODE_PRIORITY)
            try:
                self._call("cuGraphUpload", executable, stream)
            # KeyboardInterrupt, too, would leak the executable: nobody else has its handle yet.
            except BaseException:
                with contextlib.suppress(DriverError):
                    self.destroy_executable(executable)
                raise
        return executable

    def destroy_executable(self, executable: int) -> None:
        """Destroy an executable; a launch of it that still runs goes on."""
        self._call("cuGraphExecDestroy", executable)

    def launch(self, executable: int, stream: int) -> None:
        """Launch an executable on a stream of the current device."""
        code = self._launch(executable, stream)
        if code:
            self.fail_launch(code)

    @staticmethod
    def fail_launch(code: int) -> NoReturn:
        """Raise DriverError for a code that cuGraphLaunch has returned."""
        raise DriverError("cuGraphLaunch", code)

    def write_words(self, stream: int, writes: Any, count: int) -> None:
        """Enqueue `count` writes of 8-byte words on a stream; `writes` comes from `word_writes`."""
        code = self._write_words(stream, count, writes, 0)
        if code:
            raise DriverError("cuStreamBatchMemOp", code)

    def read_word(self, address: int) -> int:
        """Return 8 bytes of device memory as an integer; waits for the copy."""
        value = c_uint64()
        self._call("cuMemcpyDtoH_v2", byref(value), address, ctypes.sizeof(value))
        return value.value

    def context(self) -> int:
        """Return the current context."""
        return self._handle("cuCtxGetCurrent")

    def create_stream(self) -> int:
        """Return a new stream of the current context, which the default stream does not wait for. It lasts as long as the process."""
        return self._handle("cuStreamCreate", _STREAM_NON_BLOCKING)

    @contextlib.contextmanager
    def relaxed(self) -> Iterator[None]:
        """Allow this thread calls that are forbidden while another thread captures; they do not touch the other capture."""
        mode = c_int(_CAPTURE_MODE_RELAXED)
        self._call("cuThreadExchangeStreamCaptureMode", byref(mode))
        try:
            # The call has left the earlier mode in `mode`: the second one puts it back.
            yield
        finally:
            self._call("cuThreadExchangeStreamCaptureMode", byref(mode))

    # --- memory ---

    @contextlib.contextmanager
    def aliased(self, size: int, memory: int, device_index: int) -> Iterator[int]:
        """Yield the address of `size` bytes of a device, over which one allocation of `memory` bytes is mapped again and again.

        Both are multiples of 2 MiB, and `size` is one of `memory`. Nothing may access the range at the end.
        """
        with self.relaxed(), contextlib.ExitStack() as stack:
            address = self._handle("cuMemAddressReserve", size, 0, 0, 0)
            stack.callback(self._call, "cuMemAddressFree", address, size)
            # Never addresses alone: a kernel that is given a missed address would end the process in
            # verification. On memory with poison the miss shows as a wrong value.
            kind = MemoryProperties(_MEMORY_PINNED, 0, _LOCATION_DEVICE, device_index)
            handle = self._handle("cuMemCreate", memory, byref(kind), 0)
            stack.callback(self._call, "cuMemRelease", handle)
            for start in range(address, address + size, memory):
                self._call("cuMemMap", start, memory, 0, handle, 0)
                stack.callback(self._call, "cuMemUnmap", start, memory)
            access = MemoryAccess(_LOCATION_DEVICE, device_index, _READ_AND_WRITE)
            self._call("cuMemSetAccess", address, size, byref(access), 1)
            # In reverse at the end: mappings go before the addresses that they lie on.
            to_undo = stack.pop_all()
        try:
            yield address
        finally:
            with self.relaxed(), to_undo:
                pass

    # --- nodes ---

    def node_type(self, node: int) -> NodeType:
        """Return the type of a node; raises DriverError (code 0) for one that this version does not know."""
        value = c_int()
        self._call("cuGraphNodeGetType", node, byref(value))
        try:
            return NodeType(value.value)
        except ValueError:
            raise DriverError(f"cuGraphNodeGetType (type {value.value})", 0) from None

    def kernel(self, node: int) -> KernelNodeParams:
        """Return a kernel node's parameters; the pointers in them are valid as long as the node's graph."""
        params = KernelNodeParams()
        self._call("cuGraphKernelNodeGetParams_v2", node, byref(params))
        return params

    def is_plain_launch(self, node: int) -> bool:
        """Return whether a kernel node needs neither a cooperative launch nor clusters; False also if the driver does not say."""
        values = (c_uint64 * _ATTRIBUTE_WORDS)()
        get = self._calls["cuGraphKernelNodeGetAttribute"]
        # An error counts as no plain launch: such a kernel gets an executable, and its graph is not refused.
        attributes = (_COOPERATIVE, _CLUSTER_DIMENSION)
        return not any(get(node, attribute, values) or any(values) for attribute in attributes)

    def memcpy(self, node: int) -> Memcpy3D:
        """Return a copy node's parameters."""
        params = Memcpy3D()
        self._call("cuGraphMemcpyNodeGetParams", node, byref(params))
        return params

    def memset(self, node: int) -> MemsetNodeParams:
        """Return a memset node's parameters."""
        params = MemsetNodeParams()
        self._call("cuGraphMemsetNodeGetParams", node, byref(params))
        return params

    def arguments(self, params: KernelNodeParams, name: str) -> tuple[bytes, ...]:
        """Return the bytes of each argument of a kernel, or of the one buffer of a packed list; `name` is the kernel's name."""
        if not params.kernelParams:
            # NCCL passes all parameters of a kernel as one block.
            return (_packed(params.extra),) if params.extra else ()
        sizes = self._parameter_sizes(params, name)
        pointers = (c_void_p * len(sizes)).from_address(params.kernelParams)
        return tuple(map(ctypes.string_at, pointers, sizes))

    def _parameter_sizes(self, params: KernelNodeParams, name: str) -> tuple[int, ...]:
        call = "cuFuncGetParamInfo" if params.func else "cuKernelGetParamInfo"
        handle = params.func or params.kern
        key = (handle, name)  # a handle may be given out again once its module is gone
        if key not in self._sizes:
            if len(self._sizes) >= MAX_KERNELS:
                self._sizes.clear()
            offset, size, sizes = c_size_t(), c_size_t(), list[int]()
            # No call counts parameters: the first index out of range is an error.
            while self._calls[call](handle, len(sizes), byref(offset), byref(size)) == 0:
                sizes.append(size.value)
            self._sizes[key] = tuple(sizes)
        return self._sizes[key]

    def kernel_name(self, params: KernelNodeParams) -> str:
        """Return a kernel's mangled name."""
        name = c_char_p()
        call = "cuFuncGetName" if params.func else "cuKernelGetName"
        self._call(call, byref(name), params.func or params.kern)
        return (name.value or b"").decode(errors="replace")

    def memory_type(self, address: int) -> MemoryType | None:
        """Return the type of memory at an address; None if the driver does not know it, as with memory from `malloc`."""
        value = c_uint()
        failed = self._calls["cuPointerGetAttribute"](byref(value), _POINTER_ATTRIBUTE_MEMORY_TYPE, address)
        return None if failed else MemoryType(value.value)

    def writer(self, node_type: NodeType) -> int:
        """Return the address of the call that writes a node's parameters into an executable: (executable, node, address[, context])."""
        return _address_of(self._calls[_WRITERS[node_type]])

    def write_node(self, node_type: NodeType, node: int, parameters: int) -> None:
        """Write the parameters at an address into a node of a graph, for executables that are instantiated later."""
        self._call(_GRAPH_WRITERS[node_type], node, parameters)


_WRITERS = {
    NodeType.KERNEL: "cuGraphExecKernelNodeSetParams_v2",
    NodeType.MEMCPY: "cuGraphExecMemcpyNodeSetParams",
    NodeType.MEMSET: "cuGraphExecMemsetNodeSetParams",
}
_GRAPH_WRITERS = {
    NodeType.KERNEL: "cuGraphKernelNodeSetParams_v2",
    NodeType.MEMCPY: "cuGraphMemcpyNodeSetParams",
    NodeType.MEMSET: "cuGraphMemsetNodeSetParams",
}


def _address_of(call: Any) -> int:
    return ctypes.cast(call, c_void_p).value or 0


def _bind(library: ctypes.CDLL, name: str, signature: tuple[Any, ...]) -> Any:
    try:
        call = getattr(library, name)
    except AttributeError:
        raise DriverError(f"{name}: the driver has no such call", 0) from None
    call.argtypes = signature
    call.restype = c_int
    return call


def _packed(extra: int) -> bytes:
    entries = ctypes.cast(extra, POINTER(c_void_p))
    found: dict[int, int] = {}
    index = 0
    # Pairs of marker and value, up to CU_LAUNCH_PARAM_END, which is 0.
    while entries[index]:
        found[entries[index] or 0] = entries[index + 1] or 0
        index += 2
    size = ctypes.cast(found[_PACKED_SIZE], POINTER(c_size_t))[0]
    return ctypes.string_at(found[_PACKED_BUFFER], size)


WORD_WRITE = 6
"""8-byte words of one write in the array that `word_writes` returns."""
WORD_VALUE = 2
"""Index, within these words, of the value to write."""
_WRITE_VALUE_64 = 5
"""CU_STREAM_MEM_OP_WRITE_VALUE_64."""


def word_writes(addresses: Sequence[int]) -> Any:
    """Return an array of CUstreamBatchMemOpParams that writes 8 bytes to each address. The caller sets the values."""
    writes = (c_uint64 * (WORD_WRITE * len(addresses)))()
    for number, address in enumerate(addresses):
        # The flags and the driver's own word stay 0. The union is padded to six words.
        writes[WORD_WRITE * number] = _WRITE_VALUE_64
        writes[WORD_WRITE * number + 1] = address
    return writes


def packed_list(buffer: int, size: Any) -> Any:
    """Return the packed parameter list of a kernel: the address of the buffer of its arguments, and the size as a c_size_t."""
    return (c_void_p * 5)(_PACKED_BUFFER, buffer, _PACKED_SIZE, ctypes.addressof(size), 0)


@functools.cache
def load() -> Driver:
    """Return the driver of this machine; raises DriverError (code 0) if there is none or it is too old."""
    try:
        # Not PyDLL, whose calls would keep the GIL.
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise DriverError(f"loading {LIBRARY} ({error})", 0) from None
    return Driver(library)
