"""Imports what programs that use PyTorch import, and does once what each would do anew; `warm_server.py` runs this, and forks.

Importing PyTorch and Inductor takes seconds, and a test's program little else. In a fork, `import torch` is the first one, with
what PyTorch does last in it, and `torch._inductor.compile_fx`, which PyGraph's hook waits for, has not been imported.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import tempfile
from typing import TYPE_CHECKING, cast

import torch
import torch._dynamo.backends.registry
import torch._inductor.codecache
import torch._inductor.fx_passes.fuse_attention
import torch._inductor.graph
import torch._inductor.output_code
import torch._inductor.scheduler

if TYPE_CHECKING:
    import types
    from collections.abc import Sequence

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

# Modules of passes that make patterns in the first compilation, and what that asks them for; `post_grad` imports `compile_fx`.
PATTERNS = {"pre_grad": (), "joint_graph": (torch.device("cpu"),)}

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
    for passes, device in PATTERNS.items():
        with contextlib.suppress(Exception):  # of a version that makes them otherwise
            importlib.import_module(f"torch._inductor.fx_passes.{passes}").lazy_init(*device)
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(Exception):  # without a compiler, say
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder  # of this process alone
        torch._inductor.codecache.CppPythonBindingsCodeCache.load_pybinding(["float*"], KERNEL)
    torch._inductor.codecache.CppPythonBindingsCodeCache.cache_clear()


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
        if threads := os.environ.get("TORCHINDUCTOR_COMPILE_THREADS"):
            torch._inductor.config.compile_threads = int(threads)
        if module._is_device_backend_autoload_enabled():
            module._import_device_backends()


if __name__ == "__main__":
    prepare()
    if "torch._inductor.compile_fx" in sys.modules:
        sys.exit("torch._inductor.compile_fx has been imported: programs would not see it come")
    del sys.modules["torch"]
    sys.meta_path.insert(0, _TorchAgain())
