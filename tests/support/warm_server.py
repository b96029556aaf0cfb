"""Starts programs in forks of a process that has imported PyTorch; `WarmPython` starts it, as a script, and talks to it.

Importing PyTorch and Inductor takes seconds, and a test's program little else. A fork that runs a program looks to it like a
new process: `import torch` there is the first one, with what PyTorch does last in it, and `torch._inductor.compile_fx`, which
PyGraph's hook waits for, has not been imported.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import runpy
import socket
import sys
import tempfile
import traceback
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch._dynamo.backends.registry
import torch._inductor.codecache
import torch._inductor.fx_passes.fuse_attention
import torch._inductor.graph
import torch._inductor.output_code
import torch._inductor.scheduler

if TYPE_CHECKING:
    from collections.abc import Sequence

PATIENT = Path(__file__).parent / "patient" / "sitecustomize.py"
BEFORE_THE_HOOK = "torch._inductor.compile_fx"
CACHE = "TORCHINDUCTOR_CACHE_DIR"

# What `compile_fx` and the first compilation import, as long as none of it imports `compile_fx` itself. A module that a
# version of PyTorch does not have is imported by the fork, if at all.
LATER = (
    "sqlite3",
    "sympy.combinatorics",
    "sympy.tensor.tensor",
    "torch._dynamo.backends.cudagraphs",
    "torch._dynamo.backends.distributed",
    "torch._dynamo.repro.after_dynamo",
    "torch._functorch._aot_autograd.subclass_codegen",
    "torch._functorch._aot_autograd.subclass_parametrization",
    "torch._inductor.codegen.cpp_wrapper_cpu_array_ref",
    "torch._inductor.codegen.cpp_wrapper_gpu",
    "torch._inductor.codegen.cuda_combined_scheduling",
    "torch._inductor.codegen.halide",
    "torch._inductor.codegen.memory_planning",
    "torch._inductor.codegen.mps",
    "torch._inductor.codegen.pallas",
    "torch._inductor.codegen.python_wrapper_mtia",
    "torch._inductor.codegen.wrapper_fxir",
    "torch._inductor.codegen.xpu.xpu_combined_scheduling",
    "torch._inductor.compiler_bisector",
    "torch._inductor.fx_passes.joint_graph",
    "torch._inductor.fx_passes.post_grad",
    "torch._inductor.fx_passes.pre_grad",
    "torch._inductor.hooks",
    "torch.distributed.tensor.experimental",
    "torch.export._trace",
    "torch.fx.experimental.validator",
    "torch.fx.passes.fake_tensor_prop",
    "torch.utils.cpp_extension",
)

# Contains what has Inductor choose an instruction set, as most kernels of programs do.
KERNEL = 'extern "C" void kernel(float* x) { /* at::vec:: */ }'


def prepare() -> None:
    """Do once what each fork would do anew: imports, hashing the sources of PyTorch, and asking the compiler who it is.

    Nothing that a fork could see: what is kept of it is in caches of PyTorch's, and the same in every process.
    """
    for name in LATER:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    torch._inductor.codecache.torch_key()
    kept = os.environ.get(CACHE)
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(Exception):  # without a compiler, say
        os.environ[CACHE] = folder
        torch._inductor.codecache.CppPythonBindingsCodeCache.load_pybinding(["float*"], KERNEL)
    torch._inductor.codecache.CppPythonBindingsCodeCache.cache_clear()
    os.environ.pop(CACHE, None)
    if kept is not None:
        os.environ[CACHE] = kept


class _TorchAgain(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds torch, which is here already, once, and does what its import does at its end."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == "torch":
            return importlib.machinery.ModuleSpec(name, self)
        if name.startswith("torch."):  # its parent is here, so nothing else would ask for torch first
            importlib.import_module("torch")
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        self._spec = torch.__spec__
        return cast("types.ModuleType", torch)

    def exec_module(self, module: types.ModuleType) -> None:
        sys.meta_path.remove(self)
        module.__spec__ = self._spec
        if module._is_device_backend_autoload_enabled():
            module._import_device_backends()


def search_path(old: str, new: str) -> None:
    """Have the folders of one PYTHONPATH stand where those of another do, behind what `sys.path` begins with."""
    mine = [each for each in old.split(os.pathsep) if each]
    theirs = [each for each in new.split(os.pathsep) if each]
    if mine != theirs:
        sys.path[1:] = theirs + [each for each in sys.path[1:] if each not in mine]


def _become(request: dict[str, Any], streams: list[int]) -> tuple[str, str, types.ModuleType]:
    """Be the new process: its streams, variables, folder, arguments and search path.

    No `sitecustomize` on that path is run: `patient` asks for the one that there is.
    """
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    search_path(os.environ.get("PYTHONPATH", ""), request["environ"].get("PYTHONPATH", ""))
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["folder"])
    first, *rest = request["arguments"]
    if first == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        name, text = "<string>", rest[0]
    else:
        sys.argv, sys.path[0] = [first, *rest], str(Path(first).parent)
        name, text = first, Path(first).read_text()
    if request["patient"]:
        runpy.run_path(str(PATIENT))
    del sys.modules["torch"]
    sys.meta_path.insert(0, _TorchAgain())
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    if first != "-c":
        main.__file__ = first
    sys.modules["__main__"] = main
    return name, text, main


def _serve(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork for each request and tell how its process has ended; returns in the fork, with the request and its streams."""
    while True:
        data, streams, _, _ = socket.recv_fds(connection, 4, 3)
        if not data:
            os._exit(0)
        size = int.from_bytes(data, "big")
        data = b""
        while len(data) < size:
            data += connection.recv(size - len(data))
        process = os.fork()
        if process == 0:
            connection.close()
            return json.loads(data), streams
        for stream in streams:
            os.close(stream)
        connection.sendall(b"%d\n" % process)
        connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))


if __name__ == "__main__":
    prepare()
    if BEFORE_THE_HOOK in sys.modules:
        sys.exit(f"{BEFORE_THE_HOOK} has been imported: programs would not see it come")
    gc.collect()
    gc.freeze()  # or the first collection in a fork copies all that it shares
    _server = socket.socket(fileno=int(sys.argv[1]))
    try:
        _name, _text, _main = _become(*_serve(_server))
    except Exception:  # noqa: BLE001 - nor may this fork go on as a server
        traceback.print_exc()
        os._exit(70)
    del _server
    exec(compile(_text, _name, "exec", dont_inherit=True), _main.__dict__)
