"""Whole models on relocatable graphs: training goes as without graphs, as closely as two runs without do; so does inference.

The architectures are complete; depth and width are cut so that each compiles in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from torch.nn.attention import SDPBackend, sdpa_kernel

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.relocated import Moved, Relocated

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

STEPS = {"ResNet-50": 10, "Whisper": 15}
MOST_STEPS = 30
LEARNING_RATES = {"SGD": 0.03, "AdamW": 2e-3}
ATTENTION = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def tokens(vocabulary: int, *size: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, size, device="cuda")


def resnet50() -> tuple[torch.nn.Module, Callable[..., Any]]:
    models = pytest.importorskip("torchvision.models")
    module = models.resnet50(weights=None, num_classes=10)

    def loss(run: Callable[..., Any]) -> torch.Tensor:
        return F.cross_entropy(run(torch.randn(4, 3, 64, 64, device="cuda")).float(), tokens(10, 4))

    return module, loss


def vit() -> tuple[torch.nn.Module, Callable[..., Any]]:
    models = pytest.importorskip("torchvision.models")
    module = models.VisionTransformer(
        image_size=64,
        patch_size=16,
        num_layers=3,
        num_heads=4,
        hidden_dim=256,
        mlp_dim=512,
        dropout=0.1,
        num_classes=10,
    )

    def loss(run: Callable[..., Any]) -> torch.Tensor:
        return F.cross_entropy(run(torch.randn(4, 3, 64, 64, device="cuda")).float(), tokens(10, 4))

    return module, loss


def bert() -> tuple[torch.nn.Module, Callable[..., Any]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=1000, hidden_size=256, num_hidden_layers=3, num_attention_heads=4, intermediate_size=512
    )

    def loss(run: Callable[..., Any]) -> torch.Tensor:
        result: torch.Tensor = run(input_ids=tokens(1000, 2, 64), labels=tokens(1000, 2, 64)).loss
        return result

    return transformers.BertForMaskedLM(config), loss


def gpt2() -> tuple[torch.nn.Module, Callable[..., Any]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=1000, n_embd=256, n_layer=3, n_head=4, n_positions=64)

    def loss(run: Callable[..., Any]) -> torch.Tensor:
        ids = tokens(1000, 2, 64)
        result: torch.Tensor = run(input_ids=ids, labels=ids, use_cache=False).loss
        return result

    return transformers.GPT2LMHeadModel(config), loss


def whisper() -> tuple[torch.nn.Module, Callable[..., Any]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.WhisperConfig(
        vocab_size=1000, d_model=128, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=256, decoder_ffn_dim=256, max_source_positions=64, num_mel_bins=80,
        dropout=0.1, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip

    def loss(run: Callable[..., Any]) -> torch.Tensor:
        features = torch.randn(2, 80, 128, device="cuda")
        result: torch.Tensor = run(input_features=features, labels=tokens(1000, 2, 16), use_cache=False).loss
        return result

    return transformers.WhisperForConditionalGeneration(config), loss


class Dlrm(torch.nn.Module):  # type: ignore[misc]
    """A deep-learning recommendation model: embedding bags, a bottom and a top network, pairwise interactions."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = torch.nn.ModuleList(torch.nn.EmbeddingBag(100, 16, mode="sum") for _ in range(4))
        self.bottom = torch.nn.Sequential(torch.nn.Linear(13, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
        self.top = torch.nn.Sequential(
            torch.nn.Linear(16 + 10, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1)
        )
        self.register_buffer("rows", torch.tensor([i for i in range(5) for _ in range(i)]), persistent=False)
        self.register_buffer(
            "columns", torch.tensor([j for i in range(5) for j in range(i)]), persistent=False
        )

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        """Return a logit for each item."""
        bottom = self.bottom(dense)
        features = torch.stack([bottom, *(table(sparse[:, i]) for i, table in enumerate(self.tables))], 1)
        pairs = (features @ features.transpose(1, 2))[:, self.rows, self.columns]
        result: torch.Tensor = self.top(torch.cat([bottom, pairs], 1)).squeeze(1)
        return result


def dlrm() -> tuple[torch.nn.Module, Callable[..., Any]]:
    def loss(run: Callable[..., Any]) -> torch.Tensor:
        logits = run(torch.randn(32, 13, device="cuda"), tokens(100, 32, 4, 3))
        return F.binary_cross_entropy_with_logits(logits.float(), torch.rand(32, device="cuda").round())

    return Dlrm(), loss


MODELS = {"ResNet-50": resnet50, "ViT": vit, "BERT": bert, "GPT-2": gpt2, "Whisper": whisper, "DLRM": dlrm}


@dataclass(frozen=True, slots=True)
class Trained:
    """What some steps of training came to."""

    losses: torch.Tensor
    began: list[torch.Tensor]
    ended: list[torch.Tensor]
    """Parameters."""

    def farthest(self, other: Trained) -> torch.Tensor:
        """Return how far losses have been from another run's up to each step."""
        return (self.losses - other.losses).abs().cummax(0).values

    def distances(self, other: Trained) -> torch.Tensor:
        """Return how far each parameter has ended from another run's."""
        return _norms(self.ended, other.ended)

    def ways(self) -> torch.Tensor:
        """Return how far each parameter has come."""
        return _norms(self.ended, self.began)


def _norms(ones: list[torch.Tensor], others: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([(one - other).norm() for one, other in zip(ones, others, strict=True)])


def trained(name: str, optimizer: str) -> Trained:
    """Train for some steps, with the same weights, data and random numbers each time."""
    torch.manual_seed(0)
    module, loss_of = MODELS[name]()
    module = module.cuda().train()
    began = [each.detach().clone() for each in module.parameters()]
    run = torch.compile(module, mode="reduce-overhead", dynamic=False)
    chosen = getattr(torch.optim, optimizer)(module.parameters(), lr=LEARNING_RATES[optimizer])
    torch.manual_seed(1)
    losses = []
    for _ in range(STEPS.get(name, MOST_STEPS)):
        with torch.autocast("cuda", dtype=torch.bfloat16), sdpa_kernel(ATTENTION):
            loss = loss_of(run)
        loss.backward()
        chosen.step()
        chosen.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    return Trained(torch.stack(losses), began, [each.detach() for each in module.parameters()])


@pytest.mark.parametrize("optimizer", LEARNING_RATES)
@pytest.mark.parametrize("name", MODELS)
def test_training(relocated: Relocated, name: str, optimizer: str) -> None:
    """Held against the same code as KERNELS: only what adds in another order each time may come out otherwise."""
    with relocated.as_kernels():
        plain = trained(name, optimizer)
        torch._dynamo.reset()
        again = trained(name, optimizer)
    assert relocated.made == []

    mine = trained(name, optimizer)

    allowed = 8 * plain.farthest(again) + 1e-3 * plain.losses.abs()
    assert (mine.farthest(plain) <= allowed).all(), (mine.losses, plain.losses, again.losses)
    allowed = 8 * plain.distances(again) + 0.02 * plain.ways()
    assert (mine.distances(plain) <= allowed).all(), (mine.distances(plain) / allowed).max()
    assert plain.ways().max() > 0
    relocated.expect_all_captured()


@pytest.mark.parametrize("name", MODELS)
def test_inference(moved: Moved, name: str) -> None:
    """Each call is made twice, as KERNELS and relocated, on inputs that lie elsewhere each time."""
    torch.manual_seed(0)
    module, loss_of = MODELS[name]()
    run = torch.compile(module.cuda().eval(), mode="reduce-overhead", dynamic=False)
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        for _ in range(5):
            loss_of(run)

    moved.expect_all_captured()
