"""Which operators of real compiled graphs have to run at each call."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pygraphd.client.backend import torch_private, vouched_operators
from pygraphd.client.dispatch import compiled_graph
from pygraphd.client.frontend import settings
from pygraphd.schema.reasons import Reason, ReasonCode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

pytestmark = pytest.mark.torch


@pytest.fixture
def host_operators() -> Iterator[Callable[..., list[tuple[str, ...]]]]:
    """Return what compiles and runs a function, and returns the host operators of each graph, forward before backward."""
    found: list[tuple[str, ...]] = []
    vouched: frozenset[str] = frozenset()

    def note(original: Callable[[], None], compiled: Any, graph_kwargs: Mapping[str, Any]) -> None:
        found.append(torch_private.facts(compiled, graph_kwargs, vouched).host_operators)
        original()

    def run(function: Callable[..., Any], *inputs: Any, by_user: str = "", **arguments: Any) -> Any:
        nonlocal vouched
        vouched = settings.read({settings.GRAPH_OPS: by_user}).graph_ops
        found.clear()
        torch._dynamo.reset()
        result = torch.compile(function, **arguments)(*inputs)
        if result.requires_grad:
            result.sum().backward()
        return list(found)

    uninstall = torch_private.install(note, lambda original, runnable, kwargs: original(runnable, **kwargs))
    yield run
    uninstall()
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def ops() -> Any:
    """Return operators of the user's: with a gradient, one that writes to what it is given, and one that is tagged."""

    @torch.library.custom_op("tested::scaled", mutates_args=())  # type: ignore[untyped-decorator]
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @torch.library.custom_op("tested::scaled_backward", mutates_args=())  # type: ignore[untyped-decorator]
    def scaled_backward(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @torch.library.custom_op("tested::scale", mutates_args=("x",))  # type: ignore[untyped-decorator]
    def scale(x: torch.Tensor) -> None:
        x.mul_(2)

    @torch.library.custom_op("tested::unsafe", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))  # type: ignore[untyped-decorator]
    def unsafe(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    for each in (scaled, scaled_backward, unsafe):
        each.register_fake(torch.empty_like)
    scaled.register_autograd(lambda ctx, grad: torch.ops.tested.scaled_backward(grad))
    return torch.ops.tested


def test_operators_of_the_user_are_found_in_forward_and_backward(host_operators: Any, ops: Any) -> None:
    x = torch.randn(4, requires_grad=True)

    assert host_operators(lambda x: ops.scaled(x.sin()).cos(), x) == [
        ("tested::scaled",),
        ("tested::scaled_backward",),
    ]
    assert host_operators(lambda x: ops.scaled(x.sin()).cos(), x, by_user="tested::scaled") == [
        (),
        ("tested::scaled_backward",),
    ]
    assert host_operators(lambda x: ops.scaled(x.sin()).cos(), x, by_user="tested") == [(), ()]


def test_they_are_found_in_branches_and_where_they_write_to_what_they_are_given(
    host_operators: Any, ops: Any
) -> None:
    def writes(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        ops.scale(y)
        return y.cos()

    def branches(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: ops.scaled(x) + 1, lambda x: x - 1, (x,))

    assert host_operators(writes, torch.randn(4)) == [("tested::scale",)]
    assert host_operators(branches, torch.randn(4)) == [("higher_order::cond", "tested::scaled")]


def test_a_graph_of_pytorchs_operators_has_none_whatever_its_comments_quote(host_operators: Any) -> None:
    def plain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout((x @ y).softmax(-1), 0.5)  # no torch.ops.tested.scaled.default(x)

    pair = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    assert host_operators(plain, *pair) == [(), ()]


def test_flex_attention_has_none(host_operators: Any) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = (torch.randn(1, 2, 32, 16) for _ in range(3))

    assert host_operators(lambda q, k, v: flex_attention(q, k, v), q, k, v) == [()]


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_the_tag_counts_in_every_mode_whoever_vouches(
    host_operators: Any, ops: Any, mode: str | None
) -> None:
    def both(x: torch.Tensor) -> torch.Tensor:
        return ops.scaled(ops.unsafe(x.sin()))

    assert host_operators(both, torch.randn(4), mode=mode) == [("tested::scaled", "tested::unsafe")]
    assert host_operators(both, torch.randn(4), by_user="tested", mode=mode) == [("tested::unsafe",)]


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_in_modes_with_cuda_graphs_operators_in_cpp_may_be_captured(
    host_operators: Any, ops: Any, monkeypatch: pytest.MonkeyPatch, mode: str | None
) -> None:
    """PyTorch captures them there; in Python an operator may read and change anything, which is seen at every call only."""
    library = torch.library.Library("tested_too", "DEF")
    library.define("doubled(Tensor x) -> Tensor")
    library.impl("doubled", lambda x: x * 2, "CUDA")
    library.impl("doubled", lambda x: x * 2, "CPU")
    library.impl("doubled", torch.empty_like, "Meta")
    monkeypatch.setattr(vouched_operators, "OF_PYTORCH", vouched_operators.OF_PYTORCH - {"aten"})

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.tested_too.doubled(ops.scaled(torch.histc(x)))

    (found,) = host_operators(function, torch.eye(4), mode=mode)
    assert {"tested::scaled", "tested_too::doubled"} <= {*found}
    assert ("aten::histc" in found) is (mode is None)


LIBRARIES = re.compile(r"aten::\w*(fft|cholesky|linalg|geqrf|ormqr|lstsq|triangular_solve)")


def decompositions(x: torch.Tensor) -> list[torch.Tensor]:
    linalg = torch.linalg
    x = x.sin() + 4 * torch.eye(4)
    solved = linalg.solve(x, x), linalg.solve_triangular(x, x, upper=True), linalg.inv(x), linalg.pinv(x)
    factors = linalg.cholesky(x @ x.mT), linalg.qr(x)[0], linalg.svd(x)[1], linalg.eigh(x)[0]
    numbers = (
        linalg.det(x),
        linalg.slogdet(x)[1],
        torch.fft.rfft(x).abs(),
        torch.fft.irfft2(torch.fft.fft2(x)),
    )
    return [each.cos() * 2 for each in (*solved, *factors, *numbers, linalg.matrix_exp(x))]


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
def test_decompositions_and_transforms_run_between_graphs_in_every_mode(
    host_operators: Any, mode: str | None
) -> None:
    def all_of_them(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([each.sum() for each in decompositions(x)])

    (found,) = host_operators(all_of_them, torch.randn(4, 4), mode=mode)
    assert {
        "aten::_fft_c2c", "aten::_fft_c2r", "aten::_fft_r2c", "aten::_linalg_det", "aten::_linalg_eigh", "aten::_linalg_slogdet",
        "aten::_linalg_solve_ex", "aten::_linalg_svd", "aten::linalg_cholesky_ex", "aten::linalg_inv_ex", "aten::linalg_matrix_exp",
        "aten::linalg_pinv", "aten::linalg_qr", "aten::linalg_solve_triangular",
    } <= {*found}  # fmt: skip
    assert {*found} <= vouched_operators.WITH_LIBRARY_STATE
    assert host_operators(all_of_them, torch.randn(4, 4), mode=mode, by_user="aten") == [found]
    assert host_operators(all_of_them, torch.randn(4, 4), mode=mode, by_user=",".join(found)) == [()]


def test_all_operators_of_these_libraries_that_inductor_leaves_to_pytorch_are_known() -> None:
    lowering: Any = importlib.import_module("torch._inductor.lowering")
    names = {each._schema.name for each in lowering.fallbacks if isinstance(each, torch._ops.OpOverload)}
    found = {name for name in names if LIBRARIES.match(name)}
    assert {"aten::_linalg_svd", "aten::_fft_r2c"} <= found
    assert found <= vouched_operators.WITH_LIBRARY_STATE


def test_a_graph_with_such_operators_is_not_recorded_and_the_reason_names_them(
    host_operators: Any, ops: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded as a whole it would run them once, and never again."""
    seen: list[torch_private.CompiledFacts] = []
    read = torch_private.facts

    def facts(*arguments: Any) -> torch_private.CompiledFacts:
        seen.append(read(*arguments))
        return seen[-1]

    monkeypatch.setattr(torch_private, "facts", facts)

    for by_user in ("", "tested"):
        host_operators(lambda x: ops.scaled(x.sin()).cos(), torch.randn(4), by_user=by_user)
    without, with_vouching = (replace(each, only_cuda=True, on_cuda=True) for each in seen)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not compiled_graph.may_be_recorded_whole(without, 1)
    assert compiled_graph.may_be_recorded_whole(with_vouching, 1)
    assert compiled_graph.decision_without_graph(without).reason == Reason(
        ReasonCode.CUSTOM_OPERATORS, "tested::scaled"
    )
