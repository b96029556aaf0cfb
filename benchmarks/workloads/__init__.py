"""The registry of workloads: what can be run, without importing torch; each family has a file beside this one."""

from __future__ import annotations

import enum
import pkgutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from benchmarks.errors import UnknownNameError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from benchmarks.workloads.case import Case


class Mode(enum.StrEnum):
    """What one step does."""

    INFERENCE = "inference"
    TRAINING = "training"


@dataclass(frozen=True, slots=True)
class Workload:
    """A model with its inputs; `source` names the function that builds it, as `module:function`.

    A function that builds many models is given a `model` by name, and the mode. `batch` 0: the model's own.
    """

    name: str
    mode: Mode
    batch: int
    source: str
    in_all: bool = True
    """Whether `all` names it, too."""
    model: str = ""

    def build(self, device: torch.device) -> Case:
        """Return the module and its inputs on `device`; imports torch and raises BenchmarkError if a library is missing."""
        # Imported only now, as the modules of workloads import torch.
        builder = cast("Callable[..., Case]", pkgutil.resolve_name(self.source))
        chosen = (self.model, self.mode) if self.model else ()
        return builder(device, self.batch, *chosen)


STANDARD = (
    Workload("resnet50-inference", Mode.INFERENCE, 1, "benchmarks.workloads.vision:resnet50_inference"),
    Workload("resnet50-training", Mode.TRAINING, 8, "benchmarks.workloads.vision:resnet50_training"),
    Workload(
        # Not in `all`, as its steps take long.
        "resnet50-training-large",
        Mode.TRAINING,
        64,
        "benchmarks.workloads.vision:resnet50_training",
        in_all=False,
    ),
    Workload("bert-inference", Mode.INFERENCE, 1, "benchmarks.workloads.language:bert_inference"),
    Workload("bert-training", Mode.TRAINING, 1, "benchmarks.workloads.language:bert_training"),
    Workload("bert-training-fp32", Mode.TRAINING, 1, "benchmarks.workloads.language:bert_training_fp32"),
    Workload("three-ops", Mode.INFERENCE, 1024, "benchmarks.workloads.synthetic:three_ops"),
    # Those up to detection-inference keep something on the CPU, as models of users do. They are in plain
    # PyTorch, since libraries drop such habits from one version to the next.
    Workload("dlrm-inference", Mode.INFERENCE, 256, "benchmarks.workloads.recommendation:dlrm_inference"),
    Workload("xlnet-inference", Mode.INFERENCE, 1, "benchmarks.workloads.xlnet:xlnet_inference"),
    Workload("xlnet-training", Mode.TRAINING, 4, "benchmarks.workloads.xlnet:xlnet_training"),
    Workload("clip-inference", Mode.INFERENCE, 8, "benchmarks.workloads.clip:clip_inference"),
    Workload(
        "speech-transformer-inference",
        Mode.INFERENCE,
        8,
        "benchmarks.workloads.speech:speech_transformer_inference",
    ),
    Workload("dalle-inference", Mode.INFERENCE, 4, "benchmarks.workloads.dalle:dalle_inference"),
    Workload("t5-generation", Mode.INFERENCE, 4, "benchmarks.workloads.generation:t5_generation"),
    Workload("detection-inference", Mode.INFERENCE, 1, "benchmarks.workloads.detection:detection_inference"),
    Workload(
        "large-decode", Mode.INFERENCE, 64, "benchmarks.workloads.decoder:decoder_inference", in_all=False
    ),
    Workload("mlp-training", Mode.TRAINING, 16, "benchmarks.workloads.synthetic:mlp_training"),
)
WORKLOADS = {workload.name: workload for workload in STANDARD}
"""By name. Programs that have workloads of their own add them."""
ALL = "all"


def select_workloads(names: list[str]) -> tuple[Workload, ...]:
    """Return the workloads of these names, in this order, or `ALL`; raises UnknownNameError."""
    if names == [ALL]:
        return tuple(each for each in WORKLOADS.values() if each.in_all)
    if unknown := [name for name in names if name not in WORKLOADS]:
        raise UnknownNameError("workload", unknown, list(WORKLOADS))
    return tuple(WORKLOADS[name] for name in dict.fromkeys(names))
