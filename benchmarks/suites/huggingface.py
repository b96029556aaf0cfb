"""HuggingFace's models of the dashboard, made from their configurations: random weights, nothing is downloaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from benchmarks.errors import BenchmarkError
from benchmarks.suites.cases import ALMOST_NONE, suite_case
from benchmarks.suites.tables import HUGGINGFACE_FP32, HUGGINGFACE_TOLERANCES
from benchmarks.workloads import Mode
from benchmarks.workloads.case import require

if TYPE_CHECKING:
    from benchmarks.workloads.case import Case, Inputs, Model

_LENGTHS = (
    (1024, ("GPT2", "Bart", "T5", "PLBart", "MBart", "AllenaiLongformerBase")),
    (2048, ("OPT",)),
    (512, ("Albert", "Deberta", "Layout", "Electra", "XLNet", "MegatronBert", "Bert", "Roberta")),
    (512, ("DistillGPT2", "GoogleFnet", "YituTechConvBert", "CamemBert")),
    (256, ("TrOCRForCausalLM",)),
)
"""Tokens by how a name begins."""
_LENGTH = 128
_NAMED: dict[str, tuple[str, dict[str, Any]]] = {
    "AllenaiLongformerBase": (
        "LongformerForMaskedLM",
        {"vocab_size": 50265, "max_position_embeddings": 4098, "type_vocab_size": 1, "attention_window": 512},
    ),
    "CamemBert": (
        "CamembertForMaskedLM",
        {"vocab_size": 32005, "max_position_embeddings": 514, "type_vocab_size": 1},
    ),
    "DistillGPT2": ("GPT2LMHeadModel", {"n_layer": 6}),
    "GoogleFnet": ("FNetForMaskedLM", {}),
    "T5Small": ("T5ForConditionalGeneration", {}),
    "YituTechConvBert": ("ConvBertForMaskedLM", {}),
}
"""Names of the dashboard that are no classes: the class, and where its configuration differs from the default."""
_PADDED = ("Roberta", "GPT2ForSequenceClassification")
_WITH_DECODER_INPUTS = ("T5", "MT5", "M2M100")


def build(device: torch.device, batch: int, model: str, mode: Mode) -> Case:
    """Return a model by its name in the dashboard; raises BenchmarkError if the installed library has it no more."""
    module, config = _module(model)
    wide = model in HUGGINGFACE_FP32 or mode is Mode.TRAINING
    module = module.to(device, torch.float32 if wide else torch.bfloat16)
    length = next((tokens for tokens, begins in _LENGTHS if model.startswith(begins)), _LENGTH)

    def draw(generator: torch.Generator) -> Inputs:
        return _Drawer(config, device, batch, length, generator).inputs(model)

    def call(compiled: Model, inputs: Inputs) -> Any:
        output = compiled(**inputs)
        # Given labels, these models return the loss first.
        return output[0] if mode is Mode.TRAINING else output

    default = 1e-3 if mode is Mode.INFERENCE else 1e-2
    tolerance = HUGGINGFACE_TOLERANCES[mode].get(model, default)
    return suite_case(module, device, mode, draw, call, (model, tolerance))


def _module(model: str) -> tuple[torch.nn.Module, Any]:
    name, differing = _NAMED.get(model, (model, {}))
    made = getattr(require("transformers"), name, None)
    if made is None:
        raise BenchmarkError(f"the installed transformers has no {name}")
    config = made.config_class(**differing)
    for field, value in vars(config).items():
        if "drop" in field and isinstance(value, float) and value > 0:
            # A dropped layer is a decision of the host, which would be another graph in each step.
            setattr(config, field, 0.0 if "layerdrop" in field else ALMOST_NONE)
    if model.startswith(_PADDED):
        # GPT-2's classifier refuses batches without a token for padding.
        config.pad_token_id = 0
    # As in the dashboard: no keys and values are kept for further tokens.
    config.use_cache = False
    return made(config), config


class _Drawer:
    """Draws the inputs of one step."""

    def __init__(
        self, config: Any, device: torch.device, batch: int, length: int, generator: torch.Generator
    ) -> None:
        self._config, self._device, self._generator = config, device, generator
        self._batch, self._length = batch, length

    def inputs(self, model: str) -> dict[str, torch.Tensor]:
        """Return tokens and labels for a model; the dashboard asks for the loss in inference, too."""
        return {**self._tokens(model), **self._labels(model)}

    def _tokens(self, model: str) -> dict[str, torch.Tensor]:
        # All are padding in Roberta's: it counts positions from there, and has no embedding for the last.
        low, high = (2, None) if model == "CamemBert" else (0, 1 if model.startswith("Roberta") else None)
        tokens = self._whole_numbers(high or self._config.vocab_size, self._length, low=low)
        if "Bart" in model:
            tokens[:, -1] = self._config.eos_token_id
        if model.startswith(_WITH_DECODER_INPUTS):
            return {"input_ids": tokens, "decoder_input_ids": tokens.clone()}
        return {"input_ids": tokens}

    def _labels(self, model: str) -> dict[str, torch.Tensor]:
        if model.endswith("QuestionAnswering"):
            names = ("start_positions", "end_positions")
            return {name: self._whole_numbers(self._length) for name in names}
        if model.endswith("SequenceClassification"):
            return {"labels": self._whole_numbers(max(1, self._config.num_labels - 1))}
        return {"labels": self._whole_numbers(self._config.vocab_size - 1, self._length)}

    def _whole_numbers(self, end: int, *length: int, low: int = 0) -> torch.Tensor:
        shape = (self._batch, *length)
        return torch.randint(low, end, shape, device=self._device, generator=self._generator)
