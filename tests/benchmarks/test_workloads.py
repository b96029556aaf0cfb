from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from benchmarks.errors import BenchmarkError
from benchmarks.step import Step
from benchmarks.variants import Compile
from benchmarks.workloads import STANDARD, WORKLOADS, Mode, decoder, vision

if TYPE_CHECKING:
    from benchmarks.workloads.case import Inputs

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")
LIBRARIES = {"resnet": "torchvision", "bert": "transformers", "diffusion": "numpy"}


@pytest.mark.parametrize("name", [each.name for each in STANDARD])
def test_every_workload_builds_or_names_what_it_lacks(name: str) -> None:
    library = LIBRARIES.get(name.partition("50")[0].partition("-")[0])
    if library and not importlib.util.find_spec(library):
        with pytest.raises(BenchmarkError, match=f"needs {library}"):
            WORKLOADS[name].build(CPU)
        return
    case = WORKLOADS[name].build(CPU)
    assert (case.optimizer is not None) == (WORKLOADS[name].mode is Mode.TRAINING)


def test_the_documentation_says_of_every_workload_what_a_step_is() -> None:
    documentation = (Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md").read_text()
    assert [name for name in WORKLOADS if f"| `{name}` | " not in documentation] == []


def test_the_large_training_is_the_same_on_more_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vision, "_resnet50", lambda: torch.nn.Linear(2, 2))
    small, large = (
        WORKLOADS[name].build(CPU).draw(torch.Generator())
        for name in ("resnet50-training", "resnet50-training-large")
    )

    assert [small[each].shape[0] for each in small] == [8, 8]
    assert [large[each].shape[0] for each in large] == [64, 64]
    assert [small[each].shape[1:] for each in small] == [large[each].shape[1:] for each in large]


@pytest.mark.parametrize(("total_gb", "layers", "filled_gb"), [(85.0, 24, 67.9), (150.7, 42, 118.0)])
def test_the_large_decoder_fills_four_fifths_of_a_gpu(total_gb: float, layers: int, filled_gb: float) -> None:
    sizes = decoder.sizes_for(int(total_gb * 1e9), 64)
    with torch.device("meta"):
        tensors = decoder.Decoder(sizes, 64).state_dict().values()

    assert sizes.layers == layers
    assert sum(each.nbytes for each in tensors) == pytest.approx(filled_gb * 1e9, rel=1e-3)


@pytest.mark.parametrize("broken", ["logits", "layers.0.attention.keys", None])
def test_the_check_of_the_large_decoder_finds_wrong_results(broken: str | None) -> None:
    case = WORKLOADS["large-decode"].build(CPU)

    class Wrong(Step):
        def evaluate(self, inputs: Inputs) -> torch.Tensor:
            logits: torch.Tensor = super().evaluate(inputs)
            if broken == "logits":
                return -logits
            if broken:
                dict(case.module.named_buffers())[broken].index_fill_(2, inputs["place"], 1.0)
            return logits

    verdict = decoder.check(case, Wrong(case, CPU, Compile.EAGER), CPU, lambda: case.draw(torch.Generator()))

    assert verdict.correct is (broken is None), verdict.note
    assert verdict.note.startswith(broken or "compared")


def test_inputs_are_new_each_step_and_the_same_for_every_peer() -> None:
    case = WORKLOADS["mlp-training"].build(CPU)
    one, other = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    first, second = case.draw(one)["values"], case.draw(one)["values"]
    assert not torch.equal(first, second)
    assert torch.equal(first, case.draw(other)["values"])


def test_a_training_step_changes_the_weights_and_drops_the_gradients() -> None:
    case = WORKLOADS["mlp-training"].build(CPU)
    before = [parameter.detach().clone() for parameter in case.module.parameters()]
    Step(case, CPU, Compile.EAGER)(case.draw(torch.Generator()))
    assert all(not torch.equal(old, new) for old, new in zip(before, case.module.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in case.module.parameters())
