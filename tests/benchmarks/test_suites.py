"""The suites' models as workloads, and the dashboard's comparison and sums."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks import cli
from benchmarks.errors import BenchmarkError, UnknownNameError
from benchmarks.figures import Figure
from benchmarks.records import Record
from benchmarks.step import Step, step_of
from benchmarks.suites import catalogue, command, huggingface, summary, tables, timm_models, torchbench
from benchmarks.suites.accuracy import Accuracy
from benchmarks.suites.results import Results
from benchmarks.suites.structures import redrawn, scalar_loss, tensors_of, with_tensors
from benchmarks.suites.targets import lines
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


def test_what_cannot_be_selected_is_said(checkout: Path) -> None:
    with pytest.raises(BenchmarkError, match="--torchbench"):
        catalogue.select("torchbench", Mode.INFERENCE, [], None)
    with pytest.raises(UnknownNameError, match="typo"):
        catalogue.select("torchbench", Mode.INFERENCE, ["typo"], checkout)
    with pytest.raises(BenchmarkError, match="no training of timm"):
        catalogue.paper("timm", Mode.TRAINING, None)


def test_models_that_cannot_be_built_are_left_out_with_their_reason(tmp_path: Path, checkout: Path) -> None:
    file = tmp_path / "left-out.json"
    file.write_text('{"simple": "no data", "gone-training": "no such package", "other-inference": "no data"}')
    options = ["suite", "torchbench", "--torchbench", str(checkout), "--left-out", str(file)]
    options += ["--training", "--device", "cpu", "--out", str(tmp_path)]

    run = command.suite_run(cli.parser().parse_args(options))

    assert "simple" not in [each.model for each in run.plan.workloads]
    left_out = run.settings()["left_out"]
    assert (left_out["simple"], left_out["gone"]) == ("no data", "no such package")
    assert "other" not in left_out


def test_a_model_counts_once_in_a_mean() -> None:
    figure = Figure(1.0, 0.0, 3)
    names = ("alexnet-inference", "alexnet-inference-b2")
    both = [Record(name, "inference", 8, "eager", step_ms=figure) for name in names]

    assert list(Results.of_suite(both).models) == ["alexnet-inference"]
    assert list(Results.of_suite(both[1:]).models) == ["alexnet-inference-b2"]


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


# --- sums ------------------------------------------------------------------------------------------


def record(workload: str, variant: str, ms: float | None, **more: Any) -> Record:
    figure = ms and Figure(ms, 0.0, 5)
    return Record(
        workload, "inference", 1, variant, step_ms=figure or None, pipelined_ms=figure or None, **more
    )


RECORDS = [
    *(record("one", variant, ms) for variant, ms in (("eager", 8.0), ("default", 4.0), ("pygraph-default", 2.0))),
    *(record("two", variant, ms) for variant, ms in (("eager", 8.0), ("default", 4.0), ("pygraph-default", 5.0))),
    record("two", "default-again", 4.2),
    record("bad", "eager", 8.0),
    record("bad", "default", 1.0, correct=False, note="off by 1"),
    record("bad", "pygraph-default", 0.1, note="graphs 1; not compared: eager's results depend on chance"),
    record("dlrm-inference", "eager", None, note="KeyError: 'x'"),
]  # fmt: skip


def test_means_are_over_the_models_that_all_pass() -> None:
    settings = {"suite": "tiny", "mode": "inference", "left_out": {"other": "too large"}}
    content = {"settings": settings, "records": [dataclasses.asdict(each) for each in RECORDS]}

    shown = summary.render(content)
    rows = {line.split()[0]: line.split()[1:5] for line in shown.splitlines()[1:5]}

    assert "3 models run in eager mode, 2 pass in all of" in shown
    assert rows["default"] == ["2/3", "2", "2.000", "2.000"]
    assert rows["pygraph-default"][:3] == ["3/3", "2", f"{math.sqrt(4 * 1.6):.3f}"]
    told = {line.split("  ")[0]: line.split()[-4:] for line in shown.splitlines()}
    assert told["default over pygraph-default, waited for"] == ["1.265", "2", "NO", "two"]
    assert "largest 4.8% (two)" in shown
    assert "left out: other: too large" in shown
    assert "not compared: bad pygraph-default: eager's results depend on chance" in shown
    assert "WRONG: bad default: off by 1" in shown
    assert (
        "does not run in eager mode: dlrm-inference: KeyError: 'x' (`run` has dlrm-inference instead" in shown
    )


def line_of(records: list[Record], what: str, mode: Mode = Mode.INFERENCE) -> Any:
    (found,) = [
        each for each in lines(Results.of(records), mode) if each.what.replace("`", "").startswith(what)
    ]
    return found


def both(model: str, trees: float | None, ours: float, again: float = 4.0, **more: Any) -> list[Record]:
    return [
        *(record(model, variant, ms, reserved_mb=100.0) for variant, ms in (("eager", 8.0), ("default", 4.0), ("default-again", again))),
        record(model, "reduce-overhead", trees, reserved_mb=100.0),
        record(model, "pygraph-default", ours, **more),
    ]  # fmt: skip


def test_no_model_may_be_slower_than_the_better_of_two_by_more_than_its_noise() -> None:
    records = [*both("noisy", 2.0, 2.2, again=4.8), *both("slow", 2.0, 2.2), *both("alone", None, 3.0)]

    line = line_of(records, "better of default and reduce-overhead over pygraph-default, waited for")

    assert (line.is_met, line.missing, line.models) == (False, ("slow",), 3)
    assert line_of(records, "reduce-overhead over pygraph-default, waited for").models == 2


def test_lines_on_what_pygraph_costs_are_over_plain_variants() -> None:
    records = both("one", 2.0, 2.0, reserved_mb=120.0, measuring_s=0.5, lookup_s=0.1)
    records[1] = dataclasses.replace(records[1], compile_s=20.0)

    assert line_of(records, "peak reserved memory").figure == "1.200"
    deciding = line_of(records, "time to decide")
    assert (deciding.figure, deciding.is_met, deciding.missing) == ("3.00%", False, ("one",))
    wrong = dataclasses.replace(records[-1], correct=False)
    assert line_of([*records[:-1], wrong], "models that pygraph-default and default pass").missing == ("one",)


def test_what_is_asked_of_training_is_less() -> None:
    records = both("one", 2.0, 4.0 / 1.5)

    assert [line_of(records, "default over pygraph-default", mode).is_met for mode in Mode] == [False, True]
    assert not [each for each in lines(Results.of(records), Mode.TRAINING) if "by hand" in each.what]
