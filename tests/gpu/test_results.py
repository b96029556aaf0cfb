"""Results on a GPU: of any dtype and view they are compared, what is nondeterministic is recorded all the same, and graphs are checked while they run."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pygraphd.client.backend.driver import KernelNodeParams, NodeType
from pygraphd.client.recording.result_check import (
    CALLS_UNTIL_READ,
    DIFFERS,
    PRESUMED_S,
    SHARE,
    ResultCheck,
)
from tests.support.refusals import refusal_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.relocated import Relocated

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),
    pytest.mark.filterwarnings("ignore:.*omplex"),
]

MODE = "reduce-overhead"
CALLS = 8


@pytest.fixture
def rounded() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


def randn(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*size, device="cuda", dtype=dtype)


def sums(x: torch.Tensor, weight: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Add many rows to few, in any order, of products that may be rounded."""
    rows = torch.zeros(4, x.shape[1], device="cuda").index_add(0, index, x @ weight)
    return torch.softmax(rows @ weight, -1) @ weight


@pytest.mark.usefixtures("rounded")
def test_what_adds_in_any_order_is_recorded(relocated: Relocated) -> None:
    compiled = torch.compile(sums, mode=MODE, dynamic=False)
    weight, index = randn(256, 256), torch.randint(0, 4, (8192,), device="cuda")
    for _ in range(CALLS):
        x = randn(8192, 256)
        found, right = compiled(x, weight, index), sums(x, weight, index)
        assert float((found - right).abs().max()) <= 0.02 * float(right.abs().max())

    assert relocated.report.counts["captured"] == 1


FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def made_to(dtype: torch.dtype) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    return lambda x: ((x + 1).to(dtype), x * 2)


def drawn_of(dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    return lambda: randn(33, 5).to(dtype)


OF_TYPES: dict[str, tuple[Callable[..., Any], Callable[[], torch.Tensor]]] = {
    **{str(each): (made_to(each), lambda: randn(33, 5)) for each in FP8},
    **{
        f"from {each}": (lambda x: x.float() * 2, drawn_of(each))
        for each in (*FP8, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.uint8, torch.bool)
    },
    "complex": (lambda x: torch.fft.fft(x) * 2, lambda: randn(16, 64, dtype=torch.complex64)),
    "conjugate": (
        lambda x: torch.view_as_real(x.resolve_conj() * 2),
        lambda: randn(16, 64, dtype=torch.complex64).conj(),
    ),
    "conjugate output": (lambda x: (x * 2).conj(), lambda: randn(16, 64, dtype=torch.complex64)),
    "negative output": (lambda x: (x * 2).conj().imag, lambda: randn(16, 64, dtype=torch.complex64)),
    "negative": (lambda x: x * 2, lambda: randn(16, 64, dtype=torch.complex64).conj().imag),
    "bool": (lambda x: (x > 0, x.sum() > 0), lambda: randn(9, 9)),
    "indices": (lambda x: x.topk(3), lambda: randn(9, 9)),
    "expanded": (lambda x: x + 1, lambda: randn(9, 1).expand(9, 7)),
    "gaps": (lambda x: x + 1, lambda: randn(9, 9)[::2, ::3]),
    "empty": (lambda x: (x[:0] + 1, x + 1), lambda: randn(9, 9)),
}


@pytest.mark.parametrize("name", OF_TYPES)
def test_any_type_and_view_is_compared(relocated: Relocated, name: str) -> None:
    """With the same code as KERNELS: Inductor's own reads a negative view's memory as if it were none."""
    function, make = OF_TYPES[name]
    every = [make() for _ in range(CALLS)]
    with relocated.as_kernels():
        run_kernels = torch.compile(function, mode=MODE, dynamic=False)
        of_kernels = [run_kernels(given) for given in every]
    compiled = torch.compile(function, mode=MODE, dynamic=False)
    for given, right in zip(every, of_kernels, strict=True):
        found = compiled(given)
        pairs = zip(*((each if isinstance(each, tuple) else (each,)) for each in (found, right)), strict=True)
        for mine, theirs in pairs:
            assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
            wide = (
                each.to(torch.complex128 if each.is_complex() else torch.float64) for each in (mine, theirs)
            )
            torch.testing.assert_close(*wide, rtol=1e-4, atol=1e-4)

    assert not any("failed" in reason or "differs" in reason for reason in relocated.report.fallbacks)


def affine(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ x) + 1


def check_at_once(relocated: Relocated, wrap: Callable[[Any], Any] = lambda run_kernels: run_kernels) -> None:
    """Have the next call of each recording be checked against `wrap` of the callable that runs KERNELS."""
    for each in relocated.made:
        each._check = ResultCheck(wrap(each._run_kernels), each._recorder, each._report, each.facts, 1e-9)
        for replay in each.replays:
            replay.counts.next_check = replay.counts.replays


def test_booleans_that_nobody_has_written_are_no_difference(relocated: Relocated) -> None:
    """As those between numbers that are sent from the CPU together."""
    compiled = torch.compile(lambda x, some: torch.where(some[0], x @ x, x), mode=MODE, dynamic=False)
    for step in range(CALLS):
        x, some = randn(64, 64), torch.arange(64, dtype=torch.uint8, device="cuda")
        some[0] = step % 2
        torch.testing.assert_close(compiled(x, some.view(torch.bool)), x @ x if step % 2 else x)

    relocated.expect_all_captured()


def test_a_graph_that_serves_is_checked_and_goes_on(relocated: Relocated) -> None:
    compiled = torch.compile(affine, mode=MODE, dynamic=False)
    for _ in range(CALLS):
        compiled(randn(64, 64))
    check_at_once(relocated)
    began_s = time.monotonic()
    affine(randn(64, 64))  # cuBLAS takes a workspace for good, and a capture has given its own back
    before = torch.cuda.memory_allocated()
    for _ in range(2 * CALLS_UNTIL_READ):
        x = randn(64, 64)
        torch.testing.assert_close(compiled(x), affine(x), rtol=1e-3, atol=1e-3)

    counts = relocated.report.counts
    assert counts["checked_results"] >= 1
    assert counts["wrong_results"] == 0
    assert dict(relocated.report.failures) == {}
    recorder = relocated.made[0]._recorder
    assert recorder.next_check_at >= began_s + PRESUMED_S / SHARE  # the next one waits its time
    assert len(relocated.made[0].replays) == 1
    assert torch.cuda.memory_allocated() <= before + (1 << 20)


def make_wrong(relocated: Relocated) -> int:
    """Have each kernel of a recording that was verified run its first block only, once it is written again; return how many change."""
    changed = 0
    for replay in [each for made in relocated.made for each in made.replays]:
        assert replay._executables is not None
        parameters = replay._executables._parameters
        for node, (_, _, address, *_) in zip(parameters._nodes, parameters.writes, strict=True):
            if node.node_type is NodeType.KERNEL:
                struct = KernelNodeParams.from_address(address)
                changed += struct.gridDimX > 1
                struct.gridDimX = 1
    return changed


def test_a_recording_that_is_made_wrong_after_verification_is_found(
    relocated: Relocated, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled = torch.compile(lambda x: torch.relu(x) * 3 + 1, mode=MODE, dynamic=False)
    for _ in range(CALLS):
        compiled(randn(1 << 20))
    # The next call's input and output must not lie where those of the last call did, or no node is written.
    taken = [randn(1 << 20) for _ in range(4)]
    assert make_wrong(relocated) >= 1
    marked: list[Any] = []
    relocated.made[0]._note_failed_check = lambda *told: marked.append(told)
    check_at_once(relocated)
    kept, wrong = taken, 0
    for _ in range(2 * CALLS_UNTIL_READ):
        x = randn(1 << 20)
        kept.append(x)  # so that each lies elsewhere, and nodes are written
        found, right = compiled(x), torch.relu(x) * 3 + 1
        wrong += not torch.allclose(found, right)
        kept.append(found)

    assert 1 <= wrong <= CALLS_UNTIL_READ + 2
    torch.testing.assert_close(found, right)
    assert relocated.report.counts["wrong_results"] == 1
    assert len(relocated.made[0].replays) == 0
    assert DIFFERS in str(refusal_of(relocated.made[0]))
    assert [reason.code.value for _, reason in marked] == ["results_differ"]
    assert capsys.readouterr().err.count(DIFFERS) == 1
