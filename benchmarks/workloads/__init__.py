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
    """A model with its inputs; `source` names the function that builds it, as `module:function` in this package."""

    name: str
    mode: Mode
    batch: int
    source: str
    summary: str

    def build(self, device: torch.device) -> Case:
        """Return the module and its inputs on `device`; imports torch and raises BenchmarkError if a library is missing."""
        builder = cast(
            "Callable[[torch.device, int], Case]", pkgutil.resolve_name(f"{__name__}.{self.source}")
        )
        return builder(device, self.batch)


_WORKLOADS = (
    Workload(
        "resnet50-inference",
        Mode.INFERENCE,
        1,
        "vision:resnet50_inference",
        "torchvision's ResNet-50, bf16 weights, 224x224",
    ),
    Workload(
        "resnet50-training",
        Mode.TRAINING,
        8,
        "vision:resnet50_training",
        "torchvision's ResNet-50, bf16 autocast, SGD with momentum",
    ),
    Workload(
        "resnet50-training-large",
        Mode.TRAINING,
        64,
        "vision:resnet50_training",
        "the same with so many images that activations are most of the memory",
    ),
    Workload(
        "bert-inference",
        Mode.INFERENCE,
        1,
        "language:bert_inference",
        "transformers' BertForMaskedLM, base size, bf16 weights, 128 tokens",
    ),
    Workload(
        "bert-training",
        Mode.TRAINING,
        1,
        "language:bert_training",
        "transformers' BertForMaskedLM, base size, bf16 autocast, dropout, AdamW, 128 tokens",
    ),
    Workload(
        "bert-training-fp32",
        Mode.TRAINING,
        1,
        "language:bert_training_fp32",
        "the same in float32, for which PyTorch takes memory-efficient attention",
    ),
    Workload(
        "three-ops",
        Mode.INFERENCE,
        1024,
        "synthetic:three_ops",
        "sin, multiply and add on 1,024 float32 numbers",
    ),
    Workload(
        "wide-inference",
        Mode.INFERENCE,
        64,
        "synthetic:wide_inference",
        "99 linear layers of 64 numbers in float32: 200 inputs, of which one moves",
    ),
    Workload(
        "deep-inference",
        Mode.INFERENCE,
        64,
        "synthetic:deep_inference",
        "250 layers of 256 numbers in bf16, a product of matrices and another kernel each: a graph of 500 nodes",
    ),
    Workload(
        "autoencoder-inference",
        Mode.INFERENCE,
        4096,
        "synthetic:autoencoder_inference",
        "two linear layers around 128 numbers on 197,951 bf16 numbers an item: 1.6 GB of inputs, which move",
    ),
    Workload(
        "heavy-then-small",
        Mode.INFERENCE,
        4096,
        "synthetic:heavy_then_small",
        "two linear layers of 8,192 in bf16 on 4,096 items, then 24 graphs of three of 64: the GPU is busy all the time",
    ),
    Workload(
        "small-then-heavy",
        Mode.INFERENCE,
        4096,
        "synthetic:small_then_heavy",
        "the same the other way round: the GPU waits for the host while the small graphs are called",
    ),
    Workload(
        "dlrm-inference",
        Mode.INFERENCE,
        256,
        "recommendation:dlrm_inference",
        "26 tables, 351 interactions picked by indices that the forward makes on the CPU",
    ),
    Workload(
        "xlnet-inference",
        Mode.INFERENCE,
        1,
        "xlnet:xlnet_inference",
        "12 layers of relative attention, bf16, 512 tokens; positions that the forward makes on the CPU",
    ),
    Workload(
        "xlnet-training",
        Mode.TRAINING,
        4,
        "xlnet:xlnet_training",
        "the same, bf16 autocast, AdamW",
    ),
    Workload(
        "clip-inference",
        Mode.INFERENCE,
        8,
        "clip:clip_inference",
        "images (ViT-B/32) and texts, bf16; a mask and a range of rows that the forward makes on the CPU",
    ),
    Workload(
        "speech-transformer-inference",
        Mode.INFERENCE,
        8,
        "speech:speech_transformer_inference",
        "6 + 6 layers, bf16, 512 frames and 64 tokens; lengths that come on the CPU, masks made of them there",
    ),
    Workload(
        "dalle-inference",
        Mode.INFERENCE,
        4,
        "dalle:dalle_inference",
        "12 layers, bf16, 64 + 256 tokens; four kinds of masks that the forward makes and edits on the CPU",
    ),
    Workload(
        "t5-generation",
        Mode.INFERENCE,
        4,
        "generation:t5_generation",
        "6 + 6 layers, float32, 16 tokens generated with a cache; a step counter on the CPU, edited in place",
    ),
    Workload(
        "detection-inference",
        Mode.INFERENCE,
        1,
        "detection:detection_inference",
        "a small Mask R-CNN, float32; anchors made on the CPU, a number of regions that the host reads",
    ),
    Workload(
        "sampler-inference",
        Mode.INFERENCE,
        64,
        "sampling:sampler_inference",
        "4 layers and 32,000 logits, bf16; a temperature and a penalty on the CPU, edited in place",
    ),
    Workload(
        "diffusion-inference",
        Mode.INFERENCE,
        64,
        "diffusion:diffusion_inference",
        "10 steps of 6 layers, float32; a scale and a schedule that are NumPy scalars",
    ),
    Workload(
        "adam-step",
        Mode.INFERENCE,
        1,
        "optimization:adam_step",
        "one compiled step of Adam on 28 million weights, float32; a counter on the CPU for each of 24 tensors",
    ),
    Workload(
        "mlp-training",
        Mode.TRAINING,
        16,
        "synthetic:mlp_training",
        "three small linear layers in float32, SGD; runs anywhere",
    ),
)
WORKLOADS = {workload.name: workload for workload in _WORKLOADS}
FOR_REGIONS = frozenset({"resnet50-training-large", "deep-inference"})
"""Those that are there for what `regions` says of them: their memory, or what recording them takes."""


ALL = "all"
"""All of them but those."""


def select_workloads(names: list[str]) -> tuple[Workload, ...]:
    """Return the workloads of these names, in this order, or `ALL`; raises UnknownNameError."""
    if names == [ALL]:
        return tuple(each for name, each in WORKLOADS.items() if name not in FOR_REGIONS)
    if unknown := [name for name in names if name not in WORKLOADS]:
        raise UnknownNameError("workload", unknown, list(WORKLOADS))
    return tuple(WORKLOADS[name] for name in dict.fromkeys(names))
