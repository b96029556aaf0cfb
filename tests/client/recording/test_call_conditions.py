"""Calls whose kernels would be others than the recorded ones, or read their inputs otherwise, though all addresses fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from pygraphd.client.analysis.graph_facts import GraphFacts
from pygraphd.client.backend import torch_private
from pygraphd.client.backend.torch_private.library_switches import switches_of
from pygraphd.client.recording.call_conditions import FLAGGED, OBSERVED, SWITCHED, CallConditions
from tests.support.recording_case import Case, Operations, add, case

if TYPE_CHECKING:
    from collections.abc import Callable

    from pygraphd.client.recording.recordings import Recordings

__all__ = ["case"]  # fixtures

pytestmark = pytest.mark.torch


def negated(ops: Operations, inputs: list[Any]) -> tuple[Any, ...]:
    """Double an input as a library does, which obeys its negative bit when it is called."""
    (x,) = inputs
    x = x.resolve_neg() if x.is_neg() else x
    return (ops.add(x, x),)


def ways(made: Recordings) -> list[Callable[[list[Any]], Any]]:
    """Return both ways into a recording: by the compiled helper, and by Python."""
    return [made.run, made]


def served(made: Recordings) -> int:
    return sum(each.counts.replays for each in made.replays)


@pytest.mark.parametrize("way", range(2), ids=["helper", "Python"])
def test_a_gradient_with_a_negative_bit_is_not_given_to_a_recording_without(case: Case, way: int) -> None:
    """Autograd may set the bit at one call and not at the next, and nothing compiles the backward again."""
    made = case.made(negated, GraphFacts(tangents=frozenset({0})))
    run = ways(made)[way]
    for _ in range(3):
        assert run([case.floats(1, 2)])[0].tolist() == [2, 4]
    before = served(made)

    assert run([torch._neg_view(case.floats(1, 2))])[0].tolist() == [-2, -4]
    assert (served(made), case.report.fallbacks[FLAGGED]) == (before, 1)
    assert run([case.floats(3, 4)])[0].tolist() == [6, 8]
    assert served(made) == before + 1


def test_a_call_whose_gradient_has_a_negative_bit_is_not_recorded(case: Case) -> None:
    made = case.made(negated, GraphFacts(tangents=frozenset({0})))
    for _ in range(4):
        assert made.run([torch._neg_view(case.floats(1, 2))])[0].tolist() == [-2, -4]

    assert made.replays == ()
    assert case.report.fallbacks == {FLAGGED: 4}


@pytest.mark.parametrize("way", range(2), ids=["helper", "Python"])
def test_a_recording_serves_no_call_under_other_settings_of_a_library(
    case: Case, monkeypatch: pytest.MonkeyPatch, way: int
) -> None:
    """As where a program asks cuDNN for deterministic algorithms, or for float32 without TF32, after some steps."""
    made = case.made(add, GraphFacts(switches=("cudnn.deterministic", "cudnn.conv.fp32_precision")))
    run = ways(made)[way]
    for _ in range(3):
        assert run([case.floats(1), case.floats(2)])[0].tolist() == [3]
    before = served(made)

    for refused, (name, value) in enumerate((("deterministic", True), ("allow_tf32", False)), start=1):
        with monkeypatch.context() as changed:
            changed.setattr(torch.backends.cudnn, name, value)
            assert run([case.floats(1), case.floats(2)])[0].tolist() == [3]
        assert (served(made), case.report.fallbacks[SWITCHED]) == (before, refused)
    assert run([case.floats(1), case.floats(2)])[0].tolist() == [3]
    assert served(made) == before + 1


@pytest.mark.parametrize(
    ("code", "first"),
    [
        ("buf0 = extern_kernels.convolution(arg0, arg1)", "cudnn.enabled"),
        ("buf0 = torch.ops.aten._cudnn_rnn.default(arg0)", "cudnn.enabled"),
        ("extern_kernels.addmm(arg0, arg1, arg2, out=buf0)", "cuda.matmul.allow_fp16_accumulation"),
        ("AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_convolution(arg0, arg1, &buf0));", "cudnn.enabled"),
        ('aoti_torch_call_dispatcher("aten::_cudnn_rnn_backward", "", stack)', "cudnn.enabled"),
    ],
)
def test_settings_are_those_of_the_libraries_that_are_called(code: str, first: str) -> None:
    names = switches_of(code, is_backward=False)

    assert names[0] == first
    assert len(torch_private.switches(names)) == len(names)  # this torch tells them all
    assert "deterministic_algorithms" not in names  # Dynamo compiles a forward again


def test_tf32_is_watched_where_it_was_allowed_by_the_newer_functions() -> None:
    """PyTorch's older getter raises then."""
    matmul: Any = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        wanted = torch_private.switches(("cuda.matmul.allow_tf32",))
        assert torch_private.are_set(wanted)
        matmul.fp32_precision = "ieee"
        assert wanted
        assert not torch_private.are_set(wanted)
    finally:
        matmul.fp32_precision = before


@pytest.mark.parametrize("is_backward", [False, True])
def test_code_without_library_calls_depends_on_no_settings(is_backward: bool) -> None:
    code = "# Original ATen: [aten.mm, aten.convolution]\ntriton_poi_fused_convolution_0.run(arg0, stream=stream0)"
    assert switches_of(code, is_backward=is_backward) == ()


@pytest.mark.parametrize(
    ("code", "of_cublas"),
    [("extern_kernels.mm(arg0, arg1, out=buf0)", True), ("aten.index_put_(buf0, [arg1], arg0, True)", False)],
)
def test_a_backward_depends_on_settings_that_are_read_before_the_forward_alone(
    case: Case, code: str, of_cublas: bool
) -> None:
    names = switches_of(code, is_backward=True)
    assert ("cuda.matmul.allow_tf32" in names) is of_cublas
    assert len(torch_private.switches(names)) == len(names)  # this torch tells them all

    made = case.made(add, GraphFacts(switches=names))
    for _ in range(3):
        assert made.run([case.floats(1), case.floats(2)])[0].tolist() == [3]
    before = served(made)
    matmul: Any = torch.backends.cuda.matmul
    allowed = matmul.allow_tf32
    try:
        torch.use_deterministic_algorithms(True)
        made.run([case.floats(1), case.floats(2)])
        torch.use_deterministic_algorithms(False)
        matmul.allow_tf32 = not allowed
        made.run([case.floats(1), case.floats(2)])
    finally:
        torch.use_deterministic_algorithms(False)
        matmul.allow_tf32 = allowed
    served_one = not of_cublas
    assert (served(made), case.report.fallbacks[SWITCHED]) == (before + served_one, 2 - served_one)
    before = served(made)
    made.run([case.floats(1), case.floats(2)])
    assert served(made) == before + 1


@pytest.mark.parametrize("way", range(2), ids=["helper", "Python"])
def test_a_dispatch_mode_sees_the_operators_of_each_call(case: Case, way: int) -> None:
    """Selective checkpointing counts them, and looks for the same ones when it computes again: neither less nor a capture's."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    made = case.made(add, GraphFacts())
    run = ways(made)[way]
    with Counting():
        for _ in range(4):
            run([case.floats(1), case.floats(2)])
    assert made.replays == ()
    for _ in range(3):
        run([case.floats(1), case.floats(2)])
    before = served(made)

    with Counting():
        run([case.floats(1), case.floats(2)])
    assert (served(made), case.report.fallbacks[OBSERVED]) == (before, 5)
    run([case.floats(1), case.floats(2)])
    assert served(made) == before + 1


def test_the_mode_of_aot_autograd_at_first_calls_is_none_of_the_program() -> None:
    """It checks custom operators: a first call within it is as any first call."""
    from torch._dynamo.backends.common import aot_autograd
    from torch.utils._python_dispatch import TorchDispatchMode

    class Nothing(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    conditions, found = CallConditions(GraphFacts()), []

    def compiler(module: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            found.append((torch._C._len_torch_dispatch_stack(), conditions.why_not(inputs)))
            return module(*inputs)

        return run

    run = torch.compile(lambda x: x + 1, backend=aot_autograd(fw_compiler=compiler))
    run(torch.ones(2))
    run(torch.ones(2))

    assert found == [(1, None), (0, None)]
    with Nothing():
        assert conditions.why_not([]) == OBSERVED
