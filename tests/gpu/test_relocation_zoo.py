"""A zoo of kernels, every input and output moved at every call, guard zones around inputs, old memory poisoned.

Each case runs as `moved` has it: the compiled callable is launched for the program, and replayed beside it on copies that lie
elsewhere; both must agree on every output and every input.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch.nn.attention import SDPBackend, sdpa_kernel

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.gpu.conftest import Relocated

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


FORWARD: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "pointwise": (lambda x, y: (x.sin() * y + 1, x - y), lambda: (randn(1000, 37), randn(1000, 37))),
    "views with odd offsets": (lambda x: x[1:, 3:].exp() * 2, lambda: (randn(33, 65),)),
    "reduction": (lambda x: (x.sum(0), x.amax(1), x.var()), lambda: (randn(3000, 700),)),
    "persistent reduction": (lambda x: F.layer_norm(x, (256,)).softmax(-1), lambda: (randn(64, 256),)),
    "matrix product": (lambda a, b: a @ b, lambda: (randn(256, 512), randn(512, 384))),
    "matrix product bf16": (
        lambda a, b: a @ b,
        lambda: (randn(1024, 512, dtype=torch.bfloat16), randn(512, 2048, dtype=torch.bfloat16)),
    ),
    "matrix product fp16": (
        lambda a, b: a @ b,
        lambda: (randn(1024, 512, dtype=torch.float16), randn(512, 256, dtype=torch.float16)),
    ),
    "batched": (lambda a, b: torch.bmm(a, b), lambda: (randn(16, 128, 64), randn(16, 64, 96))),
    "split k": (lambda a, b: a @ b, lambda: (randn(16, 65536), randn(65536, 24))),
    "with bias": (
        lambda x, w, b: F.gelu(F.linear(x, w, b)),
        lambda: (randn(128, 256, dtype=torch.bfloat16), randn(512, 256, dtype=torch.bfloat16), randn(512, dtype=torch.bfloat16)),
    ),
    "fft": (lambda x: torch.fft.fft(x).real, lambda: (randn(16, 1000),)),
    "sort": (lambda x: torch.sort(x), lambda: (randn(100, 5000),)),
    "top k": (lambda x: torch.topk(x, 7), lambda: (randn(100, 5000),)),
    "scatter": (
        lambda x, i, s: x.scatter_add(0, i, s),
        lambda: (randn(100, 20), indices(100, 50, 20), randn(50, 20)),
    ),
    "index put": (
        lambda x, i, v: torch.index_put(x, (i,), v, accumulate=True),
        lambda: (randn(100, 20), indices(100, 30), randn(30, 20)),
    ),
    "embedding bag": (
        lambda i, w: F.embedding_bag(i, w, mode="sum"),
        lambda: (indices(1000, 64, 8), randn(1000, 32)),
    ),
    "cat": (lambda a, b, c: torch.cat([a, b, c], 1), lambda: (randn(50, 7), randn(50, 9), randn(50, 33))),
    "cumulative sum": (lambda x: x.cumsum(1), lambda: (randn(64, 3000),)),
    "in place": (lambda x, y: x.mul_(2).add_(y), lambda: (randn(500), randn(500))),
    "foreach": (
        lambda xs, ys: torch._foreach_add(xs, ys, alpha=0.5),
        lambda: ([randn(n) for n in (3, 500, 7000)], [randn(n) for n in (3, 500, 7000)]),
    ),
    "temporaries larger than outputs": (
        lambda x: ((x @ x).relu() @ x).sum(1)[:5],
        lambda: (randn(700, 700),),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORWARD)
def test_forward(moved: Relocated, name: str) -> None:
    function, inputs = FORWARD[name]

    call(function, *inputs())

    moved.expect_all_captured()


def test_tf32(moved: Relocated) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        call(lambda a, b: a @ b, randn(512, 512), randn(512, 512))
    finally:
        torch.set_float32_matmul_precision(before)

    moved.expect_all_captured()


def test_fp8(moved: Relocated) -> None:
    def product(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(a, b.t(), scale, scale, out_dtype=torch.bfloat16)

    eight = torch.float8_e4m3fn
    scale = torch.tensor(0.5, device="cuda")
    call(product, randn(128, 256).to(eight), randn(64, 256).to(eight), scale)

    moved.expect_all_captured()


def test_templates_with_tensor_maps(moved: Relocated) -> None:
    options = {
        "triton.cudagraphs": True,
        "max_autotune_gemm": True,
        "max_autotune_gemm_backends": "TRITON",
        "triton.enable_persistent_tma_matmul": True,
    }

    call(
        lambda a, b: (a @ b).relu(),
        randn(1024, 1024, dtype=torch.bfloat16),
        randn(1024, 1024, dtype=torch.bfloat16),
        options=options,
    )

    moved.expect_all_captured()


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
    "name", ["linear", "convolution", "channels last", "batch norm", "embedding", "dropout"]
)
def test_forward_and_backward(moved: Relocated, name: str) -> None:
    built, inputs = module(name)

    call(built, *inputs)

    moved.expect_all_captured()


def test_lstm(moved: Relocated) -> None:
    lstm = torch.nn.LSTM(32, 48, num_layers=2).cuda()
    with torch._dynamo.config.patch(allow_rnn=True):
        call(lambda x: lstm(x)[0], randn(11, 3, 32))

    moved.expect_all_captured()


@pytest.mark.parametrize(
    "backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_attention(moved: Relocated, backend: SDPBackend, dropout: float) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)

    call(attend, *(randn(2, 8, 128, 64, dtype=torch.bfloat16, grad=True) for _ in range(3)))

    if backend is SDPBackend.EFFICIENT_ATTENTION:
        # Captured, it keeps the generator's state on the GPU, launched on the CPU: the two cannot agree.
        assert moved.report.counts["captured"] == 0
        assert any(each.refusal for each in moved.made)
    else:
        moved.expect_all_captured()


def test_a_users_triton_kernel(moved: Relocated) -> None:
    from tests.gpu.triton_kernels import doubled

    call(lambda x: doubled(x) + 1, randn(1000))

    moved.expect_all_captured()


def test_inputs_that_overlap(moved: Relocated) -> None:
    compiled = torch.compile(lambda a, b: a * 2 + b, mode="reduce-overhead", dynamic=False)
    for _ in range(CALLS):
        base = randn(1000)
        compiled(base[:600], base[200:800])

    moved.expect_all_captured()
