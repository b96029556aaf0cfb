"""Graphs that are split around operators that run at each call, in modes in which Inductor splits none; on real compilations.

The CPU stands in for the GPU: Inductor is told that what runs there can be captured.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from pygraphd.client.analysis.graph_facts import facts_of
from pygraphd.client.backend import torch_private
from pygraphd.client.backend.torch_private import partitions, requirements
from pygraphd.client.decisions import fingerprint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from pygraphd.client.backend.torch_private import CompiledFacts

pytestmark = pytest.mark.torch

CALLS: list[str] = []


@torch.library.custom_op("splitting::counted", mutates_args=())  # type: ignore[untyped-decorator]
def counted(x: torch.Tensor) -> torch.Tensor:
    CALLS.append("counted")
    return x * 2


@torch.library.custom_op("splitting::other", mutates_args=())  # type: ignore[untyped-decorator]
def other(x: torch.Tensor) -> torch.Tensor:
    CALLS.append("other")
    return x + 1


@torch.library.custom_op("splitting::write", mutates_args=("x",))  # type: ignore[untyped-decorator]
def write(x: torch.Tensor) -> None:
    CALLS.append("write")
    x.add_(1)


for each in (counted, other):
    each.register_fake(torch.empty_like)
counted.register_autograd(lambda ctx, grad: torch.ops.splitting.other(grad))


class Seen:
    """What was compiled, and how often each of its partitions was called."""

    def __init__(self, vouched: frozenset[str] = frozenset()) -> None:
        self.vouched = vouched
        self.facts: list[CompiledFacts] = []
        self.calls: list[list[int]] = []

    def note(self, original: Callable[[], None], compiled: Any, graph_kwargs: Mapping[str, Any]) -> None:
        facts = torch_private.facts(compiled, graph_kwargs, self.vouched)
        original()
        self.facts.append(facts)
        partitions = torch_private.split_partitions(compiled) if facts.is_split else []
        calls = [0] * len(partitions)
        self.calls.append(calls)
        partitions[:] = [self._counting(each, calls, index) for index, each in enumerate(partitions)]

    @staticmethod
    def _counting(run: Any, calls: list[int], index: int) -> Any:
        def call(inputs: list[Any]) -> Any:
            calls[index] += 1
            # Nothing else can be bound to a recording.
            assert all(isinstance(each, torch.Tensor | int) for each in inputs), [
                type(each) for each in inputs
            ]
            return run(inputs)

        return call


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have Inductor believe that what runs on the CPU can be captured."""
    from torch._inductor import config, scheduler

    monkeypatch.setattr(scheduler.BaseSchedulerNode, "is_gpu", lambda self: True)
    monkeypatch.setattr(partitions, "_SPLIT_ON", "cpu")
    with config.patch(fx_graph_cache=False):
        yield


@contextlib.contextmanager
def splitting(vouched: frozenset[str] = frozenset(), *, with_pass: bool = True) -> Iterator[Seen]:
    """Split graphs, and see what comes of it."""
    seen = Seen(vouched)
    undo = [
        torch_private.split_graphs(vouched),
        torch_private.add_pass(lambda graph: None, (__file__,)) if with_pass else lambda: None,
        torch_private.install(seen.note, lambda original, runnable, kwargs: original(runnable, **kwargs)),
    ]
    torch._dynamo.reset()
    CALLS.clear()
    try:
        yield seen
    finally:
        for each in undo:
            each()
        torch._dynamo.reset()


@pytest.fixture
def seen(on_the_cpu: None) -> Iterator[Seen]:
    """Split graphs, of which nobody vouches for any operator."""
    with splitting() as seen:
        yield seen


def test_this_torch_has_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_private.missing_for("partitions") is None

    monkeypatch.setitem(
        requirements.REQUIRED_FOR, "partitions", {"torch._inductor.scheduler": ("Scheduler.gone",)}
    )
    assert "lacks torch._inductor.scheduler.Scheduler.gone" in str(
        torch_private.missing_for.__wrapped__("partitions")
    )


def test_an_operator_runs_between_partitions_once_a_call(seen: Seen) -> None:
    run = torch.compile(lambda x: counted(x @ x) @ x)
    x = torch.randn(4, 4)

    for _ in range(3):
        torch.testing.assert_close(run(x), (x @ x * 2) @ x)

    (facts,), (calls,) = seen.facts, seen.calls
    assert (facts.is_split, facts.partitions, facts.host_operators) == (True, 2, ("splitting::counted",))
    assert [each.inputs for each in facts.maps] == [(0,), (None, 0)]
    assert calls == [3, 3]
    assert CALLS == ["counted"] * 3


@pytest.mark.parametrize(
    ("mode", "with_pass"), [(None, True), ("reduce-overhead", True), ("reduce-overhead", False)]
)
def test_it_is_known_whether_partitions_call_an_operator(
    on_the_cpu: None, mode: str | None, with_pass: bool
) -> None:
    """Nothing is split where Inductor's cache keys would not say so; then no partition that calls the operator may be recorded."""
    x = torch.randn(4, 4)
    with splitting(with_pass=with_pass) as seen:
        torch.testing.assert_close(torch.compile(lambda x: counted(x @ x) @ x, mode=mode)(x), (x @ x * 2) @ x)

    (facts,) = seen.facts
    assert (facts.host_operators, facts.calls_host_operators) == (("splitting::counted",), not with_pass)


def test_a_backward_is_split_too(seen: Seen) -> None:
    x = torch.randn(4, 4, requires_grad=True)
    y = torch.randn(4, 4)

    (torch.compile(lambda x: counted(x @ y) @ y)(x) @ y).sum().backward()

    assert [(each.is_backward, each.is_split) for each in seen.facts] == [(False, True), (True, True)]
    assert CALLS == ["counted", "other"]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.fft.irfft(torch.fft.rfft(x), n=4),
        lambda x: torch.linalg.eigh(x)[0],
        torch.linalg.inv,
        torch.linalg.svdvals,
        torch.linalg.cholesky,
    ],
    ids=["fft", "eigh", "inv", "svdvals", "cholesky, which checks for errors"],
)
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
def test_operators_with_state_of_a_library_run_between_partitions(
    seen: Seen, function: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    def around(x: torch.Tensor) -> torch.Tensor:
        return function(x @ x.mT + torch.eye(4)) @ x

    run = torch.compile(around)
    for _ in range(2):
        x = torch.randn(4, 4)
        torch.testing.assert_close(run(x), around(x), rtol=1e-3, atol=1e-4)

    (facts,) = seen.facts
    assert facts.host_operators
    assert (facts.is_split, facts.calls_host_operators, facts.partitions) == (True, False, 2)


@torch.library.custom_op("splitting::both", mutates_args=())  # type: ignore[untyped-decorator]
def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    CALLS.append("both")
    return x * 2, x + 1


@torch.library.custom_op("splitting::some", mutates_args=())  # type: ignore[untyped-decorator]
def some(x: torch.Tensor) -> list[torch.Tensor]:
    CALLS.append("some")
    return [x * 3, x - 1]


both.register_fake(lambda x: (torch.empty_like(x), torch.empty_like(x)))
some.register_fake(lambda x: [torch.empty_like(x), torch.empty_like(x)])


@pytest.mark.parametrize("dynamic", [False, True])
def test_partitions_are_given_each_of_several_outputs(seen: Seen, dynamic: bool) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        doubled, more = both(x @ x.mT)
        tripled, less = some(doubled @ more)
        return tripled @ less + more

    run = torch.compile(function, dynamic=dynamic)
    for n in (4, 6):
        CALLS.clear()
        x = torch.randn(n, n)
        torch.testing.assert_close(run(x), function(x), rtol=1e-4, atol=1e-3)
        assert CALLS == ["both", "some"] * 2
    assert all((each.is_split, each.partitions) == (True, 3) for each in seen.facts)


def test_outputs_stay_with_their_call_where_inductor_moves_nodes(on_the_cpu: None) -> None:
    """At the end of the graph, each would keep the other ones of its call alive until then."""
    from torch._inductor import config

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        doubled, more = both(x @ x.mT)
        return doubled @ x, more

    codes: list[str] = []
    x = torch.randn(4, 4)
    with splitting() as seen, config.patch({"triton.cudagraphs": True}):
        from torch._inductor.utils import run_and_get_code

        found, codes = run_and_get_code(torch.compile(function), x)
    torch.testing.assert_close(found, function(x), rtol=1e-4, atol=1e-3)
    assert seen.facts
    (code,) = codes
    after_the_call = code[code.index("torch.ops.splitting.both") :]
    assert after_the_call.index("[1]") < after_the_call.index("partitions[1]")


@pytest.mark.parametrize("function", [lambda x: both(x)[0], torch.linalg.svdvals], ids=["custom", "library"])
def test_a_graph_of_a_host_operator_alone_has_no_partition(
    seen: Seen, function: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    x = torch.randn(4, 4)
    torch.testing.assert_close(torch.compile(function)(x), function(x))
    (facts,) = seen.facts
    assert (facts.is_split, facts.host_operators != ()) == (False, True)


def test_an_operator_that_writes_to_what_it_is_given_runs_between_partitions(seen: Seen) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x @ x
        write(y)
        return y @ x

    x = torch.randn(4, 4)
    run = torch.compile(function)

    for _ in range(2):
        torch.testing.assert_close(run(x), (x @ x + 1) @ x)
    assert seen.facts[0].is_split
    assert CALLS == ["write"] * 2


def test_the_rules_of_placement_are_told_that_graphs_are_split_in_every_mode() -> None:
    assert not torch_private.graphs_are_split()
    with splitting():
        assert torch_private.graphs_are_split()
    assert not torch_private.graphs_are_split()


@pytest.mark.parametrize(
    ("devices", "expected"),
    [(["cuda"], False), (["cuda", "cpu"], True), (["cuda", "meta"], False), (["cpu"], False)],
)
def test_a_graph_that_does_not_run_on_gpus_alone_is_split(devices: list[str], expected: bool) -> None:
    traced = torch.fx.symbolic_trace(lambda x: x.sin())
    with splitting():
        lowering = SimpleNamespace(device_types={*devices}, orig_gm=traced)
        assert partitions._split(lowering, frozenset()) == (frozenset(), expected)


def test_a_graph_of_pytorchs_operators_stays_whole(seen: Seen) -> None:
    x = torch.randn(4, 4)

    torch.compile(lambda x: (x @ x) @ x)(x)

    assert [(each.is_split, each.partitions, each.maps) for each in seen.facts] == [(False, 1, ())]


def test_an_operator_in_a_branch_cannot_be_left_out(seen: Seen) -> None:
    """Inductor does not split what it calls within a graph: then the whole graph runs as KERNELS."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: counted(x) @ x, lambda x: x @ x, (x @ x,))

    torch.compile(function)(torch.ones(4, 4))

    assert seen.facts[0].host_operators == ("higher_order::cond", "splitting::counted")
    assert not seen.facts[0].is_split


def test_nothing_is_split_where_the_keys_of_inductors_caches_would_not_say_so(on_the_cpu: None) -> None:
    """Without our pass, that is: another program would be given code that is not its own."""
    with splitting(with_pass=False) as seen:
        torch.compile(lambda x: counted(x @ x) @ x)(torch.randn(4, 4))

    assert [each.is_split for each in seen.facts] == [False]


def test_inductor_is_as_it_was_afterwards(on_the_cpu: None) -> None:
    from torch._inductor import graph, scheduler, utils

    def all_there_is() -> tuple[Any, ...]:
        wrapper = utils._unstable_customized_partition_wrapper.wrapper
        return (
            graph.GraphLowering.codegen,
            scheduler.Scheduler.should_partition,
            vars(utils.CUDAGraphWrapper)["wrapper"],
            wrapper,
        )

    before = all_there_is()
    stop = torch_private.split_graphs(frozenset())
    during = all_there_is()
    stop()

    assert all(one is not other for one, other in zip(before[:3], during[:3], strict=True))
    assert during[3] is None  # nobody generates code
    assert all_there_is() == before


def test_a_wrapper_of_the_users_is_seen_and_kept() -> None:
    from torch._inductor import utils

    stop = torch_private.split_graphs(frozenset())
    try:
        utils.set_customized_partition_wrappers(print)
        assert utils._unstable_customized_partition_wrapper.wrapper is print
    finally:
        stop()
    assert utils._unstable_customized_partition_wrapper.wrapper is print
    utils.set_customized_partition_wrappers(None)


def test_what_the_user_vouches_for_is_in_the_keys_of_inductors_caches() -> None:
    keys = []
    for vouched in (None, frozenset[str](), frozenset({"mine"})):
        stop = torch_private.split_graphs(vouched) if vouched is not None else lambda: None
        keys.append(torch_private.pass_after(None, lambda graph: None, (__file__,)).uuid())
        stop()

    assert len(set(keys)) == 3


def test_where_a_graph_is_split_is_in_its_key(on_the_cpu: None) -> None:
    """Two operators, one of which is vouched for: the text and the number of partitions are the same."""
    digests: set[str] = set()
    for vouched in ("splitting::counted", "splitting::other"):
        with splitting(frozenset({vouched})) as seen:
            torch.compile(lambda x: other(counted(x @ x) @ x) @ x)(torch.randn(4, 4))
        assert [each.partitions for each in seen.facts] == [2]
        digests |= {each.digest for each in fingerprint.graphs(seen.facts[0], ())}

    assert len(digests) == 4


@pytest.mark.parametrize(
    ("source", "split"),
    [
        ("def partition_0(args):\n    mm(a)\nclass Runner:\n    def call(self):\n        torch.ops.a.b.default(x)\n", True),
        ("def partition_0(args):\n    torch.ops.a.b.default(x)\nclass Runner:\n    def call(self):\n        torch.ops.a.b(x)\n", False),
        ("def subgraph_0(args):\n    torch.ops.a.b(x)\nclass Runner:\n    def call(self):\n        pass\n", False),
        ("class Runner:\n    def call(self):\n        # torch.ops.a.b.default(x)\n        pass\n", False),
        ("def partition_0(args):\n    assert_size_stride(x, 'torch.ops.a.b.default')\nclass Runner:\n    def call(self):\n        torch.ops.a.b.default(x)\n", True),
    ],
)  # fmt: skip
def test_generated_code_is_held_against_what_was_wanted(source: str, split: bool) -> None:
    assert partitions.is_split_around(source, ["a::b"]) is split


REDUCE = "    torch.ops._c10d_functional.all_reduce_.default(buf2, 'sum', '0')\n"
REDUCES = [("_c10d_functional::all_reduce_", "0")]
GATHER = "    buf3 = torch.ops._c10d_functional.all_gather_into_tensor.default(buf2, 2, 'f00')\n"
WAIT = "    torch.ops._c10d_functional.wait_tensor.default(buf2)\n"


OPERATORS = ["_c10d_functional::all_reduce_", "_c10d_functional::wait_tensor", "aten::mm"]
UNREAD = ([("code that is not read (_c10d_functional::all_reduce_)", "")],) * 2


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (f"def partition_0(args):\n    mm(a)\ndef partition_1(args):\n{REDUCE}{WAIT}", ((), REDUCES)),
        (f"def partition_0(args):\n    mm(a)\ndef partition_1(args):\n{WAIT}class Runner:\n    {REDUCE}", ((), ())),
        (f"class Runner:\n    def call(self, args):\n    {REDUCE}", (REDUCES,) * 2),
        (f"class Runner:\n    def call(self, args):\n    {GATHER}", ([("_c10d_functional::all_gather_into_tensor", "f00")],) * 2),
        (f"class Runner:\n    def call(self, args):\n    #{REDUCE}", UNREAD),
        ("cpp_wrapper_src = 'aoti_torch_cuda__c10d_functional_all_reduce_(x)'\n", UNREAD),
        (f"def repeated_subgraph0(args):\n{REDUCE}def partition_0(args):\n    mm(a)\ndef partition_1(args):\n{REDUCE}", UNREAD),
    ],
)  # fmt: skip
def test_the_collectives_of_each_partition_are_found(source: str, found: tuple[Any, ...]) -> None:
    assert partitions.collectives_in(source, OPERATORS, 2) == tuple(map(frozenset, found))
    assert partitions.collectives_in(source, OPERATORS[1:], 2) == (frozenset(),) * 2


TRITON = "    triton_poi_fused_0.run(buf0, 64, stream=stream0)\n"
LIBRARY = "    extern_kernels.mm(arg0, arg1, out=buf0)\n"
WRITE = "    aten.index_put_(buf0, [arg1], arg2, True)\n"
COPY = "    buf0.copy_(arg0, False)\n"
NOTED = "    assert_size_stride(buf0, (4, ), (1, ), 'torch.ops.aten.sort.default')\n"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (f"def partition_0(args):\n{TRITON}{LIBRARY}def partition_1(args):\n{REDUCE}{WAIT}{NOTED}", ((2, 1), 0)),
        (f"def partition_0(args):\n{TRITON}def partition_1(args):\n{WRITE}class Runner:\n{LIBRARY}", ((1, 1), 1)),
        (f"def partition_0(args):\n{TRITON}def partition_1(args):\n{WRITE}def partition_2(args):\n{COPY}", ((3, 3), 0)),
        (f"class Runner:\n    def call(self, args):\n    {TRITON}    #{LIBRARY}    {LIBRARY}", ((2, 2), 0)),
        ("def run(x):\n    buf0 = empty_strided_cuda((4, ), (1, ), torch.float32)\n", ((0, 0), 0)),
    ],
)  # fmt: skip
def test_the_kernels_that_each_partition_calls_are_counted(
    source: str, found: tuple[tuple[int, ...], int]
) -> None:
    assert partitions.launches_in(source, 2) == found


STRAY = "    # the user's line: text = '''\n"
KERNEL = "triton_poi_fused_0 = async_compile.triton('triton_poi_fused_0', '''\nimport triton\ntorch.ops.a.b(x)\n''', device_str='cuda')\n"


@pytest.mark.parametrize("before", ["", STRAY])
def test_sources_of_kernels_are_left_out_and_nothing_else(before: str) -> None:
    rest = f"{before}class Runner:\n    def call(self, args):\n    {TRITON}{STRAY}"
    assert partitions.without_kernels(f"import torch\n{KERNEL}{KERNEL}{rest}") == f"import torch\n\n\n{rest}"


def test_what_inductor_generates_is_little_without_its_kernels(on_the_cpu: None) -> None:
    with splitting() as seen:
        _, (source,) = run_and_get_code(lambda: torch.compile(lambda x: (x @ x).sin())(torch.randn(4, 4)))
    left = partitions.without_kernels(source)
    assert "async_compile.cpp_pybinding(" in source
    assert "async_compile.cpp_pybinding(" not in left
    assert "class Runner:" in left
    assert len(seen.facts) == 1


def test_a_split_graph_comes_from_inductors_cache_as_one_and_only_to_who_wants_it(
    on_the_cpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from torch._inductor import config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    hits = torch._dynamo.utils.counters["inductor"]
    told = []
    for with_pass in (True, True, False, False):
        before = hits["fxgraph_cache_hit"]
        with splitting(with_pass=with_pass) as seen, config.patch(fx_graph_cache=True):
            torch.compile(lambda x: counted(x @ x) @ x)(torch.randn(4, 4))
        told.append((hits["fxgraph_cache_hit"] - before, seen.facts[0].is_split, [*CALLS]))

    expected = ((0, True), (1, True), (0, False), (1, False))
    assert told == [(hit, split, ["counted"]) for hit, split in expected]


@pytest.mark.filterwarnings("ignore::UserWarning")  # Dynamo's own, of `.grad`
def test_the_backward_of_a_jagged_tensor_reads_its_size_off_a_tensor() -> None:
    """Its inputs are tensors alone, and it is compiled once for all lengths: nothing else tells one length from another."""
    linear = torch.nn.Linear(8, 16)
    seen: list[tuple[bool, bool]] = []

    def note(original: Callable[[], None], compiled: Any, graph_kwargs: Mapping[str, Any]) -> None:
        facts = torch_private.facts(compiled, graph_kwargs)
        seen.append((facts.is_backward, facts.reads_sizes))
        original()

    uninstall = torch_private.install(note, lambda original, runnable, kwargs: original(runnable, **kwargs))
    try:
        torch._dynamo.reset()
        step = torch.compile(lambda jagged: torch.nn.functional.gelu(linear(jagged)))
        for lengths in ([3, 5, 2], [7, 8, 9]):
            values = torch.randn(sum(lengths), 8, requires_grad=True)
            offsets = torch.tensor([0, *lengths]).cumsum(0)
            step(torch.nested.nested_tensor_from_jagged(values, offsets)).values().sum().backward()
            assert values.grad is not None
    finally:
        uninstall()
        torch._dynamo.reset()
    assert (True, True) in seen
    assert (True, False) not in seen


class Layer(torch.nn.Module):  # type: ignore[misc]
    """A layer with a recurrent state, as of a state-space model."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    @torch.compiler.nested_compile_region  # type: ignore[untyped-decorator]
    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        state.mul_(0.9).add_(self.linear(x))
        return x + state


def test_any_input_may_be_written_by_a_nested_region() -> None:
    """Inductor does not list the states among the inputs that are written."""
    layers, x = [Layer() for _ in range(3)], torch.ones(4, 8)
    states = [torch.ones(4, 8) for _ in layers]
    seen: list[Any] = []

    def note(original: Callable[[], None], compiled: Any, graph_kwargs: Mapping[str, Any]) -> None:
        seen.append(facts_of(torch_private.facts(compiled, graph_kwargs)))
        original()

    def step(x: torch.Tensor) -> torch.Tensor:
        for layer, state in zip(layers, states, strict=True):
            x = layer(x, state)
        return x

    uninstall = torch_private.install(note, lambda original, runnable, kwargs: original(runnable, **kwargs))
    try:
        torch._dynamo.reset()
        with torch.no_grad():
            torch.compile(step)(x)
    finally:
        uninstall()
        torch._dynamo.reset()

    assert not torch.equal(states[0], torch.ones(4, 8))
    assert [each.written for each in seen] == [None]


def test_nothing_is_split_where_inductor_plans_memory() -> None:
    """Its plans do not see partitions: values would be wrong that are right without PyGraph."""
    stop = torch_private.split_graphs(frozenset())
    try:
        with torch._inductor.config.patch({"graph_partition": True, "triton.cudagraphs": False}):
            assert torch_private.graphs_are_split()
            with torch._inductor.config.patch({"memory_planning": True}):
                assert not torch_private.graphs_are_split()
    finally:
        stop()
