"""What is used of private torch, pinned: when a torch moves something, this fails and says what."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
import torch
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.compile_worker.subproc_pool import SubprocPool
from torch._inductor.cudagraph_utils import BoxedDeviceIndex
from torch._inductor.utils import GraphPartitionMap
from torch.fx.experimental.proxy_tensor import make_fx

from pygraphd.client.analysis.attention_rng import rng_state_of, undefined_outputs
from pygraphd.client.backend import torch_private
from pygraphd.client.backend.torch_private import (
    PartitionMap,
    capture,
    compiled_facts,
    inductor,
    passes,
    requirements,
)
from pygraphd.client.placement.hoist import HERE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


pytestmark = pytest.mark.torch


def test_this_torch_has_all_that_is_needed() -> None:
    assert torch_private.missing() is None
    assert torch_private.missing_for("artifacts") is None


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, names in requirements.REQUIRED.items() for name in names]
)
def test_a_lost_name_is_named(module: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "REQUIRED", {module: (f"{name}_gone",)})

    assert f"lacks {module}.{name}_gone" in str(torch_private.missing.__wrapped__())


def test_what_operators_say_of_themselves() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    added, written = (
        graph.call_function(each, (x, x)) for each in (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)
    )

    assert [torch_private.operator_of(each) for each in (x, graph.call_function(len, (x,)))] == [None, None]
    assert torch_private.operator_of(added) is torch.ops.aten.add.Tensor
    assert [torch_private.is_mutable(each.target) for each in (added, written)] == [False, True]


@pytest.mark.parametrize(
    ("module", "name", "parameters"),
    [
        ("torch._inductor.output_code", "CompiledFxGraph.post_compile", ["self", "example_inputs", "constants", "graph_kwargs"]),
        ("torch._inductor.output_code", "maybe_realign_inputs", ["ran_cudagraphs", "compiled_graph", "inputs_to_check", "mutated_inputs_idxs"]),
        ("torch._inductor.output_code", "maybe_handle_backward_generation", ["compiled_graph", "boxed_forward_device_index"]),
    ],
    ids=["post_compile", "realign", "backward_generation"],
)  # fmt: skip
def test_signatures(module: str, name: str, parameters: list[str]) -> None:
    owner: Any = importlib.import_module(module)
    for part in name.split("."):
        owner = getattr(owner, part)

    assert list(inspect.signature(owner).parameters) == parameters


@pytest.mark.parametrize("ours", [True, False])
def test_trees_are_asked_about_backwards_of_their_own_forwards_alone(
    ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a backward that it will not capture, Inductor takes it for granted that a forward has run in a tree."""
    output_code = importlib.import_module("torch._inductor.output_code")
    trees = importlib.import_module("torch._inductor.cudagraph_trees")
    handle = output_code.maybe_handle_backward_generation
    asked: list[str] = []
    monkeypatch.setattr(output_code, "maybe_handle_backward_generation", handle)  # put back afterwards

    def get_manager(*_: Any, **__: Any) -> SimpleNamespace:
        asked.append("the trees")
        return SimpleNamespace()

    monkeypatch.setattr(trees, "get_manager", get_manager)
    torch_private.install(lambda original, *_: original(), lambda original, runnable, kwargs: runnable)()
    box, run = BoxedDeviceIndex(0), object()
    backward = SimpleNamespace(current_callable=run, fx_kwargs={"is_backward": True})
    if ours:
        torch_private.note_ours(box)

    output_code.maybe_handle_backward_generation(backward, box)

    assert asked == ([] if ours else ["the trees"])
    assert (backward.current_callable is run) is ours
    assert torch_private.is_ours(box) is ours
    assert not torch_private.is_ours(BoxedDeviceIndex(0))
    assert not torch_private.is_ours(None)


def test_cudagraphify_takes_what_is_handed_on() -> None:
    compile_fx = importlib.import_module("torch._inductor.compile_fx")
    parameters = inspect.signature(compile_fx.cudagraphify).parameters

    assert list(parameters)[:2] == ["model", "static_input_idxs"]
    assert {"device_index", "is_backward", "is_inference"} <= set(parameters)


def test_post_compile_imports_cudagraphify_when_it_is_called() -> None:
    """If it were imported with the module, replacing the attribute would change nothing."""
    output_code = importlib.import_module("torch._inductor.output_code")

    assert not hasattr(output_code, "cudagraphify")
    source = inspect.getsource(output_code.cudagraph_partition_post_compile)
    assert "from .compile_fx import cudagraphify" in source


def test_what_relocation_calls_takes_what_it_is_given() -> None:
    """What there is of it in a torch without CUDA; the rest is looked for on a GPU."""
    import torch

    begin = inspect.signature(torch.cuda.CUDAGraph.capture_begin).parameters
    record = inspect.signature(torch.cuda.memory._record_memory_history_impl).parameters

    assert {"pool", "capture_error_mode"} <= set(begin)
    assert {"enabled", "context", "stacks", "clear_history"} <= set(record)


def test_a_torch_without_cuda_is_told_from_one_that_can_relocate() -> None:
    import torch

    if torch.version.cuda is None:
        assert "_cuda_memorySnapshot" in str(torch_private.missing_for("relocation"))
    else:
        assert torch_private.missing_for("relocation") is None


def test_ranks_can_agree_with_this_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_private.missing_for("groups") is None
    monkeypatch.setitem(requirements.REQUIRED_FOR, "groups", {"torch.distributed": ("Store.clone_gone",)})

    assert "lacks torch.distributed.Store.clone_gone" in str(torch_private.missing_for.__wrapped__("groups"))


def test_a_store_takes_what_registers_hand_over() -> None:
    import torch.distributed as dist

    store = dist.HashStore()

    assert not store.check(["key"])
    assert [store.compare_set("key", "", value) for value in ("first", "second")] == [b"first"] * 2
    assert (store.check(["key"]), store.get("key")) == (True, b"first")


def test_what_changing_graphs_needs_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_private.missing_for("passes") is None

    monkeypatch.setitem(requirements.REQUIRED_FOR, "passes", {"torch._inductor.config": ("gone",)})
    assert "torch._inductor.config.gone" in str(torch_private.missing_for.__wrapped__("passes"))


def test_inductor_asks_what_it_may_reuse() -> None:
    """Of what an operator of ours returns: see `keep_results`, and the compiled tests of placement for what it does."""
    wrapper: Any = importlib.import_module("torch._inductor.codegen.wrapper")

    asked = wrapper.PythonWrapperCodegen
    assert (
        "never_reuse_buffers" in getattr(asked, "can_free", asked.can_reuse).__code__.co_names
    )  # 2.15 has both


def test_an_operator_is_compiled_as_another_is() -> None:
    lowering: Any = importlib.import_module("torch._inductor.lowering")
    lowering.lowerings.pop(HERE, None)

    torch_private.lower_as(HERE, torch.ops.aten.clone.default)

    assert lowering.lowerings.pop(HERE) is not None
    torch_private.lower_as(HERE, torch.ops.aten.clone.default)


def test_what_is_compiled_for_elsewhere_is_compiled_by_functions_of_these_names() -> None:
    inductor: Any = importlib.import_module("torch._inductor")
    compile_fx: Any = importlib.import_module(torch_private.COMPILE_FX)
    dynamo: Any = importlib.import_module("torch._dynamo.aot_compile")
    functions = (
        inductor.standalone_compile,
        inductor.aot_compile,
        compile_fx.compile_fx_aot,
        dynamo.aot_compile_fullgraph,
    )

    assert {each.__code__.co_name for each in functions} == passes._EXPORTING


@pytest.mark.parametrize(
    ("operator", "arguments", "first", "results"),
    [
        (torch.ops.aten._scaled_dot_product_flash_attention, (), 6, {1, 2}),
        (torch.ops.aten._scaled_dot_product_flash_attention, (0.1,), 6, {2}),
        (torch.ops.aten._scaled_dot_product_cudnn_attention, (None, True), 6, {1, 2}),
        (torch.ops.aten._scaled_dot_product_cudnn_attention, (None, True, 0.1), 6, set()),
        (torch.ops.aten._scaled_dot_product_efficient_attention, (None, True), 2, {1, 2}),
        (torch.ops.aten._scaled_dot_product_efficient_attention, (None, True, 0.1), 2, set()),
    ],
)
def test_attention_as_fx_prints_it(
    operator: Any, arguments: tuple[Any, ...], first: int, results: set[int]
) -> None:
    """And where the results lie that `undefined_outputs` takes for random numbers' state."""

    def attend(q: torch.Tensor) -> tuple[Any, ...]:
        made = operator(q, q, q, *arguments)
        return made[0], made[first], made[first + 1]

    traced = make_fx(attend)(torch.empty(1, 2, 64, 64, dtype=torch.bfloat16, device="meta"))
    text = traced.print_readable(print_output=False, include_stride=True, include_device=True)

    assert undefined_outputs(text) == results
    names = [each.name for each in operator.default._schema.returns]
    assert names[first : first + 2] in (["rng_state", "unused"], ["philox_seed", "philox_offset"])


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_what_attention_hands_to_its_backward_as_autograd_traces_it(dropout: float) -> None:
    texts: list[str] = []

    def note(traced: Any, _inputs: Any) -> Any:
        texts.append(traced.print_readable(print_output=False, include_stride=True, include_device=True))
        return make_boxed_func(traced)

    operator = torch.ops.aten._scaled_dot_product_efficient_attention
    q, k, v = (torch.empty(2, 4, 16, 8, device="meta", requires_grad=True) for _ in range(3))
    attend = aot_function(lambda q, k, v: operator(q, k, v, None, True, dropout)[0] * 2, note)
    attend(q, k, v).sum().backward()

    ahead, behind = map(rng_state_of, texts)
    assert ahead is not None
    assert behind is not None
    assert (len(ahead.seeds), len(ahead.offsets), len(ahead.idle_outputs)) == (
        (1, 1, 0) if dropout else (0, 0, 2)
    )
    assert (len(behind.inputs), len(behind.idle_inputs)) == ((2, 0) if dropout else (0, 2))
    arguments = [
        each.name
        for each in torch.ops.aten._scaled_dot_product_efficient_attention_backward.default._schema.arguments
    ]
    assert arguments[7:10] == ["philox_seed", "philox_offset", "dropout_p"]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_graph_with_dynamic_sizes_is_told_by_its_text_and_is_given_integers(dynamic: bool) -> None:
    seen: list[tuple[bool, bool]] = []

    def note(original: Callable[[], None], compiled: Any, graph_kwargs: Mapping[str, Any]) -> None:
        facts = torch_private.facts(compiled, graph_kwargs)
        original()
        run = compiled.current_callable

        def call(inputs: list[Any]) -> Any:
            seen.append((facts.has_dynamic_sizes, int in map(type, inputs)))
            return run(inputs)

        compiled.current_callable = call

    uninstall = torch_private.install(note, lambda original, runnable, kwargs: original(runnable, **kwargs))
    try:
        torch._dynamo.reset()
        compiled = torch.compile(lambda x, y: x @ y, dynamic=dynamic)
        for rows in (3, 5):
            compiled(torch.ones(rows, 4, requires_grad=True), torch.ones(4, 2)).sum().backward()
    finally:
        uninstall()
        torch._dynamo.reset()

    assert seen == [(dynamic, dynamic)] * 4


def test_a_partition_says_which_inputs_and_outputs_of_the_graph_its_own_are() -> None:
    fields = GraphPartitionMap.__dataclass_fields__
    told = str(fields["output_index_mapping"].type).replace("typing.", "")
    assert told in {"list[Optional[int]]", "list[int | None]", "list[list[int]]"}
    outputs: tuple[list[Any], ...] = ([None, 2, 0], [1])
    if told == "list[list[int]]":
        outputs = ([[], [2], [0, 3]], [[1]])
    maps = [GraphPartitionMap(0, i, o, []) for i, o in zip(([1, 0], [None]), outputs, strict=True)]
    compiled = SimpleNamespace(partition_maps=maps)

    with inductor.inductor_config().patch(graph_partition=True):
        both = (0, 3) if told == "list[list[int]]" else (0,)
        assert compiled_facts._partition_maps(compiled) == (
            PartitionMap((1, 0), ((), (2,), both)),
            PartitionMap((None,), ((1,),)),
        )
        assert compiled_facts._partition_maps(SimpleNamespace(partition_maps=None)) == ()
    with inductor.inductor_config().patch(graph_partition=False):
        assert compiled_facts._partition_maps(compiled) == ()


@pytest.mark.parametrize(
    ("told", "outputs"),
    [([None, 2, 0], ((), (2,), (0,))), ([[], [2], [0, 3]], ((), (2,), (0, 3)))],
    ids=["until 2.14", "2.15"],
)
def test_an_output_of_a_partition_may_be_several_of_the_graph(
    told: list[Any], outputs: tuple[tuple[int, ...], ...]
) -> None:
    maps = [SimpleNamespace(input_index_mapping=[], output_index_mapping=told)]

    with inductor.inductor_config().patch(graph_partition=True):
        assert compiled_facts._partition_maps(SimpleNamespace(partition_maps=maps)) == (
            PartitionMap((), outputs),
        )


def test_inductors_code_allocates_by_what_it_is_given_in_one_thread_alone() -> None:
    """The name that memory of a GPU is allocated by is there in the code for a CPU, too."""
    torch._dynamo.reset()
    torch.compile(lambda x: x.sin() + 1)(torch.ones(3))
    codecache: Any = importlib.import_module("torch._inductor.codecache")
    module, seen = codecache.PyCodeCache.modules[-1], list[Any]()
    original = module.empty_strided_cuda

    def allocate(first: Any, *arguments: Any) -> str:
        seen.append((first, *arguments))
        return "made"

    with torch_private.allocations_by(allocate), ThreadPoolExecutor(1) as elsewhere:
        assert module.empty_strided_cuda((2, 3), (3, 1), torch.int8) == "made"
        # Whatever the original does without a GPU, it is what another thread comes to.
        with contextlib.suppress(RuntimeError):
            assert elsewhere.submit(module.empty_strided_cuda, (), (), torch.int8).result() != "made"

    assert seen == [(original, (2, 3), (3, 1), torch.int8)]
    assert module.empty_strided_cuda is original
    torch._dynamo.reset()


def test_libtorch_has_all_that_the_compiled_helper_calls() -> None:
    assert torch_private.missing_for_helper() is None


@pytest.mark.parametrize(
    "name",
    [
        "bfloat16", "bool", "complex64", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "int16", "int32",
        "int64", "int8", "uint8",
    ],
)  # fmt: skip
def test_libtorch_has_a_code_for_each_dtype_that_a_graph_may_return(name: str) -> None:
    assert torch_private.dtype_code(getattr(torch, name)) >= 0
    assert torch_private.dtype_code(None) == -1


def test_whether_graphs_share_the_state_of_random_numbers_is_as_the_header_has_it() -> None:
    """From 2.13 on each capture has a state of its own."""
    header = Path(torch.__file__).parent / "include/ATen/cuda/CUDAGeneratorImpl.h"
    if not header.exists():
        pytest.skip("this torch has no headers")

    assert torch_private.graphs_share_random_state() is (
        "CUDAGeneratorCaptureState" not in header.read_text()
    )


class Beginning:
    """A graph: beginning to capture it does what `during` does."""

    def __init__(self, during: Callable[[], None]) -> None:
        self.during = during
        self.options: dict[str, Any] = {}

    def capture_begin(self, **options: Any) -> None:
        self.options = options
        self.during()


def test_no_tensor_is_filled_while_a_capture_begins() -> None:
    """What else is done to tensors is, and other threads' are filled."""
    ours, others, added = torch.zeros(2), torch.zeros(2), torch.zeros(2)
    thread = threading.Thread(target=others.fill_, args=(3,))

    def during() -> None:
        thread.start()
        thread.join()
        assert ours.fill_(3) is ours
        added.add_(1)
        assert not torch.utils._python_dispatch.is_in_torch_dispatch_mode()

    graph = Beginning(during)
    capture._begin_capture(graph, pool=(0, 1))

    assert graph.options == {"capture_error_mode": "thread_local", "pool": (0, 1)}
    assert [each.tolist() for each in (ours, others, added)] == [[0, 0], [3, 3], [1, 1]]


def test_tensors_are_filled_again_when_a_capture_has_begun_or_failed_to() -> None:
    def fail() -> NoReturn:
        raise RuntimeError

    for during in (lambda: None, fail):
        with contextlib.suppress(RuntimeError):
            capture._begin_capture(Beginning(during))

        assert torch.zeros(2).fill_(3).tolist() == [3, 3]


def test_a_mode_that_an_interrupt_has_left_on_fills_tensors() -> None:
    """A second Ctrl-C may come while the first one takes the mode off."""
    modes: Any = torch.utils._python_dispatch
    found: list[Any] = []
    capture._begin_capture(Beginning(lambda: found.append(modes._get_current_dispatch_mode_stack()[-1])))

    with found[0]:
        assert torch.zeros(2).fill_(3).tolist() == [3, 3]


@pytest.fixture
def artifacts_apart() -> Iterator[Any]:
    """Keep the artifacts of a test from those of others; return what torch collects them in."""
    from torch.compiler._cache import CacheArtifactManager

    with CacheArtifactManager.with_fresh_cache():
        yield CacheArtifactManager


def autotune_keys(saved: Any) -> list[str]:
    """Return the keys of what a load would write."""
    from torch.compiler._cache import CacheArtifactManager

    artifacts = CacheArtifactManager.deserialize(saved[0])
    assert artifacts is not None
    return [each.key for each in artifacts["autotune"]]


def test_what_is_added_to_artifacts_hides_nothing_that_was_saved_before(artifacts_apart: Any) -> None:
    """Of two lists of one type, which two saves leave, torch loads the second alone."""
    contents: dict[str, object] = {"pygraph/a.json": {"a": 1}}
    remove = torch_private.add_to_artifacts(lambda add: add(contents))
    artifacts_apart.record_artifact("autotune", "theirs/x.best_config", {"num_warps": 4})

    first = torch.compiler.save_cache_artifacts()
    contents["pygraph/b.json"] = {"b": 2}
    second = torch.compiler.save_cache_artifacts()
    with artifacts_apart.with_fresh_cache():  # as `standalone_compile` does for one graph
        artifacts_apart.record_artifact("autotune", "theirs/y.best_config", {})
        alone = torch.compiler.save_cache_artifacts()
    remove()
    contents["pygraph/c.json"] = {}
    third = torch.compiler.save_cache_artifacts()

    assert autotune_keys(first) == ["theirs/x.best_config", "pygraph/a.json"]
    assert autotune_keys(second) == autotune_keys(third) == [*autotune_keys(first), "pygraph/b.json"]
    assert autotune_keys(alone) == ["theirs/y.best_config"]


def test_an_artifact_is_loaded_as_a_file_of_inductors_cache(
    artifacts_apart: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    remove = torch_private.add_to_artifacts(lambda add: add({"pygraph/a.json": {"a": [1, 2.5, None]}}))
    saved = torch.compiler.save_cache_artifacts()
    remove()
    assert saved is not None

    torch.compiler.load_cache_artifacts(saved[0])

    assert torch_private.inductor_cache() == tmp_path
    assert json.loads((tmp_path / "pygraph" / "a.json").read_text()) == {"a": [1, 2.5, None]}


@pytest.mark.slow
def test_threads_by_which_inductor_compiles_are_recognized() -> None:
    before = torch_private.threads_that_compile()
    workers = SubprocPool(1)
    try:
        AsyncCompile.pool().submit(int).result()
        found = torch_private.threads_that_compile()
    finally:
        workers.shutdown()

    assert workers.read_thread in found - before
    assert {each.name.rpartition("_")[0] for each in found if each.name.startswith("ThreadPoolExecutor")}
