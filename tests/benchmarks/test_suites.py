"""The suites' models as workloads, and the dashboard's comparison."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks import cli
from benchmarks.errors import BenchmarkError, UnknownNameError
from benchmarks.step import Step, step_of
from benchmarks.suites import catalogue, huggingface, tables, timm_models, torchbench
from benchmarks.suites.accuracy import Accuracy
from benchmarks.suites.structures import redrawn, scalar_loss, tensors_of, with_tensors
from benchmarks.trial import CachePolicy
from benchmarks.variants import Compile
from benchmarks.workloads import Mode
from tests.support.tiny_suite import build

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.workloads.case import Case, Inputs

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")
MODEL = """
import torch
from torch import nn

class Model:
    DEFAULT_EVAL_BSIZE = 4

    def __init__(self, test, device, batch_size, extra_args):
        assert torch.zeros(1).device.type == "cpu"
        self.model = nn.Linear(3, 3).to(device)
        self.model.load_state_dict(torch.hub.load_state_dict_from_url("http://nowhere/weights.pt"))
        self.inputs = {"input": torch.randn(batch_size, 3)}

    def get_module(self):
        return self.model, self.inputs
"""


def seeded(number: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(number)


# --- structures ------------------------------------------------------------------------------------


def test_a_drawn_tensor_keeps_what_a_model_may_rely_on() -> None:
    example = torch.tensor([0.0, -math.inf, -2.0, 3.0])

    new = redrawn(example, seeded())

    assert new[:2].tolist() == [0.0, -math.inf]
    assert new[2] < 0 < new[3]
    assert not torch.equal(new[2:], example[2:])
    lengths = torch.tensor([3, 5])
    assert torch.equal(redrawn(lengths, seeded()), lengths)
    assert redrawn(lengths, seeded()) is not lengths


def test_a_structure_is_rebuilt_around_other_tensors() -> None:
    one, two = torch.zeros(2), torch.ones(2)
    structure = ([one, "text"], {"two": two, "none": None})

    assert [name for name, _ in tensors_of(structure)] == ["0.0", "1.two"]
    assert with_tensors(structure, lambda name, _: name) == (["0.0", "text"], {"two": "1.two", "none": None})
    assert scalar_loss((one, {"two": two, "none": None})).item() == 0.5
    with pytest.raises(TypeError, match="no loss"):
        scalar_loss("text")


# --- comparison ------------------------------------------------------------------------------------


class Off(Step):
    """A step whose numbers are off by a constant."""

    by = 0.0

    def evaluate(self, inputs: Inputs) -> Any:
        output = super().evaluate(inputs)
        return {**output, "first": output["first"] + self.by}


def verdict(case: Case, by: float) -> bool | None:
    step = Off(case, CPU, Compile.EAGER)
    step.by = by
    assert case.check
    correct: bool | None = case.check(case, step, CPU, lambda: case.draw(seeded())).correct
    return correct


@pytest.mark.parametrize(("by", "correct"), [(0.0, True), (0.5, False), (math.nan, False)])
def test_results_are_held_against_eager(by: float, correct: bool) -> None:
    assert verdict(build(CPU, 2, "right", Mode.INFERENCE), by) is correct


def test_a_model_that_draws_random_numbers_is_not_compared() -> None:
    case = build(CPU, 2, "right", Mode.INFERENCE)
    noisy = dataclasses.replace(
        case, call=lambda model, inputs: {"first": torch.rand(4) + model(**inputs)["first"].sum()}
    )

    assert verdict(noisy, 0.0) is None


@pytest.mark.slow
def test_gradients_are_compared_in_training() -> None:
    case = build(CPU, 2, "right", Mode.TRAINING)
    step = Step(case, CPU, Compile.EAGER)
    assert case.check
    assert case.check(case, step, CPU, lambda: case.draw(seeded())).correct

    case.module.linear.weight.register_hook(lambda gradient: gradient + 1)  # copies of the module have none
    wrong = case.check(case, step, CPU, lambda: case.draw(seeded()))

    assert wrong.correct is False
    assert wrong.note.startswith("gradient linear.weight is off by 1, ")


def tensors(*numbers: float) -> dict[str, torch.Tensor]:
    return {"output": torch.tensor(numbers)}


def test_a_tensor_may_be_as_far_from_float64_as_a_multiple_of_eager() -> None:
    eager, exact = tensors(1.2), {"output": torch.tensor([1.0], dtype=torch.float64)}
    rule = Accuracy(1e-3)

    assert rule.find_difference(tensors(1.5), eager, exact) is None
    assert "0.7, 0.6" in str(rule.find_difference(tensors(1.7), eager, exact))
    assert Accuracy(1e-3, lenient=True).find_difference(tensors(1.7), eager, exact) is None
    assert "off by" in str(rule.find_difference(tensors(1.5), eager, None))
    assert "[2]" in str(rule.find_difference(tensors(1.2, 1.2), eager, exact))
    assert "names" in str(rule.find_difference({}, eager, exact))


def test_only_inference_on_a_gpu_is_recorded_by_hand() -> None:
    with pytest.raises(BenchmarkError, match="only inference on a GPU"):
        step_of(build(CPU, 2, "right", Mode.INFERENCE), CPU, Compile.CUDA_GRAPH)


# --- the models ------------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("simple", "hf_Bert", "tacotron2", "maml", "no_batch"):
        folder = tmp_path / "torchbenchmark" / "models" / name
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("" if name == "no_batch" else MODEL)
    return tmp_path


def test_torchbench_is_what_a_checkout_has(checkout: Path) -> None:
    selection = catalogue.select("torchbench", Mode.INFERENCE, [], checkout)

    assert [(each.name, each.batch) for each in selection.workloads] == [
        ("maml-inference", 4),
        ("no_batch-inference", 0),
        ("simple-inference", 4),
    ]
    assert set(selection.left_out) == {"hf_Bert", "tacotron2"}
    training = catalogue.select("torchbench", Mode.TRAINING, ["maml", "simple"], checkout)
    assert [each.name for each in training.workloads] == ["simple-training"]
    assert training.left_out == {"maml": "the dashboard does not train it"}


def test_a_model_of_a_checkout_keeps_random_weights(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(catalogue.FOLDER_VARIABLE, str(checkout))
    monkeypatch.setattr("sys.path", [])
    monkeypatch.chdir(checkout)

    case = torchbench.build(CPU, 4, "simple", Mode.INFERENCE)
    first, second = (case.draw(seeded(number)) for number in (1, 2))

    assert first["input"].dtype == torch.bfloat16
    assert not torch.equal(first["input"], second["input"])
    assert Step(case, CPU, Compile.EAGER)(first).shape == (4, 3)


def test_run_takes_models_of_suites_by_name(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(catalogue.FOLDER_VARIABLE, str(checkout))
    asked = "torchbench:simple-inference,three-ops,huggingface:DistillGPT2-training"

    plan = cli.plan_of(
        cli.parser().parse_args(["run", "--workloads", asked, "--out", "a"]), CachePolicy.FRESH
    )

    names = [each.name for each in plan.workloads]
    assert names == ["three-ops", "simple-inference", "DistillGPT2-training"]
    assert [each.batch for each in plan.workloads[1:]] == [4, 16]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("none:a-inference", "choose among: huggingface, timm, torchbench"),
        ("timm:no_such-inference", "repvgg_a2"),
        ("timm:repvgg_a2", "write it as timm:MODEL-inference"),
        ("huggingface:M2M100ForConditionalGeneration-training", "the dashboard does not train it"),
        ("torchbench:dcgan-inference", "or in BENCHMARK_TORCHBENCH"),
    ],
)
def test_a_name_that_is_none_of_a_suite_is_refused(
    name: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(catalogue.FOLDER_VARIABLE, raising=False)

    with pytest.raises(BenchmarkError, match=said):
        catalogue.select_one(name)


def test_what_cannot_be_selected_is_said(checkout: Path) -> None:
    with pytest.raises(BenchmarkError, match="--torchbench"):
        catalogue.select("torchbench", Mode.INFERENCE, [], None)
    with pytest.raises(UnknownNameError, match="typo"):
        catalogue.select("torchbench", Mode.INFERENCE, ["typo"], checkout)
    with pytest.raises(BenchmarkError, match="no training of timm"):
        catalogue.paper("timm", Mode.TRAINING, None)


def test_the_published_table_has_its_own_batches(checkout: Path) -> None:
    assert len(tables.PAPER) == 25
    assert tables.STAND_INS.keys() <= {each.model for each in tables.PAPER}

    (lcnet,) = catalogue.paper("timm", Mode.INFERENCE, None).workloads
    names = [each.name for each in catalogue.paper("huggingface", Mode.INFERENCE, None).workloads]

    assert (lcnet.name, lcnet.batch) == ("lcnet_050-inference-b256", 256)
    assert names[::2] == ["XLNetLMHeadModel-inference-b1", "MT5ForConditionalGeneration-inference"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize(
    ("library", "source", "model"),
    [
        ("timm", timm_models, "mobilenetv2_100"),
        ("transformers", huggingface, "MobileBertForQuestionAnswering"),
    ],
)
def test_a_model_of_a_library_is_right_in_eager_mode(
    library: str, source: Any, model: str, mode: Mode
) -> None:
    if not importlib.util.find_spec(library):
        pytest.skip(f"{library} is not installed here")
    case = source.build(CPU, 1, model, mode)
    step = Step(case, CPU, Compile.EAGER)

    first, second = (case.draw(seeded(number)) for number in (1, 2))

    assert any(not torch.equal(first[name], second[name]) for name in first)
    assert case.check(case, step, CPU, lambda: first).correct
