"""A zoo of kernels, every input and output moved at every call, guard zones around them, old memory poisoned.

Each case runs as `moved` has it: the compiled callable runs as KERNELS for the program, and is replayed beside it on copies that lie
elsewhere; both must agree on every output and every input. Names of kernels say that it is the kernel that is meant.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch._inductor.utils import run_and_get_code
from torch.nn.attention import SDPBackend, sdpa_kernel

from pygraphd.client.backend.driver import NodeType
from pygraphd.client.frontend import settings
from tests.support.refusals import refusal_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.relocated import Moved, Relocated

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

CALLS = 5


def randn(*size: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    return torch.randn(*size, device="cuda", dtype=dtype, requires_grad=grad)


def indices(high: int, *size: int) -> torch.Tensor:
    return torch.randint(0, high, size, device="cuda")


def call(function: Callable[..., Any], *inputs: Any, calls: int = CALLS, **compile_options: Any) -> None:
    """Call a compiled function some times; where an output asks for gradients, go backward, too."""
    compiled = torch.compile(
        function, fullgraph=True, dynamic=False, **(compile_options or {"mode": "reduce-overhead"})
    )
    for _ in range(calls):
        fresh = [_like(each) for each in inputs]
        result = compiled(*fresh)
        outputs = [each for each in _flat(result) if each.requires_grad]
        if outputs:
            sum(each.float().square().sum() for each in outputs).backward()


def _flat(result: Any) -> list[torch.Tensor]:
    values = result if isinstance(result, tuple | list) else [result]
    return [
        each for value in values for each in (_flat(value) if isinstance(value, tuple | list) else [value])
    ]


def _like(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone(memory_format=torch.preserve_format).requires_grad_(value.requires_grad)


GEMM = "gemm|gemv|cutlass|cublas|nvjet|xmma"
"""Part of the name of any kernel of the BLAS libraries."""
CONVOLUTION = "cudnn|conv|cutlass|xmma|winograd|implicit|[dw]grad|fprop"

FORWARD: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]], str]] = {
    "pointwise": (
        lambda x, y: (x.sin() * y + 1, x - y),
        lambda: (randn(1000, 37), randn(1000, 37)),
        "triton_poi",
    ),
    "views with odd offsets": (lambda x: x[1:, 3:].exp() * 2, lambda: (randn(33, 65),), "triton_poi"),
    "reduction": (lambda x: (x.sum(0), x.amax(1), x.var()), lambda: (randn(3000, 700),), "triton_(red|per)"),
    "persistent reduction": (
        lambda x: F.layer_norm(x, (256,)).softmax(-1),
        lambda: (randn(64, 256),),
        "triton_per",
    ),
    "matrix product": (lambda a, b: a @ b, lambda: (randn(256, 512), randn(512, 384)), GEMM),
    "matrix product bf16": (
        lambda a, b: a @ b,
        lambda: (randn(1024, 512, dtype=torch.bfloat16), randn(512, 2048, dtype=torch.bfloat16)),
        GEMM,
    ),
    "matrix product fp16": (
        lambda a, b: a @ b,
        lambda: (randn(1024, 512, dtype=torch.float16), randn(512, 256, dtype=torch.float16)),
        GEMM,
    ),
    "batched": (lambda a, b: torch.bmm(a, b), lambda: (randn(16, 128, 64), randn(16, 64, 96)), GEMM),
    "batched bf16": (
        lambda a, b: torch.bmm(a, b),
        lambda: (randn(16, 128, 64, dtype=torch.bfloat16), randn(16, 64, 96, dtype=torch.bfloat16)),
        GEMM,
    ),
    "with bias": (
        lambda x, w, b: F.gelu(F.linear(x, w, b)),
        lambda: (
            randn(128, 256, dtype=torch.bfloat16),
            randn(512, 256, dtype=torch.bfloat16),
            randn(512, dtype=torch.bfloat16),
        ),
        GEMM,
    ),
    "grouped, of a temporary": (  # whose address, and the result's, the kernel finds where an earlier one has put them
        lambda x, w, ends: torch._grouped_mm(x.relu(), w, offs=ends, out_dtype=torch.bfloat16).relu() + 1,
        lambda: (
            randn(64, 64, dtype=torch.bfloat16),
            randn(4, 96, 64, dtype=torch.bfloat16).transpose(-2, -1),
            torch.tensor([16, 32, 48, 64], dtype=torch.int32, device="cuda"),
        ),
        "triton_",
    ),
    "sort": (lambda x: torch.sort(x), lambda: (randn(100, 5000),), "sort"),
    "top k": (lambda x: torch.topk(x, 7), lambda: (randn(100, 5000),), "topk"),
    "scatter": (
        lambda x, i, s: x.scatter_add(0, i, s),
        lambda: (randn(100, 20), indices(100, 50, 20), randn(50, 20)),
        "triton_",
    ),
    "scatter of maxima": (
        lambda x, i, s: x.scatter_reduce(0, i, s, "amax"),
        lambda: (randn(100, 20), indices(100, 50, 20), randn(50, 20)),
        "scatter",  # of ATen: Triton has no such atomic operation
    ),
    "index put": (
        lambda x, i, v: torch.index_put(x, (i,), v, accumulate=True),
        lambda: (randn(100, 20), indices(100, 30), randn(30, 20)),
        "triton_",
    ),
    "embedding bag": (
        lambda i, w: F.embedding_bag(i, w, mode="sum"),
        lambda: (indices(1000, 64, 8), randn(1000, 32)),
        "embedding",
    ),
    "cat": (
        lambda a, b, c: torch.cat([a, b, c], 1),
        lambda: (randn(50, 7), randn(50, 9), randn(50, 33)),
        "triton_",
    ),
    "cumulative sum": (lambda x: x.cumsum(1), lambda: (randn(64, 3000),), "triton_"),
    "in place": (lambda x, y: x.mul_(2).add_(y), lambda: (randn(500), randn(500)), "triton_poi"),
    "foreach": (
        lambda xs, ys: torch._foreach_add(xs, ys, alpha=0.5),
        lambda: ([randn(n) for n in (3, 500, 7000)], [randn(n) for n in (3, 500, 7000)]),
        "triton_",
    ),
    "temporaries larger than outputs": (
        lambda x: ((x @ x).relu() @ x).sum(1)[:5],
        lambda: (randn(700, 700),),
        GEMM,
    ),
}
IN_ANY_ORDER = {"scatter", "index put"}
"""What adds by atomic operations, so that two runs as KERNELS may differ, and may not."""


@pytest.mark.parametrize("name", FORWARD)
def test_forward(moved: Moved, name: str) -> None:
    function, inputs, kernel = FORWARD[name]
    moved.exact = name not in IN_ANY_ORDER

    call(function, *inputs())

    moved.expect_all_captured()
    moved.seen.expect(kernel)


def test_split_k(moved: Moved) -> None:
    """cuBLAS splits at least one of these."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        call(lambda a, b: a @ b, randn(16, 65536, dtype=dtype), randn(65536, 24, dtype=dtype), calls=4)
        torch._dynamo.reset()

    moved.expect_all_captured()
    moved.seen.expect(GEMM, "split_?k|stream_?k|sliced")


def test_tf32(moved: Moved) -> None:
    a, b = randn(512, 512), randn(512, 512)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        call(lambda a, b: a @ b, a, b)
        rounded = a @ b
    finally:
        torch.set_float32_matmul_precision(before)

    exact = a.double() @ b.double()
    assert (rounded - exact).abs().max() > 1e-5 * exact.abs().max()  # 32 bits are 100 times as exact
    moved.expect_all_captured()
    moved.seen.expect(GEMM)


def test_fp8(moved: Moved) -> None:
    def product(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(a, b.t(), scale, scale, out_dtype=torch.bfloat16)

    eight = torch.float8_e4m3fn
    scale = torch.tensor(0.5, device="cuda")
    call(product, randn(128, 256).to(eight), randn(64, 256).to(eight), scale)

    moved.expect_all_captured()
    moved.seen.expect(GEMM)


def test_templates_with_tensor_maps(moved: Moved) -> None:
    options = {
        "triton.cudagraphs": True,
        "max_autotune_gemm": True,
        "max_autotune_gemm_backends": "TRITON",
        "triton.enable_persistent_tma_matmul": True,
        "test_configs.autotune_choice_name_regex": "mm_persistent_tma",
    }

    _, codes = run_and_get_code(
        call,
        lambda a, b: (a @ b).relu(),
        randn(1024, 1024, dtype=torch.bfloat16),
        randn(1024, 1024, dtype=torch.bfloat16),
        options=options,
    )

    assert any("make_tensor_descriptor" in code or "tensormap_create" in code for code in codes)
    moved.expect_all_captured()
    moved.seen.expect("triton_tem")


def module(name: str) -> tuple[torch.nn.Module, tuple[Any, ...]]:
    """Return a module on the GPU and its inputs."""
    made: dict[str, Callable[[], tuple[torch.nn.Module, tuple[Any, ...]]]] = {
        "linear": lambda: (torch.nn.Linear(64, 32), (randn(16, 64, grad=True),)),
        "convolution": lambda: (torch.nn.Conv2d(8, 16, 3), (randn(4, 8, 20, 20, grad=True),)),
        "channels last": lambda: (
            torch.nn.Conv2d(16, 32, 3, bias=False).to(memory_format=torch.channels_last),
            (randn(4, 16, 20, 20, grad=True).to(memory_format=torch.channels_last),),
        ),
        "batch norm": lambda: (
            torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.MaxPool2d(2)),
            (randn(4, 3, 16, 16),),
        ),
        "embedding": lambda: (torch.nn.Embedding(100, 16), (indices(100, 4, 7),)),
        "dropout": lambda: (torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.5)), (randn(32, 64),)),
    }  # fmt: skip
    torch.manual_seed(0)
    built, inputs = made[name]()
    return built.cuda(), inputs


@pytest.mark.parametrize(
    ("name", "kernel", "exact"),
    [
        ("linear", GEMM, True),
        ("convolution", CONVOLUTION, False),
        ("channels last", CONVOLUTION, False),
        ("batch norm", CONVOLUTION, False),
        ("embedding", "triton_", False),
        ("dropout", GEMM, True),
    ],
)
def test_forward_and_backward(moved: Moved, name: str, kernel: str, exact: bool) -> None:
    built, inputs = module(name)
    moved.exact = exact

    call(built, *inputs)

    moved.expect_all_captured()
    moved.seen.expect(kernel)


def test_both_backwards_of_a_convolution(moved: Moved) -> None:
    """By its input and by its weight; with enough channels for cuDNN's own kernels."""
    torch.manual_seed(0)
    built = torch.nn.Conv2d(64, 64, 3, padding=1, bias=False).cuda()
    moved.exact = False

    with torch.autocast("cuda", dtype=torch.bfloat16):
        call(built, randn(8, 64, 32, 32, grad=True))

    moved.expect_all_captured()
    moved.seen.expect("dgrad|wgrad|bprop")


def test_recurrent_layers_taken_apart(moved: Moved) -> None:
    layers = torch.nn.LSTM(32, 48, num_layers=2).cuda()
    with torch._dynamo.config.patch(allow_rnn=True):
        call(lambda x: layers(x)[0], randn(11, 3, 32))

    moved.expect_all_captured()
    moved.seen.expect(GEMM)


@pytest.fixture
def vouching(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.GRAPH_OPS, "pygraph_tests")


def test_a_recurrent_layer_of_cudnn(vouching: None, moved: Moved) -> None:
    """PyTorch's own layers of cuDNN are vouched for, too; what cuDNN leaves in a kernel's parameters is not ours to say."""
    from tests.support.users_operators import lstm

    call(
        lambda *values: lstm(*values) * 2,
        randn(11, 3, 32),
        randn(192, 32),
        randn(192, 48),
        randn(192),
        randn(192),
    )

    moved.expect_all_captured()
    moved.seen.expect("rnn|lstm")


ATTENTION = {
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "fmha",
    SDPBackend.CUDNN_ATTENTION: "cudnn|sdpa|flash|fmha",
}


def attention(backend: SDPBackend, dropout: float, *, grad: bool) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)

    call(attend, *(randn(2, 8, 128, 64, dtype=torch.bfloat16, grad=grad) for _ in range(3)))


@pytest.mark.parametrize("backend", ATTENTION)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_attention(moved: Moved, backend: SDPBackend, dropout: float) -> None:
    moved.exact = False

    attention(backend, dropout, grad=True)

    moved.expect_all_captured()
    moved.seen.expect(ATTENTION[backend])


@pytest.mark.parametrize("backend", ATTENTION)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_attention_without_a_backward(moved: Moved, backend: SDPBackend, dropout: float) -> None:
    """Nothing is kept of the generator's state: each of them is captured."""
    attention(backend, dropout, grad=False)

    moved.expect_all_captured()
    moved.seen.expect(ATTENTION[backend])


# --- operators of users' -----------------------------------------------------------------------------------------


def test_a_users_triton_kernel(moved: Moved) -> None:
    from tests.support.triton_kernels import doubled

    call(lambda x: doubled(x) + 1, randn(1000))

    moved.expect_all_captured()
    moved.seen.expect("double")


def test_copies_and_memsets(moved: Moved) -> None:
    from tests.support.users_operators import copied

    call(lambda x: copied(x.sin()) + 1, randn(1000))

    moved.expect_all_captured()
    assert moved.seen.nodes[NodeType.MEMCPY] > 0
    assert moved.seen.nodes[NodeType.MEMSET] > 1


def test_a_copy_of_two_dimensions_is_right_and_not_silently_run_as_kernels(relocated: Relocated) -> None:
    """The driver is said to refuse to move one once it is in an executable."""
    from tests.support.users_operators import first_columns

    run = torch.compile(lambda x: first_columns(x, 5) * 2, mode="reduce-overhead", dynamic=False)
    kept = [randn(40, 33) for _ in range(CALLS)]
    for each in kept:
        assert torch.equal(run(each), each[:, :5] * 2)

    assert relocated.seen.nodes[NodeType.MEMCPY] > 0
    if relocated.report.counts["captured"]:
        relocated.expect_all_captured()
    else:
        reason = str(refusal_of(relocated.made[0]))
        assert "MEMCPY node" in reason
        assert relocated.report.fallbacks[reason] == CALLS - 1


def test_a_users_cuda_kernel(moved: Moved, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils import cpp_extension

    from tests.support.users_operators import tripled

    if cpp_extension.CUDA_HOME is None:
        monkeypatch.setattr(
            cpp_extension, "CUDA_HOME", "/"
        )  # looked up for headers, of which the kernel has none

    call(lambda x: tripled(x) + 1, randn(1000))

    moved.expect_all_captured()
    moved.seen.expect("tripled")


def test_a_users_operator_in_cpp(moved: Moved, tmp_path: Path) -> None:
    from tests.support.users_operators import affine_in_cpp

    if shutil.which(os.environ.get("CXX", "g++")) is None or shutil.which("ninja") is None:
        pytest.skip("it needs a C++ compiler and ninja")
    affine = affine_in_cpp(str(tmp_path))

    call(lambda x: affine(x).cos(), randn(1000))

    moved.expect_all_captured()
    moved.seen.expect("elementwise")  # of ATen, that the operator calls


def test_inputs_that_overlap(moved: Moved) -> None:
    compiled = torch.compile(lambda a, b: a * 2 + b, mode="reduce-overhead", dynamic=False)
    for _ in range(CALLS):
        base = randn(1000)
        compiled(base[:600], base[200:800])

    moved.expect_all_captured()
