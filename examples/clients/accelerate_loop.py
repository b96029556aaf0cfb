"""Trains a ViT of transformers in a loop with Accelerate: its dynamo plugin compiles, bf16, gradient accumulation, a schedule."""

from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import TorchDynamoPlugin
from measuring import DEVICE, Clock, run
from transformers import ViTConfig, ViTForImageClassification, get_cosine_schedule_with_warmup

LABELS = 10
ACCUMULATED = 2


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def main(mode: str, steps: int, tiny: bool) -> dict[str, Any]:
    """Train for `steps` optimizer steps."""
    sizes = (
        {"image_size": 32, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        if tiny
        else {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "intermediate_size": 1536}
    )  # fmt: skip
    config = ViTConfig(
        **sizes,
        num_labels=LABELS,
        problem_type="single_label_classification",
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    plugin = None if mode == "none" else TorchDynamoPlugin(backend="inductor", mode=mode)
    accelerator = Accelerator(
        mixed_precision="bf16",
        gradient_accumulation_steps=ACCUMULATED,
        cpu=DEVICE == "cpu",
        dynamo_plugin=plugin,
    )
    model = ViTForImageClassification(config)
    pictures = torch.randn(64, 3, config.image_size, config.image_size)
    data = torch.utils.data.TensorDataset(pictures, torch.randint(LABELS, (64,)))
    loader = torch.utils.data.DataLoader(data, batch_size=2 if tiny else 16, shuffle=True, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, weight_decay=0.05)
    schedule = get_cosine_schedule_with_warmup(optimizer, 20, 4 * steps)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    batches = endless(loader)

    clock = Clock(steps)
    model.train()
    for _ in range(steps):
        clock.begin()
        for _ in range(ACCUMULATED):
            images, labels = next(batches)
            with accelerator.accumulate(model):
                loss = model(pixel_values=images, labels=labels).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        clock.end(loss)
    return clock.result(tolerance=0.05)


if __name__ == "__main__":
    run(main, __doc__)
