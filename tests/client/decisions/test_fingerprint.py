"""What must and must not change a graph's key, on real compilations."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any, Protocol

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce

from pygraphd.client.backend import torch_private
from pygraphd.client.decisions import fingerprint
from pygraphd.schema.messages import Kind
from tests.support.user_program import TRAINING, Run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from tests.support.warm_python import WarmPython

pytestmark = pytest.mark.torch


class Keys(Protocol):
    """See `keys`."""

    def __call__(
        self, function: Callable[..., Any], *inputs: torch.Tensor, **arguments: Any
    ) -> dict[str, str]: ...


@pytest.fixture
def keys() -> Iterator[Keys]:
    """Return a function that compiles another one, forward and backward, and returns its keys by kind."""
    seen: dict[str, str] = {}

    def note(original: Callable[[], None], compiled: Any, graph_kwargs: Mapping[str, Any]) -> None:
        graph = fingerprint.graphs(
            torch_private.facts(compiled, graph_kwargs), torch_private.kernel_options()
        )[0]
        seen[graph.kind] = graph.digest
        original()

    def compile_once(function: Callable[..., Any], *inputs: torch.Tensor, **arguments: Any) -> dict[str, str]:
        torch._dynamo.reset()
        seen.clear()
        torch.compile(function, **arguments)(*inputs).sum().backward()
        return dict(seen)

    uninstall = torch_private.install(note, lambda original, runnable, kwargs: original(runnable, **kwargs))
    yield compile_once
    uninstall()
    torch._dynamo.reset()


# Matrix products alone: Inductor calls the library for them, and no C++ compiler takes its seconds.
def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x @ y) @ y.t()


def inputs(rows: int = 3, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, 8, dtype=dtype, requires_grad=True)
    return x, torch.randn(8, 4, dtype=dtype, requires_grad=True)


def test_the_same_function_elsewhere_with_other_values_has_the_same_keys(keys: Keys) -> None:
    def again(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        product = first @ second

        return product @ second.t()

    base = keys(function, *inputs())

    assert set(base) == {"forward", "backward"}
    assert keys(again, *inputs()) == base


def test_ranks_of_parallel_groups_have_the_same_keys(keys: Keys) -> None:
    importlib.import_module("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=4)
    try:
        one, two = (dist.new_group(ranks).group_name for ranks in ([0, 1], [0, 2]))

        def summed(first: str, second: str) -> dict[str, str]:
            def both(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                product = (x @ y).detach()
                return all_reduce(product, "sum", first) + all_reduce(product.t(), "sum", second).t() + x @ y

            return keys(both, *inputs())

        assert one != two
        assert summed(one, one) == summed(two, two)
        assert summed(one, two) == summed(two, one) != summed(one, one)
    finally:
        dist.destroy_process_group()


SAY_OPTIONS = """
from pygraphd.client.backend import torch_private
print(hash("a name"))
print(torch_private.kernel_options())
"""
WITHOUT_CACHES = """
import torch._inductor.config
torch._inductor.config.force_disable_caches = True
torch._inductor.config.compile_threads = 1
"""


@pytest.mark.slow
def test_the_same_program_in_another_process_folder_and_hash_seed_has_the_same_keys(run: Run) -> None:
    program = TRAINING.format(arguments="")

    one = run(program + SAY_OPTIONS, PYTHONHASHSEED="1")
    two = run("# a line more\n\n" + program.replace("Model", "Net") + SAY_OPTIONS, SCRIPT="other.py")
    three = run(WITHOUT_CACHES + program)

    assert set(one.graphs) == {"forward", "backward", "inference"}
    assert one.graphs == two.graphs == three.graphs
    (seed, options), (other_seed, other_options) = (each.output.splitlines() for each in (one, two))
    assert seed != other_seed
    assert options == other_options != "()"


@pytest.mark.parametrize(
    "change",
    [
        {"function": lambda x, y: (x @ y) @ y.t() @ y},
        {"inputs": inputs(rows=5)},
        {"inputs": (torch.randn(8, 3).t().requires_grad_(), inputs()[1])},
        {"inputs": inputs(dtype=torch.float64)},
        {"options": {"epilogue_fusion": False}},
        {"options": {"max_autotune_pointwise": True}},
        {"mode": "reduce-overhead"},
    ],
    ids=["operator", "size", "stride", "dtype", "option", "another option", "mode"],
)
def test_another_graph_has_other_keys(keys: Keys, change: dict[str, Any]) -> None:
    base = keys(function, *inputs())
    other = keys(change.pop("function", function), *change.pop("inputs", inputs()), **change)

    assert set(base) == set(other) == {"forward", "backward"}
    assert not set(base.values()) & set(other.values())


@pytest.mark.slow
def test_settings_that_cannot_be_read_any_more_leave_the_others(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    """Torch refuses to answer for one way to set fp32 precision after the other has been used."""
    code = """
import torch
from pygraphd.client.backend import torch_private
before = torch_private.kernel_options()
torch.backends.cuda.matmul.fp32_precision = "tf32"
torch.backends.cudnn.conv.fp32_precision = "ieee"
print(len(before) == len(torch_private.kernel_options()), before != torch_private.kernel_options())
"""
    done = warm_python.run(["-c", code], os.environ, tmp_path, 600)

    assert done.stdout == "True True\n", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [
        "torch.set_float32_matmul_precision('high')",
        "torch.use_deterministic_algorithms(True)",
        "torch.backends.cudnn.benchmark = True",
    ],
    ids=["precision", "determinism", "cudnn"],
)
def test_torchs_own_settings_are_factors(setting: str, warm_python: WarmPython, tmp_path: Path) -> None:
    """In processes of their own: there is no way back to what a precision was."""
    code = (
        "import torch; from pygraphd.client.backend import torch_private\n"
        f"before = torch_private.kernel_options(); {setting}\n"
        "print(torch_private.kernel_options() != before)"
    )
    done = warm_python.run(["-c", code], os.environ, tmp_path, 600)

    assert done.stdout == "True\n", done.stderr


def facts(**changes: object) -> torch_private.CompiledFacts:
    values: dict[str, object] = {
        "text": "    a = torch.ops.aten.sin.default(b)\n    return (a,)",
        "user_kernels": "",
        "refused_for_good": False,
        "is_backward": False,
        "is_inference": False,
        "cudagraphs_asked": True,
        "refusal": None,
        "partitions": 3,
        "on_cuda": True,
        "only_cuda": True,
        "device_index": 0,
        "has_dynamic_sizes": False,
        "static_inputs": (),
        "mutated_inputs": (),
    }
    return torch_private.CompiledFacts(**{**values, **changes})  # type: ignore[arg-type]


def test_each_partition_is_a_graph_of_its_own() -> None:
    graphs = fingerprint.graphs(facts(), ())

    assert [(graph.partition, graph.partitions, graph.operators) for graph in graphs] == [
        (0, 3, 1), (1, 3, 1), (2, 3, 1),
    ]  # fmt: skip
    assert len({graph.digest for graph in graphs}) == 3


@pytest.mark.parametrize(
    ("change", "kind"),
    [({}, Kind.FORWARD), ({"is_backward": True}, Kind.BACKWARD), ({"is_inference": True}, Kind.INFERENCE)],
    ids=str,
)
def test_the_kind_of_a_graph(change: dict[str, object], kind: Kind) -> None:
    assert fingerprint.graphs(facts(**change), ())[0].kind is kind


def test_kernels_of_the_users_are_a_factor() -> None:
    one, two = facts(user_kernels="k1 = '''a'''"), facts(user_kernels="k1 = '''b'''")

    assert fingerprint.graphs(one, ())[0].digest != fingerprint.graphs(two, ())[0].digest


def test_the_device_index_is_no_factor() -> None:
    assert fingerprint.graphs(facts(device_index=3), ()) == fingerprint.graphs(facts(), ())


def test_options_hold_no_addresses_and_no_places() -> None:
    options = dict(torch_private.kernel_options())

    assert options["triton.cudagraphs"] == "false"
    assert not any("0x" in value for value in options.values())
    assert not any(sys.prefix in value for value in options.values())


def test_the_environment_of_the_cpu_does_not_touch_cuda() -> None:
    environment = fingerprint.environment(None)

    assert (environment.gpu, environment.torch) == ("none", torch.__version__)
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Tue Aug\nGCC version: 12",
            "580.159.04",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build", "570.86.15"),
    ],
    ids=["closed", "open"],
)
def test_the_driver_is_read_from_proc_if_nvml_is_away(text: str, version: str) -> None:
    assert fingerprint._driver_by_proc(text) == version


def test_what_cannot_be_read_is_unknown_and_says_why() -> None:
    def fail() -> str:
        raise FileNotFoundError

    assert fingerprint._probe(fail) == "unknown: FileNotFoundError"


def test_a_mig_instance_is_told_apart() -> None:
    assert fingerprint._mig_profile("NVIDIA H100 80GB HBM3 MIG 1g.10gb") == "1g.10gb"
    assert fingerprint._mig_profile("NVIDIA H200") == ""
